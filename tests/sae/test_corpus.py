"""From dialogues to windows for training: reading, splitting, naming, cutting, batching."""

from __future__ import annotations

import json
from pathlib import Path

from remind.data.dialogue import Dialogue, Session, Turn
from remind.train_sae import TrainSAEConfig
from remind.train_sae.corpus import NAMES, read_dialogues, split_dialogues, with_names


def test_the_split_is_by_dialogue_and_the_limit_counts_turns(tmp_path: Path) -> None:
    turns = [{"id": f"t{number}", "speaker": "Ana", "text": "hi"} for number in range(24)]
    session = {"id": "s", "time": None, "turns": turns}
    records = [{"type": "context", "id": f"c{number}", "sessions": [session]} for number in range(10)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    dialogues = read_dialogues([tmp_path / "chat.jsonl"], TrainSAEConfig(out="", limit=100))
    assert len(dialogues) == 5
    training, held_out = split_dialogues(dialogues, 0.1, 0)
    assert (len(training), len(held_out)) == (4, 1)
    assert {d.id for d in training} | {d.id for d in held_out} == {d.id for d in dialogues}
    assert split_dialogues(dialogues[:1], 0.5, 0) == (dialogues[:1], [])
    assert split_dialogues(dialogues, 0.0, 0)[1] == []


def test_numbered_speakers_get_names_and_others_keep_theirs() -> None:
    def talk(*speakers: str) -> Dialogue:
        turns = [tuple(Turn(f"{s}:{n}", speaker, "hi") for n, speaker in enumerate(speakers * 2)) for s in (1, 2)]
        return Dialogue("d", tuple(Session(str(number), None, part) for number, part in enumerate(turns)))

    named = with_names(talk("Speaker 1", "Speaker 2", "Ana"), 0)
    first, second = ([turn.speaker for turn in session.turns] for session in named.sessions)
    assert first[:3] == first[3:] == [first[0], first[1], "Ana"]
    assert len({*first[:2]} & {*NAMES}) == 2
    assert first[:2] != second[:2]
    assert with_names(talk("Ana", "Dr. Who", "Speaker"), 0) == talk("Ana", "Dr. Who", "Speaker")
