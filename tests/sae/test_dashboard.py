"""Feature pages: figures against brute force over dense codes; pictures of coders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sae import ConfigError
from sae.dashboard import logit_effects, write_dashboard
from sae.probe import Probe, collect


@pytest.fixture(scope="module")
def probe(gpt2: Any, make_tokenizer: Any, make_coder: Any) -> Probe:
    return Probe(gpt2, make_tokenizer(), {2: make_coder(16)})


def data_of(path: Path) -> Any:
    [data] = re.findall(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    return json.loads(data)


def test_a_page_tells_what_a_full_look_finds(probe: Probe, make_texts: Any, tmp_path: Path) -> None:
    coder, texts = probe.coders[2], make_texts(40, 12)
    records = collect(probe, [(f"text {n}", text) for n, text in enumerate(texts)], per_feature=3)[2]
    path = write_dashboard(tmp_path / "page.html", coder, records, features=range(48), probe=probe, title="<b>2")
    data = data_of(path)
    every = torch.cat([one.codes[2].dense(coder.d_sae)[one.counted] for one in probe.encode(texts)])
    assert data["tokens"] == len(every)
    rows = torch.nn.functional.normalize(coder.W_dec, dim=1)
    for row in data["features"]:
        feature = row["id"]
        column = every[:, feature]
        assert row["fired"] == sum(row["counts"]) == int((column > 0).sum())
        cosine = rows @ rows[feature]
        cosine[feature] = -2
        assert [value for _, value in row["near"]] == pytest.approx(cosine.topk(6).values.tolist(), abs=1e-3)
    assert "&lt;b&gt;2" in path.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="feature 48"):
        write_dashboard(path, coder, records, features=[48])


def test_effects_on_logits_are_the_products(probe: Probe, gpt2: Any, bert: Any) -> None:
    coder = probe.coders[2]
    found = logit_effects(gpt2, probe.tokenizer, coder, [0, 7], n=3)
    for feature, effects in zip((0, 7), found, strict=True):
        scores = [float(coder.W_dec[feature] @ row) for row in gpt2.get_output_embeddings().weight]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        for ends, listed in ((order[:3], effects.promoted), (order[:-4:-1], effects.suppressed)):
            assert [token for token, _ in listed] == [probe.tokenizer.decode([i]) for i in ends]
            assert [value for _, value in listed] == pytest.approx([scores[i] for i in ends], abs=1e-4)
        # none of the bins holds both signs
        assert sum(effects.counts[: len(effects.counts) // 2]) == sum(score < 0 for score in scores)
    assert logit_effects(bert, probe.tokenizer, coder, [0]) is None
