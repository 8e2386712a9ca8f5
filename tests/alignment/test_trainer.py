"""Whole runs on the nano backbone."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from forked import Forked
from safetensors.torch import load_file
from torch import Tensor

from remind.alignment import checkpoint
from remind.alignment.config import DataConfig, Edge, LoraConfig, Objective, TrainConfig, TrainerConfig
from remind.alignment.metrics import read_metrics
from remind.alignment.run_folder import as_dict, read_config
from remind.alignment.trainer import Trainer, train
from remind.core.cli import parse
from remind.core.errors import ConfigError, DataError, FormatError, ModelError
from remind.core.files import read_json
from remind.states.parquet import StateRecord

ROOT = Path(__file__).parents[2]
LOOP = TrainerConfig(lr=1e-3, epochs=3, batch_size=4, eval_every=2, save_every=2, warmup=0.0)


def config(states: Path, out: Path, **changes: Any) -> TrainConfig:
    loop = {name: changes.pop(name) for name in list(changes) if name in vars(LOOP)}
    changes.setdefault("data", DataConfig(unlabelled="skip"))
    given = {"model": "nano-untrained", "states": str(states), "out": str(out), "trainer": replace(LOOP, **loop)}
    return TrainConfig(**{**given, **changes})


def weights(run: Path, step: int = 6) -> dict[str, Tensor]:
    return load_file(checkpoint.folder_of(run, step) / "model.safetensors")


def assert_identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def timeless(run: Path) -> list[dict[str, Any]]:
    machine = {"seconds", "tokens_per_second", "memory_gib"}
    return [{k: v for k, v in row.items() if k not in machine} for row in read_metrics(run)]


def first_step(run: Path) -> dict[str, Any]:
    """Metrics of the first training step; what stands before it is the held-out loss of the untrained model."""
    return next(row for row in timeless(run) if row["kind"] == "train")


def assert_close_metrics(a: Path, b: Path, rel: float) -> None:
    for one, other in zip(timeless(a), timeless(b), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if isinstance(value, float):
                # divergences of an untrained model are near 0 and lose digits to cancellation
                assert other[key] == pytest.approx(value, rel=rel, abs=1e-8), key
            else:
                assert other[key] == value, key


@pytest.fixture(scope="module")
def run(states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs over six examples in batches of four: six steps, every second with two samples."""
    return train(config(states, tmp_path_factory.mktemp("runs") / "run"))


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
        "config.yaml", "data.json", "metrics.jsonl", "checkpoints", "best.json", "cache",
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


def test_the_config_can_be_given_back(run: Path) -> None:
    cfg = parse(TrainConfig, "", ["--config", str(run / "config.yaml"), "--trainer.lr", "2e-5"])
    assert cfg == replace(read_config(run), trainer=replace(read_config(run).trainer, lr=2e-5))


def test_microbatches_change_memory_not_the_result(run: Path, states: Path, tmp_path: Path) -> None:
    other = train(config(states, tmp_path / "r", gradient_accumulation=4, gradient_checkpointing=True, save_every=6))
    assert_close_metrics(run, other, 1e-4)
    for name, value in weights(run).items():
        assert _relative(weights(other)[name], value) < 1e-4, name


@pytest.mark.parametrize("teacher", ["live", "ema"])
def test_a_shared_prefix_gives_the_same_run(states: Path, tmp_path: Path, teacher: Literal["live", "ema"]) -> None:
    objective = Objective(teacher_weights=teacher)
    plain = train(config(states, tmp_path / "a", objective=objective, max_steps=3))
    shared = train(config(states, tmp_path / "b", objective=objective, max_steps=3, prefix_sharing=True))
    assert_close_metrics(plain, shared, 1e-3)


def test_joint_gives_the_same_run(run: Path, states: Path, tmp_path: Path) -> None:
    other = train(config(states, tmp_path / "r", step="joint"))
    assert_close_metrics(run, other, 1e-4)


def test_a_seed_fixes_the_run(run: Path, states: Path, tmp_path: Path) -> None:
    assert_identical(weights(run), weights(train(config(states, tmp_path / "a"))))
    other = train(config(states, tmp_path / "b", seed=1, max_steps=1))
    assert first_step(other)["total"] != first_step(run)["total"]


