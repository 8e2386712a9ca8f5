import json

import pytest

from remind import read
from remind.core.errors import ImagePathError

GOOD = {"speaker": "Ana", "text": "hi"}


def test_turns_of_several_dialogues_and_sessions(written):
    path = written(
        "mine.jsonl",
        {"speaker": "Ana", "text": "hi", "time": "2024-03-01T18:30", "session": "mon", "dialogue": "d1"},
        {"name": "Ben", "text": "ho", "session": "mon", "dialogue": "d1"},
        {"role": "user", "content": "elsewhere", "dialogue": "d2"},
        {"speaker": "Cem", "text": "new day", "session": 2, "dialogue": "d1", "id": "own"},
        {"speaker": "Cem", "text": "no session named", "dialogue": "d1"},
    )
    corpus = read(path)
    assert corpus == read(path, format="chat")
    d1, d2 = corpus.dialogues
    assert (d1.id, d2.id) == ("d1", "d2")
    assert [(s.id, s.time, [t.id for t in s.turns]) for s in d1.sessions] == [
        ("mon", "2024-03-01T18:30", ["mon:T1", "mon:T2"]),
        ("2", None, ["own", "2:T2"]),
    ]
    assert d1.speakers == ("Ana", "Ben", "Cem")
    assert [(t.id, t.speaker, t.text) for t in d2.turns] == [("S1:T1", "user", "elsewhere")]


def test_whole_dialogues_and_openai_parts(tmp_path, written):
    (tmp_path / "cat.png").write_bytes(b"x")
    parts = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "https://example.org/1.jpg"}},
        {"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
        {"type": "text", "text": "here"},
    ]
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "name": "Ana", "content": parts}]
    images = [
        "cat.png",
        {"path": "cat.png", "caption": "a cat"},
        {"url": "https://example.org/2.jpg", "source": "mine"},
    ]
    turns = [{"speaker": "Ben", "text": "", "images": images[:2]}, {"speaker": "Ben", "text": "", "images": images[2:]}]
    path = written("mine.jsonl", {"id": "a", "messages": messages}, {"turns": turns})
    a, b = read(path).dialogues
    assert (a.id, b.id) == ("a", "mine-00002")
    assert [(turn.speaker, turn.text) for turn in a.turns] == [("system", "be kind"), ("Ana", "look\nhere")]
    assert [(i.index, i.path, i.source) for i in a.images] == [
        (0, None, "https://example.org/1.jpg"),
        (1, None, "data:image/png;base64,AAAA"),
    ]
    cat = str((tmp_path / "cat.png").resolve())
    assert [(i.index, i.path, i.caption, i.source) for i in b.images] == [
        (0, cat, None, None),
        (1, cat, "a cat", None),
        (2, None, None, "mine"),
    ]


def test_other_forms_of_a_file(tmp_path, written):
    turns = [{"role": "user", "content": "a\u2028b"}, {"role": "bot", "content": "c"}]
    (dialogue,) = read(written("mine.jsonl", *turns)).dialogues
    assert (dialogue.id, [turn.text for turn in dialogue.turns]) == ("mine", ["a\u2028b", "c"])
    times = ("NaN", " nat", "2024-02-29T23:59:59.5+02:00", "2024-03", "two days later")
    (dialogue,) = read(written("mine.jsonl", *({**GOOD, "time": time} for time in times))).dialogues
    assert [turn.time for turn in dialogue.turns] == [None, None, *times[2:]]
    path = tmp_path / "many_lines.json"
    path.write_text(json.dumps({"id": "a", "messages": [GOOD]}, indent=2), encoding="utf-8")
    assert read(path).dialogues[0].id == "a"
    # equal or null values under two keys are read once
    turn = {**GOOD, "content": "hi"}
    path = written(
        "two_keys.jsonl",
        turn,
        {"id": "a", "messages": [turn], "turns": [turn]},
        {"id": "b", "messages": None, "turns": [{**GOOD, "content": None}]},
        {"id": "c", "messages": [{"speaker": "Ana", "text": None, "content": "hi"}], "turns": None},
    )
    assert [[t.text for t in dialogue.turns] for dialogue in read(path).dialogues] == [["hi"]] * 4


IMAGE_PART = {"type": "image_url", "image_url": "https://example.org/1.jpg"}
TWO_TEXTS = "text and content are both given and differ; keep one"
TWO_LISTS = "messages and turns are both given and differ; keep one"


