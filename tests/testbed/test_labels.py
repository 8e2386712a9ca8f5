"""Labels of the synthetic world: wrong, few or paraphrased in training, untouched in dev and test."""

from __future__ import annotations

from pathlib import Path

import pytest
import solver
from scipy.stats import binom

from remind.data.dialogue import Question
from remind.states.dataset import read_states
from remind.testbed.labels import LabelConfig, with_labels
from remind.testbed.ladder import LadderConfig, write_states
from remind.testbed.world import World, WorldConfig, make_world


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(WorldConfig(train=30, dev=3, test=5))


@pytest.fixture(scope="module")
def solved(world: World) -> dict[str, str]:
    """The answer of every question as the independent solver finds it."""
    return {item.question.id: str(solver.solve(problem)) for item, problem in solver.problems(world)}


def train(world: World, config: LabelConfig) -> dict[str, Question]:
    questions = [item.question for item in with_labels(world.questions, config)]
    return {question.id: question for question in questions if question.split == "train"}


def labelled(world: World, config: LabelConfig) -> dict[str, tuple[str, ...]]:
    return {name: question.answers for name, question in train(world, config).items() if question.answers}


def shown(question: Question) -> str:
    """The label as it is trained on."""
    return f"[{','.join(question.answers)}]" if question.format == "multi" else question.answers[0]


def wrong(world: World, config: LabelConfig, solved: dict[str, str]) -> dict[str, tuple[str, ...]]:
    found = train(world, config)
    return {name: q.answers for name, q in found.items() if q.answers and shown(q) != solved[name]}


def test_dev_and_test_files_stay_as_they_are_byte_by_byte(tmp_path: Path) -> None:
    world = make_world(WorldConfig(train=2, dev=1, test=2))
    clean = write_states(world, tmp_path / "clean", LadderConfig())
    other = write_states(world, tmp_path / "wrong", LadderConfig(), LabelConfig(noise=1, paraphrased=True))
    names = sorted((path.name for path in clean.glob("*.parquet")), reverse=True)
    same = [(clean / name).read_bytes() == (other / name).read_bytes() for name in names]
    assert same == [False, False, True, True, True]
    # of training questions nothing but the label changes
    for before, after in zip(read_states(clean), read_states(other), strict=True):
        assert (before.x0, before.x1, before.x2, before.options) == (after.x0, after.x1, after.x2, after.options)


def test_a_wrong_label_is_one_somebody_could_give_and_never_right(world: World, solved: dict[str, str]) -> None:
    for name, question in train(world, LabelConfig(noise=1)).items():
        dimension, _, _ = solver.understand(question.text)
        problem = solver.Problem(dimension, "", "", question.format, question.options, ())
        others = {solver.answer(problem, value) for value in solver.values_of(dimension)} - {solved[name], None}
        assert shown(question) in others, name


def test_labels_are_as_many_as_asked_for_and_nested(world: World, solved: dict[str, str]) -> None:
    assert with_labels(world.questions, LabelConfig()) == list(world.questions)
    few, many = (wrong(world, LabelConfig(noise=noise), solved) for noise in (0.2, 0.4))
    assert few.items() < many.items()
    for share, names in ((0.2, few), (0.4, many)):
        low, high = binom.interval(0.999, 600, share)
        assert low <= len(names) <= high
    left = {count: labelled(world, LabelConfig(labelled=count)) for count in (50, 150)}
    assert [len(names) for names in left.values()] == [50, 150]
    assert left[50].items() < left[150].items() < labelled(world, LabelConfig()).items()
    assert left[50] != labelled(world, LabelConfig(labelled=50, seed=1))
    pool, alone = train(world, LabelConfig(labelled=50)), train(world, LabelConfig(labelled=50, pool=False))
    assert (len(pool), len(alone)) == (600, 50)
    other = train(world, LabelConfig(paraphrased=True))
    clean = {name: q for name, q in train(world, LabelConfig()).items() if q.format == "direct"}
    assert all(other[name].answers[0] in question.answers[1:] for name, question in clean.items())
