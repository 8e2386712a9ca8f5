// The dialogue: turns around the proposed evidence, the rest behind buttons, all of it on demand.
const TURNS = Object.fromEntries(Object.entries(DATA.dialogues).map(([name, sessions]) => [name, sessions.flatMap((session) => session.turns.map((turn, n) => ({ ...turn, session, first: n === 0 })))]));
const ORDERS = Object.fromEntries(Object.entries(TURNS).map(([name, turns]) => [name, turns.map((turn) => turn.id)]));
const PICTURES = Object.fromEntries(Object.entries(TURNS).map(([name, turns]) => [name, turns.flatMap((turn) => turn.images.map((image) => image.index))]));
let whole = false, cursor = null;

const boxes = () => [...byId("turns").querySelectorAll("input:not(.gap:not([open]) input)")];
const proposedBoxes = () => boxes().filter((box) => "proposed" in box.dataset);
const words = (text, kind) => el("bdi", { dir: "auto", class: kind }, text);

function tickBox(box) {
  const kept = state(), key = box.dataset.image === undefined ? "evidence" : "images";
  const value = key === "images" ? Number(box.dataset.image) : box.dataset.turn;
  kept[key] = kept[key].filter((one) => one !== value);
  if (box.checked) kept[key].push(value);
  box.closest(".turn").classList.toggle("ticked", Boolean(box.closest(".turn").querySelector("input:checked")));
  changed();
}
function box(id, attributes, checked, proposed) {
  const made = el("input", { type: "checkbox", id, tabindex: "-1", ...attributes, "data-proposed": proposed || null, onchange: (event) => tickBox(event.target), onfocus: (event) => rove(event.target) });
  made.checked = checked;
  return made;
}
function turnLine(turn, n) {
  const given = item(), kept = state();
  const proposed = given.evidence.includes(turn.id), here = kept.evidence.includes(turn.id);
  const line = el("div", { class: `turn${proposed ? " proposed" : ""}`, "data-n": n },
    box(`turn-${n}`, { "data-turn": turn.id }, here, proposed),
    el("label", { for: `turn-${n}` }, words(turn.speaker, "who"), ": ", words(turn.text), " ", words(turn.id, "name"), proposed ? el("span", { class: "tag" }, " proposed") : null));
  for (const image of turn.images) {
    const wanted = given.images.includes(image.index), id = `image-${image.index}`;
    if (wanted) line.classList.add("proposed");
    line.append(el("div", { class: "picture" }, box(id, { "data-image": image.index }, kept.images.includes(image.index), wanted),
      el("label", { for: id }, `Picture ${image.index}: `, words(image.caption || (image.src ? "" : "no caption, not available")), wanted ? el("span", { class: "tag" }, " proposed") : null,
        image.src && image.src.startsWith("data:image/jpeg;base64,") ? el("img", { src: image.src, alt: image.caption || `picture ${image.index}` }) : null)));
  }
  if (line.querySelector("input:checked")) line.classList.add("ticked");
  return line;
}
function showTurns() {
  const given = item(), parts = [];
  let gap = null;
  TURNS[given.dialogue].forEach((turn, n) => {
    const { session } = turn, line = turnLine(turn, n);
    if (turn.first) {
      parts.push(el("div", { class: "session" }, "Session ", words(session.id), session.time ? " · " : null, session.time ? words(session.time.replace(/^(\d{4}-\d\d-\d\d)T/, "$1 ")) : null));
      gap = null;
    }
    if (line.querySelector("input:checked") || given.near.some(([low, high]) => low <= n && n <= high)) {
      gap = null;
      parts.push(line);
    } else {
      if (!gap) parts.push(gap = el("details", { class: "gap", open: whole }, el("summary", {})));
      gap.append(line);
      gap.firstChild.textContent = `${gap.children.length - 1} turns more`;
    }
  });
  byId("turns").replaceChildren(...parts);
  byId("whole").setAttribute("aria-pressed", String(whole));
  const again = boxes().find((one) => one.id === cursor) || proposedBoxes()[0] || boxes()[0];
  if (again) rove(again);
}
/** One box at a time takes the Tab key. */
function rove(target) {
  const before = cursor && byId(cursor);
  if (before) before.tabIndex = -1;
  cursor = target.id;
  target.tabIndex = 0;
}
/** Scroll the dialogue to a box: into its middle, or just into view. */
function reveal(target, middle) {
  const pane = byId("turns"), line = target.closest(".turn");
  if (middle) pane.scrollTop = line.offsetTop - (pane.clientHeight - line.clientHeight) / 2;
  else line.scrollIntoView({ block: "nearest" });
}
function focusBox(target) {
  if (!target) return;
  rove(target);
  target.focus({ preventScroll: true });
  reveal(target);
}
/** To the next box of a list, from the last on to the first; first of all to the one that takes the Tab key. */
function step(by, list = boxes()) {
  const all = boxes(), at = all.findIndex((one) => one.id === cursor), inside = document.activeElement === all[at];
  const beyond = (one) => (all.indexOf(one) - at) * by > 0 || (!inside && all.indexOf(one) === at);
  focusBox((by > 0 ? list.find(beyond) : list.findLast(beyond)) || list.at(by > 0 ? 0 : -1));
}
function tickAll() {
  const boxesOf = proposedBoxes(), every = boxesOf.every((one) => one.checked);
  for (const one of boxesOf) if (one.checked === every) { one.checked = !every; tickBox(one); }
}
/** Scroll to a turn, wherever it is. */
function toTurn(n) {
  const target = byId(`turn-${n}`), gap = target.closest(".gap");
  if (gap) gap.open = true;
  rove(target);
  reveal(target, true);
  return target;
}
let hits = [], hit = -1;
function find(text) {
  const wanted = text.trim().toLowerCase();
  hits = wanted ? TURNS[item().dialogue].map((turn, n) => ([turn.speaker, turn.text, turn.id, ...turn.images.map((image) => image.caption || "")].join(" ").toLowerCase().includes(wanted) ? n : -1)).filter((n) => n >= 0) : [];
  hit = -1;
  byId("found").textContent = wanted ? `${hits.length} turn${hits.length === 1 ? "" : "s"}` : "";
}
function nextHit(back) {
  if (!hits.length) return;
  hit = (hit + (back ? -1 : 1) + hits.length) % hits.length;
  toTurn(hits[hit]).closest(".turn").classList.add("match");
  byId("found").textContent = `${hit + 1} of ${hits.length} turns`;
}
