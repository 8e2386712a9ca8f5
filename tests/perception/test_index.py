from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remind.core.errors import DataError
from remind.data.dialogue import Dialogue, Question
from remind.llm.offline import OfflineLLM
from remind.perception import Perception, PerceptionConfig, SegmentConfig
from remind.perception.index import DialogueIndex, content_key
from remind.states.pyramid import FactualState, Segment, Strategy

CONFIG = PerceptionConfig(segment=SegmentConfig(max_tokens=40))


def ask(dialogue: Dialogue, text: str = "What is the dog called?", **fields: object) -> Question:
    return Question("q", dialogue.id, text, **fields)


def perceive(dialogue: Dialogue, encoder: Any, cache: Path | None, **fields: object) -> FactualState:
    perception = Perception(CONFIG, encoder, OfflineLLM(), cache)
    return perception.perceive(dialogue, ask(dialogue, **fields))


def test_a_second_open_reads_and_encodes_only_the_question(park: Dialogue, counting: Any, tmp_path: Path) -> None:
    first = perceive(park, counting, tmp_path)
    assert len(counting.seen) > len(park.turns)
    counting.seen.clear()
    assert perceive(park, counting, tmp_path) == first
    assert counting.seen == ["What is the dog called?"]


def test_cues_are_filled_per_dimension_as_asked(park: Dialogue, counting: Any, tmp_path: Path) -> None:
    perceive(park, counting, tmp_path)
    assert {path.stem for path in tmp_path.rglob("*.json")} == {"turns", "cues-factual"}
    counting.seen.clear()
    perceive(park, counting, tmp_path, dimension="belief_modeling")
    assert {path.stem for path in tmp_path.rglob("*.json")} == {"turns", "cues-factual", "cues-belief_modeling"}
    assert not any(text.startswith("Ana: Hello again!\n") for text in counting.seen)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_equal_cues_of_several_dimensions_are_encoded_once(park: Dialogue, counting: Any, tmp_path: Path) -> None:
    class Told(OfflineLLM):
        """The same cues for all dimensions but one, and that one's share some."""

        def cues(self, dialogue: Dialogue, segments: Sequence[Segment], dimension: str | None) -> list[str]:
            own = "of its own" if dimension == "temporal_dynamics" else "of all"
            return [f"cue {number} {own if number else ''}" for number in range(len(segments))]

    dimensions = ("temporal_dynamics", "implicit_behavioral_patterns", None, "temporal_dynamics")
    config = SegmentConfig(max_tokens=12)
    together = DialogueIndex(park, counting, Told(), config, tmp_path / "together")
    counting.seen.clear()
    found = {dimension: together.cues(dimension) for dimension in dimensions}
    count = len(together.segments)
    assert count > 1
    assert len(counting.seen) == 2 * count
    for dimension, cues in found.items():
        alone = DialogueIndex(park, counting, Told(), config, None).cues(dimension)
        assert cues.texts == alone.texts
        assert torch.equal(cues.vectors, alone.vectors)


def test_a_dialogue_stays_in_memory_between_questions(park: Dialogue, counting: Any) -> None:
    perception = Perception(CONFIG, counting, OfflineLLM(), None)
    perception.perceive(park, ask(park))
    counting.seen.clear()
    perception.perceive(park, ask(park, "Who moves to Lisbon?"))
    assert counting.seen == ["Who moves to Lisbon?"]


