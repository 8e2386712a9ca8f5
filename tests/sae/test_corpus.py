"""From dialogues to windows for training: reading, splitting, naming, cutting, batching."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from remind.core.errors import ConfigError
from remind.data.dialogue import Dialogue, Image, Session, Turn
from remind.models.backbone import load_backbone
from remind.models.windows import batches, make_windows, mixed, prompt_lines, window_size
from remind.train_sae import TrainSAEConfig
from remind.train_sae.corpus import NAMES, read_dialogues, split_dialogues, with_names


@pytest.mark.parametrize(("name", "frame"), [("nano", ([], [])), ("minilm", ([101], [102]))])
def test_windows_hold_each_token_once_and_batches_frame_and_pad(name: str, frame: tuple[list[int], list[int]]) -> None:
    backbone = load_backbone(name)
    long = tuple(Turn(f"1:{t}", "Ana", "word " * (3 * t + 1)) for t in range(9))
    pictured = Turn("3:0", "Ben", "look", images=(Image(0, caption="a red\nboat"), Image(1)))
    dialogue = Dialogue("d", (Session("a", None, long), Session("c", None, (pictured,))))
    windows = make_windows(backbone, [dialogue, dialogue], 32, "test")
    ids = [backbone.tokenize(prompt_lines(turn)).ids for turn in (*dialogue.turns, *dialogue.turns)]
    assert [i for window in windows for i in window.ids] == [i for turn in ids for i in turn]
    assert [i for window in windows for i in window.turns] == [n for n, turn in enumerate(ids) for _ in turn]
    assert all(1 <= len(window.ids) <= 32 for window in windows)
    session = [*[0] * 9, 1, *[2] * 9, 3]
    assert all(len({session[turn] for turn in window.turns}) == 1 for window in windows)
    order = mixed(windows, 2, 0)
    assert order != windows
    assert Counter(order) == Counter(windows)
    assert mixed(windows, 2, 0) == order
    count = 0
    for inputs, turns in batches(backbone, windows, 3):
        for row, window in enumerate(windows[count : count + 3]):
            real = inputs["attention_mask"][row].bool()
            assert inputs["input_ids"][row][real].tolist() == [*frame[0], *window.ids, *frame[1]]
            assert real.tolist() == sorted(real.tolist(), reverse=True)
            assert turns[row][turns[row] >= 0].tolist() == list(window.turns)
        count += len(inputs["input_ids"])
    assert count == len(windows)
    if name == "minilm":
        with pytest.raises(ConfigError, match="takes 510 tokens"):
            window_size(backbone, 511)


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
    assert first[:3] == first[3:]
    assert len(set(first)) == 3
    assert first[2] == "Ana"
    assert set(first[:2]) <= set(NAMES)
    assert first[:2] != second[:2]
    assert with_names(talk("Speaker 1", "Speaker 2", "Ana"), 0) == named
    assert with_names(talk("Ana", "Dr. Who", "Speaker"), 0) == talk("Ana", "Dr. Who", "Speaker")
