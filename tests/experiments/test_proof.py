"""The proof: its plan, costs and intervals against counts by hand and a loop, and runs from end to end and killed."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import Forked

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


def test_conditions_and_plans_that_cannot_work(tmp_path: Path) -> None:
    marked = Condition("noisy-0.4", noise=0.4, null="marker")
    assert (named("noisy-0.4/marker"), marked.title) == (marked, "noisy-0.4/marker")
    assert named("none/wrong-0.4") == Condition("none", labelled=0, wrong=0.4)
    for title in ("scarce-0", "noisy-2", "noisy-0.4-pool", "clear", "none/odd"):
        with pytest.raises(ConfigError, match="condition"):
            named(title)
    for settings, message in (
        ({"seeds": (1, 2), "choose": ChooseConfig(seeds=(2, 101))}, "seed 2 is a final one"),
        ({"arms": {"sft": ["none"]}}, "nothing to learn from"),
        ({"arms": {"sft_flops": ["clean"]}}, "needs sft and pra_recommended under clean"),
        ({"arms": {"sft": ["clean/marks-built"]}}, "marks go with built"),
    ):
        with pytest.raises(ConfigError, match=message):
            ProofConfig("m", "o", **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stage all first"):
        prove(_tiny("nano", tmp_path, stage="report"))


def _store(watched: int) -> RunStore:
    return RunStore(
        BenchConfig(world=WORLD, ladder=LadderConfig(), watched=watched, dev_seed=8), "nano", "0", Path("o")
    )


def test_null_controls_take_away_what_a_level_adds() -> None:
    plain, *nulls = (training_records(_store(0), named(f"none{x}"), 3) for x in ("", "/shuffled", "/same", "/marker"))
    for before, shuffled, same, marker in zip(plain, *nulls, strict=True):
        assert before.x0 == shuffled.x0 == shuffled.x1 == same.x0 == same.x1 == same.x2 == marker.x0
        assert marker.x2 == marker.x1
        assert not shuffled.x2.markers
    assert [one.x2 for one in nulls[0]] != [one.x2 for one in plain]
    assert [one.x1 for one in nulls[2]] != [one.x1 for one in plain]


def _example(*lengths: int, answer: int, labelled: bool = True, common: int = 0) -> Example:
    prompts = [torch.arange(length, dtype=torch.int32) for length in lengths]
    prompts[2][common:] += 1000
    return Example("q", tuple(prompts), torch.zeros(answer, dtype=torch.int32), labelled)


def test_flops_against_a_count_by_hand() -> None:
    size = Size(body=10, head=3)
    one = _example(20, 25, 30, answer=4, common=22)
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that does not answer with white space alone, as tied heads like to."""
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_nano(folder, seed=1, hidden_size=16, layers=2, vision_size=16)
    made = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    with torch.no_grad():
        made.get_input_embeddings().weight[AutoTokenizer.from_pretrained(folder).encode("\n")] = 0
    made.save_pretrained(folder)
    return folder


def _tiny(model: Path | str, out: Path, workers: int = 0, **values: Any) -> ProofConfig:
    small: dict[str, Any] = {
        "steps": 2,
        "seeds": (1,),
        "arms": {
            "sft": ["scarce-4"],
            "sft_flops": ["scarce-4"],
            "sft_pseudo": ["none"],
            "pra_recommended": ["scarce-4", "none/marker"],
        },
        "bench": BenchConfig(world=SHORT, batch=2, max_new_tokens=2, upper=2, watched=1, watch_every=9),
        "choose": ChooseConfig(conditions=("scarce-4",), seeds=(9,), grids={"sft": {"lr": [1e-4, 1e-3]}}),
        "resamples": 100,
    }
    return ProofConfig(str(model), str(out), workers=workers, **{**small, **values})


@pytest.fixture(scope="module")
def proved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small proof that nothing has stopped."""
    out = tmp_path_factory.mktemp("proved") / "out"
    prove(_tiny(model, out))
    return out


@pytest.mark.slow
def test_a_small_proof_from_end_to_end(model: Path, proved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = read_json(proved / "results.json")
    points = results["scores"]["sft"]
    assert len(points) == 2
    assert results["chosen"]["sft"] == max(points, key=lambda row: row["accuracy"])["values"]
    rows = {(row["arm"], row["title"]): row for row in results["rows"]}
    ours, equal, sft = (rows[arm, "scarce-4"] for arm in ("pra_recommended", "sft_flops", "sft"))
    assert set(rows) - {("pra_recommended", "none/marker"), ("sft_pseudo", "none")} == {
        (arm, "scarce-4") for arm in ("sft", "sft_flops", "pra_recommended")
    }
    # the nearest number of steps to equal cost is off by half a step at most
    assert abs(equal["flops"] - ours["flops"]) < 0.75 * sft["flops"] / 2
    assert "PRA recommended" in (proved / "table.md").read_text()
    # nothing is left to do
    before = {path: path.stat().st_mtime_ns for path in (proved / "runs").glob("*.json")}
    prove(_tiny(model, proved, stage="report"))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "results are in" in capsys.readouterr().out


_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1])))
from test_proof import _tiny
from experiments.proof.prove import prove
if __name__ == "__main__":
    prove(_tiny(Path(sys.argv[2]), Path(sys.argv[3]), workers=1))
"""


def _runs(out: Path) -> dict[str, Any]:
    """Results by file name, but for how long they took."""
    runs = {path.name: read_json(path) for path in (out / "runs").glob("*.json")}
    return {name: {**run, "seconds": None} for name, run in runs.items()}


@pytest.mark.slow
def test_a_killed_proof_goes_on_and_ends_alike(model: Path, proved: Path, tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(_SCRIPT)
    process = Forked(script, Path(__file__).parent, model, out)
    while not list((out / "runs").glob("*.json")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    # its workers see that it is gone
    time.sleep(2)
    before = {path: path.read_bytes() for path in (out / "runs").glob("*.json")}
    prove(_tiny(model, out))
    assert {path: path.read_bytes() for path in before} == before
    assert 0 < len(before) < len(_runs(proved))
    assert _runs(out) == _runs(proved)
