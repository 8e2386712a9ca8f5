from dataclasses import replace

import pytest

from remind import Corpus, Dialogue, Question, Session, Turn
from remind.core.errors import DataError
from remind.data.dialogue import Dangling

DIALOGUE = Dialogue("d1", (Session("s", None, (Turn("a", "Ana", "hi"),)),))


def test_merge():
    first = Corpus((DIALOGUE,), (Question("q1", "d1", "?"),), (Dangling("q1", "x"),), 3, blank=1)
    second = Corpus((replace(DIALOGUE, id="d2"),), (Question("q2", "d2", "?"),), (), 4, blank=2)
    merged = Corpus.merge([first, second])
    assert (merged.dangling, merged.references, merged.blank) == ((Dangling("q1", "x"),), 7, 3)
    third = replace(second, questions=(Question("q1", "d2", "?"),))
    for other, what in ((first, "dialogue id 'd1'"), (third, "question id 'q1'")):
        with pytest.raises(DataError, match=rf"b\.json: {what} occurs twice, first in a\.json"):
            Corpus.merge([first, other], ["a.json", "b.json"])
