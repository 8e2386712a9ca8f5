from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remind.data.readers.builder import Place, Resolved
from remind.data.readers.locomo import resolve

IDS = {f"D{session}:{turn}" for session in range(1, 31) for turn in range(1, 41)}
PLACE = Place(Path("x.json"))


@pytest.mark.parametrize(
    ("references", "turns", "dangling"),
    [
        (["D8:6; D9:17"], "D8:6 D9:17", ()),
        (["['D1:3', 'D2:4']"], "D1:3 D2:4", ()),
        (["D1:3; D99:1", 7], "D1:3", ("D99:1", "7")),
        (["D1:39-42", "D"], "D1:39", ("42", "D")),
    ],
)
def test_dirty_references(references, turns, dangling):
    expected = turns.split()
    assert resolve(PLACE, references, IDS) == Resolved(tuple(expected), dangling, len(expected) + len(dangling))


def _forms(session, turn):
    forms = ("D{0}:{1}", "D{0}:{1:02d}", "D:{0}:{1}", "D{0};{1}", "d{0} : {1}")
    return st.sampled_from([form.format(session, turn) for form in forms])


@given(st.data())
def test_references_joined_by_any_separator(data):
    """Reference: what was written down before it was made dirty."""
    numbers = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=6))
    pieces = [data.draw(_forms(*number)) for number in numbers]
    separator = data.draw(st.sampled_from(["; ", ", ", " ", ". ", " and ", " / ", "\n"]))
    expected = [f"D{session}:{turn}" for session, turn in numbers]
    assert resolve(PLACE, [separator.join(pieces)], IDS) == Resolved(tuple(dict.fromkeys(expected)), (), len(expected))
