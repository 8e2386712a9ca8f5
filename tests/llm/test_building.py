"""States built with a chat model over HTTP: what it writes, what it costs, what happens where it fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_proxy import Proxy, completion, error
from small_corpus import rows

from remind.build import BuildStatesConfig, build
from remind.core.errors import ModelError
from remind.core.files import write_rows
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.states.dataset import read_manifest, read_states
from sae import TopKSAE, layer_folder

pytestmark = pytest.mark.slow


@pytest.fixture
def cfg(tmp_path: Path) -> BuildStatesConfig:
    """One dialogue, a direct question and one with options, an untrained SAE."""
    write_rows(tmp_path / "in.jsonl", rows(1))
    TopKSAE(384, 512, 8, generator=torch.Generator().manual_seed(0)).save(layer_folder(tmp_path / "sae", 5))
    made = BuildStatesConfig(str(tmp_path / "in.jsonl"), str(tmp_path / "out"), sae=str(tmp_path / "sae"))
    made.cache = str(tmp_path / "cache")
    made.perception.segment.max_tokens = 40
    made.perception.retrieve.top_share = 1.0
    made.perception.retrieve.whole_tokens = 0  # of a dialogue that is kept whole nobody needs cues
    return made


def llm(url: str, tmp_path: Path) -> LLMConfig:
    prices = {"price_prompt": 2.0, "price_completion": 10.0}
    return LLMConfig(EndpointConfig("tiny", url, "test", retries=12, **prices), cache=str(tmp_path / "llm.sqlite"))  # type: ignore[arg-type]


def write(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """A server that knows its part: by the names of the fences it tells what it is asked for."""
    user = body["messages"][-1]["content"]
    if user.startswith("<<<excerpt"):
        if "violin" in user:
            return error(400, "This model's maximum context length is 10 tokens")
        return 200, {}, completion("Ana gave up coffee.")
    if user.startswith("<<<speakers"):
        lists = {"target_speaker": ["Ana", "Zoe"], "related_entities": ["coffee"], "behavioural_focus": []}
        return 200, {}, completion(json.dumps({**lists, "temporal_scope": [], "reasoning": ["Find what stopped."]}))
    letters = re.findall(r"^([A-Z])\. ", user, re.MULTILINE)
    evidence = [{"option": one, "finding": f"About {one}."} for one in letters] or [{"finding": "She says so."}]
    value = {"understanding": "What ended.", "evidence": evidence, "conclusion": "A change of habits."}
    return 200, {}, completion(f"```json\n{json.dumps(value)}\n```")


def test_a_model_behind_a_bad_line_writes_the_states(cfg: BuildStatesConfig, tmp_path: Path) -> None:
    with Proxy(answer=write, share=0.3, seed=3, faults=("rate", "cut", "malformed")) as proxy:
        cfg.llm = llm(proxy.url, tmp_path)
        with pytest.raises(ModelError, match=r"requests for cues to tiny@test failed, more than.*context length"):
            build(cfg)
        cfg.max_failed, cfg.out = 0.5, str(tmp_path / "once")
        first = build(cfg)
        paid = dict(proxy.paid)
        assert set(paid.values()) == {1}
        direct, single = sorted(read_states(first), key=lambda record: record.question_id)
        assert "Related entities: coffee\nStep 1: Find what stopped." in direct.x0.text
        assert "A. a boat - About A.\nB. a violin - About B.\nConclusion" in single.x2.text
        report = read_manifest(first)["llm_report"]
        assert [row["failed"] for row in report["stages"].values()] == [1, 0, 0]
        assert [(one["stage"], one["failure"]) for one in report["failures"]] == [("cues", "too_long")]
        total = report["costs"]["total"]
        # but for the cue that failed a call each
        assert total["calls"] == len(paid) + 1
        assert total["cost_usd"] == pytest.approx(len(paid) * (10 * 2.0 + 3 * 10.0) / 1e6)
