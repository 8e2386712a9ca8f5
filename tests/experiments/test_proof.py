"""The proof: its plan, costs and intervals against counts by hand and a loop, and runs from end to end and killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from experiments.proof.arms import RECOMMENDED, Condition, named
from experiments.proof.config import BenchConfig, ChooseConfig, ProofConfig
from experiments.proof.prove import equal_steps, prove
from experiments.proof.runs import Size, fixed_cost, step_cost
from experiments.proof.states import training_records
from experiments.proof.statistics import draws, estimate, resampled_means, stretch
from experiments.proof.store import RunStore
from remind.alignment.config import Objective
from remind.alignment.examples import Example
from remind.alignment.step import plan
from remind.core.errors import ConfigError
from remind.core.files import read_json
from remind.models.nano import save_nano
from remind.testbed.ladder import LadderConfig
from remind.testbed.world import WorldConfig

WORLD = WorldConfig(train=2, dev=1, test=1)
SHORT = WorldConfig(train=1, dev=1, test=1, sessions=2, evidence=(1, 1), contrary=(0, 1), second_voice=0.0)


def test_conditions_and_plans_that_cannot_work() -> None:
    assert named("noisy-0.4/marker") == Condition("noisy-0.4", noise=0.4, null="marker")
    assert named("none/wrong-0.4") == Condition("none", labelled=0, wrong=0.4)
    for title in ("scarce-0", "noisy-0.4-pool", "none/odd"):
        with pytest.raises(ConfigError, match="condition"):
            named(title)
    for settings, message in (
        ({"seeds": (1, 2), "choose": ChooseConfig(seeds=(2, 101))}, "seed 2 is a final one"),
        ({"arms": {"sft_flops": ["clean"]}}, "needs sft and pra_recommended under clean"),
    ):
        with pytest.raises(ConfigError, match=message):
            ProofConfig("m", "o", **settings)  # type: ignore[arg-type]


def test_null_controls_take_away_what_a_level_adds() -> None:
    store = RunStore(BenchConfig(world=WORLD, ladder=LadderConfig(), watched=0, dev_seed=8), "nano", "0", Path("o"))
    plain, *nulls = (training_records(store, named(f"none{x}"), 3) for x in ("", "/shuffled", "/same", "/marker"))
    for before, shuffled, same, marker in zip(plain, *nulls, strict=True):
        assert before.x0 == shuffled.x0 == shuffled.x1 == same.x0 == same.x1 == same.x2 == marker.x0
        assert marker.x2 == marker.x1
        assert not shuffled.x2.markers
    assert [one.x2 for one in nulls[0]] != [one.x2 for one in plain]


def test_flops_against_a_count_by_hand() -> None:
    size = Size(body=10, head=3)
    prompts = [torch.arange(length, dtype=torch.int32) for length in (20, 25, 30)]
    prompts[2][22:] += 1000
    one = Example("q", tuple(prompts), torch.zeros(4, dtype=torch.int32), True)
    # 23, 28, 33 tokens with the answer but for its last one; 4 answer positions
    sft = Objective(lambda_hard=1.0, edges=())
    assert step_cost([one], sft, plan(sft), size) == 6 * (23 * 10 + 4 * 3)
    printed = Objective()
    naive = 6 * ((23 + 28) * 10 + 2 * 4 * 3) + 2 * (33 * 10 + 4 * 3)
    assert step_cost([one], printed, plan(printed), size) == naive
    # with the prefix shared x2 runs only what comes after the 22 tokens
    assert step_cost([one], printed, plan(printed, prefix_sharing=True), size) == naive - 2 * 22 * 10
    base = RECOMMENDED.objective
    assert step_cost([one], base, plan(base), size) == 6 * (23 * 10 + 4 * 3)
    assert fixed_cost([one, one], base, size) == 2 * 2 * ((28 + 33) * 10 + 2 * 4 * 3)
    assert equal_steps({"flops": 300.0, "steps": 3}, {"flops": 749.0, "steps": 3}) == 7


def _loop(values: Any, dialogues: list[str], resamples: int) -> list[float]:
    """The definition, number by number."""
    names = list(dict.fromkeys(dialogues))
    seeds, n = values.shape
    grand = values.mean()
    of_seed = [values[s].mean() - grand for s in range(seeds)]
    places = {name: [q for q in range(n) if dialogues[q] == name] for name in names}
    of_dialogue = {name: values[:, places[name]].mean() - grand for name in names}
    wide = values.astype(float).copy()
    for s in range(seeds):
        for q in range(n):
            wide[s, q] += (stretch(seeds) - 1) * of_seed[s] + (stretch(len(names)) - 1) * of_dialogue[dialogues[q]]
    found = []
    for drawn_seeds, drawn_dialogues in zip(*draws(seeds, len(names), resamples), strict=True):
        pool = [
            wide[s, q]
            for s in range(seeds)
            for _ in range(int(drawn_seeds[s]))
            for place, name in enumerate(names)
            for _ in range(int(drawn_dialogues[place]))
            for q in places[name]
        ]
        found.append(sum(pool) / len(pool))
    return found


def test_bootstrap_against_a_loop() -> None:
    rng = np.random.default_rng(4)
    dialogues = ["a"] * 3 + ["b"] * 5 + ["c"] * 2 + ["d"]
    values = rng.integers(-1, 2, (4, len(dialogues))).astype(float)
    expected = _loop(values, dialogues, 200)
    np.testing.assert_allclose(resampled_means(values, dialogues, 200), expected, atol=1e-12)
    interval = estimate(values, dialogues, 200)
    assert (interval["low"], interval["high"]) == pytest.approx(tuple(np.percentile(expected, [2.5, 97.5])))
    assert interval["value"] == pytest.approx(values.mean())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny random model that does not answer with white space alone, as tied heads like to."""
    folder = save_nano(tmp_path / "tiny", seed=1, hidden_size=16, layers=2, vision_size=16)
    made = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    with torch.no_grad():
        made.get_input_embeddings().weight[AutoTokenizer.from_pretrained(folder).encode("\n")] = 0
    made.save_pretrained(folder)
    return folder


