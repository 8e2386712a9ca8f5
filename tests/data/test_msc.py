import json

import pytest

from remind import read


@pytest.mark.parametrize(("name", "sessions"), [("session_2_valid", 2), ("session_3_valid", 3)])
def test_a_row_is_a_dialogue(remind_data, name, sessions):
    path = remind_data / "msc" / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row, dialogue in zip(rows, read(path).dialogues, strict=True):
        assert dialogue.id == f"{name}-{row['metadata']['initial_data_id']}"
        parts = [*row["previous_dialogs"], row]
        assert len(dialogue.sessions) == len(parts) == sessions
        for session, part in zip(dialogue.sessions, parts, strict=True):
            assert [turn.text for turn in session.turns] == [turn["text"] for turn in part["dialog"]]
            assert all(a.speaker != b.speaker for a, b in zip(session.turns, session.turns[1:], strict=False))
        assert dialogue.sessions[-1].time is None
        assert dialogue.sessions[0].time == row["previous_dialogs"][0]["time_back"].strip()
