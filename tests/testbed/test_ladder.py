"""The states of the synthetic world, what they show and how often they err; and labels, wrong or few in training."""

from __future__ import annotations

import re

import pytest
import solver
from scipy.stats import binom

from remind.data.dialogue import Question
from remind.states.dataset import StateRecord
from remind.testbed.ladder import LabelConfig, LadderConfig, records, with_labels
from remind.testbed.world import World, WorldConfig, lexicon, make_world


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(WorldConfig(train=20, dev=5, test=15))


def marked_turns(record: StateRecord) -> set[str]:
    """Ids of the turns between markers, by their places in the text."""
    start, end = record.x1.dialogue
    cuts = [start + found.start() for found in re.finditer(r"\[ATTENTION\]\n", record.x1.text[start:end])]
    return {turn.turn_id for turn in record.x1.turns if sum(cut < turn.start for cut in cuts) % 2}


def names_another_value(record: StateRecord, value: str) -> bool:
    summary = record.x2.text.split("\nReflection\n")[1].split("\n\nQuestion: ")[0].splitlines()[-1]
    entries = lexicon()["dimensions"][record.dimension]["values"]
    return not any(gist in summary for gist in entries[value]["gist"])


def within(count: int, of: int, share: float) -> bool:
    low, high = binom.interval(0.999, of, share)
    return bool(low <= count <= high)


def test_states_show_the_remarks_and_err_as_often_as_asked_for(world: World) -> None:
    config = LadderConfig(decoys=3, missed_marks=0.4, false_marks=0.03, wrong_summaries=0.2, seed=5)
    counts, wrong = {True: [0, 0], False: [0, 0]}, 0
    for item, record in zip(world.questions, records(world, config), strict=True):
        remarks = [*zip(item.remarks, item.is_evidence, strict=True), *((turns, False) for turns in item.decoys[:3])]
        assert record.evidence_found == record.evidence == item.question.evidence
        assert sorted(turn.turn_id for turn in record.x0.turns) == sorted(
            turn for turns, _ in remarks for turn in turns
        )
        marks = marked_turns(record)
        for turns, counting in remarks:
            assert len(marks & set(turns)) in (0, len(turns))
            counts[counting][0] += turns[0] in marks
            counts[counting][1] += 1
        wrong += names_another_value(record, item.trait.value)
    (hit, evidence), (false, others) = counts[True], counts[False]
    assert within(evidence - hit, evidence, config.missed_marks)
    assert within(false, others, config.false_marks)
    assert within(wrong, len(world.questions), config.wrong_summaries)


def train(world: World, **settings: object) -> dict[str, Question]:
    labels = LabelConfig(**settings)  # type: ignore[arg-type]
    questions = [item.question for item in with_labels(world.questions, labels)]
    return {question.id: question for question in questions if question.split == "train"}


def test_wrong_labels_follow_from_other_values_and_are_nested(world: World) -> None:
    solved = {item.question.id: str(solver.solve(problem)) for item, problem in solver.problems(world)}
    wrong: dict[float, set[str]] = {}
    for noise in (0.2, 0.4, 1.0):
        wrong[noise] = set()
        for name, question in train(world, noise=noise).items():
            shown = f"[{','.join(question.answers)}]" if question.format == "multi" else question.answers[0]
            problem = solver.Problem(solver.understand(question.text), question.format, question.options)
            assert shown in {solver.answer(problem, value) for value in problem.asked.words["values"]}, name
            if shown != solved[name]:
                wrong[noise].add(name)
        assert within(len(wrong[noise]), 400, noise)
    assert wrong[0.2] < wrong[0.4] < wrong[1.0]
    few = [{name for name, question in train(world, labelled=count).items() if question.answers} for count in (50, 150)]
    assert (len(few[0]), len(few[1]), few[0] < few[1]) == (50, 150, True)
    assert len(train(world, labelled=50, pool=False)) == 50
