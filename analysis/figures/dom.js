// The parts of a browser's document that plotly.js needs to draw an SVG: elements, selectors, sizes of text; no events.
// Text is measured as Liberation Sans, because it is as wide as Arial and Helvetica, for which an SVG asks.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const HTML = "http://www.w3.org/1999/xhtml";
const FONT = "Helvetica, Arial, Liberation Sans, sans-serif";

// Advances in thousandths of an em, and the letters that have them.
const ADVANCES = {
  normal: {
    191: "'", 222: "ijl‘’", 260: "|¦", 278: " !,./:;I[\\]ft\u00a0·ÌÍÎÏìíîï", 333: "()-`r¡¨²³´¸¹“”", 334: "{}", 350: "•",
    355: '"', 389: "*", 400: "°", 469: "^", 500: "Jcksvxyzçýÿ", 549: "±÷≈≠≤≥",
    556: "#$0123456789?L_abdeghnopqu£§«»àáâãäåèéêëðñòóôõöøùúûüþ–", 576: "µμ", 584: "+<=>~¬×−", 611: "FTZ¿ßø",
    667: "&ABEKPSVXYÀÁÂÃÄÅÈÉÊËÝÞ", 668: "Δ", 722: "CDHNRUwÇÐÑÙÚÛÜ", 737: "©®", 778: "GOQÒÓÔÕÖØ", 833: "Mm", 889: "%æ",
    944: "W", 1000: "Æ—…→", 1015: "@",
  },
  bold: {
    238: "'", 278: " ,./I\\ijl\u00a0·ÌÍÎÏìíîï‘’", 280: "|¦", 333: "!()-:;[]`ft¡¨²³´¸¹", 350: "•", 389: "*r{}", 400: "°",
    474: '"', 500: "z“”", 549: "±÷≈≠≤≥", 556: "#$0123456789J_aceksvxy£§«»àáâãäåçèéêëýÿ–", 576: "µ", 584: "+<=>^~¬×−",
    611: "?FLTZbdghnopqu¿ßðñòóôõöøùúûüþ", 667: "EPSVXYÈÉÊËÝÞ", 719: "Δ", 722: "&ABCDHKNRUÀÁÂÃÄÅÇÐÑÙÚÛÜ", 737: "©®",
    778: "GOQwÒÓÔÕÖØ", 833: "M", 889: "%mæ", 944: "W", 975: "@", 1000: "Æ—…→",
  },
};
const ASCENT = 0.905, DESCENT = 0.212; // em, above and below the line
const OTHER = 600, WIDE = 1000; // thousandths of an em of letters that are in no table, and of Chinese and beyond
const widths = Object.fromEntries(Object.entries(ADVANCES).map(([weight, table]) => [
  weight, new Map(Object.entries(table).flatMap(([width, letters]) => [...letters].map((one) => [one, Number(width)]))),
]));

/** Return the width of a line of text, in em. */
function textWidth(text, weight) {
  const known = widths[weight === "bold" || weight >= 600 ? "bold" : "normal"];
  let sum = 0;
  for (const letter of text) {
    if (letter !== "\u200b") sum += known.get(letter) ?? (letter.codePointAt(0) < 0x2e80 ? OTHER : WIDE);
  }
  return sum / 1000;
}

// Nodes --------------------------------------------------------------------------------------------------------------

class Node {
  constructor(type, name) {
    Object.assign(this, { nodeType: type, nodeName: name, childNodes: [], parentNode: null, ownerDocument: globalThis.document });
  }

  get parentElement() { return this.parentNode; }
  get children() { return this.childNodes.filter((one) => one.nodeType === 1); }
  get firstChild() { return this.childNodes[0] ?? null; }
  get lastChild() { return this.childNodes.at(-1) ?? null; }
  get nextSibling() { return this.sibling(1); }
  get previousSibling() { return this.sibling(-1); }
  get textContent() { return this.childNodes.map((one) => one.textContent).join(""); }
  set textContent(text) {
    for (const one of this.childNodes) one.parentNode = null;
    this.childNodes = [];
    if (text !== null && text !== "") this.appendChild(new Text(text));
  }

