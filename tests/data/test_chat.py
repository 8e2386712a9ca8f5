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
        {"id": "d3", "messages": [GOOD]},
    )
    corpus = read(path)
    assert corpus == read(path, format="chat")
    d1, d2, d3 = corpus.dialogues
    assert (d1.id, d2.id, d3.id) == ("d1", "d2", "d3")
    assert [(s.id, s.time, [t.id for t in s.turns]) for s in d1.sessions] == [
        ("mon", "2024-03-01T18:30", ["mon:T1", "mon:T2"]),
        ("2", None, ["own", "2:T2"]),
    ]
    assert d1.speakers == ("Ana", "Ben", "Cem")
    assert [(t.id, t.speaker, t.text) for t in d2.turns] == [("S1:T1", "user", "elsewhere")]


def test_turns_without_words_are_left_out_and_counted(written, caplog):
    """Tool calls as OpenAI's and Anthropic's protocols have them; ids of the other turns do not depend on it."""
    call = {"id": "x", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "clock"}]},
        {"role": "tool", "tool_call_id": "x", "content": "noon"},
        {"role": "assistant", "content": " \n"},
        {"role": "assistant", "content": "It is noon."},
    ]
    kept = [("S1:T1", "What time is it?"), ("S1:T4", "noon"), ("S1:T6", "It is noon.")]
    for path in (written("mine.jsonl", *messages), written("mine.json", {"id": "mine", "messages": messages})):
        caplog.clear()
        corpus = read(path)
        assert [(t.id, t.text) for t in corpus.dialogues[0].turns] == kept
        assert corpus.blank == 3
        assert caplog.messages == [f"{path}: turns without words or images, which are left out: 3"]


ASKED = [
    {"text": "Who?", "answers": "Ana", "evidence": ["S1:T1", "S9:T1"], "split": "train"},
    {"question": "Which?", "options": ["hi", "ho"], "answer": "ho", "evidence": "S1:T2", "split": "test", "id": "own"},
    {"text": "All?", "options": ["hi", "ho", "3"], "answers": ["A", 3], "dimension": "pattern_induction"},
]


def test_questions_in_a_chat(written):
    messages = [GOOD, {"speaker": "Ben", "text": "ho"}]
    forms = (
        [{"id": "us", "messages": messages, "questions": ASKED}],
        [{**messages[0], "dialogue": "us"}, {"dialogue": "us", "questions": ASKED}, {**messages[1], "dialogue": "us"}],
    )
    for form in forms:
        corpus = read(written("mine.jsonl", *form))
        assert len(corpus.dialogue("us").turns) == 2
        found = [(q.id, q.text, q.format, q.options, q.answers, q.evidence, q.split) for q in corpus.questions]
        assert found == [
            ("us-q000", "Who?", "direct", (), ("Ana",), ("S1:T1",), "train"),
            ("own", "Which?", "single", ("hi", "ho"), ("B",), ("S1:T2",), "test"),
            ("us-q002", "All?", "multi", ("hi", "ho", "3"), ("A", "C"), (), None),
        ]
        assert corpus.questions[2].dimension == "pattern_induction"
        assert ([lost.reference for lost in corpus.dangling], corpus.references) == (["S9:T1"], 3)


def test_local_images_stay_in_the_data_folder(tmp_path, written):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"x")
    (data / "link.png").symlink_to(tmp_path / "secret.png")
    (data / "a.png").write_bytes(b"x")
    (data / "b.png").symlink_to(data / "a.png")
    outside, missing = ("../secret.png", "/etc/hostname", "link.png"), ("gone.png", "file:///etc/hostname")
    for reference in (*outside, *missing, "nul\0.png"):
        path = written("data/mine.jsonl", GOOD, {**GOOD, "images": [reference]})
        with pytest.raises(ImagePathError, match=r"outside the data folder|no such file|not a usable path") as caught:
            read(path)
        assert str(caught.value).startswith(f"{path} [line 2]: image ")
        assert ("outside" in str(caught.value)) == (reference in outside)
    # links inside it are followed
    (dialogue,) = read(written("data/x.jsonl", {**GOOD, "images": ["b.png", str(data / "a.png")]})).dialogues
    assert [image.path for image in dialogue.images] == [str((data / "a.png").resolve())] * 2
