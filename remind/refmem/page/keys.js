// Keys first; every one of them is also a control.
function confide(n) {
  state().confidence = n;
  for (const radio of document.getElementsByName("confidence")) radio.checked = Number(radio.value) === n;
  changed();
}
function removal(flag) {
  state().remove = flag;
  byId("remove").checked = flag;
  changed();
}
function showWhole() {
  whole = !whole;
  showTurns();
  reveal(byId(cursor), true);
}
const ACTIONS = {
  n: () => go(current + 1), p: () => go(current - 1), u: nextOpen, s: save, v: showWhole, y: tickAll, r: () => removal(!state().remove),
  w: () => byId("own").focus(), q: () => byId("note").focus(), "/": () => byId("find").focus(),
  ".": () => step(1, proposedBoxes()), ",": () => step(-1, proposedBoxes()), arrowdown: () => step(1), arrowup: () => step(-1),
};
const isText = (node) => node.matches("textarea, input[type=text], input[type=search]");
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  const target = event.target, key = event.key.toLowerCase();
  if (isText(target)) {
    if (event.key === "Escape") { event.preventDefault(); byId("main").focus({ preventScroll: true }); }
    if (event.key === "Enter" && target.id === "find") { event.preventDefault(); nextHit(event.shiftKey); }
    if (event.key === "Enter" && target.id === "own") { event.preventDefault(); byId("main").focus({ preventScroll: true }); }
    return;
  }
  if (event.key === "Enter") {
    if (target.matches("button, a, summary")) return;
    event.preventDefault();
    go(current + 1);
    return;
  }
  // arrows belong to a group of radio buttons while it has the focus
  if (key.startsWith("arrow") && target.matches("input[type=radio]")) return;
  let act = ACTIONS[key];
  if (/^[1-5]$/.test(key)) act = () => confide(Number(key));
  if (/^[a-j]$/.test(key)) {
    const n = DATA.letters.indexOf(key.toUpperCase());
    act = n < Math.min(10, item().choices.length) ? () => choose(n) : null;
  }
  if (!act) return;
  event.preventDefault();
  act();
});
for (const button of document.querySelectorAll("button[aria-keyshortcuts]")) button.addEventListener("click", ACTIONS[button.getAttribute("aria-keyshortcuts").toLowerCase()]);
byId("remove").addEventListener("change", (event) => removal(event.target.checked));
for (const radio of document.getElementsByName("confidence")) radio.addEventListener("change", () => confide(Number(radio.value)));
byId("own").addEventListener("input", (event) => { state().own = event.target.value; changed(); });
byId("note").addEventListener("input", (event) => { state().note = event.target.value; changed(); });
byId("find").addEventListener("input", (event) => find(event.target.value));
byId("load").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const count = take(await file.text());
    keep();
    showItem(false);
    tell(`${count} item${count === 1 ? "" : "s"} read from ${file.name}.`, true);
  } catch (error) { tell(`${file.name} was not read. ${error.message}.`); }
});
for (const kind of ["pointerdown", "keydown"]) document.addEventListener(kind, tick, { capture: true, passive: true });
addEventListener("visibilitychange", () => { tick(); keep(); });
recall();
showItem(false);
