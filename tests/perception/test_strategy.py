from __future__ import annotations

import pytest

from remind.core.errors import DataError
from remind.data.dialogue import Question
from remind.perception.auxiliary import OfflineLLM
from remind.text.words import guide, kind_of, target_speakers, temporal_scope
from tests.perception.conftest import build

PEOPLE = build(
    ["Melanie Green: I paint lakes.", "Caroline: Nice.", "Mae O'Brien: A kayak trip, then paint.", "Carl: Paint."]
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What did Caroline say?", ("Caroline",)),
        ("What are Carolines plans?", ("Caroline",)),
        ("Did Mel call?", ("Melanie Green",)),
        ("Did Ms. Green call O'Brien?", ("Melanie Green", "Mae O'Brien")),
    ],
)
def test_target_speakers(text: str, expected: tuple[str, ...]) -> None:
    assert target_speakers(PEOPLE, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What happened on 7 May 2023?", ("7 May 2023",)),
        ("Where was she last summer, or two weeks ago?", ("last summer", "two weeks ago")),
        ("What did he do on 2024-03-05?", ("2024-03-05",)),
        ("May she march over the bridge?", ()),
    ],
)
def test_temporal_scope(text: str, expected: tuple[str, ...]) -> None:
    assert temporal_scope(text) == expected


def test_anchors_name_what_to_look_for() -> None:
    texts = (
        'When did Caroline visit the kayak club in June 2023 with "Old Tom"?',
        "Is there paint or a kayak or a zebra?",
    )
    told, rare = OfflineLLM().strategies(PEOPLE, [Question("q", "d", text) for text in texts])
    assert (told.speakers, told.focus, told.scope) == (("Caroline",), ("visit",), ("June 2023",))
    assert told.entities == ("Old Tom", "kayak club")
    # rarer ones first: kayak occurs once, paint three times, zebra never
    assert rare.entities == ("kayak", "paint", "zebra")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("When did Carl leave?", "temporal"),
        ("Would Carl likely enjoy it?", "inference"),
        ("What books has Carl read?", "multi_hop"),
        ("What does Carl drive?", "single"),
    ],
)
def test_kind_follows_the_wording_not_the_category(text: str, kind: str) -> None:
    assert {kind_of(Question("q", "d", text, category=category)) for category in (None, 1, 2, 3, 4, 5)} == {kind}
    with pytest.raises(DataError, match="unknown dimension 'mood'"):
        guide("mood")
