"""Items of a chat model, valid, invalid and mixed; each filter on items made to trip it, and on ones that must pass."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations
from random import Random
from typing import Any

import pytest
from refmem_samples import drafted, talk
from scripted_chat import Scripted, items_for

from remind.core.errors import ModelError
from remind.data.dialogue import DIMENSIONS, FORMATS, VISUAL_DIMENSIONS, Corpus
from remind.llm.request import Reply, Request
from remind.refmem.cluster import Cluster
from remind.refmem.config import FilterConfig, ItemsConfig
from remind.refmem.drafts import apply_filters, item_request, near_pairs, write_questions
from remind.refmem.items import anchors_missing
from remind.states import prompts
from remind.text.words import stems

TALK = Corpus((talk(),))
#: Every fourth session is on one subject; and each speaker's images.
CLUSTERS = [
    Cluster(f"text-{n}", "talk", "text", None, tuple(turn.id for s in talk().sessions[n::4] for turn in s.turns))
    for n in range(4)
]
for speaker in ("Ana", "Bo"):
    own = [turn for turn in talk().turns if turn.speaker == speaker and turn.images]
    shown = tuple(image.index for turn in own for image in turn.images)
    CLUSTERS.append(Cluster(f"image-{speaker}", "talk", "image", speaker, tuple(turn.id for turn in own), shown))
GOOD = {
    "format": "single",
    "question": "What calms Ana?",
    "options": ["making bowls", "long walks", "loud music", "fast cars"],
    "answers": ["A"],
    "candidates": [],
    "evidence": ["D1:1", "D5:1"],
    "images": [],
}


def writer() -> Scripted:
    return Scripted(lambda request: items_for(request.messages[0].text, request.messages[1].text))


def test_a_chat_model_is_asked_by_cluster_and_dimension() -> None:
    """Items of all dimensions and formats come out, on evidence that exists."""
    chat, clusters = writer(), {cluster.id: cluster for cluster in CLUSTERS}
    items, counts = write_questions(TALK, CLUSTERS, chat, ItemsConfig(per_cluster=3))
    assert counts == {"requests": len(chat.requests), "retried": 0, "dropped": 0}
    first = chat.requests[0]
    assert all(f"[{turn}]" in first.messages[1].text for turn in clusters[first.sample].turns)
    per_cell = Counter((item.cluster_id, item.dimension, item.format) for item in items)
    assert set(per_cell.values()) == {3}
    assert {dimension for _, dimension, _ in per_cell} == set(DIMENSIONS)
    assert {kind for *_, kind in per_cell} == set(FORMATS)
    assert len({item.id for item in items}) == len(items)
    assert {(item.made_by, item.prompt_id) for item in items} == {("scripted", prompts.prompt_id("refmem_items"))}
    for item in items:
        assert item.problem() is None
        assert not anchors_missing(item, TALK.dialogues[0])
        assert bool(item.images) == (item.dimension in VISUAL_DIMENSIONS)
    # what is said cannot close the fence, and of a large cluster some turns are shown
    request = item_request(TALK.dialogues[0], CLUSTERS[0], "belief_modeling", ItemsConfig(max_turns=5))
    opening, *lines, closing = request.messages[1].text.split("\n")
    code = opening.split()[-1]
    assert (opening, closing) == (f"<<<passages {code}", f"passages {code}>>>")
    assert not any(code in line for line in lines)
    assert sum(bool(re.match(r"\[D\d+:\d+\]", line)) for line in lines) == 5


def test_options_are_put_in_an_order_of_the_seed() -> None:
    """The script always has the right answer second; a benchmark must not."""
    drawn = []
    for seed in (0, 0, 1):
        config = ItemsConfig(per_cluster=30, formats=["single"], seed=seed)
        items = write_questions(TALK, CLUSTERS[:1], writer(), config)[0]
        drawn.append(Counter(item.answers[0] for item in items))
    # 150 items: mean 37.5, deviation 5.3
    assert all(abs(drawn[0][letter] - 37.5) < 5 * 5.3 for letter in "ABCD")
    assert drawn[0] == drawn[1] != drawn[2]


def told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


FEW = {name: GOOD[name] for name in ("question", "evidence")}
LETTERED = [f"{letter}. {option}" for letter, option in zip("ABCD", GOOD["options"], strict=True)]


@pytest.mark.parametrize(
    "reply",
    [
        {"items": [{**GOOD, "confidence": 0.9}], "language": "en"},
        [GOOD],
        {"Items": [{**GOOD, "Format": "SINGLE", "answers": "a)", "evidence": ["[D1:1]"]}]},
        {"items": [{**GOOD, "candidates": None, "answers": ["A. making bowls"], "options": LETTERED}]},
        {"items": [{**FEW, "format": "direct", "answers": "making bowls"}]},
        {"items": [{**FEW, "format": "single", "options": GOOD["options"], "answers": ["making bowls"]}]},
        {"items": ["an item", {**GOOD, "format": "essay"}, {**GOOD, "options": ["a", "b"]}, GOOD]},
        {"items": [{**GOOD, "answers": ["E"]}, {**GOOD, "answers": ["A", "B"]}, GOOD]},
        f"Maybe {json.dumps({'items': [{**GOOD, 'answers': ['D']}]})}?\n</think>\n```json\n{json.dumps([GOOD])}\n```",
    ],
)
def test_what_is_right_in_a_reply_is_taken(reply: Any) -> None:
    items, counts = write_questions(TALK, CLUSTERS[:1], Scripted(lambda request: Reply(told(reply))), ItemsConfig())
    assert [(item.question, item.gold, item.evidence[0]) for item in items] == [
        (GOOD["question"], ("making bowls",), "D1:1")
    ] * 5
    assert (counts["retried"], counts["dropped"]) == (0, 0)
    assert not any(option.startswith("A. ") for item in items for option in item.options)


def test_replies_of_no_use_are_asked_for_once_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("REMIND_QUIET", raising=False)
    wrong, second = {**GOOD, "answers": ["E"]}, 0

    def answer(request: Request) -> Any:
        nonlocal second
        if len(request.messages) == 4:
            assert "That reply cannot be used: an answer that is no option" in request.messages[-1].text
            second += 1
            return {"items": [wrong if second == 1 else GOOD]}
        return {"items": [wrong]}

    items, counts = write_questions(TALK, CLUSTERS[:1], Scripted(answer), ItemsConfig())
    assert (len(items), counts) == (4, {"requests": 5, "retried": 5, "dropped": 1})
    told = capsys.readouterr().err
    assert "1 of 5 replies for items could not be used: an answer that is no option" in told
    assert "items: 100% 5/5" in told
    assert write_questions(TALK, CLUSTERS[:1], Scripted(lambda request: {"items": []}), ItemsConfig())[0] == []
    with pytest.raises(
        ModelError, match=r"5 of 5 replies of scripted could not be used; the first: a format not asked for"
    ):
        write_questions(TALK, CLUSTERS[:1], Scripted(lambda _: {"items": [GOOD]}), ItemsConfig(formats=["direct"]))


def test_items_are_removed_for_the_first_reason_and_the_first_of_its_kind_stays() -> None:
    habit = {"question": "Which habit of hers returns?"}
    items = [
        drafted("good", **habit),
        drafted("gone", evidence=("D99:1",)),
        drafted("leak", question="Does she like walking or not?"),
        drafted("long", options=("x" * 60, "cooking", "reading", "singing")),
        drafted("twin", **habit),
        drafted("near", question="Which is the habit of hers that returns?"),
        drafted("other", answers=("B",), **habit),
    ]
    assert apply_filters(items, TALK, FilterConfig())[0] == {
        "gone": "evidence",
        "leak": "leak",
        "long": "uneven",
        "twin": "near_duplicate",
        "near": "near_duplicate",
    }


def test_near_pairs_are_those_of_a_brute_force() -> None:
    rng = Random(4)
    words = ["garden", "river", "kettle", "violin", "ladder", "pepper", "candle", "marble"]
    items = [
        drafted(
            str(n),
            "direct",
            question=" ".join(rng.choices(words, k=rng.randint(2, 6))),
            answers=(rng.choice(words[:3]),),
            dialogue_id=rng.choice(["talk", "chat"]),
        )
        for n in range(120)
    ]

    bags = [set(stems(one.question)) for one in items]
    expected = [
        (i, j)
        for i, j in combinations(range(len(items)), 2)
        if items[i].dialogue_id == items[j].dialogue_id
        and len(bags[i] & bags[j]) / len(bags[i] | bags[j]) >= 0.4
        and items[i].answers == items[j].answers
    ]
    assert near_pairs(items, 0.4) == expected != []


def test_what_a_model_answers_without_the_dialogue_goes() -> None:
    items = [
        drafted("by heart", question="What do people do with their feet?"),
        drafted("hard", question="Which of them is hers?"),
        drafted("said", "direct", answers=("green tea",), question="Her favourite drink?"),
        drafted("unsaid", "direct", answers=("oolong",), question="And her other drink?"),
        drafted("broken", question="Which one then?"),
    ]
    known = {"by heart": "walking", "hard": "cooking", "said": "Green tea", "unsaid": "tea"}

    def answer(request: Request) -> dict[str, list[str]] | None:
        wanted = known.get(request.sample)
        lines = request.messages[1].text.split("\n")
        letter = next((line[0] for line in lines if line.endswith(f". {wanted}")), None)
        return None if wanted is None else {"answers": [letter or wanted]}

    chat = Scripted(answer)
    reasons, no_guess = apply_filters(items, TALK, FilterConfig(blind_draws=6), chat)
    assert (reasons, no_guess) == ({"by heart": "blind", "said": "blind"}, 6)
    # nothing of the dialogue is shown, and the options stand in several orders
    shown = [request.messages[1].text for request in chat.requests if request.sample == "by heart"]
    assert (len(shown), len(set(shown)) > 1) == (6, True)
    assert not any("Ana:" in text for text in shown)