def _tiny(model: Path | str, out: Path, workers: int = 0) -> ProofConfig:
    arms = {name: ["scarce-4"] for name in ("sft", "sft_flops", "pra_recommended")} | {"sft_pseudo": ["none"]}
    bench = BenchConfig(world=SHORT, batch=2, max_new_tokens=2, upper=2, watched=1, watch_every=9)
    choose = ChooseConfig(conditions=("scarce-4",), seeds=(9,), grids={"sft": {"lr": [1e-4, 1e-3]}})
    small: dict[str, Any] = {"steps": 2, "seeds": (1,), "arms": arms, "bench": bench, "choose": choose}
    return ProofConfig(str(model), str(out), workers=workers, resamples=100, **small)


def _runs(out: Path) -> dict[str, Any]:
    """Results by file name, but for how long they took."""
    return {path.name: {**read_json(path), "seconds": None} for path in (out / "runs").glob("*.json")}


@pytest.mark.slow
def test_a_small_proof_that_is_killed_goes_on_and_ends_alike(model: Path, tmp_path: Path, kill: Any) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    prove(_tiny(model, whole))
    results = read_json(whole / "results.json")
    points = results["scores"]["sft"]
    assert results["chosen"]["sft"] == max(points, key=lambda row: row["accuracy"])["values"]
    rows = {(row["arm"], row["title"]): row for row in results["rows"]}
    ours, equal, sft = (rows[arm, "scarce-4"] for arm in ("pra_recommended", "sft_flops", "sft"))
    # the nearest number of steps to equal cost is off by half a step at most
    assert abs(equal["flops"] - ours["flops"]) < 0.75 * sft["flops"] / 2

    line = f"from test_proof import Path, _tiny, prove; prove(_tiny({str(model)!r}, Path({str(out)!r}), workers=1))"
    kill(line, lambda: list(out.glob("runs/*.json")))
    # its workers see that it is gone
    time.sleep(2)
    before = {path: path.read_bytes() for path in (out / "runs").glob("*.json")}
    prove(_tiny(model, out))
    assert {path: path.read_bytes() for path in before} == before
    assert 0 < len(before) < len(_runs(whole))
    assert _runs(out) == _runs(whole)
