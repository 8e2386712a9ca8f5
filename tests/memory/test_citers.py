"""Who tells what an answer cites."""

from __future__ import annotations

from remind.data.dialogue import Question
from remind.memory.base import Memory
from remind.memory.learning import cited

ASKED = Question("q", "d", "Where did Ann buy her red bicycle?", answers=("Oslo",), evidence=("t1", "t5"))


def test_who_cites_what() -> None:
    given: list[tuple[str, tuple[str, ...] | None]] = [
        ("Ann: I bought the bicycle", ("t3",)),
        ("Ann: it is red", ("t1", "t2")),
        ("Bob: hello", ("t4",)),
        ("Bob: a red bike that Ann buys; a bicycle", None),
    ]
    shown = [Memory(f"m{n}", text, "turn", sources, None, 0.0, 3) for n, (text, sources) in enumerate(given)]
    assert cited("oracle", ASKED, shown) == {1}
    # of Ann, buy, red, bicycle two are needed; stems count
    assert cited("lexical", ASKED, shown) == {0, 1, 3}
    assert cited("oracle", ASKED, []) == frozenset()
    blank = Question("q", "d", "Where did Ann buy her red bicycle?")
    assert cited("oracle", blank, shown) is None
    assert cited("noisy", ASKED, shown) <= {0, 1, 2, 3}
