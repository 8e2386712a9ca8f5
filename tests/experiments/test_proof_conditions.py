"""What the arms of the proof minimise, what they are told, and how their answers are scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.proof.arms import ARMS, RECOMMENDED, knobs_of
from experiments.proof.conditions import Condition, named
from experiments.proof.runs import arguments
from experiments.proof.states import split_records, training_records
from experiments.proof.store import BenchConfig, RunStore, Spec
from remind.alignment.config import Edge, Objective
from remind.core.errors import ConfigError
from remind.evaluation.judge import judge_run
from remind.evaluation.scores import parse_all, score
from remind.llm.auxiliary import OfflineLLM
from remind.models.generate import Generation
from remind.states.records import StateRecord
from remind.testbed.accuracy import is_correct
from remind.testbed.labels import LabelConfig
from remind.testbed.ladder import LadderConfig, records, target
from remind.testbed.world import WorldConfig, make_world

WORLD = WorldConfig(train=2, dev=1, test=1)
LADDER = LadderConfig()


# arms


def test_arms_minimise_what_they_are_said_to() -> None:
    objectives = {arm: knobs_of(arm, RECOMMENDED).objective for arm in ARMS}
    for arm in ("sft", "sft_flops", "sft_pseudo"):
        assert objectives[arm] == Objective(lambda_hard=1.0, edges=())
    assert objectives["sft_mixed"] == Objective(lambda_hard=1.0, edges=(), hard_levels=(0, 1, 2))
    assert objectives["distil_20"] == Objective(edges=(Edge(0, 2),))
    assert objectives["pra_printed"] == Objective()
    ours = objectives["pra_recommended"]
    assert (ours.teacher_model_kind, ours.tau, ours.edges) == ("base", 1.0, (Edge(0, 1), Edge(0, 2)))


def test_a_setting_that_cannot_work_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="edges into level 0"):
        knobs_of("pra_printed", RECOMMENDED, {"teacher_weights": "base"})
    with pytest.raises(ConfigError, match="no setting 'rate'"):
        knobs_of("sft", RECOMMENDED, {"rate": 1.0})
    with pytest.raises(ConfigError, match="no arm"):
        knobs_of("magic", RECOMMENDED)


def test_labels_only_arms_never_get_a_decoded_answer(tmp_path: Path) -> None:
    store = RunStore(BenchConfig(world=WORLD), "any", "hash", tmp_path)
    for arm, expected in (("sft", "skip"), ("sft_mixed", "skip"), ("sft_pseudo", "skip"), ("pra_printed", "x2")):
        spec = Spec(arm, named("none"), 1, knobs_of(arm, RECOMMENDED), 3)
        args = arguments(store, spec, tmp_path / "o")
        assert (args.unlabelled, args.seed, args.max_steps) == (expected, 1, 3)


# conditions


def test_conditions_of_names() -> None:
    for name, values in (
        ("scarce-60", {"labelled": 60, "pool": False}),
        ("scarce-60-pool", {"labelled": 60}),
        ("none", {"labelled": 0}),
        ("noisy-0.4", {"noise": 0.4}),
    ):
        assert named(name) == Condition(name, **values)  # type: ignore[arg-type]
    for name in ("scarce", "scarce-0", "scarce-x", "noisy-2", "noisy-0.4-pool", "clear"):
        with pytest.raises(ConfigError, match="no condition"):
            named(name)


def test_blind_arms_see_one_condition_for_all_shares_of_wrong_summaries() -> None:
    condition = replace(named("scarce-6-pool"), wrong=0.4)
    assert condition.seen_by("sft") == named("scarce-6")
    assert condition.seen_by("sft_mixed") == replace(named("scarce-6"), wrong=0.4)
    assert condition.seen_by("pra_printed") == condition


def test_training_states_are_those_of_the_world_and_dev_questions_are_clean() -> None:
    condition = replace(named("noisy-0.4"), wrong=1.0)
    made = training_records(store_of(1), condition, 3)
    world = make_world(replace(WORLD, dev=0, test=0, seed=3))
    expected = records(world, replace(LADDER, seed=3, wrong_summaries=1.0), LabelConfig(noise=0.4, seed=3))
    assert [one for one in made if one.split == "train"] == expected
    clean = records(make_world(replace(WORLD, train=0, test=0, seed=8)), replace(LADDER, seed=8))
    assert [one for one in made if one.split == "dev"] == clean
    assert {one.split for one in made} == {"train", "dev"}


def _train(null: Any, rest: Any = "empty", name: str = "none") -> list[StateRecord]:
    return training_records(store_of(0), replace(named(name), null=null, rest=rest), 3)


def store_of(watched: int) -> RunStore:
    return RunStore(BenchConfig(world=WORLD, ladder=LADDER, watched=watched, dev_seed=8), "nano", "0", Path("out"))


def _summary(record: StateRecord) -> str:
    lines = record.x2.text.splitlines()
    return lines[lines.index("Reflection") + 2] if "Reflection" in lines else ""


def test_shuffled_summaries_are_the_same_ones_and_none_at_its_place() -> None:
    before, after = _train(None), _train("shuffled", "keep")
    summaries, moved = list(map(_summary, before)), list(map(_summary, after))
    assert sorted(summaries) == sorted(moved)
    # equal words may stand at two places, but hardly
    assert sum(map(str.__eq__, summaries, moved)) <= 2
    assert [record.x1 for record in after] == [record.x1 for record in before]
    alone = _train("shuffled")
    assert list(map(_summary, alone)) == moved
    for record, plain in zip(alone, before, strict=True):
        assert record.x0 == record.x1 == plain.x0
        assert not record.x2.markers


def test_the_same_state_teaches_nothing_and_null_controls_leave_labels_alone() -> None:
    for record, kept, plain in zip(_train("same"), _train("same", "keep"), _train(None), strict=True):
        assert record.x2 == record.x1 == record.x0 == plain.x0
        assert (kept.x1, kept.x2) == (plain.x0, plain.x2)
    targets = [record.target for record in _train(None, name="noisy-0.4")]
    for null in ("shuffled", "same", "marker"):
        assert [record.target for record in _train(null, name="noisy-0.4")] == targets
        assert all(record.target is None for record in _train(null))


def _marked(record: StateRecord) -> frozenset[str]:
    """Turns between an opening and a closing marker."""
    pairs = list(zip(record.x1.markers[::2], record.x1.markers[1::2], strict=True))
    return frozenset(
        turn.turn_id
        for turn in record.x1.turns
        for first, last in pairs
        if first[1] <= turn.start and turn.end <= last[0]
    )


def test_random_marks_are_as_many_and_have_lost_the_evidence() -> None:
    before, after = _train(None, name="clean"), _train("marker", name="clean")
    kept = evidence = chance = 0.0
    for plain, record in zip(before, after, strict=True):
        assert record.x0 == plain.x0
        assert record.x2 == record.x1
        assert record.target == plain.target is not None
        if len(record.evidence) == len(_marked(plain) & set(record.evidence)) == len(_marked(plain)):
            assert len(_marked(record)) >= 1
        kept += len(_marked(record) & set(record.evidence))
        evidence += len(_marked(plain) & set(record.evidence))
        chance += len(_marked(record)) * len(record.evidence) / len(record.x1.turns)
    assert evidence > 1.5 * chance
    assert kept == pytest.approx(chance, rel=0.35)
    # a remark of two turns takes the place of one of one turn, so turns agree on average alone
    turns = [sum(len(_marked(record)) for record in some) for some in (before, after)]
    assert turns[1] == pytest.approx(turns[0], rel=0.2)


# scores


def test_scores_are_those_of_the_evaluation() -> None:
    asked = split_records(store_of(1), "dev", 1, 8)
    assert {record.format for record in asked} == {"direct", "single", "multi"}
    texts = [target(_question(record)) or "" for record in asked]
    # one place further, so that some are wrong and of another form
    for shift in (0, 1):
        outputs = [Generation(texts[(n + shift) % len(texts)], 9) for n in range(len(texts))]
        found = [is_correct(record, output) for record, output in zip(asked, outputs, strict=True)]
        parsed = parse_all(asked, outputs)
        rulings = judge_run(OfflineLLM(), asked, outputs, parsed)
        expected = score(asked, outputs, parsed, rulings, lambda lines: torch.zeros(len(lines), 1))
        assert found == [one.accuracy == 1.0 for one in expected]
        assert all(found) == (shift == 0)
    assert not is_correct(asked[0], Generation("", 9, failure="error"))
    assert not is_correct(asked[0], None)


def _question(record: StateRecord) -> Any:
    world = make_world(replace(WORLD, train=0, test=0, seed=8))
    return next(item.question for item in world.questions if item.question.id == record.question_id)
