"""`PRATrainer` as a Trainer of transformers, and the command's run folder; all on nano."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModel, AutoModelForImageTextToText, TrainerCallback

from remind.alignment.config import LoraConfig
from remind.alignment.metrics import read_metrics
from remind.core import memory
from remind.core.cli import parse
from remind.core.errors import ConfigError, DataError, ModelError, RemindError
from remind.core.files import read_json
from remind.core.run_folder import as_dict
from remind.models.backbone import load_backbone
from remind.models.chat import prompt_ids
from remind.train_pra.config import DataConfig, TrainConfig
from remind.train_pra.run import make_trainer, read_config, train

ROOT = Path(__file__).parents[2]


def steps(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [row for row in read_metrics(run) if row["kind"] == kind]


@pytest.fixture(scope="module")
def records(make_record: Any) -> tuple[list[Any], list[Any]]:
    """Four to train on, three held out."""
    return [make_record(n) for n in range(4)], [make_record(10 + n) for n in range(3)]


def test_models_and_rows_of_every_kind_train_alike(runs: Any, records: Any, tmp_path: Path) -> None:
    backbone, rows = load_backbone("nano-untrained"), [[runs.row(record) for record in some] for some in records]
    for part in (backbone.model, backbone.processor, backbone.tokenizer):
        part.save_pretrained(tmp_path / "folder")
    nested = [[{**row, "x0": {"text": row["x0"]}} for row in some] for some in rows]
    ways: dict[str, tuple[Any, Any, Any]] = {
        "name": ("nano-untrained", None, records),
        "folder": (str(tmp_path / "folder"), None, rows),
        "object": (backbone.model, backbone.tokenizer, [datasets.Dataset.from_list(some) for some in nested]),
    }
    found = {}
    for name, (model, tokenizer, (some, held_out)) in ways.items():
        trainer = runs.trainer(tmp_path / name, some, held_out, model, processing_class=tokenizer, max_steps=2)
        before = trainer.evaluate()
        trainer.train()
        found[name] = ({k: v for k, v in before.items() if k.endswith(("loss", "0", "1", "2"))}, tmp_path / name)
        assert "eval_dist12" in found[name][0]
    for figures, run in found.values():
        assert figures == found["name"][0]
        runs.assert_same_runs(run, found["name"][1], 2)


def brute(model: Any, tokenizer: Any, record: Any) -> dict[str, float]:
    """The terms of one question, in float64, from logits of plain forward passes."""
    answer = [*tokenizer(record.target, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    values, logits = {}, []
    for level in range(3):
        ids = torch.tensor([[*prompt_ids(tokenizer, getattr(record, f"x{level}").text), *answer]])
        with torch.no_grad():
            logits.append(model(input_ids=ids).logits[0, -len(answer) - 1 : -1].double())
        p = logits[-1].softmax(-1)
        values[f"ce{level}"] = float(-p.log()[range(len(answer)), answer].mean())
        values[f"entropy{level}"] = float(-(p * p.log()).sum(-1).mean())
    for one, other in ((0, 1), (1, 2)):
        s, t = ((logits[level] / 2).softmax(-1) for level in (one, other))
        kl = 0.5 * (t * (t / s).log()).sum(-1) + 0.5 * (s * (s / t).log()).sum(-1)
        values[f"dist{one}{other}"] = float(kl.mean())
    values["loss"] = 0.2 * values["ce0"] + 0.8 * 2**2 * 3 * (values["dist01"] + values["dist12"])
    return values


def test_evaluate_is_the_mean_over_questions(runs: Any, records: Any, tmp_path: Path) -> None:
    backbone = load_backbone("nano")
    each = [brute(backbone.model, backbone.tokenizer, record) for record in records[1]]
    expected = {f"eval_{name}": sum(values[name] for values in each) / 3 for name in each[0]}
    trainer = runs.trainer(tmp_path / "r", records[0], records[1], "nano", per_device_eval_batch_size=2)
    found = trainer.evaluate()
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert trainer.evaluate(records[1][:1])["eval_ce0"] == pytest.approx(each[0]["ce0"], rel=1e-5)
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_a_saved_model_opens_as_any_other(runs: Any, records: Any, tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path / "r", records[0], max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "m"))
    assert not [file.name for file in (tmp_path / "m").iterdir() if file.suffix in (".bin", ".pt", ".pth")]
    ids = torch.arange(30)[None]
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=ids).logits
        assert torch.equal(AutoModelForImageTextToText.from_pretrained(tmp_path / "m")(input_ids=ids).logits, expected)
        hidden = AutoModel.from_pretrained(tmp_path / "m")(input_ids=ids).last_hidden_state
    torch.testing.assert_close(trainer.model.get_output_embeddings()(hidden), expected)


@pytest.mark.parametrize("kind", ["ours", "peft"])
def test_adapters_alone_are_trained_and_saved(runs: Any, records: Any, tmp_path: Path, kind: str) -> None:
    ours = LoraConfig(r=2, alpha=4)
    of_peft = peft.LoraConfig(r=2, lora_alpha=4, target_modules=list(ours.target_modules))
    trainer = runs.trainer(
        tmp_path / "r", *records, peft_config=ours if kind == "ours" else of_peft, learning_rate=1e-2, max_steps=4
    )
    base = runs.trainer(tmp_path / "base", *records)
    # the second matrix of each begins with zeros
    assert trainer.evaluate()["eval_loss"] == pytest.approx(base.evaluate()["eval_loss"], rel=1e-6)
    trainer.train()
    held_out = steps(tmp_path / "r", "eval")
    assert held_out[-1]["ce0"] < held_out[0]["ce0"]
    trainer.save_model(str(tmp_path / "m"))
    assert {file.name for file in (tmp_path / "m").glob("*.safetensors")} == {"adapter_model.safetensors"}
    again = peft.PeftModel.from_pretrained(load_backbone("nano-untrained").model, tmp_path / "m").eval()
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


class Counts(TrainerCallback):
    def __init__(self) -> None:
        self.steps, self.logs = 0, list[dict[str, float]]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_callbacks_and_optimizers_of_others_are_used(runs: Any, records: Any, tmp_path: Path) -> None:
    model = load_backbone("nano-untrained").model
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    counts = Counts()
    trainer = runs.trainer(
        tmp_path / "r", records[0], None, model, processing_class=load_backbone("nano-untrained").tokenizer,
        callbacks=[counts], optimizers=(sgd, torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)),
        max_steps=1, max_grad_norm=0, logging_steps=1,
    )  # fmt: skip
    trainer.train()
    (row,) = steps(tmp_path / "r")
    moved = sum(float((p.detach() - before[n]).double().square().sum()) for n, p in model.named_parameters())
    assert moved**0.5 == pytest.approx(0.5 * row["grad_norm"], rel=1e-4)
    # what trackers are told is what the metrics say
    assert counts.steps == 1
    line = next(line for line in counts.logs if "loss" in line)
    assert line["loss"] == pytest.approx(row["total"], rel=1e-5)
    assert {name: line[name] for name in ("ce0", "dist01", "entropy2")} == pytest.approx(
        {name: row[name] for name in ("ce0", "dist01", "entropy2")}
    )


def test_metrics_of_every_step(run: Path) -> None:
    rows = steps(run)
    assert [(row["step"], row["samples"]) for row in rows] == [(1, 4), (2, 2), (3, 4), (4, 2), (5, 4), (6, 2)]
    for row in rows:
        parts = (0.2 * row["hard"], 0.8 * 4 * 3 * row["dist01"], 0.8 * 4 * 3 * row["dist12"])
        assert row["total"] == pytest.approx(sum(parts))
        shares = [row[f"share_{name}"] for name in ("hard", "dist01", "dist12")]
        assert shares == pytest.approx([part / row["total"] for part in parts])
        assert {"ce1", "ce2", "entropy0", "jsd01", "jsd12", "lr", "grad_norm"} <= row.keys()
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert 0.05 < row["memory_gib"] < 64
        assert row["tokens"] > row["answer_tokens"] > 0
    held_out = steps(run, "eval")
    assert [(row["step"], row["split"], row["samples"]) for row in held_out] == [(n, "dev", 3) for n in (0, 2, 4, 6)]
    assert held_out[-1]["ce0"] < held_out[0]["ce0"]


BLOCKED = ("datasets", "pydantic", "jsonargparse", "openai")


def test_the_library_is_imported_without_the_packages_of_the_commands() -> None:
    modules = [f"remind.alignment.{path.stem}" for path in (ROOT / "remind/alignment").glob("[a-z]*.py")]
    lines = ["import sys, importlib", f"sys.modules.update(dict.fromkeys({BLOCKED}))"]
    lines += [f"[importlib.import_module(name) for name in {[*sorted(modules), 'sae']}]"]
    lines += ["from remind import PRAConfig, PRATrainer", "assert PRATrainer.__name__ == 'PRATrainer'"]
    process = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr[-2000:]


# the command


def test_the_run_folder(runs: Any, run: Path, states: Path) -> None:
    names = {path.name for path in run.iterdir() if not path.name.startswith("checkpoint-")}
    assert names == {".lock", "config.yaml", "data.json", "metrics.jsonl"}
    values = yaml.safe_load((run / "config.yaml").read_text())
    assert (values["trainer"]["learning_rate"], values["states"]) == (1e-3, str(states))
    assert as_dict(read_config(run)) == values
    cfg = parse(TrainConfig, "", ["--config", str(run / "config.yaml"), "--seed", "5"])
    assert cfg == replace(read_config(run), seed=5)
    about = read_json(run / "data.json")
    assert about["train"]["left_out"] == {"without a gold answer": 1}
    assert about["inputs"] == {"made-up.json": "0" * 64}
    before = runs.timeless(run)
    train(runs.config(states, run, resume=True))
    assert runs.timeless(run) == before


@pytest.mark.parametrize(
    ("why", "message"),
    [
        ("split", "all are of split test"),
        ("length", "left out: 3 too long"),
        ("memory", "more memory than there is"),
        ("encoder", "encoder"),
        ("no states", "not a states folder"),
        ("a file", "is a file"),
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
    cfg = runs.config(folder, tmp_path / "deep" / "r", data=data)
    if why == "no states":
        cfg = replace(cfg, states=str(tmp_path), model="no-such-model")
    elif why == "memory":
        monkeypatch.setattr(memory, "capacity", lambda device: 10_000_000)
    elif why == "encoder":
        cfg = replace(cfg, model="minilm")
    elif why == "a file":
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "r").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RemindError, match=message) as error:
        train(cfg)
    assert isinstance(error.value, ConfigError | DataError | ModelError)
    assert sorted(tmp_path.rglob("*")) == before


def test_test_is_watched_only_by_name_and_chooses_nothing(
    runs: Any, tmp_path: Path, make_record: Any, make_states: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_states(tmp_path / "s", [make_record(1), make_record(2, "test")])
    out = train(runs.config(folder, tmp_path / "plain", max_steps=1))
    assert not steps(out, "eval")
    assert "warning: no questions of split dev" in capsys.readouterr().err
    out = train(runs.config(folder, tmp_path / "r", max_steps=2, data=DataConfig(eval_split="test")))
    assert "held-out loss: 1 questions of split test" in capsys.readouterr().err
    assert [row["split"] for row in steps(out, "eval")] == ["test", "test"]
    assert read_json(out / "checkpoint-2" / "trainer_state.json")["best_global_step"] is None


# those of smaller Qwen3-VL differ in nothing that nano has; tests/docs runs them
SHIPPED = sorted(path for path in ROOT.glob("configs/**/pra_*.yaml") if "qwen3" not in path.stem)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_takes_a_step(path: Path, runs: Any, states: Path, tmp_path: Path) -> None:
    """As it is, only on nano, a few questions and the CPU."""
    words = ["--config", str(path), "--model", "nano", "--states", str(states), "--out", str(tmp_path / "r")]
    words += ["--trainer.max_steps", "1", "--data.eval_limit", "1", "--data.unlabelled", "skip"]
    cfg: Any = parse(TrainConfig, "", words)
    needed = {"bitsandbytes": cfg.quantise is not None, "torchao": cfg.trainer.optim == "adamw_torch_8bit"}
    if missing := [name for name, needs in needed.items() if needs and find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    trainer = make_trainer(cfg)
    assert trainer.model.get_input_embeddings().weight.dtype == getattr(torch, cfg.dtype)
    trainer.train()
    (row,) = steps(Path(cfg.out))
    assert row["grad_norm"] > 0
    saved: dict[str, Tensor] = runs.weights(Path(cfg.out), 1)
    assert all(value.isfinite().all() for value in saved.values())
    assert any("lora" in key for key in saved) == (cfg.lora is not None)
    expected = torch.bfloat16 if cfg.dtype == "bfloat16" and cfg.lora is None else torch.float32
    assert {value.dtype for value in saved.values()} == {expected}
