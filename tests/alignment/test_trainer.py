"""`PRATrainer` as a Trainer of transformers, and the command's run folder; all on nano."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import pytest
import torch
from transformers import TrainerCallback

from remind.alignment import step
from remind.alignment.config import LoraConfig
from remind.alignment.objective import pra_loss
from remind.core.errors import ConfigError, RemindError
from remind.core.files import read_json
from remind.models.backbone import load_backbone
from remind.models.chat import prompt_ids
from remind.train_pra.config import read_config
from remind.train_pra.run import make_trainer, train


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
    for name, (model, tokenizer, (some, held_out)) in ways.items():
        runs.trainer(tmp_path / name, some, held_out, model, processing_class=tokenizer, max_steps=2).train()
        runs.assert_same_runs(tmp_path / name, tmp_path / "name", 2)


def test_evaluate_is_the_mean_over_questions(runs: Any, records: Any, tmp_path: Path) -> None:
    """Of `pra_loss` in float64, from logits of plain forward passes."""
    backbone = load_backbone("nano")
    tokenizer, losses = backbone.tokenizer, []
    for record in records[1]:
        answer = [*tokenizer(record.target, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        logits = []
        for level in (record.x0, record.x1, record.x2):
            ids = torch.tensor([[*prompt_ids(tokenizer, level.text), *answer]])
            with torch.no_grad():
                logits.append(backbone.model(input_ids=ids).logits[0, -len(answer) - 1 : -1].double())
        losses.append(pra_loss(*logits, torch.tensor(answer)))
    trainer = runs.trainer(tmp_path / "r", records[0], records[1], "nano", per_device_eval_batch_size=2)
    found = trainer.evaluate()
    for name, field in (("loss", "total"), ("ce0", "hard"), ("dist01", "dist01"), ("dist12", "dist12")):
        expected = fmean(float(getattr(loss, field)) for loss in losses)
        assert found[f"eval_{name}"] == pytest.approx(expected, rel=1e-3, abs=1e-7)


def test_held_out_rows_without_a_level_are_measured_under_the_others(runs: Any, records: Any, tmp_path: Path) -> None:
    rows = [{name: value for name, value in runs.row(record).items() if name != "x2"} for record in records[1]]
    trainer = runs.trainer(tmp_path / "r", records[0], rows, "nano", edges=[(0, 1), (0, 2)])
    whole = runs.trainer(tmp_path / "w", records[0], records[1], "nano", edges=[(0, 1), (0, 2)]).evaluate()
    found = trainer.evaluate()
    assert "eval_dist02" in whole
    assert "eval_dist02" not in found
    assert found["eval_dist01"] == pytest.approx(whole["eval_dist01"], rel=1e-4)


def test_training_twice_on_one_trainer_is_training_once(runs: Any, records: Any, tmp_path: Path) -> None:
    """The teacher stays what it was before the first time, and a signal ends one time of training."""
    told = {"teacher_model_kind": "base", "edges": [(0, 1), (0, 2)], "lr_scheduler_type": "constant"}
    once = runs.trainer(tmp_path / "once", records[0], max_steps=4, **told)
    once.train()
    twice = runs.trainer(tmp_path / "twice", records[0], max_steps=4, callbacks=[Interrupt(2)], **told)
    with pytest.raises(SystemExit, match="130"):
        twice.train()
    twice.train(resume_from_checkpoint=True)
    assert twice.state.global_step == 4
    runs.assert_identical(runs.weights(tmp_path / "twice", 4), runs.weights(tmp_path / "once", 4))


class Interrupt(TrainerCallback):
    """Ctrl-C in a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit"])
def test_weights_in_bfloat16_need_an_optimizer_that_rounds(runs: Any, records: Any, tmp_path: Path, optim: str) -> None:
    with pytest.raises(ConfigError, match=r"^weights in bfloat16 do not move[^\n]*adamw_torch_8bit[^\n]*$"):
        runs.trainer(tmp_path, records[0], optim=optim, dtype="bfloat16")
    # adapters are float32
    runs.trainer(tmp_path, records[0], dtype="bfloat16", peft_config=LoraConfig(r=2))


# the command


def test_a_tracker_that_is_not_installed_is_refused_first(runs: Any, states: Path, tmp_path: Path) -> None:
    """Nor is anything written: no model of that name is looked for."""
    with pytest.raises(ConfigError, match=r"^report_to: no tracker comet_ml; pip install comet_ml[^\n]*$"):
        make_trainer(runs.config(states, tmp_path / "r", model="no-such-model", report_to="comet_ml"))


def test_the_run_folder_and_its_metrics(runs: Any, run: Path, states: Path) -> None:
    names = {path.name for path in run.iterdir() if not path.name.startswith("checkpoint-")}
    assert names == {".lock", "config.yaml", "data.json", "metrics.jsonl"}
    assert read_config(run) == runs.config(states.resolve(), run, save_steps=1, save_total_limit=None)
    about = read_json(run / "data.json")
    assert about["train"] == {"examples": 6, "labelled": 6, "left_out": {"without an answer": 1}}
    assert (about["inputs"], about["held_out"]) == ({"made-up.json": "0" * 64}, {"examples": 3, "split": "dev"})
    rows, before = runs.timeless(run, "train"), runs.timeless(run)
    assert [(row["step"], row["samples"]) for row in rows] == [(1, 4), (2, 2), (3, 4), (4, 2), (5, 4), (6, 2)]
    for row in rows:
        assert row["share_hard"] == pytest.approx(0.2 * row["hard"] / row["total"])
        assert {"ce1", "ce2", "entropy0", "jsd01", "jsd12", "lr", "grad_norm", "tokens"} <= row.keys()
    held_out = runs.timeless(run, "eval")
    assert [(row["step"], row["split"], row["samples"]) for row in held_out] == [(n, "dev", 3) for n in (0, 2, 4, 6)]
    # a run that is through stays as it is
    train(runs.config(states, run, resume=True, save_steps=1, save_total_limit=None))
    assert runs.timeless(run) == before


@pytest.mark.parametrize(
    ("why", "message"),
    [
        ("split", "nothing to train on: all are of split test; give the dialogue file questions of split train"),
        ("memory", r"^the run needs more memory than there is \(main memory: weights [^\n]*$"),
        ("no states", "not a states folder"),
    ],
)
def test_a_refused_run_leaves_nothing(
    runs: Any, tmp_path: Path, monkeypatch: Any, make_record: Any, make_states: Any, why: str, message: str
) -> None:
    folder = make_states(tmp_path / "s", [make_record(n, "test" if why == "split" else "train") for n in range(3)])
    cfg = runs.config(folder, tmp_path / "deep" / "r")
    if why == "no states":
        cfg = replace(cfg, states=str(tmp_path), model="no-such-model")
    elif why == "memory":
        monkeypatch.setattr(step, "capacity", lambda device: 10_000_000)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RemindError, match=message):
        train(cfg)
    assert sorted(tmp_path.rglob("*")) == before
