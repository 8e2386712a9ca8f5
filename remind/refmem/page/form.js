// The item at hand: question, options, what was chosen.
function choiceKind() { return item().format === "single" ? "radio" : "checkbox"; }
const valueOf = (n) => (item().format === "direct" ? item().choices[n] : DATA.letters[n]);

function choose(n) {
  const kept = state(), value = valueOf(n);
  if (item().format === "single") kept.answers = [value];
  else kept.answers = kept.answers.includes(value) ? kept.answers.filter((one) => one !== value) : [...kept.answers, value];
  // in the order shown, so that the same choice reads the same
  kept.answers.sort((a, b) => item().choices.findIndex((_, i) => valueOf(i) === a) - item().choices.findIndex((_, i) => valueOf(i) === b));
  paintChoices();
  changed();
}
function paintChoices() {
  byId("choices").querySelectorAll("input").forEach((input, n) => { input.checked = state().answers.includes(valueOf(n)); });
}
function showItem(focus) {
  const given = item(), kept = state();
  cursor = null; hits = []; hit = -1; whole = false;
  byId("find").value = ""; byId("found").textContent = "";
  byId("kind").textContent = `Item ${current + 1} of ${ITEMS.length} · ${given.dimension} · ${{ single: "one answer", multi: "any number of answers", direct: "short answer" }[given.format]}`;
  byId("question").replaceChildren(words(given.question));
  byId("hint").textContent = given.hint ? `It should ask for ${given.hint}.` : "";
  byId("answers-legend").textContent = { single: "Choose one", multi: "Choose all that are right", direct: given.choices.length ? "Vote for all that are right, or give your own" : "Give your answer" }[given.format];
  byId("choices").replaceChildren(...given.choices.map((text, n) => {
    const key = n < 10 ? DATA.letters[n] : null;
    return el("label", { class: "choice" }, el("input", { type: choiceKind(), name: "answer", "aria-keyshortcuts": key, onchange: () => choose(n) }), key ? el("kbd", {}, key) : el("span", {}), words(text));
  }));
  paintChoices();
  byId("own-line").hidden = given.format !== "direct";
  byId("own").value = kept.own;
  byId("note").value = kept.note;
  byId("remove").checked = kept.remove;
  for (const radio of document.getElementsByName("confidence")) radio.checked = Number(radio.value) === kept.confidence;
  showTurns();
  paint();
  byId("main").scrollTop = 0;
  const first = proposedBoxes()[0];
  byId("turns").scrollTop = 0;
  if (first) reveal(first, true);
  if (focus) byId("main").focus({ preventScroll: true });
}
function paint() {
  const ready = ITEMS.filter(done).length, kept = state(), given = item();
  byId("progress").value = ready;
  byId("count").textContent = `${ready} of ${ITEMS.length} done`;
  byId("prev").disabled = current === 0;
  byId("next").disabled = current === ITEMS.length - 1;
  const lacks = [];
  if (!kept.remove && !answersOf(given, kept).length) lacks.push("an answer");
  if (!kept.remove && kept.confidence === null) lacks.push("your confidence");
  const unchecked = !kept.remove && !kept.evidence.length && !kept.images.length;
  byId("missing").textContent = lacks.length ? `Still needed: ${lacks.join(" and ")}.${unchecked ? " No evidence is ticked yet." : ""}` : kept.remove ? "Done: flagged for removal." : unchecked ? "Done, but no evidence is ticked: it will count as not checked." : "Done.";
  byId("missing").className = `small ${lacks.length ? "soft" : unchecked ? "bad" : "good"}`;
  const turns = TURNS[given.dialogue], rows = [];
  turns.forEach((turn, n) => {
    const to = (label) => el("button", { type: "button", "aria-label": `Go to ${label}`, onclick: () => focusBox(toTurn(n)) }, words(label));
    if (kept.evidence.includes(turn.id)) rows.push(el("li", {}, to(turn.id), words(turn.text.length > 90 ? `${turn.text.slice(0, 90)}…` : turn.text)));
    for (const image of turn.images) if (kept.images.includes(image.index)) rows.push(el("li", {}, to(`picture ${image.index}`), words(image.caption || "")));
  });
  byId("chosen").replaceChildren(...(rows.length ? rows : [el("li", { class: "none" }, "Nothing ticked.")]));
}
function changed() {
  tick();
  paint();
  keep();
}
function go(n) {
  if (n < 0 || n >= ITEMS.length) return;
  tick();
  current = n;
  tell("");
  keep();
  showItem(true);
}
function nextOpen() {
  for (let by = 1; by <= ITEMS.length; by += 1) {
    const n = (current + by) % ITEMS.length;
    if (!done(ITEMS[n])) { go(n); return; }
  }
  tell("Every item is done. Save the file and hand it in.", true);
}
