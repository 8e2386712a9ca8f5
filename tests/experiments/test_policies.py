"""Arms and controls of experiments.policies: what they change, and that nothing else does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.policies import PoliciesConfig, policies
from remind.core.errors import ConfigError
from remind.memory_training import config

SHORT = config.RewardConfig(core_free=10, core_full=25, free_below=12)


def test_arms_start_from_the_imitation_and_are_done_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imitation = config.TrainMemoryConfig(
        "", steps=2, batch_size=4, world=config.MemoryWorldConfig(dialogues=2, sessions=2, evaluate=1)
    )
    learning = replace(
        imitation, method="adrpo", steps=1, batch_size=1, rl=config.PolicyGradientConfig(group=2), reward=SHORT
    )
    stages = (
        replace(imitation, method="salimory_sft"),
        replace(learning, method="salimory", salimory=config.SaliMoryConfig(4)),
    )
    arms = ("adrpo", "null_rewards", "salimory_r1")
    cfg = PoliciesConfig(str(tmp_path), imitation, imitation, learning, *stages, arms, (1,), dialogues=3, resamples=50)
    results = policies(cfg)
    rows = {(row["start"], row["arm"]): row for row in results["rows"]}
    sft, adrpo = (rows["sft", name] for name in ("sft", "adrpo"))
    assert adrpo["less sft"]["value"] == adrpo["final"]["value"] - sft["final"]["value"]
    assert {("sft", "null_rewards"), ("salimory_sft", "salimory_r1")} <= rows.keys()
    for start in ("sft", "salimory_sft"):
        names = ("an expert without mistakes", "the expert that is imitated", "keeps nothing")
        best, imitated, nothing = (rows[start, name]["final"]["value"] for name in names)
        assert best > imitated > nothing
    assert policies(cfg) == results
    assert "| ADRPO |" in capsys.readouterr().out
    # what stands there is not told as that of other settings
    with pytest.raises(ConfigError, match=r"other settings \(sft\.steps\)|sft\.steps"):
        policies(replace(cfg, sft=replace(imitation, steps=3)))
    with pytest.raises(ConfigError, match="no arm 'ppo'"):
        PoliciesConfig("out", arms=("ppo",))
    with pytest.raises(ConfigError, match=r"salimory\.method must be salimory, not sft"):
        PoliciesConfig("out", salimory=config.TrainMemoryConfig(""))
