"use strict";
// Elements are made from text alone: nothing that came with the data is ever read as markup.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const byId = (id) => document.getElementById(id);
const DATA = JSON.parse(byId("data").textContent);
const SHADES = 8;
/** 0 (unshaded) to SHADES for a value between low and high. */
function shade(value, low, high) {
  if (!(value > low) || !(high > low)) return 0;
  return Math.min(SHADES, Math.max(1, Math.ceil((SHADES * (value - low)) / (high - low))));
}
function shown(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}
function percent(share) {
  return `${shown(100 * share, 2)} %`;
}
/** A snippet whose tokens are shaded by digits 0 to 9; pieces: [text, digit or null, is it the peak, activation]. */
function snippet(pieces, note) {
  const line = el("bdi", { dir: "auto" });
  for (const [text, digit, peak, value] of pieces) {
    const level = digit === null ? 0 : Math.ceil((digit * SHADES) / 9);
    const blank = level || peak ? text.length - text.trimStart().length : 0;
    line.append(text.slice(0, blank), level || peak ? el("span", { class: `${level ? `v${level}` : ""}${peak ? " peak" : ""}`, title: value ? `activation ${shown(value)}` : null }, text.slice(blank)) : text);
  }
  return el("p", { class: "example" }, line, note ? el("small", {}, ` ${note}`) : null);
}
/** An example from a corpus: [snippet, peak token, digits, activations of those that are not 0, activation at the peak]. */
function fromCorpus([number, peak, levels, active, value]) {
  const [text, ends, label] = DATA.snippets[number], pieces = [], values = active.values();
  let at = 0;
  ends.forEach((end, i) => {
    const digit = Number(levels[i]), here = digit ? values.next().value : 0;
    if (end > at) pieces.push([text.slice(at, end), digit, i === peak, here]);
    at = Math.max(at, end);
  });
  return { pieces, value, note: label };
}
/** The words some examples peak on, as a handle to remember a feature by. */
function peakWords(examples) {
  const words = examples.map(({ pieces }) => (pieces.find((piece) => piece[2]) || [""])[0].trim().toLowerCase());
  return [...new Set(words.filter(Boolean))].slice(0, 3).join(" · ");
}
function meter(share) {
  const bar = el("b", {});
  bar.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return el("span", { class: "meter", "aria-hidden": "true" }, bar);
}
(function theme() {
  const root = document.documentElement, key = "sae-page-theme";
  // storage is refused to some pages that are opened from disk
  try { root.dataset.theme = localStorage.getItem(key) || ""; } catch { /* not kept */ }
  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem(key, root.dataset.theme); } catch { /* not kept */ }
  });
})();
/** Press a column's head to sort a table by it: by numbers where the cells begin with one, once more: the other way round. */
for (const head of document.querySelectorAll("table.sortable th")) {
  const button = el("button", { type: "button" }, ...head.childNodes), body = head.closest("table").tBodies[0];
  const value = (row) => row.cells[head.cellIndex].textContent.trim().replace("−", "-").replaceAll(",", "");
  const compare = (a, b) => parseFloat(a) - parseFloat(b) || isNaN(parseFloat(a)) - isNaN(parseFloat(b)) || a.localeCompare(b);
  button.addEventListener("click", () => {
    const falling = head.ariaSort === "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.ariaSort = falling ? "descending" : "ascending";
    body.append(...[...body.rows].sort((a, b) => (falling ? compare(value(b), value(a)) : compare(value(a), value(b)))));
  });
  head.replaceChildren(button);
}
/** Search: <input data-list="id"> shows the children of #id with all of its words, <select data-list="id"> those of a class. */
(function search() {
  const box = document.querySelector("input[data-list]");
  if (!box) return;
  const rows = () => [...byId(box.dataset.list).children];
  const has = (row, word) => (row.dataset.number && /^\d+$/.test(word) ? row.dataset.number.startsWith(word) : (row.words ??= row.textContent.toLowerCase()).includes(word));
  function show() {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean), all = rows();
    const kinds = [...document.querySelectorAll("select[data-list]")].map((select) => select.value).filter(Boolean);
    for (const row of all) row.hidden = !(kinds.every((kind) => row.classList.contains(kind)) && words.every((word) => has(row, word)));
    const left = all.filter((row) => !row.hidden).length;
    byId("found").textContent = left < all.length ? `${left} of ${all.length}` : "";
  }
  for (const control of document.querySelectorAll("[data-list]")) control.addEventListener("input", show);
  addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
    if (typing) {
      event.target.blur();
      return;
    }
    if (event.key === "/") box.focus();
    else if (event.key === "j" || event.key === "k") {
      const left = rows().filter((row) => !row.hidden), at = left.findIndex((row) => row.contains(document.activeElement));
      const next = left[at < 0 ? 0 : at + (event.key === "j" ? 1 : -1)];
      if (next) next.querySelector("summary, a, button").focus();
    } else return;
    event.preventDefault();
  });
  show();
})();
