const every = Math.max(1, DATA.tokens + DATA.image_tokens), rate = (one) => (one.fired + one.fired_images) / every;
const list = byId("features"), byFeature = new Map(), given = DATA.features;
const highest = Math.max(1e-9, ...given.map((one) => one.max));
function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
/** Bars over evenly wide bins; says(i) is what bar i tells, ends stand below the outer bins. */
function bars(counts, name, ends, says, kind = () => "") {
  const most = Math.max(1, ...counts);
  const box = svg("svg", { viewBox: `0 0 ${Math.max(1, counts.length)} 100`, preserveAspectRatio: "none", class: "strength", role: "img", "aria-label": `${name}: ${counts.join(", ")}` },
    ...counts.map((count, i) => {
      const told = svg("title", {}, says(i));
      return svg("g", {}, svg("rect", { x: i + 0.05, width: 0.9, y: 100 - (100 * count) / most, height: (100 * count) / most, class: kind(i) }), svg("rect", { x: i, width: 1, y: 0, height: 100, class: "catch" }, told));
    }));
  return el("div", {}, box, el("div", { class: "ends small soft num" }, ...ends.map((end) => el("span", {}, end))));
}
function strength({ edges, counts }) {
  const range = (i) => `${shown(edges[i])} to ${shown(edges[i + 1])}`;
  return bars(counts, `Tokens by activation, from ${shown(edges[0])} to ${shown(edges[edges.length - 1])}`, [shown(edges[0]), shown(edges[edges.length - 1])], (i) => `${counts[i]} tokens of activation ${range(i)}`);
}
function logits([promoted, suppressed, largest, counts]) {
  const width = (2 * largest) / counts.length, at = (i) => i * width - largest;
  const table = (title, rows, kind) => el("div", {}, el("h3", {}, title), ...rows.map(([token, value]) => {
    const cell = el("bdi", { class: `token ${kind}` }, token.trim() ? token : "␣");
    cell.style.setProperty("--share", `${Math.round((100 * Math.abs(value)) / (largest || 1))}%`);
    return el("div", { class: "logit small" }, cell, el("span", { class: "num soft" }, shown(value, 2)));
  }));
  return [el("div", { class: "logits" }, table("Suppresses", suppressed, "less"), table("Promotes", promoted, "more")),
    el("h3", {}, "Vocabulary by effect on the logit"),
    bars(counts, `Tokens of the vocabulary by effect, from ${shown(-largest)} to ${shown(largest)}`, [shown(-largest), "0", shown(largest)], (i) => `${counts[i]} tokens, effect ${shown(at(i))} to ${shown(at(i + 1))}`, (i) => (2 * i < counts.length ? "less" : "more"))];
}
/** A picture whose patches that fire are framed and tinted by activation: [number, digits, columns, value]. */
function picture([number, levels, columns, value]) {
  const [url, caption] = DATA.pictures[number], firing = [...levels].flatMap((level, i) => (level === "0" ? [] : [i]));
  const tint = firing.map((i) => svg("rect", { x: i % columns, y: Math.floor(i / columns), width: 1, height: 1, "fill-opacity": (Number(levels[i]) / 9) * 0.4 }));
  const box = svg("svg", { viewBox: `0 0 ${columns} ${levels.length / columns}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...tint);
  const note = `fires on ${tint.length} of ${levels.length} patches, up to ${shown(value)}`;
  return el("figure", { class: "picture" }, el("div", {}, el("img", { src: url, alt: `${caption}: ${note}`, decoding: "async" }), box), el("figcaption", { class: "small", title: note }, `${shown(value)} `, el("bdi", { class: "soft", dir: "auto" }, caption)));
}
function body(one) {
  const side = el("div", {});
  if (one.counts.length) side.append(el("h3", {}, `Tokens${DATA.image_tokens ? " of text" : ""} by activation`), strength(one));
  if (one.logits) side.append(...logits(one.logits));
  side.append(el("h3", {}, "Nearest decoder rows"), el("ul", { class: "near" }, ...one.near.map(([other, cosine]) => {
    const known = byFeature.has(other);
    const words = known ? peakWords(byFeature.get(other).one.examples.map(fromCorpus)) : "";
    return el("li", { class: "small" }, known ? el("button", { type: "button", class: "num", onclick: () => openFeature(other) }, String(other)) : el("span", { class: "num" }, String(other)),
      el("span", { class: "num" }, ` cosine ${shown(cosine, 2)} `), el("bdi", { class: "words" }, words));
  })));
  const examples = (found) => found.map((example) => {
    const { pieces, value, note } = fromCorpus(example), line = snippet(pieces, note);
    // a token that is part of a character has no text of its own
    const peak = pieces.find((piece) => piece[2]);
    line.prepend(el("span", { class: "at small" }, el("bdi", { class: "soft" }, peak ? peak[0].trim() : ""), el("b", { class: "num" }, shown(value))));
    return line;
  });
  const texts = el("div", { class: "valued" }, ...(one.examples.length ? examples(one.examples) : [el("p", { class: "soft" }, DATA.image_tokens ? "It fires on no text." : "It fired on no token.")]));
  if (one.drawn.length) texts.append(el("h3", {}, "Drawn at random from all tokens it fires on"), ...examples(one.drawn));
  const left = el("div", {}, one.name ? named(one.name, one.examples.length ? "" : " from captions") : null, texts);
  if (DATA.image_tokens) {
    const images = el("div", { class: "pictures" }, ...(one.pictures.length ? one.pictures.map(picture) : [el("p", { class: "soft" }, "It fires on no image.")]));
    texts.prepend(el("h3", {}, `Text: ${percent(one.fired / Math.max(1, DATA.tokens))} of tokens`));
    left.append(el("div", { class: "both" }, el("div", {}, el("h3", {}, `Images: ${percent(one.fired_images / DATA.image_tokens)} of tokens`), images), texts));
  }
  return [left, side];
}
function named({ text, scores }, from) {
  const parts = Object.entries(scores).map(([kind, score]) => `${kind.replace("_control", " of another name")} ${score ? `${percent(score.value)} (${percent(score.low)} to ${percent(score.high)}, n ${score.n})` : "failed"}`);
  return el("p", { class: "name" }, el("b", {}, `Explanation by a model${from}: `), el("bdi", { dir: "auto" }, text), parts.length ? el("small", { class: "soft" }, ` ${parts.join(" · ")}`) : null);
}
function openFeature(id) {
  const found = byFeature.get(id);
  if (!found) return;
  found.row.hidden = false;
  found.row.open = true;
  found.row.scrollIntoView({ block: "start" });
  found.row.querySelector("summary").focus({ preventScroll: true });
}
for (const one of given) {
  const captions = one.pictures.map(([number]) => DATA.pictures[number][1]), texts = [...one.examples, ...one.drawn].map(([number]) => DATA.snippets[number][0]);
  const words = one.name ? one.name.text : peakWords(one.examples.map(fromCorpus)) || captions[0] || "", inside = el("div", { class: "body" });
  const row = el("details", { class: "feature", id: `f${one.id}`, "data-number": one.id }, el("summary", {}, el("b", { class: "num" }, String(one.id)), meter(one.max / highest),
    el("span", { class: "num small" }, `up to ${shown(one.max)}, on ${percent(rate(one))} of tokens`), one.pictures.length && !one.examples.length ? el("span", { class: "small" }, "images alone") : null, el("bdi", { class: "words small" }, words)), inside);
  row.addEventListener("toggle", () => { if (row.open && !inside.childNodes.length) inside.append(...body(one)); });
  // the address is that of the feature opened last
  row.querySelector("summary").addEventListener("click", () => history.replaceState(null, "", `#f${one.id}`));
  row.words = [words, ...texts, ...captions].join(" ").toLowerCase();
  byFeature.set(one.id, { one, row });
  list.append(row);
}
/** How much more often a feature fires on tokens of images than on text, from -1 to 1. */
function imagined(one) {
  const text = one.fired / Math.max(1, DATA.tokens), image = one.fired_images / Math.max(1, DATA.image_tokens);
  return text + image ? (image - text) / (image + text) : 0;
}
byId("order").addEventListener("change", (event) => {
  const by = { given: () => 0, max: (a, b) => b.max - a.max, fired: (a, b) => rate(b) - rate(a), rare: (a, b) => rate(a) - rate(b), image: (a, b) => imagined(b) - imagined(a), text: (a, b) => imagined(a) - imagined(b), id: (a, b) => a.id - b.id }[event.target.value];
  list.append(...[...given].sort(by).map((one) => byFeature.get(one.id).row));
});
function fromAddress() {
  const found = location.hash.match(/^#f(\d+)$/);
  if (found) openFeature(Number(found[1]));
}
addEventListener("hashchange", fromAddress);
if (location.hash) fromAddress();
else if (given.length) byFeature.get(given[0].id).row.open = true;
