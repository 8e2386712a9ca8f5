"""Each filter on items made to trip it, and on ones that must pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import pytest
from scripted_chat import Scripted

from remind.data.dialogue import Corpus
from remind.llm.request import Request
from remind.refmem.config import FilterConfig
from remind.refmem.filters import REASONS, apply_filters, leaks, near_pairs, uneven
from remind.refmem.items import Item, shuffled
from remind.text.words import stems

Make = Callable[..., Item]


@pytest.mark.parametrize(
    ("question", "fields", "leaking"),
    [
        ("Why does Ana go walking?", {}, True),
        # another form of the word
        ("Why does Ana walk so often?", {}, True),
        ("Why does Ana go cooking?", {}, False),
        ("Why does Ana walk?", {"options": ("walking", "walks", "walked", "a walk")}, False),
        ("Walks how long?", {"format": "direct", "options": (), "answers": ("the sea", "long walks")}, True),
        ("How often in the 13 weeks?", {"format": "direct", "options": (), "answers": ("3",)}, False),
    ],
)
def test_an_answer_in_the_question_leaks(question: str, fields: dict[str, Any], leaking: bool, make_item: Make) -> None:
    assert leaks(make_item(question=question, **fields)) is leaking


def test_every_reason_is_counted_and_the_first_of_its_kind_stays(corpus: Corpus, make_item: Make) -> None:
    good = make_item(id="good", question="Which habit of hers returns?")
    items = [
        good,
        make_item(id="bad", answers=("F",)),
        make_item(id="gone", evidence=("D99:1",)),
        make_item(id="none", evidence=()),
        make_item(id="image", dimension="cross_modal_latent_inference", evidence=(), images=(10_000,)),
        make_item(id="leak", question="Does she like walking or not?"),
        make_item(id="long", options=("x" * 60, "cooking", "reading", "singing")),
        replace(good, id="twin", question="Which habit of hers returns"),
        replace(good, id="near", question="Which is the habit of hers that returns?"),
        replace(good, id="other", question="Which habit of hers returns?", answers=("B",)),
    ]
    done = apply_filters(items, corpus, FilterConfig())
    assert [item.id for item in done.kept] == ["good", "other"]
    assert {item.id: reason for item, reason in done.removed} == {
        "bad": "malformed",
        "gone": "evidence",
        "none": "evidence",
        "image": "evidence",
        "leak": "leak",
        "long": "uneven",
        "twin": "duplicate",
        "near": "near_duplicate",
    }
    assert set(done.counts) == set(REASONS)
    assert done.counts["evidence"] == 3
    assert sum(done.counts.values()) + len(done.kept) == len(items)
    # short options may differ by as much
    assert not uneven(make_item(options=("a", "bcdefghij", "kl", "m")), FilterConfig())


@pytest.mark.parametrize("threshold", [0.4, 0.7, 1.0])
def test_near_pairs_are_those_of_a_brute_force(make_item: Make, threshold: float) -> None:
    rng = Random(4)
    words = ["garden", "river", "kettle", "violin", "ladder", "pepper", "candle", "marble"]
    items = [
        make_item(
            format="direct",
            options=(),
            question=" ".join(rng.choices(words, k=rng.randint(2, 6))),
            answers=(rng.choice(words[:3]),),
            dialogue_id=rng.choice(["talk", "chat"]),
        )
        for _ in range(120)
    ]

    def jaccard(a: str, b: str) -> float:
        x, y = set(stems(a)), set(stems(b))
        return len(x & y) / len(x | y)

    expected = [
        (i, j)
        for i, j in combinations(range(len(items)), 2)
        if items[i].dialogue_id == items[j].dialogue_id
        and jaccard(items[i].question, items[j].question) >= threshold
        and items[i].answers == items[j].answers
    ]
    assert near_pairs(items, threshold) == expected
    assert expected


def guesser(known: dict[str, str], broken: str) -> Scripted:
    """Knows the answers to some items without context; its reply to `broken` is invalid."""

    def answer(request: Request) -> dict[str, list[str]] | None:
        wanted = known.get(request.sample, "")
        lines = request.messages[1].text.split("\n")
        letter = next((line[0] for line in lines if line.endswith(f". {wanted}")), None)
        return None if request.sample == broken else {"answers": [letter or wanted or "A"]}

    return Scripted(answer)


def test_what_a_model_answers_without_the_dialogue_goes(corpus: Corpus, make_item: Make) -> None:
    direct = {"format": "direct", "options": ()}
    items = [
        make_item(id="by heart", question="What do people do with their feet?"),
        make_item(id="hard", question="Which of them is hers?"),
        make_item(id="lucky", question="And which of them is his?"),
        make_item(id="said", answers=("green tea",), question="Her favourite drink?", **direct),
        make_item(id="unsaid", answers=("oolong",), question="And her other drink?", **direct),
        make_item(id="broken", question="Which one then?"),
    ]
    chat = guesser({"by heart": "walking", "hard": "cooking", "said": "Green tea"}, "broken")
    done = apply_filters(items, corpus, FilterConfig(blind_draws=6), chat)
    assert {item.id for item, _ in done.removed} == {"by heart", "said"}
    assert done.counts["blind"] == 2
    assert done.no_guess == 6
    # nothing of the dialogue is shown, and the options stand in several orders
    shown = [request.messages[1].text for request in chat.requests if request.sample == "by heart"]
    assert len(shown) == 6
    assert len(set(shown)) > 1
    assert not any("Ana:" in text or corpus.dialogues[0].turns[0].text in text for text in shown)


def test_a_draw_moves_the_options_and_keeps_the_answer(make_item: Make) -> None:
    item = make_item(format="multi", answers=("A", "C"))
    draws = [shuffled(item, f"0:{draw}") for draw in range(8)]
    assert len({one.options for one in draws}) > 2
    assert all(set(one.gold) == {"walking", "reading"} for one in draws)
