"""Feature pages: which tokens and patches fire, against a forward and dense codes; and names by a local model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image as Picture

from remind.core.errors import ConfigError
from remind.core.files import read_json
from remind.data.dialogue import Corpus, Dialogue, Image, Session, Turn
from remind.data.readers.refmem import write_refmem
from remind.llm.endpoints import LOCAL, EndpointConfig, LLMConfig
from remind.models.images import Pictures
from remind.models.windows import batches, make_windows
from remind.testbed.pictures import draw
from remind.viewing import open_workbench
from remind.viewing.config import FeaturePagesConfig
from remind.viewing.workbench import write_feature_pages
from sae import hooks, layer_folder
from tests.viewing.conftest import data_of, saes

CAPTIONS = ("<b>a red bicycle & a fence", "some dog full of tulips")


@pytest.fixture
def cfg(tmp_path: Path) -> FeaturePagesConfig:
    """Two sessions: a wide picture that is shown twice, and a square one."""
    wide, square = str(tmp_path / "wide.png"), str(tmp_path / "square.png")
    Picture.effect_noise((384, 128), 60).convert("RGB").save(wide)
    draw(CAPTIONS[1]).save(square)
    first = (
        Turn("t0", "Ana", "This is my bike.", images=(Image(0, wide, CAPTIONS[0]),)),
        Turn("t1", "Ben", "A fine one.", images=(Image(1, square, CAPTIONS[1]), Image(2, None, "no file"))),
    )
    second = (Turn("t2", "Ana", "Here it is again.", images=(Image(3, wide, CAPTIONS[0]),)),)
    dialogue = Dialogue("d", (Session("s0", None, first), Session("s1", None, second)))
    write_refmem(Corpus((dialogue,), ()), tmp_path / "talk.jsonl")
    saes(2)[2].save(layer_folder(tmp_path / "sae", 2))
    files = {"sae": str(tmp_path / "sae"), "data": [str(tmp_path / "talk.jsonl")], "out": str(tmp_path / "pages")}
    return FeaturePagesConfig(**files, backbone="nano-untrained", image_tokens=32, most=96)


def test_patches_are_those_of_dense_codes(cfg: FeaturePagesConfig) -> None:
    bench = open_workbench(cfg.backbone, cfg.data, cfg.sae)
    backbone, coder = bench.backbone, bench.coders[2]
    on_text, on_images = [], []
    for window in make_windows(backbone, bench.corpus.dialogues, 512, "", 32):
        ((inputs, _),) = batches(backbone, [window], 1, 32)
        with torch.no_grad():
            states = hooks.hidden_states(backbone.model, [2], **inputs)[2][0]
        dense, ids = coder.encode(states).dense(coder.d_sae), inputs["input_ids"][0]
        visual = ids == backbone.model.config.image_token_id
        special = torch.isin(ids, torch.tensor(backbone.tokenizer.all_special_ids))
        on_text.append(dense[~visual & ~special])
        on_images += dense[visual].split([Pictures(backbone, 32).count(path) for path in window.images])
    data = data_of(write_feature_pages(cfg)[0])
    rows = {row["id"]: row for row in data["features"]}
    counts = (torch.cat(on_text) > 0).sum(0), (torch.cat(on_images) > 0).sum(0)
    assert set(rows) == set((counts[0] + counts[1]).nonzero().flatten().tolist())
    assert (data["tokens"], data["image_tokens"]) == (sum(map(len, on_text)), sum(map(len, on_images)))
    for feature, row in rows.items():
        assert (row["fired"], row["fired_images"]) == (int(counts[0][feature]), int(counts[1][feature]))
        # the wide picture counts once, where it fires most
        wide = max(on_images[0][:, feature], on_images[2][:, feature], key=lambda values: float(values.max()))
        both = [(float(values.max()), values, n) for n, values in enumerate((wide, on_images[1][:, feature]))]
        wanted = sorted((one for one in both if one[0] > 0), key=lambda one: -one[0])
        assert len(row["pictures"]) == len(wanted)
        for (number, levels, _, value), (largest, values, which) in zip(row["pictures"], wanted, strict=True):
            assert data["pictures"][number][1] == CAPTIONS[which]
            assert value == pytest.approx(largest, abs=1e-4)
            assert [level != "0" for level in levels] == (values > 0).tolist()


def test_names_by_a_local_model(cfg: FeaturePagesConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The nano model is no explainer: what it writes instead of verdicts are failures, counted and not scored."""
    llm = LLMConfig(explain=EndpointConfig("nano", LOCAL, max_tokens=8), cache=None)
    cfg = replace(cfg, data=[], backbone="nano", image_tokens=0, most=6, limit=8, llm=llm, named=2)
    assert write_feature_pages(replace(cfg, llm=replace(llm, dry_run=str(tmp_path / "dry.jsonl")))) == []
    # two names, and their scores
    assert (tmp_path / "dry.jsonl").read_text().count('"explain_name') == 2
    (page,) = write_feature_pages(cfg)
    assert len(read_json(page.with_name("layer_2.explanations.json"))["failures"]) >= 2
    assert "requests failed" in capsys.readouterr().out
    assert len(data_of(page)["features"]) == 6
    with pytest.raises(ConfigError, match=r"layer_2\.html exists"):
        write_feature_pages(cfg)
