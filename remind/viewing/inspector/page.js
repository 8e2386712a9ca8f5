// Pointing, choosing, keys, and the prompts.
const dialogue = byId("dialogue");
let chosen = null, resting = null, featured = false;
function shadeChosen() {
  const by = byId("by").value;
  featured = false;
  shadeBy(by === "s" ? TOKENS.s : by === "r" ? TOKENS.r : LAYERS[Number(by)].r);
  markChosen();
}
function markChosen() {
  for (const span of dialogue.querySelectorAll('[aria-pressed="true"]')) span.setAttribute("aria-pressed", "false");
  if (chosen !== null && spans.has(chosen)) spans.get(chosen).setAttribute("aria-pressed", "true");
}
function rest(span) {
  if (resting) resting.tabIndex = -1;
  resting = span;
  if (span) span.tabIndex = 0;
}
/** Show a token or a turn in the panel; neither: the guidance. */
function choose(token, turn = null) {
  chosen = token;
  for (const one of dialogue.querySelectorAll(".turn.chosen")) one.classList.remove("chosen");
  if (turn !== null) turnOf(turn).classList.add("chosen");
  markChosen();
  if (token !== null) tokenPanel(token);
  else if (turn !== null) turnPanel(turn);
  else guidancePanel();
}
/** Close the panel and go back to shading by resonance; the focus stays in the dialogue. */
function shut() {
  const inside = panel.contains(document.activeElement);
  if (featured) shadeChosen();
  choose(null);
  if (inside && resting) resting.focus({ preventScroll: true });
}
function showFeature(layer, local) {
  featured = true;
  const from = shadeByFeature(layer, local);
  markChosen();
  byId("said").textContent = from < 0 ? "No token shows it." : `The dialogue is shaded by feature ${LAYERS[layer].ids[local]}.`;
}
function show(n) {
  fill(n);
  turnOf(n).scrollIntoView({ block: "center" });
}
/** Go to a token and choose it. */
function go(t) {
  show(TOKENS.turn[t]);
  const span = spans.get(t);
  if (span) {
    rest(span);
    span.focus({ preventScroll: true });
  }
  choose(t);
}
function spansOf(n) {
  fill(n);
  return [...turnOf(n).querySelectorAll(".tok")];
}
/** The nearest turn with tokens in a direction, and one of its tokens. */
function turnBeyond(n, step, last) {
  for (let at = n + step; at >= 0 && at < DATA.turns; at += step) {
    const found = spansOf(at);
    if (found.length) return last ? found[found.length - 1] : found[0];
  }
  return null;
}
function move(span, key) {
  const n = TOKENS.turn[Number(span.dataset.t)], row = spansOf(n), place = row.indexOf(span);
  if (key === "Home") return row[0];
  if (key === "End") return row[row.length - 1];
  if (key === "ArrowUp") return turnBeyond(n, -1, false);
  if (key === "ArrowDown") return turnBeyond(n, 1, false);
  const forward = (key === "ArrowRight") !== (getComputedStyle(span.closest("p")).direction === "rtl");
  return row[place + (forward ? 1 : -1)] || turnBeyond(n, forward ? 1 : -1, !forward);
}
dialogue.addEventListener("click", (event) => {
  const span = event.target.closest(".tok"), button = event.target.closest(".number");
  if (span) {
    rest(span);
    choose(strongest(span));
  } else if (button) choose(null, Number(button.closest(".turn").id.slice(1)));
});
dialogue.addEventListener("keydown", (event) => {
  const span = event.target.closest(".tok");
  if (!span || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    // characters made of several tokens: once more for the next of them
    const first = Number(span.dataset.t), n = Number(span.dataset.n);
    const inside = n > 1 && chosen !== null && chosen >= first && chosen < first + n;
    choose(inside ? first + ((chosen - first + 1) % n) : strongest(span));
  } else if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) {
    event.preventDefault();
    const next = move(span, event.key);
    if (next) {
      rest(next);
      next.focus();
      next.scrollIntoView({ block: "nearest" });
    }
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") shut();
});
for (const come of ["pointerover", "focusin"]) dialogue.addEventListener(come, (event) => {
  const span = event.target.closest(".tok");
  if (span) span.title ||= tipOf(strongest(span));
  if (span && come === "focusin") rest(span);
});
byId("by").addEventListener("change", shadeChosen);
if (byId("overview")) byId("overview").addEventListener("click", (event) => {
  const box = event.currentTarget.getBoundingClientRect();
  const n = Math.max(0, Math.min(DATA.turns - 1, Math.floor(((event.clientX - box.left) / box.width) * DATA.turns)));
  show(n);
  choose(null, n);
});
for (const button of document.querySelectorAll("[data-jump]")) button.addEventListener("click", () => {
  const wanted = [...dialogue.querySelectorAll(button.dataset.jump === "block" ? ".turn.opens" : ".turn.gold")].map((node) => Number(node.id.slice(1)));
  if (!wanted.length) return;
  const step = Number(button.dataset.step), key = `at_${button.dataset.jump}`;
  const at = dialogue.dataset[key] === undefined ? (step > 0 ? -1 : wanted.length) : Number(dialogue.dataset[key]);
  const next = (at + step + wanted.length) % wanted.length;
  dialogue.dataset[key] = String(next);
  show(wanted[next]);
  choose(null, wanted[next]);
});
/** The full text of a state, made when it is opened, with its markers and its strategy marked. */
function prompt(pane) {
  const { text, markers, strategy } = DATA.levels[pane.dataset.level], cuts = [];
  for (const [list, kind] of [[markers, "marker"], [strategy, "strategy"]]) for (let i = 0; i < list.length; i += 2) cuts.push([list[i], list[i + 1], kind]);
  const pre = el("pre", { tabindex: "0" });
  let at = 0;
  for (const [start, end, kind] of cuts.sort((a, b) => a[0] - b[0])) {
    pre.append(text.slice(at, start), el("mark", { class: kind }, text.slice(start, end)));
    at = end;
  }
  pre.append(text.slice(at));
  pane.append(pre);
}
for (const pane of document.querySelectorAll("#prompts details")) pane.addEventListener("toggle", () => { if (!pane.querySelector("pre")) prompt(pane); });

shadeBy(TOKENS.s);
guidancePanel();
for (const turn of dialogue.querySelectorAll(".turn")) nearby.observe(turn);
for (let n = 0; n < DATA.turns && !resting; n += 1) rest(spansOf(n)[0] || null);
// a link to a turn
addEventListener("hashchange", () => {
  const found = location.hash.match(/^#t(\d+)$/);
  if (found && Number(found[1]) < DATA.turns) show(Number(found[1]));
});
