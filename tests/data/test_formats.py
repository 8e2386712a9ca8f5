"""RefMem-Bench, DialogCC, DialSim and PerLTQA: small files made by hand after what their repositories document."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from fuzzing import seeds

from remind import read
from remind.core.errors import DataError, ImagePathError
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


def test_published_schema(tmp_path, written):
    (tmp_path / "dog.jpg").write_bytes(b"x")
    shared = ["https://example.org/2.jpg", {"image_path": "dog.jpg", "caption": "a dog"}]
    turns = [
        {"utterance": "", "speaker": "A", "shared_image": shared, "description": "a lake"},
        {"utterance": "hm", "speaker": "B", "shared_image": None, "description": "nothing shared"},
        {"utterance": "hm", "speaker": "A", "shared_image": [{}, {"image_url": "https://example.org/3.jpg"}]},
    ]
    records = [{"dialogue_id": "d:1", "dialogue": turns}, {"dialogue": [turns[1] | {"speaker": 0}]}]
    corpus = read(written("train.json", *records))
    assert [dialogue.id for dialogue in corpus.dialogues] == ["d:1", "train-00002"]
    assert [(t.id, t.speaker) for t in corpus.dialogues[0].turns] == [("S1:T1", "A"), ("S1:T2", "B"), ("S1:T3", "A")]
    assert [(i.index, i.path, i.caption, i.source) for i in corpus.dialogues[0].images] == [
        (0, None, "a lake", "https://example.org/2.jpg"),
        (1, str((tmp_path / "dog.jpg").resolve()), "a dog", None),
        (2, None, None, "https://example.org/3.jpg"),
    ]


def test_local_files_take_the_place_of_urls(tmp_path, written):
    url = "https://example.org/{}/my%20cat.jpg?size=9"
    turns = [
        {"utterance": "", "speaker": "A", "shared_image": [url.format(n), f"https://h/{n}"], "description": "a cat"}
        for n in range(2)
    ]
    path = written("train.json", {"dialogue_id": "d", "dialogue": turns})
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    # by its whole URL, by the id of its dialogue, by the end of its URL
    names = [f"{hashlib.sha256(url.format(0).encode()).hexdigest()}.png", "more/d-1", "my cat.jpg"]
    for name in names:
        (folder / name).write_bytes(b"x")
    [dialogue] = read(path, images=folder).dialogues
    assert [image.path for image in dialogue.images] == [*(str(folder / name) for name in names), None]
    assert [(image.source, image.caption) for image in dialogue.images] == [
        (image.source, image.caption) for image in read(path).dialogues[0].images
    ]
    (folder / names[0]).unlink()
    with pytest.raises(DataError, match=r"^[^\n]*my cat\.jpg \[d\]: [^\n]*/0/my[^\n]*/1/my[^\n]* end alike[^\n]*$"):
        read(path, images=folder)
    (folder / "my cat.jpg").unlink()
    (folder / "more" / "d-1").rename(folder / "other")
    with pytest.raises(DataError, match=r"^[^\n]*pictures: no file in it is named after an image of [^\n]*$"):
        read(path, images=folder)
    with pytest.raises(DataError, match=r"^[^\n]*nowhere: no such folder of images, or an empty one$"):
        read(path, images=tmp_path / "nowhere")


OPTIONS = ["Rachel", "Monica", "Monica", "Carol", "I don't know."]
ASKED = {"questions": {"Joey": "Who left him?", "default": "Who left Ross?"}, "options": OPTIONS, "answer": "carol"}
SCRIPT = "Teleplay: Somebody\n\n[Scene: A cafe]\nMonica: Hi!\nAnd?\nRoss: Carol left.\n"


def test_a_show_of_dialsim(tmp_path: Path) -> None:
    late = ASKED | {"answer": "I don't know."}
    hard = {"past": [ASKED, ASKED | {"answer": "Phoebe"}], "past_fu": [late], "fu": []}
    scenes = {
        1: {"date": "September 22, 1994", "script": SCRIPT, "hard_q": hard},
        3: {"date": "that night", "script": "All: Bye.", "easy_q": {"ans_w_time": {9: ASKED, 12: late}}},
    }
    (tmp_path / "friends_oracle_tkg.pickle").write_bytes(b"\x80")
    (tmp_path / "friends_dialsim.pickle").write_bytes(pickle.dumps({"S01E01 The Pilot.txt": scenes, "S01E02": {}}))
    corpus = read(tmp_path)
    (dialogue,) = corpus.dialogues
    assert dialogue.id == "friends_dialsim"
    assert [(session.id, session.time) for session in dialogue.sessions] == [
        ("e001:S1", "1994-09-22"),
        ("e001:S3", "that night"),
    ]
    assert [(turn.id, turn.speaker, turn.text) for turn in dialogue.turns] == [
        ("e001:S1:T1", "[Scene", "A cafe]"),
        ("e001:S1:T2", "Monica", "Hi!\nAnd?"),
        ("e001:S1:T3", "Ross", "Carol left."),
        ("e001:S3:T1", "All", "Bye."),
    ]
    found = [(q.id, q.text, q.options, q.answers, q.category, q.time) for q in corpus.questions]
    options = ("Rachel", "Monica", "Carol", "I don't know.")
    assert found == [
        ("e001:S1-past-0", "Who left Ross?", options, ("C",), "past", "1994-09-22"),
        ("e001:S3-ans_w_time-9", "Who left Ross?", options, ("C",), "ans_w_time", "that night"),
        ("e001:S3-ans_w_time-12", "Who left Ross?", options, ("D",), "ans_w_time", "that night"),
    ]


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.canary,))


@pytest.mark.parametrize("content", ["bomb", "no show", "cut"])
def test_a_pickle_that_is_no_show_runs_nothing(tmp_path: Path, refused: Any, content: str) -> None:
    path, canary = tmp_path / "x_dialsim.pickle", tmp_path / "canary"
    held = {"bomb": pickle.dumps({"S01E01": Bomb(canary)}), "no show": pickle.dumps([1])}
    path.write_bytes(held.get(content) or pickle.dumps(seeds.DIALSIM)[:-9])
    message = {"bomb": "no pickle of plain values: it names pathlib", "no show": "a show should be an object"}
    assert message.get(content, "no pickle of plain values: ") in refused(path)
    assert not canary.exists()


def test_lives_of_perltqa(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    relation = {"Supporting Characters": "Wei", "Description": "They row together.", "Relationship": "friend"}
    event = {"content": "They won.", "summary": "A race", "Characters": ["1_0"], "Creation Time": "May 12, 2022"}
    contents = {"2022-05-12 10:00": ["Wei: Well rowed: thanks!", "Ming: Tea?"], "2022-05-12 11:00": ["Wei: Yes."]}
    memories = {
        "profile": {"Protagonist": "Ming", "Age": 28},
        "profile_description": "…",
        "social_relationship": repr({"1_0": relation}),  # as part of the published file has it
        "events": {"1_0_0": event},
        "dialogues": {"1_0_0#1": {"events": "1_0_0", "contents": contents}},
    }

    def asked(reference: str) -> dict[str, Any]:
        return {"Question": f"Of {reference}?", "Answer": "So.", "Reference Memory": reference, "Memory Anchors": []}

    questions = {
        "profile": [asked("Age")],
        "social_relationship": [{"1_0": [asked("['1_0']")]}],
        "events": [{"1_0_0": [asked("['1_0_0', '7_7_7']")]}],
        "dialogues": [{"1_0_0#1": [asked("['1_0_0#1']")]}],
    }
    (tmp_path / "perltmem_en_v2.json").write_text(json.dumps({"Ming": memories}, indent=1))
    (tmp_path / "perltqa_en_v2.json").write_text(json.dumps([{"Ming": questions}, {"Dragon": questions}]))
    corpus = read(tmp_path)
    (dialogue,) = corpus.dialogues
    assert [(turn.id, turn.speaker, turn.text, turn.time) for turn in dialogue.turns] == [
        ("Protagonist", "Ming", "Protagonist: Ming", None),
        ("Age", "Ming", "Age: 28", None),
        ("1_0", "Ming", "Wei: friend: They row together.", None),
        ("1_0_0", "Ming", "They won.", "May 12, 2022"),
        ("1_0_0#1:T1", "Wei", "Well rowed: thanks!", None),
        ("1_0_0#1:T2", "Ming", "Tea?", None),
        ("1_0_0#1:T3", "Wei", "Yes.", None),
    ]
    assert [session.time for session in dialogue.sessions] == [None, None, None, "2022-05-12 10:00"]
    talk = tuple(turn.id for turn in dialogue.turns[4:])
    assert [(q.id, q.category, q.evidence) for q in corpus.questions] == [
        ("Ming-q000", "profile", ("Age",)),
        ("Ming-q001", "social_relationship", ("1_0",)),
        ("Ming-q002", "events", ("1_0_0",)),
        ("Ming-q003", "dialogues", talk),
    ]
    assert [(one.question_id, one.reference) for one in corpus.dangling] == [("Ming-q002", "7_7_7")]
    assert caplog.messages == ["questions about Dragon, of whom nothing is remembered, are left out"]