@pytest.mark.parametrize("name", ["turns.safetensors", "turns.json", "cues-factual.safetensors", "cues-factual.json"])
@pytest.mark.parametrize("harm", ["truncate", "empty", "swap"])
def test_a_damaged_file_is_rebuilt_and_said_so(
    name: str, harm: str, park: Dialogue, bag: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = perceive(park, bag, tmp_path)
    (path,) = tmp_path.rglob(name)
    content = path.read_bytes()
    if harm == "swap":
        other = perceive_other(park, bag, tmp_path / "other")
        path.write_bytes(next(other.rglob(name)).read_bytes())
    else:
        path.write_bytes(content[: len(content) // 2] if harm == "truncate" else b"")
    with caplog.at_level(logging.WARNING):
        assert perceive(park, bag, tmp_path) == expected
    assert "it is built again" in caplog.text
    assert path.read_bytes() == content
    caplog.clear()
    perceive(park, bag, tmp_path)
    assert caplog.text == ""


def perceive_other(park: Dialogue, bag: Any, cache: Path) -> Path:
    turn = replace(park.sessions[0].turns[2], text="I sold my bicycle.")
    session = replace(park.sessions[0], turns=(*park.sessions[0].turns[:2], turn))
    perceive(Dialogue("other", (session,)), bag, cache)
    return cache


def test_a_missing_tensor_file_is_rebuilt(park: Dialogue, bag: Any, tmp_path: Path) -> None:
    expected = perceive(park, bag, tmp_path)
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    assert perceive(park, bag, tmp_path) == expected
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_the_key_covers_all_an_index_depends_on(park: Dialogue) -> None:
    key = content_key(park, "minilm", SegmentConfig(), "offline")
    first = park.sessions[0]
    edited = replace(first.turns[7].images[0], caption="a red bowl")
    others = [
        content_key(park, "other", SegmentConfig(), "offline"),
        content_key(park, "minilm", SegmentConfig(max_tokens=77), "offline"),
        content_key(park, "minilm", SegmentConfig(), "server"),
        content_key(Dialogue("renamed", park.sessions), "minilm", SegmentConfig(), "offline"),
    ]
    for turn in (
        replace(first.turns[7], text="A straight bowl."),
        replace(first.turns[7], speaker="Bea"),
        replace(first.turns[7], images=(edited,)),
    ):
        session = replace(first, turns=(*first.turns[:7], turn, *first.turns[8:]))
        others.append(
            content_key(Dialogue("park", (session, *park.sessions[1:])), "minilm", SegmentConfig(), "offline")
        )
    assert key == content_key(Dialogue("park", park.sessions), "minilm", SegmentConfig(), "offline")
    assert len({key, *others}) == len(others) + 1


def test_an_llm_that_writes_too_few_cues_is_refused(park: Dialogue, bag: Any, tmp_path: Path) -> None:
    class Lazy(OfflineLLM):
        def cues(self, *args: object, **kwargs: object) -> list[str]:
            return ["one"]

    with pytest.raises(DataError, match="wrote 1 cues for"):
        Perception(CONFIG, bag, Lazy(), tmp_path).perceive(park, ask(park))
    assert not list(tmp_path.rglob("cues-*"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "  "}, "has no text"),
        ({"dimension": "astrology"}, "unknown dimension 'astrology'"),
    ],
)
def test_questions_that_cannot_be_asked(fields: dict[str, str], message: str, park: Dialogue, bag: Any) -> None:
    with pytest.raises(DataError, match=message) as caught:
        perceive(park, bag, None, **fields)
    assert "\n" not in str(caught.value)


def test_a_question_about_another_dialogue_is_refused(park: Dialogue, bag: Any) -> None:
    with pytest.raises(DataError, match="about 'elsewhere'"):
        Perception(CONFIG, bag, OfflineLLM()).perceive(park, Question("q", "elsewhere", "Why?"))


@pytest.mark.parametrize("method", ["cue", "hybrid"])
def test_gold_changes_nothing(method: str, park: Dialogue, bag: Any) -> None:
    config = PerceptionConfig(segment=CONFIG.segment)
    config.retrieve.method = method
    seen: list[Question] = []

    class Watching(OfflineLLM):
        def strategy(self, dialogue: Dialogue, question: Question) -> Strategy:
            seen.append(question)
            return super().strategy(dialogue, question)

    perception = Perception(config, bag, Watching())
    plain = perception.perceive(park, ask(park))
    gold = ask(park, answers=("Pixel",), evidence=("1:3",), images=(0,), category=5, split="test")
    told = perception.perceive(park, gold)
    assert (plain.segments, plain.strategy) == (told.segments, told.strategy)
    assert told.question is gold
    assert seen[0] == seen[1]


def test_long_turns_with_line_breaks(bag: Any, make_dialogue: Callable[..., Dialogue]) -> None:
    long = "First line.\n\nSecond line, much longer. " * 100
    dialogue = make_dialogue([f"user: {long}", "assistant: Noted.\nAnything else?"])
    state = perceive(dialogue, bag, None)
    assert 0 in state.positions or 1 in state.positions
