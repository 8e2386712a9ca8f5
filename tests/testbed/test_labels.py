"""Labels of the synthetic world: wrong, few or paraphrased in training, untouched in dev and test."""

from __future__ import annotations

from pathlib import Path

import pytest
import solver
from scipy.stats import binom
from solver import from_dialogue

from remind.data.dialogue import Question
from remind.states.parquet import read_states
from remind.testbed.labels import LabelConfig, with_labels
from remind.testbed.ladder import LadderConfig, write_states
from remind.testbed.world import World, WorldConfig, make_world


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(WorldConfig(train=30, dev=3, test=5))


@pytest.fixture(scope="module")
def solved(world: World) -> dict[str, str]:
    """The answer of every question as the independent solver finds it."""
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    questions = world.corpus.questions
    return {q.id: str(solver.solve(from_dialogue(dialogues[q.dialogue_id], q))) for q in questions}


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


HARD = [
    LabelConfig(noise=1),
    LabelConfig(noise=0.4, labelled=50, paraphrased=True),
    LabelConfig(labelled=0),
    LabelConfig(noise=1, labelled=7, pool=False, paraphrased=True, seed=3),
]


@pytest.mark.parametrize("config", HARD)
def test_dev_and_test_stay_as_they_are(world: World, config: LabelConfig) -> None:
    after = [item for item in with_labels(world.questions, config) if item.question.split != "train"]
    assert after == [item for item in world.questions if item.question.split != "train"]
    assert len(after) == 160


def test_dev_and_test_files_stay_as_they_are_byte_by_byte(tmp_path: Path) -> None:
    world = make_world(WorldConfig(train=2, dev=1, test=2))
    clean = write_states(world, tmp_path / "clean", LadderConfig())
    noisy = write_states(world, tmp_path / "wrong", LadderConfig(), LabelConfig(noise=1, paraphrased=True))
    unlabelled = write_states(world, tmp_path / "none", LadderConfig(), LabelConfig(labelled=0))
    names = sorted(path.name for path in clean.glob("part-*"))
    assert len(names) == 5
    for other in (noisy, unlabelled):
        same = [(clean / name).read_bytes() == (other / name).read_bytes() for name in names]
        assert same == [False, False, True, True, True]
        # of training questions nothing but the label changes
        for before, after in zip(read_states(clean), read_states(other), strict=True):
            assert (before.x0, before.x1, before.x2, before.options) == (after.x0, after.x1, after.x2, after.options)
    for record in read_states(unlabelled):
        assert (record.target is None) == (record.answers == ()) == (record.split == "train")


@pytest.mark.parametrize("share", [0.2, 0.4])
def test_as_many_labels_are_wrong_as_asked_for(world: World, solved: dict[str, str], share: float) -> None:
    low, high = binom.interval(0.999, 600, share)
    assert low <= len(wrong(world, LabelConfig(noise=share), solved)) <= high


def test_no_noise_changes_nothing(world: World) -> None:
    assert with_labels(world.questions, LabelConfig()) == list(world.questions)


def test_a_wrong_label_is_one_somebody_could_give_and_never_right(world: World, solved: dict[str, str]) -> None:
    for name, question in train(world, LabelConfig(noise=1)).items():
        dimension, _, _ = solver.understand(question.text)
        problem = solver.Problem(dimension, "", "", question.format, question.options, ())
        others = {solver.answer(problem, value) for value in solver.values_of(dimension)} - {solved[name], None}
        assert shown(question) in others, name
        if question.format == "direct":
            entries = solver.bank()["dimensions"][dimension]["values"].values()
            forms = next(entry["label"] for entry in entries if entry["label"][0] == solved[name])
            assert not set(question.answers) & set(forms)


@pytest.mark.parametrize("seed", [0, 1])
def test_more_noise_keeps_the_wrong_labels_of_less(world: World, solved: dict[str, str], seed: int) -> None:
    few, many = (wrong(world, LabelConfig(noise=noise, seed=seed), solved) for noise in (0.2, 0.4))
    assert few.items() < many.items()


def test_seeds_choose_differently(world: World, solved: dict[str, str]) -> None:
    assert wrong(world, LabelConfig(noise=0.2), solved) != wrong(world, LabelConfig(noise=0.2, seed=1), solved)
    assert labelled(world, LabelConfig(labelled=60)) != labelled(world, LabelConfig(labelled=60, seed=1))


def test_as_many_labels_are_left_as_asked_for_nested(world: World) -> None:
    left = {count: labelled(world, LabelConfig(labelled=count)) for count in (0, 50, 150, 600)}
    assert [len(names) for names in left.values()] == [0, 50, 150, 600]
    assert left[50].items() < left[150].items() < left[600].items()
    assert left[600] == labelled(world, LabelConfig()) == labelled(world, LabelConfig(labelled=10_000))


def test_the_pool_is_kept_or_dropped(world: World) -> None:
    kept = train(world, LabelConfig(labelled=50))
    dropped = train(world, LabelConfig(labelled=50, pool=False))
    assert (len(kept), len(dropped)) == (600, 50)
    assert dropped == {name: question for name, question in kept.items() if question.answers}


def test_noise_strikes_the_same_questions_whatever_is_labelled(world: World, solved: dict[str, str]) -> None:
    every = wrong(world, LabelConfig(noise=0.4), solved)
    some = wrong(world, LabelConfig(noise=0.4, labelled=150), solved)
    assert some == {name: every[name] for name in labelled(world, LabelConfig(labelled=150)) if name in every}
    assert some


def test_paraphrased_labels_are_other_acceptable_answers(world: World) -> None:
    clean, other = train(world, LabelConfig()), train(world, LabelConfig(paraphrased=True))
    forms = set()
    for name, question in clean.items():
        if question.format != "direct":
            assert other[name] == question
            continue
        assert other[name].answers[0] in question.answers[1:]
        assert sorted(other[name].answers) == sorted(question.answers)
        forms.add(question.answers.index(other[name].answers[0]))
    assert forms == {1, 2}
