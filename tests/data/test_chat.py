import pytest

from remind import read
from remind.core.errors import ImagePathError

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
