"""The command `feature-pages`: what its pages hold is what the probe finds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from remind.core.errors import ConfigError, ModelError
from remind.viewing import open_workbench
from remind.viewing.config import FeaturePagesConfig
from remind.viewing.feature_pages import write_feature_pages
from sae import TopKSAE, layer_folder


def test_pages_of_the_layers_asked_for(tmp_path: Path) -> None:
    for layer in (1, 3):
        coder = TopKSAE(128, 64, 4, generator=torch.Generator().manual_seed(layer))
        coder.save(layer_folder(tmp_path / "sae", layer))
    chat = [{"speaker": who, "text": text} for who, text in (("Ana", "I had tea."), ("Ben", "I had bread <b>& jam"))]
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat))
    data, out = [str(tmp_path / "chat.jsonl")], tmp_path / "pages"
    cfg = FeaturePagesConfig(str(tmp_path / "sae"), data, "nano-untrained", [3], str(out), most=5)
    assert write_feature_pages(cfg) == [out / "layer_3.html"]
    [text] = re.findall(r'id="data">(.*?)</script>', (out / "layer_3.html").read_text(), re.DOTALL)
    shown = json.loads(text)["features"]
    bench = open_workbench(cfg.backbone, data, cfg.sae)
    examples = bench.examples()[3]
    assert len(shown) == 5
    assert all(row["fired"] == examples.fired[row["id"]] for row in shown)
    assert shown[0]["max"] == pytest.approx(float(examples.examples(shown[0]["id"], 1)[0].value), rel=1e-3)
    with pytest.raises(ConfigError, match=r"layer_3\.html exists"):
        write_feature_pages(replace(cfg, layers=None))
    with pytest.raises(ModelError, match="layer 2 does not exist"):
        write_feature_pages(replace(cfg, layers=[2], overwrite=True))
    assert [path.name for path in out.iterdir()] == ["layer_3.html"]