  sibling(step) {
    const all = this.parentNode?.childNodes;
    return all?.[all.indexOf(this) + step] ?? null;
  }

  appendChild(child) { return this.insertBefore(child, null); }

  insertBefore(child, next) {
    if (child.nodeType === 11) { // a fragment: its children move
      for (const one of [...child.childNodes]) this.insertBefore(one, next);
      return child;
    }
    child.parentNode?.removeChild(child);
    child.parentNode = this;
    if (next) this.childNodes.splice(this.childNodes.indexOf(next), 0, child);
    else this.childNodes.push(child);
    return child;
  }

  removeChild(child) {
    this.childNodes.splice(this.childNodes.indexOf(child), 1);
    child.parentNode = null;
    return child;
  }

  replaceChild(child, old) {
    this.insertBefore(child, old);
    return this.removeChild(old);
  }

  remove() { this.parentNode?.removeChild(this); }

  contains(other) {
    for (let at = other; at; at = at.parentNode) if (at === this) return true;
    return false;
  }

  addEventListener() {}
  removeEventListener() {}
  dispatchEvent() { return true; }
}

class Text extends Node {
  constructor(text) {
    super(3, "#text");
    this.data = String(text);
  }

  get textContent() { return this.data; }
  set textContent(text) { this.data = String(text); }
  get nodeValue() { return this.data; }
  cloneNode() { return new Text(this.data); }
}

/** The `style` of an element: the declarations of its attribute. */
class Style {
  constructor(element) { this.element = element; }

  read() {
    const pairs = (this.element.getAttribute("style") ?? "").split(/;(?![^(]*\))/).map((one) => one.split(/:(.*)/s));
    return new Map(pairs.filter(([name, value]) => name.trim() && value).map(([name, value]) => [name.trim(), value.trim()]));
  }

  get cssText() { return this.element.getAttribute("style") ?? ""; }
  set cssText(text) { this.element.setAttribute("style", text); }
  getPropertyValue(name) { return this.read().get(name) ?? ""; }

  setProperty(name, value) {
    const all = this.read();
    if (value === null || value === undefined || value === "") all.delete(name);
    else all.set(name, String(value));
    const text = [...all].map((one) => one.join(": ") + ";").join(" ");
    if (text) this.element.setAttribute("style", text);
    else this.element.removeAttribute("style");
  }

  removeProperty(name) { this.setProperty(name, null); }
}

const dashed = (name) => name.replace(/[A-Z]/g, (letter) => "-" + letter.toLowerCase());
const asProperties = {
  get: (style, name) => (name in style || typeof name === "symbol" ? style[name] : style.getPropertyValue(dashed(name))),
  set: (style, name, value) => (name in style ? (style[name] = value) : style.setProperty(dashed(name), value), true),
};

class Element extends Node {
  constructor(name, space) {
    super(1, name);
    this.tagName = this.localName = name;
    this.namespaceURI = space;
    this.attributes = new Map();
    this.style = new Proxy(new Style(this), asProperties);
  }

  getAttribute(name) { return this.attributes.get(name) ?? null; }
  setAttribute(name, value) { this.attributes.set(name, String(value)); }
  hasAttribute(name) { return this.attributes.has(name); }
  removeAttribute(name) { this.attributes.delete(name); }
  getAttributeNS(space, name) { return this.getAttribute(name); }
  setAttributeNS(space, name, value) {
    const prefix = /xlink$/.test(space) ? "xlink:" : /2000\/xmlns/.test(space) && name !== "xmlns" ? "xmlns:" : "";
    this.setAttribute(name.startsWith(prefix) ? name : prefix + name, value);
  }
  removeAttributeNS(space, name) { this.removeAttribute(name); }

