// The dialogue: turns around the proposed evidence first, the rest behind buttons, all of it on demand.
const TURNS = Object.fromEntries(Object.entries(DATA.dialogues).map(([name, sessions]) => [name, sessions.flatMap((session) => session.turns.map((turn, n) => ({ ...turn, session, first: n === 0 })))]));
const ORDERS = Object.fromEntries(Object.entries(TURNS).map(([name, turns]) => [name, turns.map((turn) => turn.id)]));
const PICTURES = Object.fromEntries(Object.entries(TURNS).map(([name, turns]) => [name, turns.flatMap((turn) => turn.images.map((image) => image.index))]));
let whole = false;
let opened = new Set();
let cursor = null;

const boxes = () => [...byId("turns").querySelectorAll("input")];
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
/** Ranges to show: what is near the proposals, what was opened by hand, what is ticked. */
function visible() {
  const given = item(), turns = TURNS[given.dialogue], seen = new Set(opened);
  if (whole) turns.forEach((_, n) => seen.add(n));
  for (const [low, high] of given.near) for (let n = low; n <= high; n += 1) seen.add(n);
  turns.forEach((turn, n) => { if (state().evidence.includes(turn.id) || turn.images.some((image) => state().images.includes(image.index))) seen.add(n); });
  return seen;
}
function showTurns() {
  const turns = TURNS[item().dialogue], seen = visible(), parts = [];
  let session = null;
  for (let n = 0; n < turns.length; n += 1) {
    if (!seen.has(n)) {
      let last = n;
      while (last + 1 < turns.length && !seen.has(last + 1)) last += 1;
      const from = n, to = last, count = last - n + 1;
      parts.push(el("button", { type: "button", class: "gap", onclick: () => open(from, to) }, `… ${count} turn${count === 1 ? "" : "s"} more${count > 20 ? ", show 10 on each side" : ", show"}`));
      n = last;
      continue;
    }
    if (turns[n].session !== session) {
      session = turns[n].session;
      parts.push(el("div", { class: "session" }, "Session ", words(session.id), session.time ? " · " : null, session.time ? words(session.time.replace(/^(\d{4}-\d\d-\d\d)T/, "$1 ")) : null));
    }
    parts.push(turnLine(turns[n], n));
  }
  byId("turns").replaceChildren(...parts);
  byId("whole").setAttribute("aria-pressed", String(whole));
  const again = (cursor && byId(cursor)) || proposedBoxes()[0] || boxes()[0];
  if (again) rove(again);
}
function open(from, to) {
  const long = to - from + 1 > 20;
  for (let n = from; n <= to; n += 1) if (!long || n < from + 10 || n > to - 10) opened.add(n);
  const top = byId("turns").scrollTop;
  showTurns();
  byId("turns").scrollTop = top;
  focusBox(byId(`turn-${from}`));
}
/** One box at a time takes the Tab key. */
function rove(target) {
  const before = cursor && byId(cursor);
  if (before) before.tabIndex = -1;
  cursor = target.id;
  target.tabIndex = 0;
}
/** Scroll the dialogue, and only it, to a box. */
function reveal(target, middle) {
  const pane = byId("turns"), line = target.closest(".turn").getBoundingClientRect(), frame = pane.getBoundingClientRect();
  // what is stuck to the top covers it
  const above = line.top - frame.top - 44, below = line.bottom - frame.bottom + 8;
  if (middle) pane.scrollTop += line.top - frame.top - (frame.height - line.height) / 2;
  else if (above < 0) pane.scrollTop += above;
  else if (below > 0) pane.scrollTop += Math.min(below, above);
}
function focusBox(target) {
  if (!target) return;
  rove(target);
  target.focus({ preventScroll: true });
  reveal(target);
}
function step(by, list = boxes()) {
  const all = boxes(), at = all.findIndex((one) => one.id === cursor);
  if (!all.length) return;
  if (list === all || list.length === all.length) {
    focusBox(document.activeElement === all[at] ? all[Math.min(all.length - 1, Math.max(0, at + by))] : all[Math.max(0, at)]);
    return;
  }
  const places = list.map((one) => all.indexOf(one)), inside = document.activeElement === all[at];
  const next = by > 0 ? places.find((place) => place > at || (!inside && place === at)) : places.findLast((place) => place < at);
  focusBox(all[next === undefined ? places[by > 0 ? 0 : places.length - 1] : next]);
}
function tickAll() {
  const boxesOf = proposedBoxes(), every = boxesOf.every((one) => one.checked);
  for (const one of boxesOf) if (one.checked === every) { one.checked = !every; tickBox(one); }
}
function toTurn(n) {
  opened.add(n);
  showTurns();
  focusBox(byId(`turn-${n}`));
  reveal(byId(`turn-${n}`), true);
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
  const n = hits[hit];
  for (let near = Math.max(0, n - 2); near <= Math.min(TURNS[item().dialogue].length - 1, n + 2); near += 1) opened.add(near);
  showTurns();
  rove(byId(`turn-${n}`));
  const line = byId(`turn-${n}`).closest(".turn");
  line.classList.add("match");
  reveal(byId(`turn-${n}`), true);
  byId("found").textContent = `${hit + 1} of ${hits.length} turns`;
}
