"""No cluster, no evidence and no near-duplicate on both sides, checked piece by piece."""

from collections.abc import Callable
from itertools import combinations
from random import Random

import pytest

from remind.data.dialogue import Corpus
from remind.refmem.filters import near_pairs
from remind.refmem.items import Item
from remind.refmem.split import split, units


def items_of(corpus: Corpus, make_item: Callable[..., Item], seed: int, count: int = 150) -> list[Item]:
    rng = Random(seed)
    made = []
    for number in range(count):
        dialogue = rng.choice(corpus.dialogues)
        turns = rng.sample([turn.id for turn in dialogue.turns], 2)
        visual = number % 5 == 0
        made.append(
            make_item(
                id=f"{seed}-{number}",
                dialogue_id=dialogue.id,
                cluster_id=f"{dialogue.id}/{rng.randrange(60)}",
                dimension="personalized_visual_baselines" if visual else "belief_modeling",
                evidence=() if visual else tuple(turns),
                images=(rng.randrange(len(dialogue.images)),) if visual else (),
                question=f"What about {rng.randrange(400)} and {rng.randrange(400)}?",
            )
        )
    return made


@pytest.mark.parametrize("seed", range(5))
def test_the_sides_share_nothing(corpus: Corpus, make_item: Callable[..., Item], seed: int) -> None:
    items = items_of(corpus, make_item, seed, 60)
    sides = split(items, corpus, 0.2, seed, 0.85)
    assert set(sides.values()) == {"train", "test"}
    for a, b in combinations(items, 2):
        if sides[a.id] == sides[b.id]:
            continue
        assert a.cluster_id != b.cluster_id
        if a.dialogue_id == b.dialogue_id:
            dialogue = corpus.dialogue(a.dialogue_id)
            held = [
                {*one.evidence, *(t.id for t in dialogue.turns for i in t.images if i.index in one.images)}
                for one in (a, b)
            ]
            assert not held[0] & held[1]
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


def test_one_large_unit_still_leaves_both_sides_something(corpus: Corpus, make_item: Callable[..., Item]) -> None:
    items = [make_item(question=f"Question {n}?") for n in range(9)]
    items.append(make_item(cluster_id="talk/text-1", evidence=("D9:9",), question="Another one?"))
    sides = split(items, corpus, 0.01, 0, 0.85)
    assert [item.id for item in items if sides[item.id] == "train"] == [items[-1].id]


def test_a_shared_cluster_turn_picture_or_question_keeps_items_together(
    corpus: Corpus, make_item: Callable[..., Item]
) -> None:
    talk = corpus.dialogues[0]
    place = next(turn for turn in talk.turns if turn.images)
    base = make_item(cluster_id="a", evidence=("D5:1",), question="Which habit is it?")
    for other in (
        make_item(cluster_id="a", evidence=("D6:1",), question="Something else entirely?"),
        make_item(cluster_id="b", evidence=("D5:1",), question="Something else entirely?"),
        make_item(cluster_id="b", evidence=("D6:1",), question="Which habit is it"),
    ):
        assert units([base, other], corpus, 0.85) == [[0, 1]]
    apart = make_item(cluster_id="b", evidence=("D6:1",), question="Something else entirely?")
    assert len(units([base, apart], corpus, 0.85)) == 2
    # an image, and the turn that shares it
    shown = make_item(cluster_id="c", evidence=(), images=(place.images[0].index,), question="What is shown?")
    said = make_item(cluster_id="d", evidence=(place.id,), question="What is said by them?")
    assert units([shown, said], corpus, 0.85) == [[0, 1]]