  get id() { return this.getAttribute("id") ?? ""; }
  set id(value) { this.setAttribute("id", value); }
  get className() { return this.getAttribute("class") ?? ""; }
  set className(value) { this.setAttribute("class", value); }
  get classList() {
    const names = () => this.className.split(/\s+/).filter(Boolean);
    return {
      contains: (name) => names().includes(name),
      add: (...more) => { this.className = [...new Set([...names(), ...more])].join(" "); },
      remove: (...less) => { this.className = names().filter((one) => !less.includes(one)).join(" "); },
    };
  }

  get innerHTML() { return this.childNodes.map(serialize).join(""); }
  set innerHTML(text) { this.textContent = text; } // no drawn markup is set this way
  get outerHTML() { return serialize(this); }

  cloneNode(deep) {
    const copy = this.ownerDocument.createElementNS(this.namespaceURI, this.nodeName);
    copy.attributes = new Map(this.attributes);
    if (deep) for (const one of this.childNodes) copy.appendChild(one.cloneNode(true));
    return copy;
  }

  *walk() {
    for (const one of this.childNodes) {
      if (one.nodeType !== 1) continue;
      yield one;
      yield* one.walk();
    }
  }

  matches(selector) { return alternatives(selector).some((steps) => matchesSteps(this, steps)); }
  querySelectorAll(selector) {
    const wanted = alternatives(selector);
    return [...this.walk()].filter((one) => wanted.some((steps) => matchesSteps(one, steps)));
  }
  querySelector(selector) {
    const wanted = alternatives(selector);
    for (const one of this.walk()) if (wanted.some((steps) => matchesSteps(one, steps))) return one;
    return null;
  }
  getElementsByTagName(name) { return this.querySelectorAll(name); }
  getElementsByClassName(name) { return this.querySelectorAll("." + name); }
  closest(selector) { return this.matches(selector) ? this : this.parentNode?.closest?.(selector) ?? null; }

  getBBox() { return asBox(extent(this, IDENTITY)); }
  getBoundingClientRect() { return asBox(extent(this, placed(this))); }
  getComputedTextLength() { return this.getBBox().width; }
  getTotalLength() { return alongPath(this, Infinity).length; }
  getPointAtLength(length) { return alongPath(this, length); }
  getCTM() { return asMatrix(placed(this)); }
  getScreenCTM() { return this.getCTM(); }
  get offsetWidth() { return this.getBoundingClientRect().width; }
  get offsetHeight() { return this.getBoundingClientRect().height; }
  get clientWidth() { return this.offsetWidth; }
  get clientHeight() { return this.offsetHeight; }
}

/** The canvas of a heat map: rectangles of an SVG inside the SVG, because they stay sharp. */
class Canvas extends Element {
  getContext() {
    const rectangles = this.rectangles = [];
    return {
      fillRect(x, y, width, height) {
        rectangles.push(`<rect x="${x}" y="${y}" width="${width}" height="${height}" fill="${this.fillStyle}"/>`);
      },
    };
  }

