from __future__ import annotations

from remind.data.dialogue import Question
from remind.perception.auxiliary import OfflineLLM
from tests.perception.conftest import build

PEOPLE = build(
    ["Melanie Green: I paint lakes.", "Caroline: Nice.", "Mae O'Brien: A kayak trip, then paint.", "Carl: Paint."]
)


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
