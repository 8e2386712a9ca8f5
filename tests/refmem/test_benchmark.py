"""The split, checked piece by piece, and the counts of Table 2 by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from random import Random

import pytest

from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.refmem.filters import near_pairs
from remind.refmem.items import Item
from remind.refmem.split import split, units
from remind.refmem.statistics import as_markdown, statistics


def items_of(corpus: Corpus, make_item: Callable[..., Item], seed: int) -> list[Item]:
    rng = Random(seed)
    items = []
    for number in range(60):
        dialogue = rng.choice(corpus.dialogues)
        evidence: dict[str, object] = {"evidence": tuple(rng.sample([turn.id for turn in dialogue.turns], 2))}
        if number % 5 == 0:
            evidence = {"evidence": (), "images": (rng.randrange(len(dialogue.images)),)}
        question = f"What about {rng.randrange(400)} and {rng.randrange(400)}?"
        place = {"dialogue_id": dialogue.id, "cluster_id": f"{dialogue.id}/{rng.randrange(60)}"}
        items.append(make_item(id=f"{seed}-{number}", question=question, **place, **evidence))
    return items


@pytest.mark.parametrize("seed", range(3))
def test_the_sides_share_nothing(corpus: Corpus, make_item: Callable[..., Item], seed: int) -> None:
    items = items_of(corpus, make_item, seed)
    sides = split(items, corpus, 0.2, seed, 0.85)
    assert set(sides.values()) == {"train", "test"}
    for a, b in combinations(items, 2):
        if sides[a.id] == sides[b.id]:
            continue
        assert a.cluster_id != b.cluster_id
        if a.dialogue_id == b.dialogue_id:
            shared = [(turn.id, image.index) for turn in corpus.dialogue(a.dialogue_id).turns for image in turn.images]
            first, second = ({*x.evidence, *(turn for turn, index in shared if index in x.images)} for x in (a, b))
            assert not first & second
    assert all(sides[items[i].id] == sides[items[j].id] for i, j in near_pairs(items, 0.85))
    assert split(list(reversed(items)), corpus, 0.2, seed, 0.85) == sides


def test_the_share_is_met_where_units_are_small(corpus: Corpus, make_item: Callable[..., Item]) -> None:
    turns = [turn.id for turn in corpus.dialogues[0].turns]
    items = [
        make_item(cluster_id=f"talk/{n}", evidence=(turns[n],), question=f"Question {n} about {n * 7}?")
        for n in range(100)
    ]
    assert len(units(items, corpus, 0.85)) == 100
    sides = split(items, corpus, 0.2, 0, 0.85)
    assert sum(side == "train" for side in sides.values()) == 20
    assert split(items, corpus, 0.2, 1, 0.85) != sides
    assert set(split(items, corpus, 0.0, 0, 0.85).values()) == {"test"}
    assert set(split(items, corpus, 1.0, 0, 0.85).values()) == {"train"}
    # one large unit leaves both sides something
    items = [make_item(question=f"Question {n}?") for n in range(9)]
    items.append(make_item(cluster_id="talk/text-1", evidence=("D9:9",), question="Another one?"))
    sides = split(items, corpus, 0.01, 0, 0.85)
    assert [item.id for item in items if sides[item.id] == "train"] == [items[-1].id]


def test_a_shared_cluster_turn_picture_or_question_keeps_items_together(
    corpus: Corpus, make_item: Callable[..., Item]
) -> None:
    place = next(turn for turn in corpus.dialogues[0].turns if turn.images)
    base = make_item(cluster_id="a", evidence=("D5:1",), question="Which habit is it?")
    for fields, together in (
        ({"cluster_id": "a"}, True),
        ({"evidence": ("D5:1",)}, True),
        ({"question": "Which habit is it"}, True),
        ({}, False),
    ):
        apart = {"cluster_id": "b", "evidence": ("D6:1",), "question": "Something else entirely?"}
        assert (len(units([base, make_item(**{**apart, **fields})], corpus, 0.85)) == 1) is together
    # an image, and the turn that shares it
    shown = make_item(cluster_id="c", evidence=(), images=(place.images[0].index,), question="What is shown?")
    said = make_item(cluster_id="d", evidence=(place.id,), question="What is said by them?")
    assert units([shown, said], corpus, 0.85) == [[0, 1]]


TURNS = (Turn("1", "Ana", "one two three", images=(Image(0), Image(1))), Turn("2", "Bo", "four"))
LATER = (Turn("3", "Ana", "five  six"),)
DIALOGUES = (
    Dialogue("a", (Session("1", None, TURNS), Session("2", None, LATER))),
    Dialogue("b", (Session("1", None, (Turn("1", "Cy", "a b c d"),)),)),
)
OPTIONS = ("w", "x", "y", "z")
BELIEF = "belief_modeling"
QUESTIONS = (
    Question("q1", "a", "?", "single", OPTIONS, ("B",), ("1", "3"), (), BELIEF, split="train"),
    Question("q2", "a", "?", "multi", OPTIONS, ("A", "C", "D"), ("2",), (), BELIEF, split="test"),
    Question("q3", "a", "?", "direct", (), ("m", "n"), ("1",), (0, 1), "cross_modal_latent_inference", split="test"),
)
TALK = Corpus(DIALOGUES, QUESTIONS)


def test_the_counts_are_those_of_a_hand() -> None:
    counts = statistics(TALK, 5)
    talk, questions = counts["conversations"], counts["questions"]
    names = ("contexts", "sessions", "segments", "turns", "images", "words")
    assert [talk[name] for name in names] == [2, 3, 5, 4, 2, 10]
    assert [talk[name] for name in ("turns_per_session", "words_per_turn", "images_per_context")] == [1.3333, 2.5, 1.0]
    assert questions["total"] == 3
    assert questions["by_format"] == {"single": 1, "multi": 1, "direct": 1}
    assert (questions["by_dimension"][BELIEF], questions["by_dimension"]["pattern_induction"]) == (2, 0)
    assert questions["by_split"] == {"test": 2, "train": 1}
    per_item = ("options_per_item", "answer_cardinality", "anchors_per_item")
    assert [questions[name] for name in per_item] == [4.0, 2.0, 2.0]
    assert questions["answer_cardinality_by_format"] == {"single": 1.0, "multi": 3.0, "direct": 2.0}
    assert questions["letters_of_single"] == {"B": 1}


def test_the_page_tells_them() -> None:
    filters = {"in": 9, "kept": 3, "removed": {"leak": 4, "near_duplicate": 2}}
    lines = as_markdown(statistics(TALK, 5), filters).splitlines()
    assert {
        "| Turns | 4 |",
        "| Belief modeling | 2 (66.7%) | 1 | 1 | 0 |",
        "| Evidence anchors per item | 2.00 |",
        "| removed: near duplicate | 2 |",
    } <= set(lines)
    assert all(line.endswith("|") for line in lines if line.startswith("|"))
    # a corpus without questions has a page too
    assert "| Total | 0 |" in as_markdown(statistics(Corpus(DIALOGUES), 0))