def test_a_loss_that_is_not_finite_stops_with_names_and_state(
    run: Path, states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    through = Trainer.run_passes

    def poisoned(self: Trainer, *args: Any) -> dict[str, Tensor]:
        values = through(self, *args)
        if trainer.step == 4 and len(args) > 4:
            values["dist01"][2] = float("nan")
        return values

    cfg = config(states, tmp_path / "r", save_every=100)
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
    assert_identical(weights(run), weights(tmp_path / "r"))


def test_a_folder_in_use_is_refused(run: Path, states: Path) -> None:
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="holds a run already"):
        train(config(states, run))
    with pytest.raises(ConfigError, match=r"other settings \(objective\.tau, trainer\.lr\)"):
        train(config(states, run, resume=True, lr=0.5, objective=Objective(tau=1.0)))
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("held", ["states", "a log", "a file"])
def test_a_folder_of_something_else_is_refused(states: Path, tmp_path: Path, held: str) -> None:
    out = tmp_path / "r"
    if held == "states":
        shutil.copytree(states, out)
    elif held == "a log":
        out.mkdir()
        (out / "log.txt").write_text("x")
    else:
        out.write_text("x")
    before = sorted(out.rglob("*"))
    with pytest.raises(ConfigError, match=r"r (holds what is not of a run \((log|manifest)|is a file)"):
        train(config(states, out, resume=True))
    assert sorted(out.rglob("*")) == before


def test_what_a_run_killed_before_its_first_step_leaves_is_no_hindrance(states: Path, tmp_path: Path) -> None:
    kept = tmp_path / "whole"
    train(config(states, kept, max_steps=1))
    out = tmp_path / "r"
    shutil.copytree(kept / "cache", out / "cache")
    (out / "cache" / "tokens" / ".x.safetensors.1.tmp").write_bytes(b"half")
    (out / ".config.yaml.1.tmp").write_bytes(b"half")
    train(config(states, out, max_steps=1))
    assert_identical(weights(out, 1), weights(kept, 1))


@pytest.mark.parametrize("why", ["split", "length", "vocabulary"])
def test_a_refused_run_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_record: Callable[..., StateRecord],
    make_states: Callable[..., Path],
    why: str,
) -> None:
    folder = make_states(tmp_path / "s", [make_record(n, "test" if why == "split" else "train") for n in range(3)])
    out = tmp_path / "deep" / "r"
    data = DataConfig(unlabelled="skip", max_length=9, on_long="skip") if why == "length" else DataConfig()
    if why == "vocabulary":

        def odd(*_: Any) -> None:
            raise ModelError("not of one model")

        monkeypatch.setattr("remind.alignment.setup.check_vocabulary", odd)
    word = {"split": "all are of split test", "length": "left out: 3 too long", "vocabulary": "not of one model"}[why]
    with pytest.raises((DataError, ModelError), match=word):
        train(config(folder, out, data=data))
    assert not out.parent.exists()
    out.mkdir(parents=True)
    with pytest.raises((DataError, ModelError), match=word):
        train(config(folder, out, data=data))
    assert list(out.iterdir()) == []
    # a cache that others share is theirs
    with pytest.raises((DataError, ModelError), match=word):
        train(config(folder, out, data=replace(data, cache=str(tmp_path / "shared"))))
    assert list(out.iterdir()) == []


def test_a_finished_run_stays_as_it_is(run: Path, states: Path) -> None:
    before = timeless(run)
    train(config(states, run, resume=True))
    assert timeless(run) == before


def test_other_examples_are_noticed_on_resume(
    states: Path, tmp_path: Path, make_record: Callable[..., StateRecord], make_states: Callable[..., Path]
) -> None:
    folder = make_states(tmp_path / "s", [make_record(1), make_record(2)])
    cfg = config(folder, tmp_path / "r", max_steps=1)
    train(cfg)
    make_states(folder, [make_record(1), make_record(3)])
    with pytest.raises(ConfigError, match="training examples"):
        train(replace(cfg, resume=True))


def test_test_is_watched_but_chooses_nothing(
    tmp_path: Path, make_record: Callable[..., StateRecord], make_states: Callable[..., Path]
) -> None:
    folder = make_states(tmp_path / "s", [make_record(1), make_record(2, "test")])
    out = train(config(folder, tmp_path / "r", max_steps=2))
    assert [row["split"] for row in read_metrics(out) if row["kind"] == "eval"] == ["test", "test"]
    assert not (out / "best.json").exists()


