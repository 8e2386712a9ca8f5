"""Nothing in a folder of others is run: pickles, and code beside a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import run_module

from remind import PRAConfig, PRATrainer
from remind.core.errors import ModelError
from remind.data.sample import sample_path


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.canary,))


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A file that must not be there after the test."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists()


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def plant(folder: Path, canary: Path, file: str, **fields: Any) -> None:
    """Change fields of a configuration, and put the code they name, which creates the canary, beside it."""
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **fields}))
    (folder / "own.py").write_text(f"open({str(canary)!r}, 'w')\nclass Own: pass\n")


@pytest.mark.parametrize(("kind", "reason"), [("code", "no usable model configuration"), ("pickle", "pickle files")])
def test_a_model_folder_with_code_or_pickles_is_refused_in_one_line(
    kind: str, reason: str, model: Path, saes: Path, canary: Path, tmp_path: Path
) -> None:
    if kind == "code":
        auto_map = {"AutoConfig": "own.Own", "AutoModel": "own.Own"}
        plant(model, canary, "config.json", model_type="own", auto_map=auto_map)
    else:
        (model / "model.safetensors").unlink()
        torch.save({"weight": Bomb(canary)}, model / "pytorch_model.bin")
    words = ("--input", sample_path() / "test.jsonl", "--out", tmp_path / "out", "--backbone", model, "--sae", saes)
    status, _, output = run_module("remind", "build-states", *words, "--limit", "1", "--cache", tmp_path / "cache")
    assert status == 2
    error = output.splitlines()[-1]
    assert error.startswith("error: ")
    assert str(model) in error
    assert reason in error
    assert not (tmp_path / "out").exists()


def test_a_pickle_in_a_checkpoint_of_alignment_is_not_opened(tmp_path: Path, canary: Path) -> None:
    row = {"x0": "Ana: hi", "x1": "Ana: hi!", "x2": "Ana: hi, hi", "target": "<answer>hi</answer>"}
    args = PRAConfig(str(tmp_path), batch_size=1, use_cpu=True, disable_tqdm=True, max_steps=2, save_steps=1)
    PRATrainer("nano-untrained", args, [row, row]).train()
    checkpoint = max(tmp_path.glob("checkpoint-*"))
    torch.save({"state": Bomb(canary)}, checkpoint / "optimizer.pt")
    with pytest.raises(ModelError, match=rf"^[^\n]*{checkpoint.name}[^\n]*$"):
        PRATrainer("nano-untrained", args, [row, row]).train(resume_from_checkpoint=True)
