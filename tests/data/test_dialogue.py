from dataclasses import replace

import pytest

from remind import Corpus, Dialogue, Image, Question, Session, Turn
from remind.core.errors import DataError
from remind.data.dialogue import Dangling


def turn(turn_id, speaker="Ana", images=()):
    return Turn(turn_id, speaker, f"words of {turn_id}", None, tuple(images))


@pytest.fixture
def dialogue():
    first = Session("s1", "2024-03-01T18:30", (turn("a"), turn("b", "Ben", [Image(0), Image(1, caption="x")])))
    second = Session("s2", None, (turn("c", "Cem", [Image(2)]), turn("d")))
    return Dialogue("d1", (first, second))


def test_views(dialogue):
    assert [t.id for t in dialogue.turns] == ["a", "b", "c", "d"]
    assert dialogue.positions == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert dialogue.speakers == ("Ana", "Ben", "Cem")
    assert dialogue.turn("c") is dialogue.sessions[1].turns[0]
    sessions = {turn_id: session.id for turn_id, session in dialogue.session_of.items()}
    assert sessions == {"a": "s1", "b": "s1", "c": "s2", "d": "s2"}
    with pytest.raises(DataError, match=r"^\[d1\]: no turn 'z'$"):
        dialogue.turn("z")


@pytest.mark.parametrize(
    ("sessions", "message"),
    [
        ((Session("s1", None, ()),), "the dialogue has no turns"),
        ((Session("s", None, (turn("a"),)), Session("s", None, (turn("b"),))), "session id occurs twice"),
        ((Session("s1", None, (turn("a"),)), Session("s2", None, (turn("a"),))), "turn id 'a' occurs twice"),
        ((Session("s1", None, (turn("a", images=[Image(1)]),)),), "image index 1 is out of order"),
    ],
)
def test_bad_dialogues_are_refused(sessions, message):
    with pytest.raises(DataError, match=message) as caught:
        Dialogue("d1", sessions)
    assert caught.value.record == "d1"


def test_corpus(dialogue):
    other = replace(dialogue, id="d2")
    questions = (Question("q1", "d2", "?"), Question("q2", "d1", "?"), Question("q3", "d2", "?"))
    corpus = Corpus((dialogue, other), questions)
    assert corpus.dialogue("d2") is other
    assert [(d.id, [q.id for q in own]) for d, own in corpus.by_dialogue()] == [("d1", ["q2"]), ("d2", ["q1", "q3"])]
    with pytest.raises(DataError, match="no dialogue 'd3'"):
        corpus.dialogue("d3")


def test_bad_corpora_are_refused(dialogue):
    question = Question("q", "d1", "?")
    for dialogues, questions, message in (
        ((dialogue, dialogue), (), "dialogue id 'd1' occurs twice"),
        ((dialogue,), (question, question), "question id 'q' occurs twice"),
        ((), (question,), r"\[q\]: its dialogue 'd1' is not in the file"),
    ):
        with pytest.raises(DataError, match=message):
            Corpus(dialogues, questions)


def test_merge(dialogue):
    first = Corpus((dialogue,), (Question("q1", "d1", "?"),), (Dangling("q1", "x"),), 3, blank=1)
    second = Corpus((replace(dialogue, id="d2"),), (Question("q2", "d2", "?"),), (), 4, blank=2)
    merged = Corpus.merge([first, second])
    assert [d.id for d in merged.dialogues] == ["d1", "d2"]
    assert [q.id for q in merged.questions] == ["q1", "q2"]
    assert (merged.dangling, merged.references, merged.blank) == ((Dangling("q1", "x"),), 7, 3)
    assert Corpus.merge([first, second], ["a.json", "b.json"]) == merged
    third = replace(second, questions=(Question("q1", "d2", "?"),))
    for other, what in ((first, "dialogue id 'd1'"), (third, "question id 'q1'")):
        with pytest.raises(DataError, match=rf"b\.json: {what} occurs twice, first in a\.json"):
            Corpus.merge([first, other], ["a.json", "b.json"])
