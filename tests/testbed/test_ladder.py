"""The states of the synthetic world: what they show, and how often they err."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import solver
from scipy.stats import binom
from solver import bank

from remind.states.dataset import StateRecord
from remind.testbed.ladder import LadderConfig, records
from remind.testbed.world import World, WorldConfig, WorldQuestion, make_world


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(WorldConfig(train=20, dev=5, test=15))


@pytest.fixture(scope="module")
def small() -> World:
    return make_world(WorldConfig(train=2, dev=1, test=2, seed=8))


def marked_turns(record: StateRecord) -> list[str]:
    """Ids of the turns between markers, by their places in the text."""
    cuts = [found.start() for found in re.finditer(r"\[ATTENTION\]\n", record.x1.text[: record.x1.dialogue[1]])]
    cuts = [cut for cut in cuts if cut >= record.x1.dialogue[0]]
    return [turn.turn_id for turn in record.x1.turns if sum(cut < turn.start for cut in cuts) % 2]


def remarks(item: WorldQuestion, config: LadderConfig) -> list[tuple[tuple[str, ...], bool]]:
    """The remarks of x0, and which of them are evidence."""
    own = zip(item.remarks, item.is_evidence, strict=True)
    return [*own, *((turns, False) for turns in item.decoys[: config.decoys])]


def summary_value(record: StateRecord) -> str:
    """The value that the summary names, by the lexicon."""
    dimension, speaker, topic = solver.understand(record.question)
    words = bank()["dimensions"][dimension]
    text = summary(record)
    found = [
        value
        for value, entry in words["values"].items()
        for gist in entry["gist"]
        for form in words["gist"]
        if form.replace("{S}", speaker).replace("{topic}", topic).replace("{gist}", gist) == text
    ]
    assert len(found) == 1, text
    return found[0]


def summary(record: StateRecord) -> str:
    return record.x2.text.split("\nReflection\n")[1].split("\n\nQuestion: ")[0].splitlines()[-1]


def within(count: int, of: int, share: float) -> bool:
    low, high = binom.interval(0.999, of, share)
    return low <= count <= high


def test_the_factual_state_holds_all_remarks_to_the_point_and_the_decoys(small: World) -> None:
    config = LadderConfig(decoys=3)
    for item, record in zip(small.questions, records(small, config), strict=True):
        assert record.evidence_found == record.evidence == item.question.evidence
        shown = [turn.turn_id for turn in record.x0.turns]
        assert sorted(shown) == sorted(turn for turns, _ in remarks(item, config) for turn in turns)
        assert len(remarks(item, config)) == len(item.remarks) + 3
        assert not set(item.remarks) & set(item.decoys)
        answers = item.question.answers
        answer = f"[{','.join(answers)}]" if item.question.format == "multi" else answers[0]
        assert record.target == f"<answer>{answer}</answer><explanation></explanation>"


def test_shares_of_missed_and_false_marks_are_those_asked_for(world: World) -> None:
    config = LadderConfig(missed_marks=0.4, false_marks=0.03, seed=5)
    counts = {True: [0, 0], False: [0, 0]}
    for item, record in zip(world.questions, records(world, config), strict=True):
        marks = set(marked_turns(record))
        for turns, counting in remarks(item, config):
            assert len(marks & set(turns)) in (0, len(turns))
            counts[counting][0] += turns[0] in marks
            counts[counting][1] += 1
    (hit, evidence), (false, others) = counts[True], counts[False]
    assert min(evidence, others) > 1000
    assert within(evidence - hit, evidence, config.missed_marks)
    assert within(false, others, config.false_marks)


def test_wrong_summaries_are_as_many_as_asked_for_nested_and_change_nothing_else(world: World) -> None:
    right = records(world, LadderConfig())
    wrong: dict[float, dict[str, str]] = {}
    for share in (0.0, 0.4, 1.0):
        states = records(world, LadderConfig(wrong_summaries=share))
        named = {record.question_id: summary_value(record) for record in states}
        wrong[share] = {
            i.question.id: named[i.question.id] for i in world.questions if named[i.question.id] != i.trait.value
        }
        for split in ("train", "dev", "test"):
            count = sum(record.split == split for record in states)
            assert within(sum(name.startswith(split) for name in wrong[share]), count, share), split
        for one, other in zip(right, states, strict=True):
            assert replace(other, x2=one.x2) == one
            assert other.x2.text.replace(summary(other), summary(one)) == one.x2.text
    assert wrong[0.0].items() <= wrong[0.4].items() <= wrong[1.0].items()
