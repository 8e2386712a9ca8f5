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


def test_merge(dialogue):
    first = Corpus((dialogue,), (Question("q1", "d1", "?"),), (Dangling("q1", "x"),), 3, blank=1)
    second = Corpus((replace(dialogue, id="d2"),), (Question("q2", "d2", "?"),), (), 4, blank=2)
    merged = Corpus.merge([first, second])
    assert (merged.dangling, merged.references, merged.blank) == ((Dangling("q1", "x"),), 7, 3)
    third = replace(second, questions=(Question("q1", "d2", "?"),))
    for other, what in ((first, "dialogue id 'd1'"), (third, "question id 'q1'")):
        with pytest.raises(DataError, match=rf"b\.json: {what} occurs twice, first in a\.json"):
            Corpus.merge([first, other], ["a.json", "b.json"])
