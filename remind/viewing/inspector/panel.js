// What stands beside the dialogue: the features of a token, of a turn, or of the whole guidance.
const panel = byId("panel");
function featuresOf(layer, t) {
  const { features, values, v } = LAYERS[layer];
  const found = features[t].map((local, i) => ({ local, value: values[t][i], share: values[t][i] * v[local] }));
  return found.sort((a, b) => b.share - a.share || b.value - a.value);
}
/** Examples of a feature as lines. */
function examplesOf(layer, local) {
  return LAYERS[layer].examples[local].map(fromDialogue);
}
function fromDialogue([peak, levels]) {
  const turn = TOKENS.turn[peak], first = Math.max(FIRST[turn], peak - DATA.context), pieces = [];
  let at = TOKENS.start[first];
  for (let i = 0; i < levels.length; i += 1) {
    const start = Math.max(at, TOKENS.start[first + i]), end = TOKENS.end[first + i];
    if (start > at) pieces.push([TEXT.slice(at, start).replace("\n", " ⏎ "), null, false]);
    if (end > start) pieces.push([TEXT.slice(start, end), Number(levels[i]), first + i === peak]);
    at = Math.max(at, end);
  }
  if (pieces.length) pieces[0][0] = pieces[0][0].trimStart();
  const last = pieces[pieces.length - 1];
  if (last) last[0] = last[0].trimEnd();
  return { pieces, peak, note: `turn ${turn + 1}` };
}
const wordsOf = (layer, local) => peakWords(examplesOf(layer, local));
function featureRow(layer, found, most, open) {
  const { ids, fired, v } = LAYERS[layer], { local } = found;
  const numbers = [];
  if (found.value !== undefined) numbers.push(`activation ${shown(found.value)}`);
  if (found.share !== undefined) numbers.push(`adds ${shown(found.share)}`);
  const body = el("div", {});
  const row = el("details", { class: "feature", "data-layer": LAYERS[layer].layer, "data-feature": ids[local] },
    el("summary", {}, el("b", { class: "num" }, String(ids[local])), most > 0 ? meter((found.share ?? v[local]) / most) : null,
      el("span", { class: "num small" }, numbers.join(", ") || `weight ${shown(v[local])}`), el("bdi", { class: "words small", dir: "auto" }, LAYERS[layer].names[local] || wordsOf(layer, local) || "fires nowhere here")), body);
  const build = () => {
    if (body.childNodes.length) return;
    const facts = [`weight in the guidance ${shown(v[local])}`, `fires on ${fired[local]} of ${COUNT} tokens here`];
    body.append(el("p", { class: "small soft" }, facts.join(" · ")));
    for (const example of examplesOf(layer, local)) {
      const line = snippet(example.pieces);
      line.append(" ", el("button", { type: "button", class: "small quiet", onclick: () => go(example.peak) }, example.note));
      body.append(line);
    }
    body.append(el("p", {}, el("button", { type: "button", class: "small", onclick: () => showFeature(layer, local) }, "Shade the dialogue by it")));
  };
  row.addEventListener("toggle", () => { if (row.open) build(); });
  if (open) { row.open = true; build(); }
  return row;
}
function put(title, about, ...content) {
  const idle = title === null;
  panel.classList.toggle("idle", idle);
  const close = el("button", { type: "button", class: "close quiet", "aria-label": "Close", onclick: () => shut() }, "✕");
  panel.replaceChildren(...(idle ? [] : [close]), el("h2", {}, ...(idle ? ["What the strategy asks for"] : title)), ...about.map((line) => el("p", { class: "small soft" }, line)), ...content);
  panel.scrollTop = 0;
}
const heading = (layer, text) => el("h3", {}, `Layer ${LAYERS[layer].layer}`, el("span", { class: "soft small" }, ` ${text}`));
function guidancePanel() {
  const parts = LAYERS.flatMap((layer, i) => {
    const most = Math.max(0, ...layer.guiding.map((local) => layer.v[local]));
    const rows = layer.guiding.map((local) => featureRow(i, { local }, most, false));
    return [heading(i, ""), ...(rows.length ? rows : [el("p", { class: "small soft" }, "The strategy has no active feature.")])];
  });
  put(null, ["The features with the largest weight in the guidance v (Eq. 3). A token resonates as far as it activates them."], ...parts);
}
function tokenPanel(t) {
  const turn = TOKENS.turn[t], text = tokenText(t).trim() || "white space";
  const together = LAYERS.length > 1 ? " (layers standardised and averaged)" : "";
  const about = [`Turn ${turn + 1}, ${PARTS[TOKENS.part[t]]} · r ${shown(TOKENS.r[t], 4)}${together} · smoothed s ${shown(TOKENS.s[t], 4)}`];
  const parts = LAYERS.flatMap((layer, i) => {
    const found = featuresOf(i, t), most = Math.max(0, ...found.map((one) => one.share));
    const speaker = layer.r[t] - layer.local[t];
    const rows = found.map((one, place) => featureRow(i, one, most, place === 0));
    const rest = layer.active[t] > found.length ? [el("p", { class: "small soft" }, `${found.length} of ${layer.active[t]} active features are shown.`)] : [];
    return [heading(i, `r ${shown(layer.r[t], 4)} = ${shown(layer.local[t], 4)} from its features + ${shown(speaker, 3)} from speakers`), ...(rows.length ? rows : [el("p", { class: "small soft" }, "No active feature.")]), ...rest];
  });
  put(["“", el("bdi", { dir: "auto" }, text), "”"], about, ...parts);
  byId("said").textContent = `${text}: resonance ${shown(TOKENS.s[t])}, ${LAYERS.map((_, i) => featuresOf(i, t).length).reduce((a, b) => a + b, 0)} features listed beside the dialogue`;
}
function turnPanel(n) {
  const parts = LAYERS.flatMap((layer, i) => {
    const rows = layer.carried[n].map(([local, share]) => featureRow(i, { local, share }, layer.carried[n][0][1], false));
    return [heading(i, ""), ...(rows.length ? rows : [el("p", { class: "small soft" }, "Nothing the strategy asks for fires here.")])];
  });
  const salience = turnOf(n).querySelector(".side .num").textContent;
  put([`Turn ${n + 1}`], [`Salience ${salience}. The features that carried it: what each adds, summed over the turn's tokens.`], ...parts);
}
/** The numbers of a token, a line each. */
function tipOf(t) {
  const lines = LAYERS.map((layer, i) => `layer ${layer.layer}: ${featuresOf(i, t).slice(0, 3).map((one) => `${layer.ids[one.local]} (${shown(one.value)})`).join(", ") || "no feature"}`);
  return [`r ${shown(TOKENS.r[t])} · s ${shown(TOKENS.s[t])}`, ...lines].join("\n");
}
