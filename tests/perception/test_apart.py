"""An index depends on the dialogue alone: not on the process that built it, nor on what that had encoded before."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked

from remind.core.files import read_json, write_json
from remind.data.dialogue import Dialogue, Question
from remind.llm.offline import OfflineLLM
from remind.models.encoder import SentenceEncoder
from remind.perception import Perception, PerceptionConfig, RetrieveConfig, SegmentConfig
from remind.perception.bm25 import BM25
from remind.perception.index import DialogueIndex

QUESTIONS = ("What is the dog called?", "Who moves to Lisbon?", "Ana: Looks great.")
#: Builds the index of the same dialogue elsewhere, after other work, and is killed where that is asked for.
OTHER = """
import importlib.util, os, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("own", sys.argv[1])
own = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own)
spec = importlib.util.spec_from_file_location("made", Path(sys.argv[1]).with_name("conftest.py"))
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)
encoder = own.SentenceEncoder()
encoder.encode(["Ana: Hello again!", "something else that is rather long, and sits in the batch", "Ben: Hi Ana"])
own.asked(made.build(["Ana: I sold my bicycle.", "Ben: Hi Ana, how are you?"], name="other"), encoder, None)
encoder.forget()
if sys.argv[3] == "kill":
    import remind.perception.store as store
    store.write_json = lambda *_: os._exit(9)
if sys.argv[3] == "together":
    import time
    import remind.perception.store as store
    save, ready = store.save_file, Path(sys.argv[2]).with_suffix(".ready")
    def once_both_are_here(*arguments, **more):
        ready.mkdir(exist_ok=True)
        (ready / str(os.getpid())).touch()
        while len(list(ready.iterdir())) < 2:
            time.sleep(0.001)
        save(*arguments, **more)
    store.save_file = once_both_are_here
print(own.asked(made.PARK, encoder, Path(sys.argv[2])))
"""


def asked(dialogue: Dialogue, encoder: SentenceEncoder, folder: Path | None) -> str:
    """Hash of all the bits that an index, its cues of two kinds, its questions and its retrieval come to."""
    config = PerceptionConfig(SegmentConfig(max_tokens=40), RetrieveConfig(method="hybrid"))
    perception = Perception(config, encoder, OfflineLLM(), folder)
    digest = hashlib.sha256()
    for dimension in (None, "belief_modeling"):
        for number, text in enumerate(QUESTIONS):
            state = perception.perceive(dialogue, Question(f"q{number}", dialogue.id, text, dimension=dimension))
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
    """Neither process starts to write before both have computed what they will write."""
    encoder.encode(["Ben: Hi Ana, how are you?", "Ana: Looks great.", "quite another text"])
    encoder.forget()
    built = asked(park, encoder, tmp_path / "here")
    script, shared = tmp_path / "other.py", tmp_path / "shared"
    script.write_text(OTHER)
    processes = [Forked(script, Path(__file__), shared, "together") for _ in range(2)]
    for process in processes:
        said, errors = process.communicate(timeout=300)
        assert said.strip() == built, errors
    names = sorted(path.relative_to(shared) for path in shared.rglob("*") if path.is_file())
    assert len(names) == 8
    for name in names:
        assert (tmp_path / "here" / name).read_bytes() == (shared / name).read_bytes(), name
    for folder in (tmp_path / "here", None):  # read back, and in memory
        encoder.encode(["Ben: Hi Ana, how are you?", "and more"])
        encoder.forget()
        assert asked(park, encoder, folder) == built


def test_a_killed_build_leaves_nothing_that_counts(park: Dialogue, encoder: SentenceEncoder, tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text(OTHER)
    process = Forked(script, Path(__file__), tmp_path / "killed", "kill")
    process.communicate(timeout=300)
    assert process.returncode == 9
    (left,) = (tmp_path / "killed").rglob("*.safetensors")
    left.write_bytes(left.read_bytes()[::-1])
    encoder.forget()
    expected = asked(park, encoder, None)
    encoder.forget()
    assert asked(park, encoder, tmp_path / "killed") == expected


def test_forgetting_leaves_nothing_held(encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder.encode(["a green kite"])
    encoder.forget()
    monkeypatch.setattr(encoder, "_model", None)
    with pytest.raises(AttributeError):
        encoder.encode(["a green kite"])


def test_encoding_apart_neither_reads_nor_fills_the_hold(encoder: SentenceEncoder) -> None:
    encoder.forget()
    texts = ["one kite", "two kites", "one kite"]
    first = encoder.encode_apart(texts)
    assert not encoder._held
    encoder.hold(texts[:1], torch.zeros(1, 384))
    assert torch.equal(encoder.encode_apart(texts), first)
    assert torch.equal(first[0], first[2])
    assert encoder.encode_apart([]).shape == (0, 384)
    encoder.forget()


def test_an_index_of_another_version_is_built_again(park: Dialogue, bag: SentenceEncoder, tmp_path: Path) -> None:
    first = DialogueIndex(park, bag, OfflineLLM(), SegmentConfig(), tmp_path)
    path = tmp_path / "turns.json"
    content = path.read_bytes()
    write_json(path, read_json(path) | {"format_version": 1})
    again = DialogueIndex(park, bag, OfflineLLM(), SegmentConfig(), tmp_path)
    assert torch.equal(again.vectors, first.vectors)
    assert path.read_bytes() == content


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="needs /proc/self/maps")
def test_vectors_are_views_of_the_file(park: Dialogue, bag: SentenceEncoder, tmp_path: Path) -> None:
    for _ in ("built", "read"):
        index = DialogueIndex(park, bag, OfflineLLM(), SegmentConfig(), tmp_path)
        mapped = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith(str(tmp_path / "turns.safetensors")):
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                mapped.append(range(low, high))
        assert any(index.vectors.data_ptr() in addresses for addresses in mapped)


def test_words_on_disk_score_as_those_in_memory(park: Dialogue) -> None:
    documents = [turn.text.lower().split() for turn in park.turns]
    made = BM25(documents)
    read = BM25.from_tensors(len(documents), made.terms, made.tensors())
    for query in (["pixel", "is", "pixel"], ["zebra"], [], [""], ["ä"], ["blue", "zebra"]):
        assert np.array_equal(made.scores(query), read.scores(query))
    assert BM25([[], []]).scores(["a"]).tolist() == [0, 0]
