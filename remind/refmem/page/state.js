// What has been decided so far: kept in the browser with every change, saved to and read from JSON Lines.
const ITEMS = DATA.items;
const KEY = `remind-annotation:${DATA.build}:${DATA.annotator}`;
const IDLE = 60;
const blank = () => ({ answers: [], own: "", evidence: [], images: [], confidence: null, remove: false, note: "", seconds: 0 });
const STATE = new Map(ITEMS.map((item) => [item.id, blank()]));
let current = 0;
let lastSeen = Date.now();

const item = () => ITEMS[current];
const state = () => STATE.get(item().id);
/** Letters, or the phrases chosen and the own ones, without repeats. */
function answersOf(given, kept) {
  const own = given.format === "direct" ? kept.own.split(";").map((text) => text.trim()).filter(Boolean) : [];
  return [...new Set([...kept.answers, ...own])];
}
const done = (given) => {
  const kept = STATE.get(given.id);
  return kept.remove || (answersOf(given, kept).length > 0 && kept.confidence !== null);
};
const touched = (given) => {
  const kept = STATE.get(given.id);
  return kept.remove || kept.confidence !== null || Boolean(kept.note || kept.own.trim()) || kept.answers.length + kept.evidence.length + kept.images.length > 0;
};
/** Time since the last key or click counts for the item at hand, up to a minute: longer is a pause. */
function tick() {
  const now = Date.now(), passed = (now - lastSeen) / 1000;
  lastSeen = now;
  if (passed > 0) state().seconds += Math.min(passed, IDLE);
}
function rowOf(given) {
  const kept = STATE.get(given.id), place = new Map(ORDERS[given.dialogue].map((id, n) => [id, n]));
  return {
    item_id: given.id, annotator: DATA.annotator, answers: answersOf(given, kept),
    evidence: [...kept.evidence].sort((a, b) => place.get(a) - place.get(b)),
    images: [...kept.images].sort((a, b) => a - b),
    confidence: kept.confidence, remove: kept.remove, note: kept.note, seconds: Math.round(kept.seconds * 10) / 10, fingerprint: given.fingerprint,
  };
}
const lines = () => ITEMS.filter(done).map((given) => `${JSON.stringify(rowOf(given))}\n`).join("");

function keep() {
  try {
    localStorage.setItem(KEY, JSON.stringify({ current, items: ITEMS.filter((given) => touched(given) || STATE.get(given.id).seconds).map((given) => [given.id, STATE.get(given.id)]) }));
    say("Kept in this browser");
  } catch { say("This browser keeps nothing: save the file often"); }
}
function recall() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) || "null");
    if (!kept) return;
    for (const [id, value] of kept.items) if (STATE.has(id)) STATE.set(id, { ...blank(), ...value });
    current = Math.min(Math.max(0, kept.current | 0), ITEMS.length - 1);
  } catch { /* nothing kept, or nothing readable */ }
}
function say(text) { byId("saved").textContent = text; }
function tell(text, good = false) {
  const box = byId("message");
  box.textContent = text; box.hidden = !text; box.className = good ? "good" : "";
}
const fileName = () => `annotations_${DATA.annotator.replace(/[^\p{L}\p{N}._-]+/gu, "_")}.jsonl`;
const summary = () => {
  const ready = ITEMS.filter(done).length, begun = ITEMS.filter((given) => touched(given) && !done(given)).length;
  return `${ready} of ${ITEMS.length} items saved${begun ? `; ${begun} begun but not complete, kept in this browser only` : ""}.`;
};

function save() {
  const link = el("a", { download: fileName(), href: URL.createObjectURL(new Blob([lines()], { type: "application/x-ndjson" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  tell(`${summary()} Look for ${fileName()} among your downloads.`, true);
}

/** Read rows back; all or none. Throws with the line that cannot be used. */
function take(text) {
  const byName = new Map(ITEMS.map((given) => [given.id, given])), found = new Map();
  text.replace(/^\uFEFF/, "").split("\n").forEach((line, n) => {
    if (!line.trim()) return;
    const wrong = (why) => { throw new Error(`line ${n + 1}: ${why}`); };
    let row;
    try { row = JSON.parse(line); } catch { wrong("not JSON"); }
    const given = byName.get(row.item_id);
    if (!given) wrong("an item of another build");
    if (row.fingerprint && row.fingerprint !== given.fingerprint) wrong("the item reads otherwise in this build");
    if (row.annotator !== DATA.annotator) wrong(`annotated by ${row.annotator}, this page is ${DATA.annotator}'s`);
    const known = given.format === "direct" ? given.choices : [...DATA.letters].slice(0, given.choices.length);
    const own = row.answers.filter((answer) => !known.includes(answer));
    if (given.format !== "direct" && own.length) wrong(`no option ${own[0]}`);
    found.set(given.id, {
      ...blank(), answers: row.answers.filter((answer) => known.includes(answer)), own: own.join("; "), evidence: row.evidence || [], images: row.images || [],
      confidence: row.confidence, remove: row.remove, note: row.note, seconds: row.seconds,
    });
  });
  for (const [id, value] of found) STATE.set(id, value);
  return found.size;
}
