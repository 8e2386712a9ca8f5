"""The command `feature-pages`: what its pages hold is what the probe finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from remind.core.errors import ConfigError
from remind.core.files import read_json
from remind.llm.endpoints import LOCAL, EndpointConfig, LLMConfig
from remind.viewing.config import FeaturePagesConfig
from remind.viewing.workbench import write_feature_pages
from sae import TopKSAE, layer_folder
from tests.viewing.conftest import data_of


def test_names_by_a_local_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The nano model is no explainer: what it writes instead of verdicts are failures, counted and not scored."""
    out = tmp_path / "pages"
    llm = LLMConfig(explain=EndpointConfig("nano", LOCAL, max_tokens=8), cache=None)
    TopKSAE(128, 64, 8, generator=torch.Generator().manual_seed(0)).save(layer_folder(tmp_path / "sae", 3))
    cfg = FeaturePagesConfig(str(tmp_path / "sae"), [], "nano", [3], str(out), most=6, limit=8, llm=llm, named=2)
    dry = replace(cfg, llm=replace(llm, dry_run=str(tmp_path / "dry.jsonl")))
    assert write_feature_pages(dry) == []
    # two names, and a score each
    assert len((tmp_path / "dry.jsonl").read_text().splitlines()) == 2 + 2
    write_feature_pages(cfg)
    assert len(read_json(out / "layer_3.explanations.json")["failures"]) >= 2
    assert "requests failed" in capsys.readouterr().out
    assert len(data_of(out / "layer_3.html")["features"]) == 6
    with pytest.raises(ConfigError, match=r"layer_3\.html exists"):
        write_feature_pages(replace(cfg, layers=None))