  toDataURL() {
    const { width, height } = this;
    const opening = `<svg xmlns="${SVG}" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
    const svg = `${opening} preserveAspectRatio="none" shape-rendering="crispEdges">${this.rectangles.join("")}</svg>`;
    return "data:image/svg+xml," + encodeURIComponent(svg);
  }
}

// Selectors ----------------------------------------------------------------------------------------------------------

const PART = /([\w-]+|\*)|#([\w-]+)|\.([\w-]+)|\[([\w-]+)(?:([\^$*~]?=)["']?([^"'\]]*)["']?)?\]|:not\(([^)]*)\)|:([\w-]+)/gy;
const COMPARED = {
  "=": (has, wanted) => has === wanted,
  "^=": (has, wanted) => has.startsWith(wanted),
  "$=": (has, wanted) => has.endsWith(wanted),
  "*=": (has, wanted) => has.includes(wanted),
  "~=": (has, wanted) => has.split(" ").includes(wanted),
};
const PLACED = {
  "first-child": (one) => one.parentNode?.children[0] === one,
  "last-child": (one) => one.parentNode?.children.at(-1) === one,
};
const parsed = new Map();

/** Split a selector into alternatives: steps that an element and its ancestors must match, the element's first. */
function alternatives(selector) {
  if (!parsed.has(selector)) {
    const each = selector.split(/,(?![^[(]*[\])])/).map((one) => one.trim().replace(/\s*>\s*/g, " >").split(/\s+(?![^[]*\])/));
    parsed.set(selector, each.map((steps) => steps.map((step) => (
      { direct: step.startsWith(">"), tests: tests(step.replace(/^>/, "")) })).reverse()));
  }
  return parsed.get(selector);
}

function tests(step) {
  const found = [];
  PART.lastIndex = 0;
  while (PART.lastIndex < step.length) {
    const part = PART.exec(step);
    if (!part) throw new Error(`selector ${step}`);
    const [, name, id, kind, attribute, how, value, not, place] = part;
    if (name && name !== "*") found.push((one) => one.nodeName.toLowerCase() === name.toLowerCase());
    if (id) found.push((one) => one.id === id);
    if (kind) found.push((one) => one.classList.contains(kind));
    if (attribute) found.push((one) => one.hasAttribute(attribute) && (!how || COMPARED[how](one.getAttribute(attribute), value)));
    if (not) found.push((one) => !one.matches(not));
    if (place) found.push(PLACED[place]);
  }
  return found;
}

function matchesSteps(element, [first, ...around]) {
  if (!first.tests.every((test) => test(element))) return false;
  if (!around.length) return true;
  for (let at = element.parentNode; at?.nodeType === 1; at = at.parentNode) {
    if (matchesSteps(at, around)) return true;
    if (first.direct) return false;
  }
  return false;
}

// Sizes --------------------------------------------------------------------------------------------------------------

const IDENTITY = [1, 0, 0, 1, 0, 0];
const asMatrix = ([a, b, c, d, e, f]) => ({ a, b, c, d, e, f, inverse: () => asMatrix(IDENTITY) });
const times = ([a, b, c, d, e, f], [g, h, i, j, k, l]) => [
  a * g + c * h, b * g + d * h, a * i + c * j, b * i + d * j, a * k + c * l + e, b * k + d * l + f];
const number = (text) => parseFloat(text) || 0;

function transform(element) {
  let found = IDENTITY;
  for (const [, name, inside] of (element.getAttribute("transform") ?? "").matchAll(/(\w+)\(([^)]*)\)/g)) {
    const [x = 0, y, z] = inside.split(/[\s,]+/).filter(Boolean).map(Number);
    const turn = (x * Math.PI) / 180;
    const turned = [Math.cos(turn), Math.sin(turn), -Math.sin(turn), Math.cos(turn), 0, 0];
    if (name === "translate") found = times(found, [1, 0, 0, 1, x, y ?? 0]);
    if (name === "scale") found = times(found, [x, 0, 0, y ?? x, 0, 0]);
    if (name === "rotate") found = times(times(times(found, [1, 0, 0, 1, y ?? 0, z ?? 0]), turned), [1, 0, 0, 1, -(y ?? 0), -(z ?? 0)]);
  }
  return found;
}

function placed(element) {
  const around = element.parentNode?.nodeType === 1 ? placed(element.parentNode) : IDENTITY;
  return times(around, transform(element));
}

const asBox = (points) => {
  const xs = points.map(([x]) => x), ys = points.map(([, y]) => y);
  const [left, right] = points.length ? [Math.min(...xs), Math.max(...xs)] : [0, 0];
  const [top, bottom] = points.length ? [Math.min(...ys), Math.max(...ys)] : [0, 0];
  return { x: left, y: top, left, right, top, bottom, width: right - left, height: bottom - top };
};

/** Return the corners of what an element draws, transformed by a matrix. */
function extent(element, matrix) {
  if (style(element, "display") === "none") return [];
  if (element.nodeName === "text" || element.nodeName === "tspan") {
    return textBoxes(element).flatMap((box) => corners(box, matrix));
  }
  if (element.size) return corners([0, 0, ...element.size], matrix);
  if (element.nodeName === "path") return pathPoints(element.getAttribute("d") ?? "").flatMap(([x, y]) => corners([x, y, 0, 0], matrix));
  const at = (name) => number(element.getAttribute(name));
  if (element.nodeName === "rect") return corners([at("x"), at("y"), at("width"), at("height")], matrix);
  return element.children.flatMap((one) => extent(one, times(matrix, transform(one))));
}

const corners = ([x, y, width, height], [a, b, c, d, e, f]) =>
  [[x, y], [x + width, y], [x, y + height], [x + width, y + height]].map(([u, v]) => [a * u + c * v + e, b * u + d * v + f]);

/** Return the points that a path goes through, or is bent towards. */
function pathPoints(path) {
  const found = [];
  let x = 0, y = 0;
  for (const [, letter, inside] of path.matchAll(/([A-Za-z])([^A-Za-z]*)/g)) {
    const all = (inside.match(/-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?/g) ?? []).map(Number);
    const kind = letter.toUpperCase(), relative = letter !== kind;
    const size = { H: 1, V: 1, A: 7, C: 6, S: 4, Q: 4 }[kind] ?? 2;
    for (let i = 0; i + size <= all.length; i += size) {
      const [u, v] = kind === "H" ? [all[i], relative ? 0 : y] : kind === "V" ? [relative ? 0 : x, all[i]] : all.slice(i + size - 2, i + size);
      [x, y] = relative ? [x + u, y + v] : [u, v];
      found.push([x, y]);
    }
  }
  return found;
}

/** Return where a path of straight lines is after the `wanted` length, and the length up to there. */
function alongPath(element, wanted) {
  const [[x, y], ...others] = pathPoints(element.getAttribute("d") ?? "");
  const at = { x, y, length: 0 };
  for (const [u, v] of others) {
    const step = Math.hypot(u - at.x, v - at.y), part = Math.min(step, wanted - at.length);
    if (step > 0) Object.assign(at, { x: at.x + ((u - at.x) * part) / step, y: at.y + ((v - at.y) * part) / step });
    at.length += part;
    if (part < step) break;
  }
  return at;
}

const INHERITED = { "font-size": "12px", "font-weight": "normal", "text-anchor": "start" };

function style(element, name) {
  for (let at = element; at?.nodeType === 1; at = at.parentNode) {
    const own = at.style.getPropertyValue(name) || at.getAttribute(name);
    if (own && own !== "inherit") return own;
    if (!(name in INHERITED)) break;
  }
  return INHERITED[name] ?? "";
}

function fontSize(element) {
  const own = style(element, "font-size");
  return own.endsWith("%") ? (number(own) / 100) * fontSize(element.parentNode) : number(own);
}

/** Return the boxes (x, y, width, height) of a text's pieces: a tspan with an x of its own begins a line. */
function textBoxes(element) {
  const lines = [];
  let y = number(element.getAttribute("y"));
  const begin = (x, anchor) => lines.push({ x, anchor, width: 0, pieces: [] });
  const visit = (node, around) => {
    if (node.nodeType === 3) {
      const size = fontSize(around), width = size * textWidth(node.data, style(around, "font-weight"));
      const line = lines.at(-1);
      line.pieces.push([line.width, y - Math.round(ASCENT * size), width, Math.round(ASCENT * size) + Math.round(DESCENT * size)]);
      line.width += width;
      return;
    }
    if (node !== element && node.hasAttribute("x")) {
      begin(number(node.getAttribute("x")), style(node, "text-anchor"));
      if (node.hasAttribute("y")) y = number(node.getAttribute("y"));
    }
    const down = node.getAttribute("dy") ?? "";
    y += number(down) * (down.endsWith("em") ? fontSize(node) : 1);
    for (const one of node.childNodes) visit(one, node);
  };
  begin(number(element.getAttribute("x")), style(element, "text-anchor"));
  visit(element, element);
  return lines.flatMap(({ x, anchor, width, pieces }) => {
    const left = x - width * ({ middle: 0.5, end: 1 }[anchor] ?? 0);
    return pieces.filter(([, , wide]) => wide > 0).map(([from, top, wide, high]) => [left + from, top, wide, high]);
  });
}

// The document -------------------------------------------------------------------------------------------------------

const NO_XML = /[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]/g;
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escaped = (text) => text.replace(/[&<>"]/g, (sign) => ENTITIES[sign]).replace(NO_XML, "\ufffd");

function serialize(node) {
  if (node.nodeType === 3) return escaped(node.data);
  const attributes = [...node.attributes].map(([name, value]) => ` ${name}="${escaped(value)}"`).join("");
  return `<${node.nodeName}${attributes}>${node.childNodes.map(serialize).join("")}</${node.nodeName}>`;
}

class Document extends Node {
  constructor() {
    super(9, "#document");
    globalThis.document = this;
    this.documentElement = this.appendChild(this.createElement("html"));
    this.head = this.documentElement.appendChild(this.createElement("head"));
    this.body = this.documentElement.appendChild(this.createElement("body"));
    this.defaultView = globalThis;
  }

  createElementNS(space, name) {
    const made = new (name === "canvas" ? Canvas : Element)(name, space);
    if (name === "text") made.setAttribute("xml:space", "preserve"); // for viewers that do not know `white-space: pre`
    return made;
  }
  createElement(name) { return this.createElementNS(HTML, name.toLowerCase()); }
  createTextNode(text) { return new Text(text); }
  createDocumentFragment() { return new Node(11, "#fragment"); }
  getElementById(id) { return this.querySelector("#" + id); }
  querySelector(selector) { return this.documentElement.querySelector(selector); }
  querySelectorAll(selector) { return this.documentElement.querySelectorAll(selector); }
}

Object.assign(globalThis, {
  window: globalThis, self: globalThis, Node, Element, Text, HTMLElement: Element, SVGElement: Element,
  navigator: { userAgent: "" }, location: { href: "", protocol: "", search: "" }, devicePixelRatio: 1,
  innerWidth: 1000, innerHeight: 1000, scrollX: 0, scrollY: 0, pageXOffset: 0, pageYOffset: 0,
  URL: { createObjectURL: () => "" }, Blob: class {},
  DOMParser: class {}, TextDecoder: class {}, TextEncoder: class {},
  XMLSerializer: class { serializeToString(node) { return serialize(node); } },
  getComputedStyle: (element) => ({ getPropertyValue: (name) => style(element, name) }),
  addEventListener() {}, removeEventListener() {}, matchMedia: () => ({ matches: false }),
  requestAnimationFrame: (then) => then(0), cancelAnimationFrame() {}, setTimeout: () => 0, clearTimeout() {},
});
new Document();

// Names of clips and patterns are random. A fixed seed gives the same figure the same names, and so the same file.
let seed = 1;
Math.random = () => { seed = (seed * 48271) % 2147483647; return seed / 2147483647; };

/** Return an object that is filled in once the figure is drawn: `svg`, shown `scale` times as large; or `error`. */
function draw(figure, width, height, scale) {
  const found = {};
  const { data, layout } = JSON.parse(figure);
  const place = document.body.appendChild(document.createElement("div"));
  place.size = [width, height];
  seed = 1;
  const whole = { ...layout, width, height, font: { ...layout.font, family: FONT } };
  Promise.resolve().then(() => Plotly.newPlot(place, data, whole, { staticPlot: true }))
    .then(() => { found.svg = Plotly.Snapshot.toSVG(place, "svg", scale); })
    .catch((error) => { found.error = String(error.stack ?? error); })
    .then(() => place.remove());
  return found;
}
