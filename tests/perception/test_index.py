"""An index depends on the dialogue alone: not on the process that built it, nor on what that had encoded before."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from remind.core.errors import DataError
from remind.data.dialogue import Dialogue, Question
from remind.models.encoder import SentenceEncoder
from remind.perception import Perception, PerceptionConfig, RetrieveConfig, SegmentConfig
from remind.perception.auxiliary import OfflineLLM
from remind.states.pyramid import FactualState
from tests.perception.conftest import PARK

CONFIG = PerceptionConfig(SegmentConfig(max_tokens=40), RetrieveConfig(method="hybrid", whole_tokens=0))
QUESTIONS = ("What is the dog called?", "Who moves to Lisbon?", "Ana: Looks great.")


def index_hash(dialogue: Dialogue, encoder: SentenceEncoder, folder: Path | None) -> str:
    """Hash of all the bits that an index, its cues of two kinds, its questions and its retrieval come to."""
    perception = Perception(CONFIG, encoder, OfflineLLM(), folder)
    digest = hashlib.sha256()
    for dimension in (None, "belief_modeling"):
        for number, text in enumerate(QUESTIONS):
            state = perception.perceive(dialogue, [Question(f"q{number}", dialogue.id, text, dimension=dimension)])[0]
            digest.update(repr((state.segments, state.strategy)).encode())
            digest.update(encoder.encode([text]).numpy().tobytes())
        cues = perception.index(dialogue).cues(dimension)
        digest.update(repr(cues.texts).encode() + cues.vectors.numpy().tobytes())
    digest.update(perception.index(dialogue).vectors.numpy().tobytes())
    for text, vector in encoder._held.items():
        digest.update(text.encode() + vector.numpy().tobytes())
    return digest.hexdigest()


def test_the_same_bits_whatever_was_encoded_before_and_read_back(encoder: SentenceEncoder, tmp_path: Path) -> None:
    built = index_hash(PARK, encoder, tmp_path)
    for folder in (tmp_path, None):  # read back, and in memory
        encoder.encode(["Ben: Hi Ana, how are you?", "Ana: Looks great.", "quite another text"])
        encoder.forget()
        assert index_hash(PARK, encoder, folder) == built


def ask(dialogue: Dialogue, text: str = "What is the dog called?", **fields: Any) -> Question:
    return Question("q", **{"dialogue_id": dialogue.id, "text": text, **fields})


def perceive(dialogue: Dialogue, encoder: Any, cache: Path | None, **fields: Any) -> FactualState:
    return Perception(CONFIG, encoder, OfflineLLM(), cache).perceive(dialogue, [ask(dialogue, **fields)])[0]


def test_what_is_cached_is_not_encoded_again(park: Dialogue, bag: Any, tmp_path: Path) -> None:
    first = perceive(park, bag, tmp_path)
    assert len(bag.seen) > len(park.turns)
    bag.seen.clear()
    assert perceive(park, bag, tmp_path) == first
    assert bag.seen == ["What is the dog called?"]
    # cues of another kind are added to the file
    perceive(park, bag, tmp_path, dimension="belief_modeling")
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert not any(text.startswith("Ana: Hello again!\n") for text in bag.seen)
    # in memory between questions
    perception = Perception(CONFIG, bag, OfflineLLM(), None)
    perception.perceive(park, [ask(park)])
    bag.seen.clear()
    perception.perceive(park, [ask(park, "Who moves to Lisbon?")])
    assert bag.seen == ["Who moves to Lisbon?"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "  "}, "has no text"),
        ({"dimension": "astrology"}, "unknown dimension 'astrology'"),
        ({"dialogue_id": "elsewhere"}, "about 'elsewhere'"),
    ],
)
def test_questions_that_cannot_be_asked(fields: dict[str, str], message: str, park: Dialogue, bag: Any) -> None:
    with pytest.raises(DataError, match=message) as caught:
        perceive(park, bag, None, **fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["cue", "hybrid"])
def test_gold_changes_nothing(method: Any, park: Dialogue, bag: Any) -> None:
    config = PerceptionConfig(CONFIG.segment, RetrieveConfig(method=method))
    gold = ask(park, answers=("Pixel",), evidence=("1:3",), images=(0,), category=5, split="test")
    plain, told = Perception(config, bag, OfflineLLM()).perceive(park, [ask(park), gold])
    assert (plain.segments, plain.strategy) == (told.segments, told.strategy)
    assert told.question is gold
