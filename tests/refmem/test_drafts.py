"""Items of a chat model, valid, invalid and mixed; each filter on items made to trip it, and on ones that must pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import pytest
from scripted_chat import Scripted, items_for

from remind.data.dialogue import DIMENSIONS, FORMATS, VISUAL_DIMENSIONS, Corpus
from remind.llm.request import Request
from remind.refmem.cluster import Cluster
from remind.refmem.config import FilterConfig, ItemsConfig
from remind.refmem.filters import REASONS, apply_filters, leaks, near_pairs, uneven
from remind.refmem.generate import item_request, write_questions
from remind.refmem.items import Item, anchors_missing, shuffled
from remind.states import prompts
from remind.text.words import stems


def clusters_of(corpus: Corpus) -> list[Cluster]:
    """Every fourth session is on one subject: those are the clusters; and each speaker's images."""
    clusters = []
    for dialogue in corpus.dialogues:
        for first in range(4):
            turns = [turn.id for session in dialogue.sessions[first::4] for turn in session.turns]
            clusters.append(Cluster(f"{dialogue.id}/text-{first}", dialogue.id, "text", None, tuple(turns)))
        for place, speaker in enumerate(dialogue.speakers):
            own = [turn for turn in dialogue.turns if turn.speaker == speaker and turn.images]
            images = tuple(image.index for turn in own for image in turn.images)
            if images:
                name = f"{dialogue.id}/image-{place}-0"
                clusters.append(Cluster(name, dialogue.id, "image", speaker, tuple(turn.id for turn in own), images))
    return clusters


GOOD = {
    "format": "single",
    "question": "What calms Ana?",
    "options": ["making bowls", "long walks", "loud music", "fast cars"],
    "answers": ["A"],
    "candidates": [],
    "evidence": ["D1:1", "D5:1"],
    "images": [],
}


def test_a_chat_model_is_asked_by_cluster_and_dimension(corpus: Corpus) -> None:
    """Items of all dimensions and formats come out, on evidence that exists."""
    clusters = {cluster.id: cluster for cluster in clusters_of(corpus)}
    chat = Scripted(lambda request: items_for(request.messages[0].text, request.messages[1].text))
    items, counts = write_questions(corpus, list(clusters.values()), chat, ItemsConfig(per_cluster=3))
    assert counts == {"requests": len(chat.requests), "retried": 0, "dropped": 0}
    assert all(request.stage == "questions" and request.schema is not None for request in chat.requests)
    first = chat.requests[0]
    assert all(f"[{turn}]" in first.messages[1].text for turn in clusters[first.sample].turns)
    per_cell = Counter((item.cluster_id, item.dimension, item.format) for item in items)
    assert set(per_cell.values()) == {3}
    assert {dimension for _, dimension, _ in per_cell} == set(DIMENSIONS)
    assert {kind for *_, kind in per_cell} == {"single", "multi", "direct"}
    assert len({item.id for item in items}) == len(items)
    assert {(item.made_by, item.prompt_id) for item in items} == {("scripted", prompts.prompt_id("refmem_items"))}
    for item in items:
        assert item.problem() is None
        assert not anchors_missing(item, corpus.dialogue(item.dialogue_id))
        assert bool(item.images) == (item.dimension in VISUAL_DIMENSIONS)
        assert item.dialogue_id == clusters[item.cluster_id].dialogue_id


def test_options_are_put_in_an_order_of_the_seed(corpus: Corpus) -> None:
    """The script always has the right answer second; a benchmark must not."""

    def letters(seed: int) -> Counter[str]:
        chat = Scripted(lambda request: items_for(request.messages[0].text, request.messages[1].text))
        config = ItemsConfig(per_cluster=4, formats=["single"], seed=seed)
        items, _ = write_questions(corpus, clusters_of(corpus), chat, config)
        assert all(item.gold == (chosen,) for item in items for chosen in [item.options["ABCD".index(item.answers[0])]])
        return Counter(item.answers[0] for item in items)

    first = letters(0)
    # 208 items: mean 52, deviation 6.2
    assert sum(first.values()) == 208
    assert all(abs(first[letter] - 52) < 5 * 6.2 for letter in "ABCD")
    assert letters(0) == first != letters(1)


def test_what_the_dialogue_says_cannot_close_the_fence(corpus: Corpus) -> None:
    request = item_request(corpus.dialogues[0], clusters_of(corpus)[0], "belief_modeling", ItemsConfig(max_turns=5))
    opening, *lines, closing = request.messages[1].text.split("\n")
    code = opening.split()[-1]
    assert (opening, closing) == (f"<<<passages {code}", f"passages {code}>>>")
    assert code in request.messages[0].text
    assert not any(code in line for line in lines)
    assert sum(bool(re.match(r"\[D\d+:\d+\]", line)) for line in lines) == 5


def test_invalid_items_are_left_out_and_unusable_replies_asked_for_once_more(corpus: Corpus) -> None:
    cluster = clusters_of(corpus)[0]
    wrong = {**GOOD, "answers": ["E"]}
    broken = [wrong, {**GOOD, "options": ["a", "b"]}, {**GOOD, "answers": ["A", "B"]}, GOOD]

    def written(answer: Any, *formats: str) -> tuple[int, dict[str, int], Scripted]:
        chat = Scripted(answer)
        items, counts = write_questions(corpus, [cluster], chat, ItemsConfig(formats=list(formats or FORMATS)))
        assert all(item.gold == ("making bowls",) for item in items)
        return len(items), counts, chat

    def counted(retried: int, dropped: int) -> dict[str, int]:
        return {"requests": 5, "retried": retried, "dropped": dropped}

    assert written(lambda request: None)[:2] == (0, counted(5, 5))
    assert written(lambda request: {"items": broken})[:2] == (5, counted(0, 0))
    assert written(lambda request: {"items": []})[:2] == (0, counted(0, 0))
    assert written(lambda request: {"items": [GOOD]}, "direct")[:2] == (0, counted(5, 5))
    *outcome, stubborn = written(lambda request: {"items": [wrong]})
    assert outcome == [0, counted(5, 5)]
    assert [message.role for message in stubborn.requests[5].messages] == ["system", "user", "assistant", "user"]
    assert "an answer that is no option" in stubborn.requests[5].messages[-1].text
    repaired = written(lambda request: {"items": [GOOD if len(request.messages) == 4 else wrong]})
    assert repaired[:2] == (5, counted(5, 0))


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