def test_adapters_alone_are_trained_and_saved(states: Path, tmp_path: Path) -> None:
    lora = LoraConfig(r=2, alpha=4)
    out = train(config(states, tmp_path / "r", lora=lora, gradient_checkpointing=True, lr=1e-2))
    saved = weights(out)
    assert all("lora_" in name for name in saved)
    assert all(float(value.abs().max()) > 0 for value in saved.values())
    rows = [row["ce0"] for row in read_metrics(out) if row["kind"] == "eval"]
    assert rows[-1] < rows[0]


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        TrainConfig(states="s", out="o", dtype="bfloat16")
    with pytest.raises(ConfigError, match="joint"):
        TrainConfig(states="s", out="o", objective=Objective(target_grad="flow"))
    for change in ({"batch_size": 0}, {"max_steps": 0}, {"lr": -1.0}, {"warmup": 2.0}, {"clip": float("nan")}):
        with pytest.raises(ConfigError):
            TrainerConfig(**change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        DataConfig(max_answer=0)
    with pytest.raises(ConfigError, match="must be given"):
        Trainer(TrainConfig(states="", out="", model=""))


def test_an_encoder_is_refused(states: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="encoder"):
        train(config(states, tmp_path / "r", model="minilm"))
    assert not (tmp_path / "r").exists()


def test_a_vocabulary_that_does_not_match_is_refused(
    states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer with one token more than the model has rows, which the prompts hold."""
    import remind.alignment.setup as setup_module

    load_model = setup_module.load

    def other_tokenizer(*args: Any) -> Any:
        backbone = load_model(*args)
        rows = backbone.model.get_input_embeddings().weight.shape[0]
        spare = rows - len(backbone.tokenizer)
        backbone.tokenizer.add_tokens([f"<filler{n}>" for n in range(spare)])
        # a word of every answer's header, which the chat template puts
        backbone.tokenizer.add_tokens(["assistant"])
        return backbone

    monkeypatch.setattr(setup_module, "load", other_tokenizer)
    with pytest.raises(ModelError, match="rows: they are not of one model"):
        train(config(states, tmp_path / "r"))


def test_a_folder_that_is_no_states_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a states folder"):
        train(config(tmp_path, tmp_path / "r", model="no-such-model"))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/pra_*.yaml")), ids=lambda path: path.stem)
def test_configs_can_be_read(path: Path) -> None:
    cfg = parse(TrainConfig, "", ["--config", str(path)])
    assert cfg.objective == Objective()
    assert cfg.objective.edges == (Edge(0, 1), Edge(1, 2))
    assert cfg.trainer.batch_size == 2


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/accelerate/*.yaml")), ids=lambda path: path.stem)
def test_accelerate_configs_can_be_read(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes == 2


def test_help_names_every_group() -> None:
    process = Forked(ROOT / "scripts" / "train_pra.py", "--help")
    shown, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    for name in ("--objective.tau", "--trainer.lr", "--data.on_long", "--lora", "--objective.edges"):
        assert name in shown


def environment() -> dict[str, str]:
    # sums depend on the number of threads in their last digits
    return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}


def test_the_held_out_loss_says_how_far_it_is(
    states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("REMIND_QUIET", raising=False)
    monkeypatch.setattr("remind.core.progress.LINE_SECONDS", 0.0)
    train(config(states, tmp_path / "r", max_steps=1, batch_size=2))
    lines = [line.strip() for line in capsys.readouterr().err.split("\r") if line.startswith("train: ")]
    notes = [line.rpartition(", ")[2] for line in lines if "held-out" in line]
    # before the first step and after the last
    assert list(dict.fromkeys(notes)) == ["held-out loss of 2 of 3", "held-out loss of 3 of 3"]
    assert any(", loss " in line for line in lines)


KILLED = """
import os, signal, sys
from remind.alignment import checkpoint
from remind.alignment.config import TrainConfig
from remind.alignment.trainer import train
from remind.core.cli import main

original = checkpoint.sha256_file

def kill_in_the_middle_of_a_checkpoint(path):
    if "step-00000006" in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(path)

checkpoint.sha256_file = kill_in_the_middle_of_a_checkpoint
main(TrainConfig, train, "")
"""


@pytest.mark.slow
def test_a_killed_run_resumes_to_identical_weights(
    run: Path, states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL while the last checkpoint is being written; then the newest whole one is damaged as well."""
    cfg = config(states, tmp_path / "r")
    (tmp_path / "cfg.yaml").write_text(yaml.safe_dump(as_dict(cfg)))
    (tmp_path / "killed.py").write_text(KILLED)
    process = Forked(tmp_path / "killed.py", "--config", tmp_path / "cfg.yaml", environment=environment())
    _, errors = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL, errors
    out = tmp_path / "r"
    assert [path.name for path in checkpoint.checkpoints(out)] == ["step-00000002", "step-00000004"]
    damaged = out / "checkpoints" / "step-00000004" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "ki')

    train(replace(cfg, resume=True))
    assert "going back to the checkpoint before" in capsys.readouterr().err
    assert_identical(weights(run), weights(out))
    assert timeless(out) == timeless(run)
    assert not list((out / "checkpoints").glob(".step-*"))


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
