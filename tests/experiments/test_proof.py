"""The proof's plan, and its runs: from end to end, and killed on the way."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked

from experiments.proof.arms import RECOMMENDED, Knobs, knobs_of
from experiments.proof.conditions import Condition, named
from experiments.proof.config import ChooseConfig, ProofConfig, TraceConfig
from experiments.proof.plan import cells, final_runs, grid_runs
from experiments.proof.prove import prove
from experiments.proof.queue import groups
from experiments.proof.store import BenchConfig, RunStore, Spec, built_settings, open_store
from remind.core.errors import ConfigError
from remind.core.files import read_json
from remind.models.nano import save_nano
from remind.perception import PerceptionConfig, RetrieveConfig
from remind.testbed.built import BuiltConfig
from remind.testbed.world import WorldConfig

WORLD = WorldConfig(train=2, dev=1, test=1)
SHORT = WorldConfig(train=1, dev=1, test=1, sessions=2, evidence=(1, 1), contrary=(0, 1), second_voice=0.0)


# plan


def test_choices_are_made_on_dev_and_final_runs_on_test() -> None:
    cfg = ProofConfig("m", "o")
    specs = [spec for points in grid_runs(cfg).values() for _, runs in points for spec in runs]
    assert {spec.on for spec in specs} == {"dev"}
    assert not {spec.seed for spec in specs} & {*cfg.seeds}
    chosen = {arm: points[0][0] for arm, points in grid_runs(cfg).items()}
    final = [spec for *_, spec in final_runs(cfg, chosen)]
    assert {(spec.on, spec.seed) for spec in final} == {("test", seed) for seed in cfg.seeds}
    assert all(spec.knobs.lr == chosen[spec.arm]["lr"] for spec in final)


def test_which_arms_take_part_where() -> None:
    table = set(cells(ProofConfig("m", "o")))
    for title, arms in (
        ("none", {"sft_pseudo", "distil_20", "pra_printed", "pra_recommended"}),
        ("clean", {"sft", "sft_flops", "sft_mixed", "distil_20", "pra_printed", "pra_recommended"}),
        ("clean/wrong-0.4", {"sft_mixed", "distil_20", "pra_printed", "pra_recommended"}),
        ("noisy-0.4/same", {"pra_recommended"}),
    ):
        assert {arm for arm, condition in table if condition.title == title} == arms
    some = cells(
        ProofConfig(
            *("m", "o"),
            conditions=("clean", "none", "noisy-0.4"),
            arm_conditions={"pra_printed": ["none"]},
            wrong_conditions=["noisy-0.4"],
            wrong_arms=["pra_recommended"],
            nulls=(),
        )
    )
    assert {condition.title for arm, condition in some if arm == "pra_printed"} == {"none"}
    wrong = [(arm, condition.title) for arm, condition in some if condition.wrong]
    assert wrong == [("pra_recommended", f"noisy-0.4/wrong-{share}") for share in (0.2, 0.4)]


def test_plans_that_cannot_work(tmp_path: Path, model: Path) -> None:
    for values, message in (
        ({"seeds": (1, 2), "choose": ChooseConfig(seeds=(2, 101))}, "seed 2 is a final one"),
        ({"conditions": ("clean",), "wrong_conditions": ["scarce-30"]}, "scarce-30 is in arm_conditions"),
        ({"arm_conditions": {"sfd": ["clean"]}}, "no arm 'sfd'"),
        ({"marks": ("built",)}, "marks go with built states"),
        ({"bench": BenchConfig(built=BuiltConfig())}, "marks go with built states"),
        ({"bench": BenchConfig(built=BuiltConfig()), "marks": ("built",)}, "marks in place of nulls"),
    ):
        with pytest.raises(ConfigError, match=message):
            ProofConfig("m", "o", **values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dev would be test"):
        BenchConfig(dev_seed=5, test_seed=5)
    with pytest.raises(ConfigError, match="stage choose first"):
        prove(_tiny(model, tmp_path, stage="run"))
    with pytest.raises(ConfigError, match="not a model folder"):
        prove(_tiny(tmp_path, tmp_path))


@pytest.mark.parametrize(
    ("sizes", "workers", "expected"),
    [((6,), 2, [3, 3]), ((7, 2), 3, [3, 3, 1, 2]), ((1,), 4, [1]), ((2,), 4, [1, 1]), ((3, 3, 3), 2, [3, 3, 3])],
)
def test_runs_on_the_same_states_go_together_unless_a_worker_would_be_idle(
    tmp_path: Path, sizes: tuple[int, ...], workers: int, expected: list[int]
) -> None:
    store = _store(tmp_path)
    specs = [
        Spec("sft", named("clean"), seed, Knobs(lr=(n + 1) * 1e-4), 5, "test")
        for seed, size in enumerate(sizes)
        for n in range(size)
    ]
    shared = groups(store, specs, workers)
    assert [len(group) for group in shared] == expected
    assert [spec for group in shared for spec in group] == specs
    assert all(len({store.states_key(spec) for spec in group}) == 1 for group in shared)


def test_the_name_of_a_run_depends_on_what_it_reads_and_on_nothing_else(tmp_path: Path) -> None:
    store = _store(tmp_path)
    config, world = store.config, store.config.world
    spec = Spec("sft", named("clean"), 1, knobs_of("sft", RECOMMENDED), 3, "dev")
    key = store.key(spec)
    moved = replace(config, test_seed=77, world=replace(world, test=9, seed=4))
    other = replace(store, model="elsewhere", config=moved)
    assert other.key(spec) == key
    assert other.key(replace(spec, on="test")) != store.key(replace(spec, on="test"))
    changes: list[dict[str, Any]] = [{"dev_seed": 6}, {"batch": 5}]
    others = [replace(store, weights="x"), *(replace(store, config=replace(config, **change)) for change in changes)]
    assert key not in {changed.key(spec) for changed in others}
    assert store.key(replace(spec, knobs=replace(spec.knobs, lr=1.0))) != key
    short, usual = (RetrieveConfig(method="hybrid", whole_tokens=tokens) for tokens in (5000, 1000))
    plain, long = (built_settings(BuiltConfig(perception=PerceptionConfig(retrieve=one))) for one in (usual, short))
    # of settings that came later, a run on built states is named by those that are not their default
    assert plain["perception"]["retrieve"].keys() ^ long["perception"]["retrieve"].keys() == {"whole_tokens"}


def test_published_runs_can_be_read_back() -> None:
    runs = Path(__file__).parents[2] / "docs" / "results" / "proof" / "runs.jsonl"
    for line in runs.read_text().splitlines():
        values = json.loads(line)["spec"]
        spec = Spec(**{**values, "condition": Condition(**values["condition"]), "knobs": Knobs(**values["knobs"])})
        values["condition"]["marks"] = None
        assert json.loads(json.dumps(asdict(spec))) == values


def _store(folder: Path) -> RunStore:
    model = folder / "any"
    model.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text(name)
    return open_store(BenchConfig(world=WORLD), str(model), folder)


# runs


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


def _tiny(model: Path, out: Path, **values: Any) -> ProofConfig:
    small: dict[str, Any] = {
        "workers": 0,
        "steps": 2,
        "seeds": (1,),
        "arms": ("sft", "sft_flops", "sft_pseudo", "pra_recommended"),
        "conditions": ("none", "scarce-4"),
        "wrong_summaries": (0.0,),
        "nulls": ("marker",),
        "null_conditions": ("none",),
        "bench": BenchConfig(world=SHORT, batch=2, max_new_tokens=2, upper=2, watched=1, watch_every=9),
        "choose": ChooseConfig(conditions=("scarce-4",), seeds=(9,), grids={"sft": {"lr": [1e-4, 1e-3]}}),
        "trace": TraceConfig(arms=("pra_recommended",), conditions=("none",), every=1),
        "resamples": 100,
    }
    return ProofConfig(str(model), str(out), **{**small, **values})


@pytest.mark.slow
def test_a_small_proof_from_end_to_end(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    prove(_tiny(model, out))
    chosen, results = read_json(out / "chosen.json"), read_json(out / "results.json")
    assert len(chosen["scores"]["sft"]) == 2
    assert chosen["chosen"]["sft"] == max(chosen["scores"]["sft"], key=lambda row: row["accuracy"])["values"]
    rows = {(row["arm"], row["title"]): row for row in results["rows"]}
    assert set(rows) == {
        ("sft_pseudo", "none"),
        ("pra_recommended", "none"),
        ("sft", "scarce-4"),
        ("sft_flops", "scarce-4"),
        ("pra_recommended", "scarce-4"),
        ("pra_recommended", "none/marker"),
    }
    # the nearest number of steps to equal cost is off by half a step at most
    ours, equal, sft = (rows[arm, "scarce-4"] for arm in ("pra_recommended", "sft_flops", "sft"))
    assert abs(equal["flops"] - ours["flops"]) < 0.75 * sft["flops"] / 2
    assert all((out / name).stat().st_size > 10_000 for name in ("accuracy.png", "trajectory.png"))
    assert "PRA recommended" in (out / "table.md").read_text()
    traced = [read_json(path) for path in (out / "runs").glob("*.json")]
    steps = [
        [row["step"] for row in run["trace"]["accuracy"]] for run in traced if run.get("trace", {}).get("accuracy")
    ]
    assert steps == [[0, 1, 2]]
    assert not list((out / "work").glob("*"))
    # nothing is left to do, and a changed run is refused by nobody but done anew
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")}
    prove(_tiny(model, out, stage="run"))
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")} == before
    assert "results are in" in capsys.readouterr().out


_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1])))
from test_proof import _resumed
from experiments.proof.prove import prove
if __name__ == "__main__":
    prove(_resumed(Path(sys.argv[2]), Path(sys.argv[3])))
"""


