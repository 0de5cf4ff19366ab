// Figures, the picker, copying and tips. Parts packed in the page (deflate in base64) are unpacked here; nothing is fetched.
"use strict";
const page = (function () {
  const byId = (id) => document.getElementById(id);
  const choices = JSON.parse(byId("choices").textContent);
  const state = { picks: new Map(), search: "" };
  const listeners = []; // called when the choice has changed

  async function unpack(id) {
    const text = atob(byId(id).textContent.trim());
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  }

  // Settings are shown if no choice contradicts them; settings without an axis are shown whatever is chosen on it.
  function chosen(settings) {
    for (const [key, value] of state.picks) if (key in settings && String(settings[key]) !== value) return false;
    return true;
  }
  const chosenGroup = (number) => number < 0 || chosen(choices.groups[number]);

  // --- figures
  const drawn = new Map(); // div to { plot, narrow }
  const direct = (trace) => Boolean(trace.meta && trace.meta.direct);

  function visible(spec, narrow) {
    const most = state.picks.size ? (spec.layout.meta || {}).most || Infinity : Infinity;
    const seen = new Set();
    const order = spec.data.map((trace, i) => i).sort((a, b) => (spec.data[a].visible === false) - (spec.data[b].visible === false) || a - b);
    const shown = new Array(spec.data.length);
    for (const i of order) {
      const trace = spec.data[i], settings = trace.meta && trace.meta.settings;
      let show = trace.visible === undefined ? true : trace.visible;
      if (settings && state.picks.size) {
        const key = JSON.stringify(settings);
        show = chosen(settings) && (seen.has(key) || seen.size < most) && (trace.visible === "legendonly" ? "legendonly" : true);
        if (show) seen.add(key);
      }
      shown[i] = narrow && direct(trace) ? false : show;
    }
    return shown;
  }

  // The page holds the changes for a narrow screen (layout.py); only these are laid over the figure.
  const NARROW = 560;
  function over(base, change) {
    if (!change || typeof change !== "object" || Array.isArray(change)) return change === undefined ? base : change;
    const made = { ...base };
    for (const [key, value] of Object.entries(change)) made[key] = over(made[key], value);
    return made;
  }

  async function arrange(div) {
    const { plot, narrow } = drawn.get(div);
    const small = div.parentElement.clientWidth < NARROW, shown = visible(plot, small && !narrow.beside);
    const known = plot.data.filter((trace) => trace.meta && trace.meta.settings);
    const none = state.picks.size > 0 && known.length > 0 && !plot.data.some((t, i) => shown[i] && t.meta && t.meta.settings);
    div.dataset.narrow = String(small);
    div.hidden = none;
    div.nextElementSibling.hidden = !none;
    if (none) return;
    const data = plot.data.map((trace, i) => over(over(trace, small ? narrow.traces[i] : undefined), { visible: shown[i] }))
      .filter((trace) => trace.visible !== false); // do not draw what nobody sees
    const layout = over(structuredClone(plot.layout), small ? narrow.layout : undefined); // plotly writes into it
    layout.height = small ? narrow.height : plot.layout.height || 460;
    div.style.height = layout.height + "px";
    div.querySelector(":scope > img")?.remove();
    if (div._fullLayout) div._fullLayout._reservedMargin = {}; // plotly keeps the space of a legend that is gone
    await window.Plotly.react(div, data, layout, { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] });
  }

  async function drawAll() {
    const divs = [...document.querySelectorAll(".plot")];
    if (!divs.length) return;
    const script = document.createElement("script");
    script.textContent = await unpack("library");
    document.head.append(script);
    for (const div of divs) {
      drawn.set(div, JSON.parse(await unpack("spec-" + div.dataset.number)));
      await arrange(div);
      await new Promise((done) => setTimeout(done)); // a reader's click comes first
    }
    document.documentElement.dataset.drawn = String(divs.length);
  }

  let resizing = 0;
  window.addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => drawn.forEach((_, div) => {
      if (div.dataset.narrow !== String(div.parentElement.clientWidth < NARROW)) arrange(div);
    }), 150);
  });

  // --- choosing; the choice is in the address, so that a view can be linked
  const form = byId("picker");
  const PREFIX = "#view?";

  function address() {
    const told = new URLSearchParams([...state.picks]);
    if (state.search) told.set("search", state.search);
    return String(told) ? PREFIX + told : "";
  }

  function show() {
    if (form) {
      const matching = choices.groups.filter(chosen).length;
      byId("chosen").textContent = state.picks.size ? matching + " of " + choices.groups.length + " configurations" : "";
    }
    document.querySelectorAll("tr[data-group]").forEach((row) => { row.hidden = !chosenGroup(Number(row.dataset.group)); });
    document.querySelectorAll("figure[data-kind]").forEach((one) => { one.hidden = !chosen({ [choices.kind]: one.dataset.kind }); });
    drawn.forEach((_, div) => arrange(div));
    listeners.forEach((one) => one());
  }

  function remember() {
    history.replaceState(null, "", address() || location.pathname + location.search);
  }

  function read() {
    if (location.hash && !location.hash.startsWith(PREFIX)) return open(location.hash.slice(1));
    const told = new URLSearchParams(location.hash.slice(PREFIX.length));
    state.picks = new Map([...told].filter(([key]) => choices.axes.includes(key)));
    state.search = told.get("search") || "";
    if (form) for (const select of form.querySelectorAll("select")) {
      const value = state.picks.has(select.name) ? "=" + state.picks.get(select.name) : "";
      select.value = value;
      if (select.value !== value) { select.value = ""; state.picks.delete(select.name); } // no such value here
    }
    show();
  }

  if (form) {
    form.addEventListener("change", () => {
      state.picks = new Map([...form.querySelectorAll("select")].filter((s) => s.value).map((s) => [s.name, s.value.slice(1)]));
      remember();
      show();
    });
    form.addEventListener("reset", () => setTimeout(() => { state.picks.clear(); remember(); show(); }));
    form.addEventListener("submit", (event) => event.preventDefault());
    byId("link").addEventListener("click", () => copy(location.href, "The link to this view is copied."));
  }
  window.addEventListener("hashchange", read);

  // The target of a link may be folded.
  function open(id) {
    const target = document.getElementById(id), fold = target && target.querySelector(":scope > details");
    if (fold) fold.open = true;
  }
  document.addEventListener("click", (event) => {
    const link = event.target.closest && event.target.closest('a[href^="#"]');
    if (link) open(link.getAttribute("href").slice(1));
  });
  window.addEventListener("beforeprint", () => document.querySelectorAll("section > details").forEach((one) => { one.open = true; }));

  // --- copying: the clipboard may be closed to a page that is a file
  async function copy(text, words) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const field = document.createElement("textarea"), before = document.activeElement;
      field.value = text;
      field.className = "unseen";
      document.body.append(field);
      field.select();
      if (!document.execCommand("copy")) words = "Copying is not allowed here.";
      field.remove();
      if (before) before.focus();
    }
    byId("said").textContent = "";
    byId("said").textContent = words;
  }

  // --- tips, by the mouse and by the keyboard; screen readers get them as labels
  const tip = byId("tip");
  function hint(event) {
    const of = event.target.closest && event.target.closest("[data-tip]");
    tip.hidden = !of;
    if (!of) return;
    tip.textContent = of.dataset.tip;
    const at = of.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (at.bottom + tip.offsetHeight + 8 < innerHeight ? at.bottom + 6 : at.top - tip.offsetHeight - 6) + "px";
  }
  document.addEventListener("mouseover", hint);
  document.addEventListener("focusin", hint);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  function start() {
    read();
    document.documentElement.dataset.ready = "true";
    requestAnimationFrame(() => setTimeout(drawAll));
  }
  document.addEventListener("DOMContentLoaded", start);
  return { chosenGroup, copy, listeners, remember, state, unpack };
})();
