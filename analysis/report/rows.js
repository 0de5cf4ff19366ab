// The table of rows: search, sorting and pages. It is filled when it is first opened.
"use strict";
(function () {
  const byId = (id) => document.getElementById(id);
  const PAGE = 50, GIB = 2 ** 30;
  const table = byId("rows-table"), fold = table.closest("details");
  const number = (digits) => (value) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const gib = (v) => (0 < v && v < 0.005 * GIB ? "<0.01" : number(v && v < 0.995 * GIB ? 2 : 1)(v / GIB));
  let data, texts, order = [], first = 0, sorted = { name: "", down: false };

  const text = (name) => (i) => data[name].texts[data[name].at[i]];
  const command = (i) => data.command[i].map((word) => data.words[word]).join(" ");
  const COLUMNS = [
    { name: "trial", value: (i) => data.trial[i], cell: code },
    { name: "configuration", value: (i) => (data.group[i] < 0 ? "" : data.labels[data.group[i]]) },
    { get name() { return data.axis; }, value: (i) => data.length[i], show: number(0) },
    { name: "batch", value: (i) => data.batch[i], show: number(0) },
    { name: "outcome", value: (i) => text("outcome")(i) },
    { name: "allocated (GiB)", value: (i) => data.allocated[i], show: gib, claim: "memory" },
    { name: "reserved (GiB)", value: (i) => data.reserved[i], show: gib, claim: "memory" },
    { get name() { return data.rate; }, value: (i) => data.speed[i], show: number(0), claim: "speed" },
    { name: "command", value: command, cell: copied },
  ];

  function element(name, content, attributes) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    made.append(...[].concat(content === undefined ? [] : content));
    return made;
  }

  function code(i) { return element("code", data.trial[i]); }

  function copied(i) {
    const text = element("code", command(i), { class: "command", title: command(i) });
    if (!command(i).startsWith("python ")) return text; // the text says why there is no command
    const button = element("button", "Copy", { type: "button", "aria-label": "Copy the command of trial " + data.trial[i] });
    button.addEventListener("click", () => page.copy(command(i), "The command is copied."));
    return element("div", [button, text], { class: "copied" });
  }

  function badge(sign, words, kind) {
    return element("span", sign, { class: "badge " + kind, role: "note", tabindex: "0", "aria-label": words, "data-tip": words });
  }

  // Badges next to a number, for what speaks against it.
  function badges(i, claim) {
    const against = data.flagged[i].map((at) => data.flags[at]).filter((f) => !f.forbids.length || f.forbids.includes(claim));
    const found = [];
    if (against.length) found.push(badge("⚑", "Flagged. " + against.map((f) => f.name + (f.meaning ? ": " + f.meaning : "")).join("; "), "flag"));
    if (text("kind")(i) === "predicted") {
      const techniques = text("unproven")(i);
      const words = "Predicted, not measured" + (techniques ? "; unproven, because no GPU has confirmed the prediction yet: " + techniques : "");
      found.push(badge(techniques ? "p!" : "p", words, "kind"));
    }
    return found;
  }

  function cell(column, i) {
    if (column.cell) return element("td", column.cell(i));
    const value = column.value(i);
    if (!column.show) return element("td", String(value));
    if (value === null) return element("td", "–", { class: "number" });
    const marks = column.claim ? badges(i, column.claim) : [];
    return element("td", [column.show(value), ...marks.flatMap((mark) => [" ", mark])], { class: "number" });
  }

  function heading() {
    const row = element("tr");
    for (const column of COLUMNS) {
      const button = element("button", column.name, { type: "button" });
      const head = element("th", button, { scope: "col", "aria-sort": sorted.name !== column.name ? "none" : sorted.down ? "descending" : "ascending" });
      if (column.show) head.className = "number";
      button.addEventListener("click", () => {
        sorted = { name: column.name, down: sorted.name === column.name && !sorted.down };
        arrange();
        table.tHead.querySelectorAll("button")[COLUMNS.indexOf(column)].focus();
      });
      row.append(head);
    }
    table.tHead.replaceChildren(row);
  }

  function arrange() {
    const words = page.state.search.toLowerCase().split(/\s+/).filter(Boolean);
    texts = texts || data.trial.map((id, i) => (COLUMNS[1].value(i) + " " + text("outcome")(i) + " " + text("kind")(i) + " " + data.length[i] + " " +
      data.flagged[i].map((at) => data.flags[at].name).join(" ") + " " + command(i) + " " + id).toLowerCase());
    order = [];
    for (let i = 0; i < data.trial.length; i++) {
      if (page.chosenGroup(data.group[i]) && words.every((word) => texts[i].includes(word))) order.push(i);
    }
    const column = COLUMNS.find((one) => one.name === sorted.name);
    if (column) {
      const keys = new Map(order.map((i) => [i, column.value(i)])), way = sorted.down ? -1 : 1;
      order.sort((a, b) => {
        const x = keys.get(a), y = keys.get(b);
        if (x === null || y === null) return (x === null) - (y === null); // unknown values are last in both directions
        return (typeof x === "number" ? x - y : x < y ? -1 : x > y ? 1 : 0) * way || a - b;
      });
    }
    first = 0;
    show();
  }

  function show() {
    heading();
    table.tBodies[0].replaceChildren(...order.slice(first, first + PAGE).map((i) => element("tr", COLUMNS.map((c) => cell(c, i)))));
    const last = Math.min(first + PAGE, order.length), all = number(0)(data.trial.length);
    byId("rows-count").textContent = order.length ? number(0)(first + 1) + "–" + number(0)(last) + " of " + number(0)(order.length) +
      (order.length < data.trial.length ? " that match, of " + all : "") : "None of " + all + " rows match.";
    byId("before").disabled = first === 0;
    byId("after").disabled = last >= order.length;
  }

  async function fill() {
    if (data) return;
    data = {}; // do not fill it twice
    data = JSON.parse(await page.unpack("rows-data"));
    byId("search").value = page.state.search;
    arrange();
    page.listeners.push(arrange);
    table.dataset.filled = "true";
  }

  let typing = 0;
  byId("search").addEventListener("input", (event) => {
    clearTimeout(typing);
    typing = setTimeout(() => { page.state.search = event.target.value; page.remember(); arrange(); }, 120);
  });
  byId("before").addEventListener("click", () => { first = Math.max(0, first - PAGE); show(); });
  byId("after").addEventListener("click", () => { first += PAGE; show(); });
  fold.addEventListener("toggle", () => { if (fold.open) fill(); });
  page.listeners.push(() => { if (page.state.search && !fold.open) fold.open = true; byId("search").value = page.state.search; });
})();
