"""Optimisers: what decays, and weights in bfloat16."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from remind.alignment.config import LoraConfig
from remind.core.errors import ConfigError, ModelError

NARROW = {"optim": "adamw_torch_8bit", "dtype": "bfloat16"}


def test_names_of_transformers_pass_through(runs: Any, make_record: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    trainer = runs.trainer(tmp_path / "r", [make_record(0)], optim="adamw_8bit")
    assert type(trainer.create_optimizer()).__module__.startswith("bitsandbytes")


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit"])
def test_weights_in_bfloat16_need_an_optimizer_that_rounds(
    runs: Any, make_record: Any, tmp_path: Path, optim: str
) -> None:
    rows = [make_record(0)]
    with pytest.raises(ConfigError, match=r"^weights in bfloat16 do not move[^\n]*adamw_torch_8bit[^\n]*$"):
        runs.trainer(tmp_path / "r", rows, optim=optim, dtype="bfloat16")
    # adapters are float32
    runs.trainer(tmp_path / "r", rows, dtype="bfloat16", peft_config=LoraConfig(r=2))


@pytest.mark.parametrize("missing", ["torchao", "g++"])
def test_what_the_optimizer_needs_is_said_in_a_line(
    runs: Any, make_record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "g++":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        if shutil.which("g++") is None:
            pytest.skip("no g++ here, which is asked for first")
        monkeypatch.setitem(sys.modules, "torchao", None)
        monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises((ConfigError, ModelError), match=rf"^[^\n]*adamw_torch_8bit[^\n]*{missing.replace('+', '.')}"):
        runs.trainer(tmp_path / "r", [make_record(0)], **NARROW)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchao") is None or shutil.which("g++") is None, reason="needs torchao and g++")
def test_weights_in_bfloat16_move_at_a_rate_of_a_hundred_thousandth(
    runs: Any, make_record: Any, tmp_path: Path
) -> None:
    rows = [make_record(n) for n in range(4)]
    more = {"learning_rate": 1e-5, "lr_scheduler_type": "constant", "save_steps": 2, "max_steps": 4, **NARROW}
    trainer = runs.trainer(tmp_path / "whole", rows, **more)
    before = {name: p.detach().double() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    weights = dict(trainer.model.named_parameters())
    assert {weights[name].dtype for name in before} == {torch.bfloat16}
    # AdamW's steps are about as long as the rate where gradients keep their sign, and never much longer
    away = torch.cat([(weights[name].detach().double() - old).abs().flatten() for name, old in before.items()])
    assert 0.5e-5 < float(away.mean()) < 4.5e-5
    # rounded by numbers that a checkpoint keeps
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "r" / "checkpoint-2")
    runs.trainer(tmp_path / "r", rows, **more).train(resume_from_checkpoint=True)
    runs.assert_identical(runs.weights(tmp_path / "r", 4), runs.weights(tmp_path / "whole", 4))