def _resumed(model: Path, out: Path, workers: int = 1) -> ProofConfig:
    plan: dict[str, Any] = {
        "arms": ("sft", "pra_recommended"),
        "conditions": ("clean",),
        "nulls": (),
        "seeds": (1, 2),
    }
    return _tiny(model, out, workers=workers, **plan, choose=ChooseConfig(grids={}), trace=TraceConfig(every=0))


def _runs(out: Path) -> dict[str, Any]:
    """Results by file name, but for how long they took."""
    runs = {path.name: read_json(path) for path in (out / "runs").glob("*.json")}
    return {name: {**run, "seconds": None} for name, run in runs.items()}


@pytest.mark.slow
def test_a_killed_proof_goes_on_and_ends_alike(model: Path, tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(_SCRIPT)
    process = Forked(script, Path(__file__).parent, model, out)
    done: list[Path] = []
    while not done and process.poll() is None:
        time.sleep(0.05)
        done = list((out / "runs").glob("*.json"))
    # it alone: its workers are to see that it is gone
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    workers = [int(folder.name) for folder in (out / "work").glob("*")]
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    before = {path: path.read_bytes() for path in (out / "runs").glob("*.json")}
    prove(_resumed(model, out, workers=0))
    assert {path: path.read_bytes() for path in before} == before
    prove(_resumed(model, tmp_path / "whole", workers=0))
    whole = _runs(tmp_path / "whole")
    assert 0 < len(before) < len(whole)
    assert _runs(out) == whole
