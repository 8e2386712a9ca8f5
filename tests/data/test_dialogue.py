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
