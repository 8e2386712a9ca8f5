"""Formats read from small files made by hand: RefMem-Bench, DialogCC, DialSim, PerLTQA, chats, JSON by a mapping."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import seeds
from fuzzing.seeds import changed

from remind import Corpus, read
from remind.core.errors import ConfigError, DataError, ImagePathError
from remind.data.readers import stream, write_refmem
from remind.data.sample import sample_path


def test_images_stay_beside_the_file(tmp_path):
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "a.png").write_bytes(b"x")
    rows = changed(seeds.REFMEM, "0.sessions.0.turns.1.images.0.path", "img/a.png")
    (tmp_path / "bench.jsonl").write_bytes(seeds.as_lines(changed(rows, "1.evidence", ["t1", "gone"])))
    corpus = read(tmp_path / "bench.jsonl")
    write_refmem(corpus, tmp_path / "copy.jsonl")
    first = json.loads((tmp_path / "copy.jsonl").read_text().splitlines()[0])
    assert first["sessions"][0]["turns"][1]["images"] == rows[0]["sessions"][0]["turns"][1]["images"]
    assert read(tmp_path / "copy.jsonl") == corpus
    assert [lost.reference for lost in corpus.dangling] == ["gone"]
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


def test_a_show_of_dialsim(tmp_path: Path) -> None:
    script = "Teleplay: Somebody\n\n[Scene: A cafe]\nMonica: Hi!\nAnd?\nRoss: Carol left.\n"
    scene = {**seeds.DIALSIM["S01E01"][1], "script": script}
    late = {**scene["hard_q"]["past"][0], "answer": "I don't know."}
    odd = [late | {"answer": "Phoebe"}, late]  # none of the options
    last = {"date": "that night", "script": "All: Bye.", "hard_q": {"past": odd, "past_fu": [late]}}
    (tmp_path / "friends_oracle_tkg.pickle").write_bytes(b"\x80")
    show = {"S01E01 The Pilot.txt": {1: scene, 3: last}, "S01E02": {}}
    (tmp_path / "friends_dialsim.pickle").write_bytes(pickle.dumps(show))
    corpus = read(tmp_path)
    (dialogue,) = corpus.dialogues
    assert dialogue.id == "friends_dialsim"
    assert [(s.id, s.time) for s in dialogue.sessions] == [("e001:S1", "1994-03-01"), ("e001:S3", "that night")]
    assert [(turn.id, turn.speaker, turn.text) for turn in dialogue.turns] == [
        ("e001:S1:T1", "[Scene", "A cafe]"),
        ("e001:S1:T2", "Monica", "Hi!\nAnd?"),
        ("e001:S1:T3", "Ross", "Carol left."),
        ("e001:S3:T1", "All", "Bye."),
    ]
    assert {q.options for q in corpus.questions} == {("Ana", "Ben", "I don't know.")}
    assert [(q.id, q.text, q.answers, q.category, q.time) for q in corpus.questions] == [
        ("e001:S1-past-0", "Who paints?", ("A",), "past", "1994-03-01"),
        ("e001:S1-ans_w_time-7", "Who paints?", ("A",), "ans_w_time", "1994-03-01"),
        ("e001:S3-past-1", "Who paints?", ("C",), "past", "that night"),
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
    # as part of the published file has it
    memories = changed(seeds.PERLTQA[0], "Ana.social_relationship", repr({"1_0": relation}))
    questions = seeds.PERLTQA[1]["Ana"]
    (tmp_path / "perltmem_en_v2.json").write_text(json.dumps(memories, indent=1))
    (tmp_path / "perltqa_en_v2.json").write_text(json.dumps([{"Ana": questions}, {"Dragon": questions}]))
    corpus = read(tmp_path)
    (dialogue,) = corpus.dialogues
    assert [(turn.id, turn.speaker, turn.text, turn.time) for turn in dialogue.turns] == [
        ("Age", "Ana", "Age: 28", None),
        ("1_0", "Ana", "Wei: friend: They row together.", None),
        ("1_0_0", "Ana", "They met.", "May 2022"),
        ("1_0_0#1:T1", "Ana", "hi", None),
        ("1_0_0#1:T2", "Ben", "ho", None),
    ]
    assert [session.time for session in dialogue.sessions] == [None, None, None, "2022-05-12 10:00"]
    assert [(q.id, q.category, q.evidence) for q in corpus.questions] == [
        ("Ana-q000", "profile", ("Age",)),
        ("Ana-q001", "dialogues", ("1_0_0#1:T1", "1_0_0#1:T2")),
    ]
    assert [(one.question_id, one.reference) for one in corpus.dangling] == [("Ana-q001", "9")]
    assert caplog.messages == ["questions about Dragon, of whom nothing is remembered, are left out"]


GOOD = {"speaker": "Ana", "text": "hi"}


def test_turns_of_several_dialogues_and_sessions(written):
    path = written(
        "mine.jsonl",
        {"speaker": "Ana", "text": "hi", "time": "2024-03-01T18:30", "session": "mon", "dialogue": "d1"},
        {"role": "user", "content": "elsewhere", "dialogue": "d2"},
        {"speaker": "Cem", "text": "new day", "session": 2, "dialogue": "d1", "id": "own"},
        {"name": "Cem", "text": "no session named", "dialogue": "d1"},
        {"id": "d3", "messages": [GOOD]},
    )
    d1, d2, d3 = read(path).dialogues
    assert [(s.id, s.time, [t.id for t in s.turns]) for s in d1.sessions] == [
        ("mon", "2024-03-01T18:30", ["mon:T1"]),
        ("2", None, ["own", "2:T2"]),
    ]
    assert [(t.id, t.speaker, t.text) for t in d2.turns] == [("S1:T1", "user", "elsewhere")]
    assert d3.id == "d3"


def test_sessions_are_the_days_of_a_chat_that_names_none(written):
    times = ("29.12.2023, 22:42:04", "29.12.2023, 23:00:00", None, "30.12.2023, 00:01:10", "2024-05-07T09:00")
    said = [{"speaker": "Ana", "text": str(n), "time": time} for n, time in enumerate(times)]
    (dialogue,) = read(written("mine.jsonl", *said)).dialogues
    assert [(s.id, s.time, [t.id for t in s.turns]) for s in dialogue.sessions] == [
        ("S1", times[0], ["S1:T1", "S1:T2", "S1:T3"]),
        ("S2", times[3], ["S2:T1"]),
        ("S3", times[4], ["S3:T1"]),
    ]
    # days in words; what comes first without a time belongs to the first day
    said = [{"role": "system", "content": "Be kind."}]
    said += [
        {"role": "user", "content": time, "time": time}
        for time in ("8 May 2023, 9:00", "8 May 2023, 10:00", "9 May 2023")
    ]
    (dialogue,) = read(written("mine.jsonl", {"messages": said})).dialogues
    assert [(s.id, s.time, len(s.turns)) for s in dialogue.sessions] == [
        ("S1", said[1]["time"], 3),
        ("S2", "9 May 2023", 1),
    ]
    # a clock before a date is no part of it
    said = [
        {"speaker": "Ana", "text": time, "time": time}
        for time in ("10:01 AM 2023-05-08", "10:02 AM 2023-05-08", "May 8, 2023")
    ]
    (dialogue,) = read(written("mine.jsonl", *said)).dialogues
    assert [len(s.turns) for s in dialogue.sessions] == [2, 1]
    # one that is named holds until another is
    (dialogue,) = read(written("mine.jsonl", {**said[0], "session": "mon"}, *said[1:])).dialogues
    assert [(s.id, len(s.turns)) for s in dialogue.sessions] == [("mon", 3)]


def test_what_is_thought_and_what_tools_reply_is_not_said(written):
    thought = [{"type": "reasoning", "text": "SECRET"}, {"type": "text", "text": "Hi."}]
    corpus = read(
        written("x.json", {"messages": [{"role": "assistant", "content": thought}, {"role": "tool", "content": "{}"}]})
    )
    assert [turn.text for turn in corpus.dialogues[0].turns] == ["Hi."]
    assert corpus.blank == 1


CALL = [{"type": "tool_use", "name": "clock"}, {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": None}]
RESULT = [{"type": "tool_result", "tool_use_id": "x", "content": "noon"}, {"type": "image_url", "image_url": None}]


def test_blank_turns_are_left_out_and_counted(written, caplog):
    for text in (None, " \n", float("nan"), [], [None, {}], CALL, RESULT):
        path = written("x.json", {"messages": [GOOD, {"role": "tool", "content": text}]})
        caplog.clear()
        corpus = read(path)
        assert (len(corpus.dialogues[0].turns), corpus.blank) == (1, 1), text
        assert caplog.messages == [f"{path}: turns without words or images, which are left out: 1"]
    inline = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    shown = [{"type": "image_url", "image_url": {"url": "https://e.org/x"}}, "Look!", inline, {"text": "Nice."}]
    turn = read(written("x.json", {"messages": [GOOD, {"role": "user", "content": shown}]})).dialogues[0].turns[1]
    assert (turn.text, len(turn.images)) == ("Look!\nNice.", 2)


def test_dialogues_of_blank_turns_are_left_out_unless_somebody_asks(written, refused):
    lost = {"messages": [{"role": "assistant", "tool_calls": [{}]}]}
    corpus = read(written("x.jsonl", {"role": "assistant", "tool_calls": []}, {"messages": [GOOD]}, lost))
    assert ([d.id for d in corpus.dialogues], corpus.blank) == (["x-00002"], 2)
    assert refused(written("y.jsonl", lost)) == ": holds no dialogues"
    assert "the dialogue has no turns" in refused(written("z.jsonl", lost | {"questions": [{"text": "?"}]}))


ASKED = [
    {"text": "Who?", "answers": "Ana", "evidence": ["S1:T1", "S9:T1"], "split": "train"},
    {"question": "Which?", "options": ["hi", "ho"], "answer": "ho", "evidence": "S1:T2", "split": "test", "id": "own"},
    {"text": "All?", "options": ["hi", "ho", "3"], "answers": ["A", 3]},
]


def test_questions_in_a_chat(written):
    messages = [GOOD, {"speaker": "Ben", "text": "ho"}]
    apart = {"dialogue": "us", "questions": ASKED}
    forms = (
        [{"id": "us", "messages": messages, "questions": ASKED}],
        [{"id": "us", "messages": messages}, apart, {"id": "we", "messages": messages}],
        [{**messages[0], "dialogue": "us"}, apart, {**messages[1], "dialogue": "us"}],
    )
    for form in forms:
        corpus = read(written("mine.jsonl", *form))
        assert len(corpus.dialogue("us").turns) == 2
        found = [(q.id, q.text, q.format, q.answers, q.evidence, q.split) for q in corpus.questions]
        assert found == [
            ("us-q000", "Who?", "direct", ("Ana",), ("S1:T1",), "train"),
            ("own", "Which?", "single", ("B",), ("S1:T2",), "test"),
            ("us-q002", "All?", "multi", ("A", "C"), (), None),
        ]
        assert ([lost.reference for lost in corpus.dangling], corpus.references) == (["S9:T1"], 3)


def test_numbers_in_a_chat_are_as_good_as_words(written):
    turns = [{"id": n, "speaker": "Ana", "text": f"It costs {n}."} for n in range(3)]
    asked = [
        {"text": "How much?", "answer": 4.5, "evidence": 0},
        {"text": "Which?", "options": [1, 2.5], "answer": 2.5, "evidence": [1, 2, 7]},
    ]
    corpus = read(written("mine.jsonl", {"id": "us", "messages": turns, "questions": asked}))
    assert [(q.answers, q.options, q.evidence) for q in corpus.questions] == [
        (("4.5",), (), ("0",)),
        (("B",), ("1", "2.5"), ("1", "2")),
    ]
    assert [lost.reference for lost in corpus.dangling] == ["7"]


def test_local_images_stay_in_the_data_folder(tmp_path, written):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"x")
    (data / "link.png").symlink_to(tmp_path / "secret.png")
    (data / "a.png").write_bytes(b"x")
    (data / "b.png").symlink_to(data / "a.png")
    outside, gone, unusable = "outside the data folder", "no such file", "not a usable path"
    bad = {"../secret.png": outside, "link.png": outside, "gone.png": gone, "nul\0.png": unusable}
    for reference, message in bad.items():
        with pytest.raises(ImagePathError, match=rf"\[line 2\]: image .*{message}"):
            read(written("data/mine.jsonl", GOOD, {**GOOD, "images": [reference]}))
    (dialogue,) = read(written("data/x.jsonl", {**GOOD, "images": ["b.png", str(data / "a.png")]})).dialogues
    assert [image.path for image in dialogue.images] == [str((data / "a.png").resolve())] * 2


DATA = seeds.SHAPED
# BaseLoader makes text, lists and dictionaries alone: `no` is a key here, and nothing can be constructed
MAPPING = yaml.load(seeds.MAPPING, yaml.BaseLoader)


def write(folder: Path, mapping: Any, **files: Any) -> tuple[Path, str]:
    """The JSON files and the mapping; what `read` takes."""
    (folder / "data").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    path = folder / "mapping.yaml"
    path.write_text(mapping if isinstance(mapping, str) else yaml.safe_dump(mapping), encoding="utf-8")
    return folder / "data", str(path)


@pytest.mark.parametrize(("nested", "answers"), [(True, "letter"), (False, "index"), (True, "text")])
def test_the_bundled_sample_in_other_shapes(tmp_path: Path, nested: bool, answers: str) -> None:
    """Other names and values; questions in their dialogues, or in files of their own; sessions by name."""
    corpus = read(sample_path() / "dev.jsonl")
    dialogues, asked = [], []
    for dialogue, questions in corpus.by_dialogue():
        rows = []
        for q in questions:
            places = ["ABCDEF".index(letter) for letter in q.answers] if q.options else []
            told = {"letter": q.answers, "index": [n + 1 for n in places], "text": [q.options[n] for n in places]}
            about = {"ask": q.text, "kind": f"<{q.format}>", "dim": q.dimension}
            row = {"qid": q.id, "meta": about, "of": dialogue.id, "choices": [{"says": text} for text in q.options]}
            row |= {"gold": told[answers] if q.options else q.answers, "part": q.split}
            rows.append({**row, "why": q.evidence, "shown": [index + 1 for index in q.images]})
        asked += rows
        parts = {
            s.id: {"when": s.time, "log": [[t.id, t.speaker, t.text, [[i.caption] for i in t.images]] for t in s.turns]}
            for s in dialogue.sessions
        }
        dialogues.append({"name": dialogue.id, "parts": parts, **({"qa": rows} if nested else {})})
    mapping = f"""\
        count_from: 1
        dialogue: {{id: name, sessions: parts, {"records: all.those, questions: qa" if nested else "file: talk*"}}}
        session: {{time: when, turns: log}}
        turn: {{id: 0, speaker: 1, text: 2, images: "3?"}}
        image: {{caption: 0}}
        question: {{id: qid, text: meta.ask, format: meta.kind, dimension: meta.dim, split: part, options: choices,
                   answers: gold, evidence: why, images: shown{"" if nested else ", dialogue: of, file: 'ask?.json'"}}}
        option: {{text: says}}
        answer: {{{answers}: .}}
        values: {{format: {{<single>: single, <multi>: multi, <direct>: direct}}}}
    """
    files = {"x": {"all": {"those": dialogues}}} if nested else {"talks": dialogues, "ask1": asked}
    folder, format = write(tmp_path, mapping, **files)
    assert read(folder, format) == corpus
    pieces = list(stream(folder, format))
    assert (Corpus.merge(pieces), len(pieces)) == (corpus, len(corpus.dialogues))


@pytest.mark.parametrize(
    ("path", "message"), [("turn.txt", "unknown key"), ("turn.text", "turn.text: 'a..b' is not a")]
)
def test_a_mapping_that_is_none(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"mapping\.yaml: {message}"):
        read(*write(tmp_path, changed(MAPPING, path, "a..b"), x=DATA))
