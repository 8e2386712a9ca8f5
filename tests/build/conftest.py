"""A corpus small enough to be built many times, and scripts run as a person runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import ROOT, Forked
from small_corpus import rows

from sae import TopKSAE, layer_folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Six dialogues in one file."""
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(6)))
    return path


@pytest.fixture(scope="session")
def minilm_sae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained SAE of MiniLM: enough to run on, meaningless to read."""
    folder = tmp_path_factory.mktemp("sae")
    TopKSAE(384, 512, 8, generator=torch.Generator().manual_seed(0)).save(layer_folder(folder, 5))
    return folder


@pytest.fixture
def start(minilm_sae: Path) -> Callable[..., Forked]:
    """Start `build_states.py` in a process of its own, or in two as a launcher does."""

    def run(corpus: Path, out: Path, cache: Path, *more: str, processes: int = 1) -> Forked:
        given = ["--input", corpus, "--out", out, "--cache", cache, "--sae", minilm_sae]
        return Forked(ROOT / "scripts" / "build_states.py", *given, *more, processes=processes)

    return run
