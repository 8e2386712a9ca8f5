"""No cluster, no evidence and no near-duplicate on both sides, checked piece by piece."""

from collections.abc import Callable
from itertools import combinations
from random import Random

import pytest

from remind.data.dialogue import Corpus
from remind.refmem.filters import near_pairs
from remind.refmem.items import Item
from remind.refmem.split import split, units


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
