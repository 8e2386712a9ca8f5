import json

import pytest

from remind import read
from remind.core.errors import DataError, ImagePathError
from remind.data.readers import stream, window

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


def test_turns_alone_are_one_dialogue(written):
    turns = [{"role": "user", "content": "a\u2028b"}, {"role": "bot", "content": "c"}]
    (dialogue,) = read(written("mine.jsonl", *turns)).dialogues
    assert (dialogue.id, [turn.text for turn in dialogue.turns]) == ("mine", ["a\u2028b", "c"])


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


def test_one_dialogue_printed_over_many_lines(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"id": "a", "messages": [GOOD]}, indent=2), encoding="utf-8")
    assert read(path).dialogues[0].id == "a"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "hi"}, "[line 2]: speaker is missing or blank"),
        ({"speaker": "", "text": "hi"}, "[line 2]: speaker is missing or blank"),
        ({"speaker": ["Ana"], "text": "hi"}, "[line 2]: speaker should be text, not a list"),
        ({"speaker": "Ana"}, "[line 2]: text is missing or blank, and there are no images"),
        ({"speaker": "Ana", "text": " \t"}, "[line 2]: text is missing or blank, and there are no images"),
        ({"role": "assistant", "content": None}, "[line 2]: text is missing or blank, and there are no images"),
        ({"role": "user", "content": [{"type": "audio"}]}, "[line 2]: content part of type 'audio'"),
        ({"role": "user", "content": [{"type": "text"}]}, "[line 2]: a text part should be text, not missing or null"),
        ({"speaker": "Ana", "text": "hi", "time": 17}, "[line 2]: time should be text, not a number"),
        ({"speaker": "Ana", "text": "hi", "images": "x.png"}, "[line 2]: images should be a list, not text"),
        ({"speaker": "Ana", "text": "hi", "images": [{}]}, "[line 2]: an image without path, url, source or caption"),
        ({"speaker": "Ana", "text": "hi", "id": "S1:T1"}, "[mine]: turn id 'S1:T1' occurs twice"),
        ({"speaker": "Ana", "text": "half \ud83d"}, "[line 2]: text holds half a character"),
        ([GOOD], "[line 2]: a line should be an object, not a list"),
        ({"id": "a", "messages": []}, "[line 2, a]: the dialogue has no turns"),
        ({"id": "a", "messages": [GOOD, {"role": "user"}]}, "[line 2, a, turn 2]: text is missing or blank"),
        ({"id": "a", "messages": {}}, "[line 2, a]: messages should be a list, not an object"),
        ({"id": "mine", "messages": [GOOD]}, "[line 2]: dialogue id 'mine' occurs twice"),
        (
            {"id": "a", "messages": [GOOD], "turns": [GOOD, GOOD]},
            "[line 2]: messages and turns are both given and differ; keep one",
        ),
        ({"messages": {}, "turns": [GOOD]}, "[line 2]: messages and turns are both given and differ; keep one"),
        ({**GOOD, "content": "ho"}, "[line 2]: text and content are both given and differ; keep one"),
        ({**GOOD, "text": "", "content": "ho"}, "[line 2]: text and content are both given and differ; keep one"),
        (
            {**GOOD, "content": [{"type": "image_url", "image_url": "https://example.org/1.jpg"}]},
            "[line 2]: text and content are both given and differ; keep one",
        ),
        (
            {"id": "a", "messages": [GOOD, {**GOOD, "content": "ho"}]},
            "[line 2, a, turn 2]: text and content are both given and differ; keep one",
        ),
    ],
)
def test_bad_records_are_named(tmp_path, refused, record, message):
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(record)}\n", encoding="utf-8")
    assert refused(path).startswith(message)


def test_equal_or_null_values_under_two_keys_are_read_once(written):
    turn = {**GOOD, "content": "hi"}
    path = written(
        "mine.jsonl",
        turn,
        {"id": "a", "messages": [turn], "turns": [turn]},
        {"id": "b", "messages": None, "turns": [{**GOOD, "content": None}]},
        {"id": "c", "messages": [{"speaker": "Ana", "text": None, "content": "hi"}], "turns": None},
    )
    assert [[t.text for t in dialogue.turns] for dialogue in read(path).dialogues] == [["hi"]] * 4


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


def test_a_session_that_comes_back(written, refused):
    path = written("x.jsonl", *({**GOOD, "session": name} for name in ("a", "b", "a")))
    assert refused(path).startswith("[line 3]: session 'a' comes back after another")


CHANGES = {
    "a new turn": lambda records: [*records, {**GOOD, "dialogue": "new"}],
    "a dialogue goes on": lambda records: [*records, records[0]],
    "a whole dialogue": lambda records: [*records, {"id": "new", "messages": [GOOD]}],
    "cut": lambda records: records[:-1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_read(written, monkeypatch, change):
    monkeypatch.setattr(window, "CHUNK", 1 << 10)
    # longer than what the system reads ahead
    records = [{**GOOD, "text": "so it goes " * 1000, "dialogue": f"d{number // 2}"} for number in range(40)]
    path = written("mine.jsonl", *records)
    pieces = stream(path)
    assert next(pieces).dialogues[0].id == "d0"
    written("mine.jsonl", *CHANGES[change](records))
    with pytest.raises(DataError) as caught:
        list(pieces)
    assert str(caught.value) == f"{path}: changed while it was read; try again when nothing writes to it"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("../secret.png", "leaves the data folder"),
        ("/etc/hostname", "leaves the data folder"),
        ("link.png", "leaves the data folder"),
        ("sub/../../secret.png", "leaves the data folder"),
        ("gone.png", "no such file"),
        ("sub", "no such file"),
        ("file:///etc/hostname", "no such file"),
        ("nul\0.png", "is not a usable path"),
        ("n" * 5000, "is not a usable path"),
    ],
)
def test_local_images_stay_in_the_data_folder(tmp_path, written, reference, message):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"x")
    (data / "link.png").symlink_to(tmp_path / "secret.png")
    path = written("data/mine.jsonl", GOOD, {**GOOD, "images": [reference]})
    with pytest.raises(ImagePathError) as caught:
        read(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path} [line 2]: image ")


def test_links_within_the_data_folder_are_followed(tmp_path, written):
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    (dialogue,) = read(written("x.jsonl", {**GOOD, "images": ["b.png", str(tmp_path / "a.png")]})).dialogues
    assert [image.path for image in dialogue.images] == [str((tmp_path / "a.png").resolve())] * 2
