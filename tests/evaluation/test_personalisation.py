"""The judge of personalisation, played by a script: every leaf of Figure 5, every stage, replies of no use."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from scripted import FENCED, ScriptedChat, parts

from remind.evaluation.personalisation import QUALITY, Assessment, Used, assess, quality_label, tally
from remind.llm.request import Reply, Request

#: The points of a reply (`QUALITY`), by a word of it.
POINTS = {"rich": (1, 1, 1, 1, 1, 0), "name": (0, 0, 1, 1, 1, 0), "rude": (1, 1, 0, 1, 1, 0)}


def said(request: Request) -> Any:
    shown = parts(request)
    keys = list(request.schema["properties"])  # type: ignore[index]
    if keys == ["personalised"]:
        if "silent" in shown["reply"]:
            return Reply("", failure="server", message="busy")
        return json.dumps({"personalised": any(word in shown["reply"] for word in POINTS)})
    if keys == list(QUALITY):
        (points,) = (points for word, points in POINTS.items() if word in shown["reply"])
        return json.dumps({key: bool(point) for key, point in zip(keys, points, strict=True)})
    if keys == ["signals"]:
        return "NaN" if "odd" in shown["reply"] else json.dumps({"signals": "food" in shown["memory"]})
    assert keys == ["suffices"]
    assert shown["answers"] == "curry\nThai food"
    return json.dumps({"suffices": "curry" in shown["text"]})


def case(prediction: str, profile: str = "p", memory: str = "food", wrong: bool = False) -> Used:
    return Used("What shall I cook?", ("curry", "Thai food"), prediction, profile, memory, wrong)


def test_every_leaf_and_every_stage() -> None:
    chat = ScriptedChat(said)
    cases = [
        case("rich"),
        case("name"),
        case("rude", "likes curry", wrong=True),
        case("plain", "tea", "food, curry", wrong=True),
        case("plain", "", "cars", wrong=True),
        case("anything", "", "", wrong=True),
        case("silent"),
        case("odd", "tea", wrong=True),
    ]
    found = assess(chat, cases, [f"q{n}" for n in range(len(cases))])
    assert [(one.label, one.bucket) for one in found] == [
        ("good", None),
        ("basic", None),
        ("bad", "generation"),
        ("underuse", "profile"),
        ("na", "memory"),
        ("na", "memory"),
        (None, None),
        (None, "memory"),
    ]
    assert [one.why.partition(":")[0] for one in found] == [""] * 6 + ["detection", "signals"]
    # four steps, each for the answers that need it; nothing is asked of an empty memory or profile
    steps = [len(request.schema["properties"]) for request in chat.asked]  # type: ignore[index]
    assert (len(chat.asked), steps.count(6)) == (7 + 3 + 3 + 3 + 3, 3)
    assert {request.stage for request in chat.asked} == {"judge"}
    assert all("curry" not in FENCED.sub("", request.messages[-1].text) for request in chat.asked)
    assert (
        "suffices: invalid"
        in assess(
            ScriptedChat(lambda one: "{}" if "suffices" in str(one.schema) else said(one)),
            [case("rich", wrong=True)],
            [""],
        )[0].why
    )
    assert assess(chat, [], []) == []


def test_good_needs_all_points_and_bad_is_what_is_of_poor_quality() -> None:
    for points in product((False, True), repeat=6):
        label = quality_label(dict(zip(QUALITY, points, strict=True)))
        if not all(points[2:5]) or points[5]:
            assert label == "bad"
        else:
            assert label == ("good" if all(points[:5]) else "basic")


def test_shares_sum_to_one_and_what_was_not_read_is_counted_apart() -> None:
    labels = ["good", "basic", "bad", "underuse", "na", "na", "good", None]
    buckets = [None, "profile", None, "memory", None, "memory", None, None]
    answers: list[tuple[str, dict[str, Any]]] = [
        (f"d{n % 2}", {**Assessment(label, bucket)._asdict(), "p13n": label, "verdict": n % 2 == 0})
        for n, (label, bucket) in enumerate(zip(labels, buckets, strict=True))
    ]
    assert tally([("d", {"verdict": True})]) is None
    told = tally(answers, resamples=50)
    assert told is not None
    assert (told["n"], told["unread"]) == (7, 1)
    assert told["good"]["value"] == pytest.approx(2 / 7)
    assert told["p13n"]["value"] == pytest.approx(4 / 7)
    assert sum(told[name]["value"] for name in ("good", "basic", "bad", "underuse", "na")) == pytest.approx(1)
    # of the wrong ones, at odd places
    assert told["errors"] == {"memory": 2, "profile": 1, "generation": 0, "unread": 1}