@pytest.mark.parametrize(
    ("record", "place", "message"),
    [
        ({"text": "hi"}, "", "speaker is missing or blank"),
        ({"speaker": ["Ana"], "text": "hi"}, "", "speaker should be text, not a list"),
        ({"speaker": "Ana", "text": " \t"}, "", "text is missing or blank, and there are no images"),
        ({"role": "user", "content": [{"type": "audio"}]}, "", "content part of type 'audio'"),
        ({"role": "user", "content": [{"type": "text"}]}, "", "a text part should be text, not missing or null"),
        *(
            ({**GOOD, "time": day}, "", f"time {day!r} is not a valid date")
            for day in ("2024-02-30", "2024-02-03T25:00:00Z")
        ),
        ({**GOOD, "images": [{}]}, "", "an image without path, url, source or caption"),
        ([GOOD], "", "a line should be an object, not a list"),
        ({"id": "a", "messages": [GOOD, {"role": "user"}]}, ", a, turn 2", "text is missing or blank"),
        ({"id": "mine", "messages": [GOOD]}, "", "dialogue id 'mine' occurs twice"),
        ({"id": "a", "messages": [GOOD], "turns": [GOOD, GOOD]}, "", TWO_LISTS),
        ({**GOOD, "text": "", "content": "ho"}, "", TWO_TEXTS),
        ({**GOOD, "content": [IMAGE_PART]}, "", TWO_TEXTS),
    ],
)
def test_bad_records_are_named(tmp_path, refused, record, place, message):
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(record)}\n", encoding="utf-8")
    assert refused(path).startswith(f"[line 2{place}]: {message}")


def test_ids_and_sessions_that_come_twice_are_named(written, refused):
    path = written("mine.jsonl", GOOD, {**GOOD, "id": "S1:T1"})
    assert refused(path) == "[mine]: turn id 'S1:T1' occurs twice; ids must be unique in a dialogue"
    path = written("x.jsonl", *({**GOOD, "session": name} for name in ("a", "b", "a")))
    assert refused(path).startswith("[line 3]: session 'a' appears again after another")


def test_two_lists_of_turns_nested_deeply_are_refused_in_one_line(tmp_path, refused):
    path = tmp_path / "mine.jsonl"
    for depth in (500, 900, 960, 980, 100_000):
        deep = "[" * depth + "]" * depth
        path.write_text(f'{json.dumps(GOOD)}\n{{"messages": {deep}, "turns": {deep}}}\n')
        assert refused(path)


@pytest.mark.parametrize("turn", [{**GOOD, "dialogue": "b"}, {**GOOD, "dialogue": "b", "session": "other"}])
@pytest.mark.parametrize("between", [[], [GOOD]])
def test_a_dialogue_is_whole_or_in_single_turns(written, refused, turn, between):
    whole = {"id": "b", "messages": [GOOD]}
    start = f"[line {2 + len(between)}]: dialogue id 'b' occurs twice"
    assert refused(written("x.jsonl", whole, *between, turn)).startswith(f"{start}: this turn follows a whole")
    assert refused(written("x.jsonl", turn, *between, whole)) == start
    # turns without a dialogue belong to the file
    message = refused(written("x.jsonl", {**whole, "id": "x"}, GOOD))
    assert message.startswith("[line 2]: dialogue id 'x' occurs twice: this turn follows a whole")


@pytest.mark.parametrize("end", ["", "\n", "\n \n"])
def test_the_only_line_is_named(tmp_path, refused, end):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n" + json.dumps({"text": "who?"}) + end, encoding="utf-8")
    assert refused(path) == "[line 2]: speaker is missing or blank"
    assert refused(path.rename(tmp_path / "mine.json")) == ": speaker is missing or blank"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("../secret.png", "is outside the data folder"),
        ("/etc/hostname", "is outside the data folder"),
        ("link.png", "is outside the data folder"),
        ("gone.png", "no such file"),
        ("file:///etc/hostname", "no such file"),
        ("nul\0.png", "is not a usable path"),
    ],
)
def test_local_images_stay_in_the_data_folder(tmp_path, written, reference, message):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"x")
    (data / "link.png").symlink_to(tmp_path / "secret.png")
    (data / "a.png").write_bytes(b"x")
    (data / "b.png").symlink_to(data / "a.png")
    path = written("data/mine.jsonl", GOOD, {**GOOD, "images": [reference]})
    with pytest.raises(ImagePathError) as caught:
        read(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path} [line 2]: image ")
    # links inside it are followed
    (dialogue,) = read(written("data/x.jsonl", {**GOOD, "images": ["b.png", str(data / "a.png")]})).dialogues
    assert [image.path for image in dialogue.images] == [str((data / "a.png").resolve())] * 2
