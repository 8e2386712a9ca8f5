"""The judge of personalisation, played by a script: every leaf of Figure 5, every stage, replies of no use."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted import FENCED, ScriptedChat, parts

from remind.evaluation.judge import QUALITY, Used, assess, tally
from remind.llm.request import Reply, Request

#: The points of a reply (`QUALITY`), by a word of it.
POINTS = {"rich": (1, 1, 1, 1, 1, 0), "name": (0, 0, 1, 1, 1, 0), "rude": (1, 1, 0, 1, 1, 0)}


def said(request: Request) -> Any:
    shown, keys = parts(request), list(request.schema["properties"])  # type: ignore[index]
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


def test_every_leaf_and_every_stage() -> None:
    #: prediction, profile, memory, whether it is wrong; label and bucket
    cases = [
        (("rich", "p", "food", False), ("good", None)),
        (("name", "p", "food", False), ("basic", None)),
        (("rude", "likes curry", "food", True), ("bad", "generation")),
        (("plain", "tea", "food, curry", True), ("underuse", "profile")),
        (("plain", "", "cars", True), ("na", "memory")),
        (("anything", "", "", True), ("na", "memory")),
        (("silent", "p", "food", False), (None, None)),
        (("odd", "tea", "food", True), (None, "memory")),
    ]
    chat = ScriptedChat(said)
    used = [Used("What shall I cook?", ("curry", "Thai food"), *case) for case, _ in cases]
    found = assess(chat, used, [f"q{n}" for n in range(len(cases))])
    assert [(one.label, one.bucket) for one in found] == [told for _, told in cases]
    # four steps, each for the answers that need it; nothing is asked of an empty memory or profile
    assert len(chat.asked) == 7 + 3 + 3 + 3 + 3
    assert all("curry" not in FENCED.sub("", request.messages[-1].text) for request in chat.asked)
    # of the wrong ones, at odd places
    answers = [
        (f"d{n % 2}", {**one._asdict(), "p13n": one.label, "verdict": not case[3]})
        for n, (one, (case, _)) in enumerate(zip(found, cases, strict=True))
    ]
    told = tally(answers, resamples=50) or {}
    assert (told["n"], told["unread"]) == (6, 2)
    assert told["p13n"]["value"] == pytest.approx(3 / 6)
    assert sum(told[name]["value"] for name in ("good", "basic", "bad", "underuse", "na")) == pytest.approx(1)
    assert told["errors"] == {"memory": 3, "profile": 1, "generation": 1, "unread": 0}
