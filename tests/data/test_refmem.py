import json

import pytest

from remind import read
from remind.core.errors import ImagePathError
from remind.data.readers import write_refmem

IMAGES = [{"path": "img/a.png", "caption": "a", "source": "orig.png"}, {"path": None, "caption": "b", "source": None}]
FIRST = [{"id": "s1:1", "speaker": "Ana", "text": "hi"}, {"id": "s1:2", "speaker": "Ben", "text": "", "images": IMAGES}]
LAST = [{"id": "s2:1", "speaker": "Cem", "text": "x", "images": [{"path": "https://e.org/c"}]}]
SESSIONS = [{"id": "s1", "time": "2024-03-01T18:30", "turns": FIRST}, {"id": "s2", "turns": LAST}]
CONTEXT = {"type": "context", "id": "c01", "sessions": SESSIONS}
QUESTION = {"type": "question", "id": "q1", "context_id": "c01", "question": "Which?", "format": "multi"}
QUESTION |= {"options": ["one", "two", "three"], "answers": ["A", "C"], "evidence": ["s1:1", "gone"]}
QUESTION |= {"images": [0, 2], "dimension": "pattern_induction", "split": "train", "category": None, "time": None}


def write(folder, *records):
    (folder / "img").mkdir()
    (folder / "img" / "a.png").write_bytes(b"x")
    path = folder / "bench.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_round_trip_of_real_dialogues(remind_data, tmp_path):
    corpus = read(remind_data / "locomo" / "locomo_dev.json")
    write_refmem(corpus, tmp_path / "locomo.jsonl")
    back = read(tmp_path / "locomo.jsonl")
    assert (back.dialogues, back.questions, back.dangling) == (corpus.dialogues, corpus.questions, corpus.dangling)


def test_images_stay_beside_the_file(tmp_path):
    corpus = read(write(tmp_path, CONTEXT, QUESTION))
    write_refmem(corpus, tmp_path / "copy.jsonl")
    first = json.loads((tmp_path / "copy.jsonl").read_text().splitlines()[0])
    assert first["sessions"][0]["turns"][1]["images"][0] == IMAGES[0]
    assert read(tmp_path / "copy.jsonl") == corpus
    (tmp_path / "else").mkdir()
    with pytest.raises(ImagePathError, match="lies outside"):
        write_refmem(corpus, tmp_path / "else" / "copy.jsonl")
