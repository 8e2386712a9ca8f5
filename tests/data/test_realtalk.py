import json
import re

from remind import read


def test_turns_and_evidence_are_those_of_the_files(remind_data):
    """Brute force: a turn belongs to the session that lists it; a dangling reference names no turn of its chat."""
    dev, misnumbered = read(remind_data / "realtalk"), 0
    for dialogue in dev.dialogues:
        raw = json.loads((remind_data / "realtalk" / f"{dialogue.id}.json").read_text(encoding="utf-8"))
        ids = {t["dia_id"] for k, v in raw.items() if re.fullmatch(r"session_\d+", k) for t in v}
        lost = {x.reference for x in dev.dangling if x.question_id.startswith(f"{dialogue.id}-q")}
        assert not lost & ids
        assert all(re.fullmatch(r"D\d+:\d+", reference) for reference in lost)
        for session in dialogue.sessions:
            listed = raw[f"session_{session.id[1:]}"]
            expected = [(t["dia_id"], t["speaker"], t["clean_text"]) for t in listed]
            assert [(t.id, t.speaker, t.text) for t in session.turns] == expected
            misnumbered += sum(turn.id.split(":")[0] != f"D{session.id[1:]}" for turn in session.turns)
    assert misnumbered == 369 + 243 + 374 + 344
