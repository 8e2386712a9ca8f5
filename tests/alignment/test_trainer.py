"""Whole runs on the nano backbone."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from remind.alignment import checkpoint
from remind.alignment.config import DataConfig, LoraConfig, Objective, TrainConfig
from remind.alignment.metrics import read_metrics
from remind.alignment.model import load
from remind.alignment.run_folder import as_dict, read_config
from remind.alignment.trainer import Trainer, train
from remind.core import memory
from remind.core.cli import parse
from remind.core.errors import ConfigError, DataError, FormatError, ModelError
from remind.core.files import read_json
from remind.core.processes import sole_writer

ROOT = Path(__file__).parents[2]


def assert_close_metrics(runs: Any, a: Path, b: Path) -> None:
    for one, other in zip(runs.timeless(a), runs.timeless(b), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            # divergences of an untrained model are near 0 and lose digits to cancellation
            expected = pytest.approx(value, rel=1e-4, abs=1e-8) if isinstance(value, float) else value
            assert other[key] == expected, key


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation": 4, "gradient_checkpointing": True, "save_every": 6},
        {"step": "joint"},
        {"prefix_sharing": False},
    ],
    ids=["microbatches", "joint", "prefix"],
)
def test_what_changes_memory_does_not_change_the_result(
    runs: Any, run: Path, states: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    other = train(runs.config(states, tmp_path / "r", **changes))
    assert_close_metrics(runs, run, other)
    for name, value in runs.weights(run).items():
        assert float((runs.weights(other)[name] - value).norm()) < 1e-4 * float(value.norm().clamp_min(1e-30)), name


def test_metrics_of_every_step(run: Path) -> None:
    rows = read_metrics(run)
    steps = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["samples"] for row in steps] == [4, 2, 4, 2, 4, 2]
    for row in steps:
        parts = (0.2 * row["hard"], 0.8 * 4 * 3 * row["dist01"], 0.8 * 4 * 3 * row["dist12"])
        assert row["total"] == pytest.approx(sum(parts))
        shares = [row[f"share_{name}"] for name in ("hard", "dist01", "dist12")]
        assert shares == pytest.approx([part / row["total"] for part in parts])
        assert row["ce0"] == row["hard"]
        assert {"ce1", "ce2", "entropy0", "entropy1", "entropy2", "jsd01", "jsd12", "lr", "grad_norm"} <= row.keys()
        assert row["seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert 0.05 < row["memory_gib"] < 64
        assert row["tokens"] > row["answer_tokens"] > 0
    held_out = [row for row in rows if row["kind"] == "eval"]
    assert [(row["step"], row["split"], row["samples"]) for row in held_out] == [(n, "dev", 3) for n in (0, 2, 4, 6)]
    assert held_out[-1]["ce0"] < held_out[0]["ce0"]


def test_the_run_folder(run: Path, states: Path) -> None:
    assert {path.name for path in run.iterdir()} == {
        ".lock", "config.yaml", "data.json", "metrics.jsonl", "checkpoints", "best.json", "cache",
    }  # fmt: skip
    values = yaml.safe_load((run / "config.yaml").read_text())
    assert values["trainer"]["lr"] == 1e-3
    assert values["states"] == str(states)
    assert as_dict(read_config(run)) == values
    about = read_json(run / "data.json")
    assert about["train"]["without_target"] == 1
    assert about["inputs"] == {"made-up.json": "0" * 64}
    best = read_json(run / "best.json")
    rows = {row["step"]: row["ce0"] for row in read_metrics(run) if row["kind"] == "eval"}
    assert (best["step"], best["ce0"]) == min(rows.items(), key=lambda item: item[1])
    assert [path.name for path in checkpoint.checkpoints(run)] == ["step-00000004", "step-00000006"]


def test_configs_of_older_runs_open_unless_they_set_what_is_gone(run: Path, tmp_path: Path) -> None:
    values = yaml.safe_load((run / "config.yaml").read_text())
    for group, name, value in (("objective", "clip_kl", None), ("data", "group_by_length", False)):
        values[group][name] = value
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    assert read_config(tmp_path) == read_config(run)
    for group, name, value in (("data", "on_long", "cut"), ("objective", "clip_kl", 2.0)):
        file.write_text(yaml.safe_dump({**values, group: {**values[group], name: value}}))
        with pytest.raises(ConfigError, match=f"{name}.* no longer supported"):
            read_config(tmp_path)


def test_the_config_can_be_given_back(run: Path) -> None:
    cfg = parse(TrainConfig, "", ["--config", str(run / "config.yaml"), "--trainer.lr", "2e-5"])
    assert cfg == replace(read_config(run), trainer=replace(read_config(run).trainer, lr=2e-5))


def test_a_seed_fixes_the_run(runs: Any, run: Path, states: Path, tmp_path: Path) -> None:
    runs.assert_identical(runs.weights(run), runs.weights(train(runs.config(states, tmp_path / "a"))))
    other = train(runs.config(states, tmp_path / "b", seed=1, max_steps=1))
    one, two = (next(row for row in read_metrics(of) if row["kind"] == "train") for of in (run, other))
    assert one["total"] != two["total"]


def test_a_loss_that_is_not_finite_stops_with_names_and_state(
    runs: Any, run: Path, states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    through = Trainer.run_passes

    def poisoned(self: Trainer, *args: Any) -> dict[str, Tensor]:
        values = through(self, *args)
        if trainer.step == 4 and len(args) > 3:
            values["dist01"][2] = float("nan")
        return values

    cfg = runs.config(states, tmp_path / "r", save_every=100)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run_passes", poisoned)
        trainer = Trainer(cfg)
        guilty = trainer.data.train.items[trainer.order.batch(4)[2]].id
        with pytest.raises(ModelError, match=rf"not finite in step 5, questions {guilty};"):
            trainer.fit()
    report = read_json(tmp_path / "r" / "failure.json")
    assert report["questions"] == [guilty]
    assert report["values"]["dist01"] == ["nan"]
    assert len(report["batch"]) == 4
    # the state before the step is whole: with the cause gone, the run ends where it would have
    train(replace(cfg, resume=True))
    runs.assert_identical(runs.weights(run), runs.weights(tmp_path / "r"))


def test_a_model_that_cannot_fit_is_refused(
    runs: Any, states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "capacity", lambda device: 10_000_000)
    with pytest.raises(ConfigError, match=r"more memory than there is \(main memory: weights .* would help$"):
        train(runs.config(states, tmp_path / "r"))
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_refused(runs: Any, run: Path, states: Path) -> None:
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="already holds a run"):
        train(runs.config(states, run))
    with pytest.raises(ConfigError, match=r"other settings \(objective\.tau, trainer\.lr\)"):
        train(runs.config(states, run, resume=True, lr=0.5, objective=Objective(tau=1.0)))
    # another process trains in it
    with sole_writer(run), pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* is at work in {run}"):
        train(replace(read_config(run), resume=True))
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("held", ["states", "a log", "a file"])
def test_a_folder_of_something_else_is_refused(runs: Any, states: Path, tmp_path: Path, held: str) -> None:
    out = tmp_path / "r"
    if held == "states":
        shutil.copytree(states, out)
    elif held == "a log":
        out.mkdir()
        (out / "log.txt").write_text("x")
    else:
        out.write_text("x")
    before = sorted(out.rglob("*"))
    with pytest.raises(ConfigError, match=r"r (holds files that are not of a run \((log|manifest)|is a file)"):
        train(runs.config(states, out, resume=True))
    assert sorted(out.rglob("*")) == before


def test_what_a_run_killed_before_its_first_step_leaves_is_no_hindrance(
    runs: Any, states: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "whole"
    train(runs.config(states, kept, max_steps=1))
    out = tmp_path / "r"
    shutil.copytree(kept / "cache", out / "cache")
    (out / "cache" / "tokens" / ".x.safetensors.1.tmp").write_bytes(b"half")
    (half := out / ".config.yaml.0a_b2c3d.tmp").write_bytes(b"half")
    train(runs.config(states, out, max_steps=1))
    assert not half.exists()
    runs.assert_identical(runs.weights(out, 1), runs.weights(kept, 1))


@pytest.mark.parametrize(
    ("why", "message"),
    [
        ("split", "all are of split test"),
        ("length", "left out: 3 too long"),
        ("vocabulary", "rows: they belong to different models"),
        ("encoder", "encoder"),
        ("no states", "not a states folder"),
    ],
)
def test_a_refused_run_leaves_nothing(
    runs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_record: Any,
    make_states: Any,
    why: str,
    message: str,
) -> None:
    folder = make_states(tmp_path / "s", [make_record(n, "test" if why == "split" else "train") for n in range(3)])
    data = DataConfig(unlabelled="skip", max_length=9, on_long="skip") if why == "length" else DataConfig()
    settings = {"data": data, "model": "minilm" if why == "encoder" else "nano-untrained"}
    if why == "no states":
        folder, settings["model"] = tmp_path, "no-such-model"
    elif why == "vocabulary":
        monkeypatch.setattr("remind.alignment.setup.load", with_more_tokens)
    out = tmp_path / "deep" / "r"
    for before in (False, True):
        if before:
            out.mkdir(parents=True)
        with pytest.raises((DataError, FormatError, ModelError), match=message):
            train(runs.config(folder, out, **settings))
        assert list(out.iterdir()) == [] if before else not out.parent.exists()
    # a cache that others share is theirs
    settings["data"] = replace(data, cache=str(tmp_path / "shared"))
    with pytest.raises((DataError, FormatError, ModelError), match=message):
        train(runs.config(folder, out, **settings))
    assert list(out.iterdir()) == []


def with_more_tokens(*args: Any) -> Any:
    """A model whose tokenizer has one token more than it has rows, which the prompts hold."""
    backbone = load(*args)
    spare = backbone.model.get_input_embeddings().weight.shape[0] - len(backbone.tokenizer)
    # the last one is a word of every answer's header, which the chat template puts
    backbone.tokenizer.add_tokens([*(f"<filler{n}>" for n in range(spare)), "assistant"])
    return backbone


def test_a_finished_run_stays_as_it_is(runs: Any, run: Path, states: Path) -> None:
    before = runs.timeless(run)
    train(runs.config(states, run, resume=True))
    assert runs.timeless(run) == before


def test_other_examples_are_noticed_on_resume(
    runs: Any, states: Path, tmp_path: Path, make_record: Any, make_states: Any
) -> None:
    folder = make_states(tmp_path / "s", [make_record(1), make_record(2)])
    cfg = runs.config(folder, tmp_path / "r", max_steps=1)
    train(cfg)
    make_states(folder, [make_record(1), make_record(3)])
    with pytest.raises(ConfigError, match="training examples"):
        train(replace(cfg, resume=True))


def test_test_is_watched_only_by_name_and_chooses_nothing(
    runs: Any, tmp_path: Path, make_record: Any, make_states: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_states(tmp_path / "s", [make_record(1), make_record(2, "test")])
    out = train(runs.config(folder, tmp_path / "plain", max_steps=1))
    assert not [row for row in read_metrics(out) if row["kind"] == "eval"]
    assert "warning: no questions of split dev" in capsys.readouterr().err
    out = train(runs.config(folder, tmp_path / "r", max_steps=2, eval_split="test"))
    assert "held-out loss: 1 questions of split test" in capsys.readouterr().err
    assert [row["split"] for row in read_metrics(out) if row["kind"] == "eval"] == ["test", "test"]
    assert not (out / "best.json").exists()


def test_adapters_alone_are_trained_and_saved(runs: Any, states: Path, tmp_path: Path) -> None:
    lora = LoraConfig(r=2, alpha=4)
    out = train(runs.config(states, tmp_path / "r", lora=lora, gradient_checkpointing=True, lr=1e-2))
    saved = runs.weights(out)
    assert all("lora_" in name for name in saved)
    assert all(float(value.abs().max()) > 0 for value in saved.values())
    rows = [row["ce0"] for row in read_metrics(out) if row["kind"] == "eval"]
    assert rows[-1] < rows[0]


# those of smaller Qwen3-VL differ in nothing that nano has; tests/docs runs them
SHIPPED = sorted(path for path in ROOT.glob("configs/**/pra_*.yaml") if "qwen3" not in path.stem)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_takes_a_step(path: Path, runs: Any, states: Path, tmp_path: Path) -> None:
    """As it is, only on nano, a few questions and the CPU."""
    words = ["--config", str(path), "--model", "nano-untrained", "--states", str(states), "--out", str(tmp_path / "r")]
    words += ["--trainer.max_steps", "1", "--trainer.eval_limit", "1", "--data.unlabelled", "skip"]
    cfg: Any = parse(TrainConfig, "", words)
    if cfg.quantise is not None and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed: 4 bits are not tested")
    train(cfg)
    row = next(row for row in read_metrics(cfg.out) if row["kind"] == "train")
    assert (row["step"], row["grad_norm"] > 0) == (1, True)
    saved, moments = (runs.weights(Path(cfg.out), 1, name) for name in ("model", "optimizer"))
    assert all(value.isfinite().all() for value in saved.values())
    assert any("lora" in key for key in saved) == (cfg.lora is not None)
    expected = torch.bfloat16 if cfg.dtype == "bfloat16" and cfg.lora is None else torch.float32
    assert {value.dtype for value in saved.values()} == {expected}
    codes = any(value.dtype == torch.int8 for value in moments.values())
    assert codes == (cfg.trainer.optimizer == "adamw8bit")


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/accelerate/*.yaml")), ids=lambda path: path.stem)
def test_accelerate_configs_can_be_read(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes == 2


def test_the_held_out_loss_says_how_far_it_is(
    runs: Any, states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("REMIND_QUIET", raising=False)
    monkeypatch.setattr("remind.core.progress.LINE_SECONDS", 0.0)
    train(runs.config(states, tmp_path / "r", max_steps=1, batch_size=2))
    lines = [line.strip() for line in capsys.readouterr().err.split("\r") if line.startswith("train: ")]
    notes = [line.rpartition(", ")[2] for line in lines if "held-out" in line]
    # before the first step and after the last
    assert list(dict.fromkeys(notes)) == ["held-out loss of 2 of 3", "held-out loss of 3 of 3"]
    assert any(", loss " in line for line in lines)


def test_a_killed_run_resumes_to_identical_weights(
    runs: Any, run: Path, states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if killed while it wrote a checkpoint and a line of metrics; the newest whole one is damaged as well."""
    out = shutil.copytree(run, tmp_path / "r")
    damaged = checkpoint.folder_of(out, 6) / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    shutil.copytree(checkpoint.folder_of(out, 4), out / "checkpoints" / ".step-00000008.x.tmp")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "ki')
    train(runs.config(states, out, resume=True))
    assert "falling back to the previous checkpoint" in capsys.readouterr().err
    runs.assert_identical(runs.weights(run), runs.weights(out))
    assert runs.timeless(out) == runs.timeless(run)
    assert not list((out / "checkpoints").glob(".step-*"))
