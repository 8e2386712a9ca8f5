"""An index depends on the dialogue alone: not on the process that built it, nor on what that had encoded before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked import Forked

from remind.core.errors import DataError
from remind.data.dialogue import Dialogue, Question
from remind.llm.auxiliary import OfflineLLM
from remind.models.encoder import SentenceEncoder
from remind.perception import Perception, PerceptionConfig, RetrieveConfig, SegmentConfig
from remind.states.pyramid import FactualState, Strategy

CONFIG = PerceptionConfig(SegmentConfig(max_tokens=40), RetrieveConfig(method="hybrid", whole_tokens=0))
QUESTIONS = ("What is the dog called?", "Who moves to Lisbon?", "Ana: Looks great.")
#: Builds the index of the same dialogue elsewhere, after other work; starts to write when a second process does.
OTHER = """
import importlib.util, os, sys, time
from pathlib import Path
import remind.core.files as cache
def imported(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
own = imported("own", sys.argv[1])
dialogues = imported("dialogues", Path(sys.argv[1]).with_name("conftest.py"))
encoder = own.SentenceEncoder()
encoder.encode(["Ana: Hello again!", "something else that is rather long, and sits in the batch", "Ben: Hi Ana"])
own.index_hash(dialogues.build(["Ana: I sold my bicycle.", "Ben: Hi Ana, how are you?"], name="other"), encoder, None)
encoder.forget()
write, ready = cache.write_tensors, Path(sys.argv[2]).with_suffix(".ready")
def once_both_are_here(*arguments):
    ready.mkdir(exist_ok=True)
    (ready / str(os.getpid())).touch()
    while len(list(ready.iterdir())) < 2:
        time.sleep(0.001)
    write(*arguments)
cache.write_tensors = once_both_are_here
print(own.index_hash(dialogues.PARK, encoder, Path(sys.argv[2])))
"""


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


def test_to_the_bit_the_same_in_two_processes_at_once_and_read_back(
    park: Dialogue, encoder: SentenceEncoder, tmp_path: Path
) -> None:
    encoder.encode(["Ben: Hi Ana, how are you?", "Ana: Looks great.", "quite another text"])
    encoder.forget()
    built = index_hash(park, encoder, tmp_path / "here")
    script, shared = tmp_path / "other.py", tmp_path / "shared"
    script.write_text(OTHER)
    for process in [Forked(script, Path(__file__), shared) for _ in range(2)]:
        output, errors = process.communicate(timeout=300)
        assert output.strip() == built, errors
    names = sorted(path.relative_to(shared) for path in shared.rglob("*") if path.is_file())
    # one file, whichever process wrote it last
    assert [name.parts[0] for name in names] == ["index"]
    assert (tmp_path / "here" / names[0]).read_bytes() == (shared / names[0]).read_bytes()
    for folder in (tmp_path / "here", None):  # read back, and in memory
        encoder.encode(["Ben: Hi Ana, how are you?", "and more"])
        encoder.forget()
        assert index_hash(park, encoder, folder) == built


def ask(dialogue: Dialogue, text: str = "What is the dog called?", **fields: Any) -> Question:
    return Question("q", **{"dialogue_id": dialogue.id, "text": text, **fields})


def perceive(dialogue: Dialogue, encoder: Any, cache: Path | None, **fields: Any) -> FactualState:
    return Perception(CONFIG, encoder, OfflineLLM(), cache).perceive(dialogue, [ask(dialogue, **fields)])[0]


def test_what_is_cached_is_not_encoded_again(park: Dialogue, counting: Any, tmp_path: Path) -> None:
    first = perceive(park, counting, tmp_path)
    assert len(counting.seen) > len(park.turns)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    counting.seen.clear()
    assert perceive(park, counting, tmp_path) == first
    assert counting.seen == ["What is the dog called?"]
    # cues of another kind
    perceive(park, counting, tmp_path, dimension="belief_modeling")
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert not any(text.startswith("Ana: Hello again!\n") for text in counting.seen)
    # in memory between questions
    perception = Perception(CONFIG, counting, OfflineLLM(), None)
    perception.perceive(park, [ask(park)])
    counting.seen.clear()
    perception.perceive(park, [ask(park, "Who moves to Lisbon?")])
    assert counting.seen == ["Who moves to Lisbon?"]


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
    seen: list[Question] = []

    class Recording(OfflineLLM):
        def strategies(self, dialogue: Dialogue, questions: Sequence[Question]) -> list[Strategy]:
            seen.extend(questions)
            return super().strategies(dialogue, questions)

    perception = Perception(PerceptionConfig(CONFIG.segment, RetrieveConfig(method=method)), bag, Recording())
    (plain,) = perception.perceive(park, [ask(park)])
    gold = ask(park, answers=("Pixel",), evidence=("1:3",), images=(0,), category=5, split="test")
    (with_gold,) = perception.perceive(park, [gold])
    assert (plain.segments, plain.strategy) == (with_gold.segments, with_gold.strategy)
    assert with_gold.question is gold
    assert seen[0] == seen[1]
