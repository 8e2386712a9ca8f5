"""Arms and controls of experiments.policies: what they change, and that nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import yaml

from experiments.policies import Control, PoliciesConfig, controlled, policies
from remind.core.errors import ConfigError
from remind.memory_training import pico
from remind.memory_training.config import (
    MemoryWorldConfig,
    PolicyGradientConfig,
    RewardConfig,
    SaliMoryConfig,
    TrainMemoryConfig,
)
from remind.memory_training.episodes import Scores
from remind.memory_training.membuilder import MemBuilderTask
from remind.memory_training.rewards import ROLES
from remind.testbed.memory_world import ORACLE, Expert, make_life

SHORT = RewardConfig(core_free=10, core_full=25, free_below=12)
LESSONS = [one for number in range(4) for one in pico.lessons(make_life(0, number), Expert())]


def replies(row: int) -> list[Sequence[str]]:
    """Of four rollouts: the expert's, one without mistakes, nothing, and one that only core can do without."""
    views = LESSONS[row].views
    best = [pico.expert_reply(view, ORACLE, Random(0)) for view in views]
    return [LESSONS[row].replies, best, [pico.END] * 4, [pico.END, *best[1:]]]


def scores(control: Control | None, row: int, alpha: float = 4.0) -> Scores:
    kind = controlled(control, 1) if control else MemBuilderTask
    task = kind(LESSONS, pico.tokenizer(), SHORT, alpha)
    result: Scores = task.score(row, replies(row))
    return result


@pytest.mark.parametrize("row", [3, 20])
def test_each_control_changes_what_it_is_named_after(row: int) -> None:
    plain = scores(None, row)
    null = scores("null_rewards", row)
    assert {role: sorted(v) for role, v in null.rewards.items()} == {r: sorted(v) for r, v in plain.rewards.items()}
    assert (null.weights, scores("uniform", row).rewards) == (plain.weights, plain.rewards)
    flat = [value for values in plain.weights.values() for value in values]
    assert {v for values in scores("uniform", row).weights.values() for v in values} == {sum(flat) / len(flat)}
    drawn, task = scores("random_role", row), MemBuilderTask(LESSONS, pico.tokenizer(), SHORT, 4.0)
    for n, reply in enumerate(replies(row)):
        retrieved = task.scorers[row].result(reply).retrieved
        heavy = [role for role in ROLES if drawn.weights[role][n] == 4]
        assert len(heavy) == bool(retrieved)
        assert set(heavy) <= set(retrieved)


def test_a_session_in_eight_is_asked_about_and_others_have_validity_and_length() -> None:
    asked = []
    for seed in range(4):
        task = controlled("sparse", seed)(LESSONS, pico.tokenizer(), SHORT, 4.0)
        asked += [row for row in range(len(LESSONS)) if task.score(row, [LESSONS[row].replies]).weights]
    assert len(LESSONS) / 4 < len(asked) < len(LESSONS)
    silent = next(row for row in range(len(LESSONS)) if not scores("sparse", row).weights)
    some = next(row for row in range(len(LESSONS)) if scores("sparse", row).weights)
    assert scores("sparse", some) == scores(None, some)
    scorer = MemBuilderTask(LESSONS, pico.tokenizer(), SHORT, 4.0).scorers[silent]
    tasks = [scorer.result(reply).task for reply in replies(silent)]
    for role, values in scores("sparse", silent).rewards.items():
        expected = [task * value for task, value in zip(tasks, values, strict=True)]
        assert scores(None, silent).rewards[role] == pytest.approx(expected)


@pytest.mark.parametrize("row", [3, 20])
def test_a_role_is_worth_what_the_questions_lose_without_it(row: int) -> None:
    plain, less = scores(None, row), scores("difference", row)
    scorer = MemBuilderTask(LESSONS, pico.tokenizer(), SHORT, 1.0).scorers[row]
    for place, role in enumerate(ROLES):
        for n, reply in enumerate(replies(row)):
            kept = list(reply)
            kept[place] = pico.END
            assert less.rewards[role][n] == plain.rewards[role][n] - scorer.result(kept).task


def test_arms_start_from_the_imitation_and_are_done_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imitation = TrainMemoryConfig(
        "", steps=2, batch_size=4, world=MemoryWorldConfig(dialogues=2, sessions=2, evaluate=1)
    )
    learning = replace(imitation, method="adrpo", steps=1, batch_size=1, rl=PolicyGradientConfig(group=2), reward=SHORT)
    cfg = PoliciesConfig(
        str(tmp_path),
        imitation,
        imitation,
        learning,
        replace(imitation, method="salimory_sft"),
        replace(learning, method="salimory", salimory=SaliMoryConfig(turns=4)),
        ("adrpo", "sparse", "salimory_r1"),
        (1,),
        dialogues=3,
        resamples=50,
    )
    results = policies(cfg)
    tables = {
        start: {row["arm"]: row for row in results["rows"] if row["start"] == start}
        for start in ("sft", "salimory_sft")
    }
    rows = tables["sft"]
    assert list(rows)[:3] == ["sft", "adrpo", "sparse"]
    assert list(tables["salimory_sft"])[:2] == ["salimory_sft", "salimory_r1"]
    assert rows["adrpo"]["less sft"]["value"] == rows["adrpo"]["final"]["value"] - rows["sft"]["final"]["value"]
    for own in tables.values():
        final = {name: row["final"]["value"] for name, row in own.items()}
        assert final["an expert without mistakes"] > final["the expert that is imitated"]
        useless = {name for name in final if name.startswith(("writes", "keeps nothing"))}
        assert max(final[name] for name in useless) < final["the expert that is imitated"]
        assert own["keeps nothing"]["words"]["value"] == 0
    trained = {path: path.stat().st_mtime_ns for path in tmp_path.glob("seed-*/*/policy/model.safetensors")}
    assert len(trained) == 5
    settings = yaml.safe_load((tmp_path / "seed-1" / "salimory_r1" / "config.yaml").read_text())["salimory"]
    assert (settings["boost"], settings["memory_penalty"], settings["turns"]) == (0, 0, 4)
    assert policies(cfg) == results
    assert trained == {path: path.stat().st_mtime_ns for path in trained}
    assert "| ADRPO |" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"other settings \(rl\.alpha\)"):
        changed = replace(cfg, rl=replace(learning, rl=PolicyGradientConfig(group=2, alpha=2.0)), seeds=(1, 3))
        (tmp_path / "seed-1" / "adrpo" / "test-3.json").unlink()
        policies(changed)


def test_what_cannot_be_run() -> None:
    with pytest.raises(ConfigError, match="no arm 'ppo'"):
        PoliciesConfig("out", arms=("ppo",))
    with pytest.raises(ConfigError, match="distinct"):
        PoliciesConfig("out", seeds=(1, 1))
    with pytest.raises(ConfigError, match="at least one of arms"):
        PoliciesConfig("out", arms=())
    with pytest.raises(ConfigError, match=r"salimory\.method must be salimory, not sft"):
        PoliciesConfig("out", salimory=TrainMemoryConfig(""))
