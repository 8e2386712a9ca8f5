// The dialogue: turns stand in the page as text; their tokens become elements as they come near the window.
const TOKENS = DATA.tokens, LAYERS = DATA.layers, COUNT = TOKENS.turn.length;
const PARTS = ["label", "speaker", "text", "caption"];
const TEXT = DATA.levels.x0.text;
/** FIRST[n] is the first token of turn n; FIRST[turns] the number of tokens. */
const FIRST = new Uint32Array(DATA.turns + 1).fill(COUNT);
for (let t = COUNT - 1; t >= 0; t -= 1) FIRST[TOKENS.turn[t]] = t;
for (let n = DATA.turns - 1; n >= 0; n -= 1) FIRST[n] = Math.min(FIRST[n], FIRST[n + 1]);
const tokenText = (t) => TEXT.slice(TOKENS.start[t], TOKENS.end[t]);
const turnOf = (n) => byId(`t${n}`);
const filled = new Set();
// token spans by the number of their first token, and for each token the first of its span
const spans = new Map();
let shading = { values: TOKENS.s, low: 0, high: 1 };

/** Replace the text of a turn's pieces by one element per token; tokens of one character share an element. */
function fill(n) {
  if (filled.has(n)) return;
  filled.add(n);
  for (const piece of turnOf(n).querySelectorAll(".piece")) {
    const from = Number(piece.dataset.a), to = Number(piece.dataset.b), parts = [];
    let at = from, last = null;
    for (let t = FIRST[n]; t < FIRST[n + 1]; t += 1) {
      let start = Math.max(TOKENS.start[t], at);
      const end = Math.min(TOKENS.end[t], to);
      if (end <= from || TOKENS.start[t] >= to) continue;
      if (end <= start) {
        if (last) last.dataset.n = String(t + 1 - Number(last.dataset.t));
        continue;
      }
      const blank = TEXT.slice(start, end).match(/^\s*/)[0].length;
      if (blank < end - start) start += blank;
      if (start > at) parts.push(TEXT.slice(at, start));
      last = el("span", { class: "tok", role: "button", tabindex: "-1", "data-t": t, "data-n": 1, "aria-pressed": "false" }, TEXT.slice(start, end));
      parts.push(last);
      at = end;
    }
    if (at < to) parts.push(TEXT.slice(at, to));
    piece.replaceChildren(...parts);
  }
  const found = [...turnOf(n).querySelectorAll(".tok")];
  for (const span of found) {
    const t = Number(span.dataset.t);
    for (let i = t; i < t + Number(span.dataset.n); i += 1) spans.set(i, span);
    paint(span);
  }
}
/** The token of a span that resonates most. */
function strongest(span) {
  const first = Number(span.dataset.t), n = Number(span.dataset.n);
  let best = first;
  for (let t = first + 1; t < first + n; t += 1) if (TOKENS.s[t] > TOKENS.s[best]) best = t;
  return best;
}
function paint(span) {
  const first = Number(span.dataset.t), n = Number(span.dataset.n);
  let value = -Infinity;
  for (let t = first; t < first + n; t += 1) value = Math.max(value, shading.values[t]);
  const level = shade(value, shading.low, shading.high);
  span.className = level ? `tok v${level}` : "tok";
}
function repaint() {
  for (const span of new Set(spans.values())) paint(span);
}
function quantile(sorted, share) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : 0;
}
/** Shade by numbers per token, from their median to where the highest half percent begins. */
function shadeBy(values) {
  const sorted = values.toSorted((a, b) => a - b);
  shading = { values, low: quantile(sorted, 0.5), high: quantile(sorted, 0.995) };
  legend(`${shown(shading.low, 2)} (median)`, `≥ ${shown(shading.high, 2)}`, "");
  repaint();
}
/** Shade by the activation of one feature, over the tokens whose rows show it; returns the first of the strongest. */
function shadeByFeature(layer, local) {
  const { features, values } = LAYERS[layer];
  const row = features.map((shown, t) => (shown.includes(local) ? values[t][shown.indexOf(local)] : 0));
  const high = row.reduce((a, b) => Math.max(a, b), 0);
  shading = { values: row, low: 0, high };
  legend("0", shown(high), `activation of feature ${LAYERS[layer].ids[local]}`);
  repaint();
  return high ? row.indexOf(high) : -1;
}
function legend(low, high, note) {
  const steps = Array.from({ length: SHADES + 1 }, (_, i) => el("i", { class: i ? `v${i}` : "" }));
  const node = byId("legend");
  node.replaceChildren(low, el("span", {}, ...steps), high, note);
  node.setAttribute("aria-label", `Shades from ${low}, which is not shaded, to ${high} ${note}`);
}
const nearby = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    nearby.unobserve(entry.target);
    fill(Number(entry.target.id.slice(1)));
  }
}, { rootMargin: "700px 0px" });
