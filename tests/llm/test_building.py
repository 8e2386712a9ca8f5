"""States built with a chat model over HTTP: what it writes, what it costs, what happens where it fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import chat_samples  # noqa: F401  skips without the extra llm
import pytest
import torch
from fault_proxy import Proxy, completion, error

from remind.build import BuildStatesConfig, build
from remind.core.errors import ConfigError, ModelError
from remind.data.dialogue import Corpus, Dialogue, Question, Session, Turn
from remind.data.readers import write_refmem
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.states import prompts
from remind.states.dataset import read_manifest, read_states
from sae import TopKSAE, layer_folder

pytestmark = pytest.mark.slow

SAID = {
    "s1": ["I quit smoking in March.", "Well done! How do you feel?", "Restless. I run at dawn now."],
    "s2": ["My sister bought a violin.", "Does she play well?", "Not yet. We laugh about it."],
}
STRATEGY = {
    "target_speaker": ["Ana", "Zoe"],
    "related_entities": ["cigarettes"],
    "behavioural_focus": [],
    "temporal_scope": ["March"],
    "reasoning": ["Find what stopped."],
}


@pytest.fixture
def cfg(tmp_path: Path) -> BuildStatesConfig:
    """One dialogue of two sessions, a direct question and one with options, an untrained SAE."""
    sessions = []
    for name, texts in SAID.items():
        turns = [Turn(f"{name}:{n}", ("Ana", "Ben")[n % 2], text) for n, text in enumerate(texts)]
        sessions.append(Session(name, None, tuple(turns)))
    options = ("running", "violin")
    questions = (
        Question("q1", "c", "What did Ana stop?", "direct", (), ("x-gold",), ("s1:0",), split="test"),
        Question("q2", "c", "What is Ana's habit?", "single", options, ("A",), ("s1:0",), split="test"),
    )
    write_refmem(Corpus((Dialogue("c", tuple(sessions)),), questions), tmp_path / "in.jsonl")
    TopKSAE(384, 512, 8, generator=torch.Generator().manual_seed(0)).save(layer_folder(tmp_path / "sae", 5))
    made = BuildStatesConfig(str(tmp_path / "in.jsonl"), str(tmp_path / "out"), sae=str(tmp_path / "sae"))
    made.cache = str(tmp_path / "cache")
    made.perception.retrieve.top_share = 1.0
    made.perception.retrieve.whole_tokens = 0  # of a dialogue that is kept whole nobody needs cues
    return made


def llm(url: str, tmp_path: Path, **fields: Any) -> LLMConfig:
    endpoint = EndpointConfig(
        "tiny", url, name="test", timeout=5, retries=12, price_prompt=2.0, price_completion=10.0, **fields
    )
    return LLMConfig(endpoint, cache=str(tmp_path / "llm.sqlite"))


def write(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """A server that knows its part: by the names of the fences it tells what it is asked for."""
    user = body["messages"][-1]["content"]
    if user.startswith("<<<excerpt"):
        if "violin" in user:
            return error(400, "This model's maximum context length is 10 tokens")
        return 200, {}, completion("Ana gave up cigarettes.")
    if user.startswith("<<<speakers"):
        return 200, {}, completion(json.dumps(STRATEGY))
    assert user.startswith("<<<conversation")
    letters = re.findall(r"^([A-Z])\. ", user, re.MULTILINE)
    evidence = [{"option": one, "finding": f"About {one}."} for one in letters] or [{"finding": "She says so."}]
    value = {"understanding": "What ended.", "evidence": evidence, "conclusion": "A change of habits."}
    return 200, {}, completion(f"```json\n{json.dumps(value)}\n```")


def test_a_model_behind_a_bad_line_writes_the_states(cfg: BuildStatesConfig, tmp_path: Path) -> None:
    with Proxy(answer=write, share=0.3, seed=3, faults=("rate", "cut", "malformed")) as proxy:
        cfg.llm = llm(proxy.url, tmp_path)
        cfg.max_failed = 0.5
        first = build(cfg)
        paid = dict(proxy.paid)
        assert set(paid.values()) == {1}
        assert proxy.faults
        assert not any("x-gold" in json.dumps(body) for body in proxy.bodies)
        direct, single = read_states(first)
        strategy = (
            "Target speaker: Ana\nRelated entities: cigarettes\nTemporal scope: March\nStep 1: Find what stopped."
        )
        assert strategy in direct.x0.text
        assert "Evidence:\n- She says so.\nConclusion: A change of habits.\n\nQuestion" in direct.x2.text
        assert "A. running - About A.\nB. violin - About B.\nConclusion" in single.x2.text
        assert "x-gold" in (direct.target or "")

        manifest = read_manifest(first)
        report = manifest["llm_report"]
        assert {name: (row["prompt"], row["failed"]) for name, row in report["stages"].items()} == {
            "cues": (prompts.prompt_id("ask_cue"), 1),
            "strategy": (prompts.prompt_id("ask_strategy"), 0),
            "summary": (prompts.prompt_id("ask_summary"), 0),
        }
        [failure] = report["failures"]
        assert (failure["stage"], failure["failure"], failure["sample"][:8]) == ("cues", "too_long", "c s2:0..")
        total = report["costs"]["total"]
        assert (total["prompt_tokens"], total["completion_tokens"]) == (10 * len(paid), 3 * len(paid))
        assert total["cost_usd"] == pytest.approx(len(paid) * (10 * 2.0 + 3 * 10.0) / 1e6)
        # but for the cue that failed a call each
        assert total["calls"] == len(paid) + 1
        assert "tiny@test" in manifest["llm"]

        # again: only the cue that failed is asked for, and the states do not change by a byte
        proxy.share, hits = 0.0, proxy.hits
        cfg.out = str(tmp_path / "again")
        second = build(cfg)
        assert proxy.hits == hits + 1
        assert dict(proxy.paid) == paid
        contents = [[path.read_bytes() for path in sorted(one.glob("part-*"))] for one in (first, second)]
        assert contents[0] == contents[1]


def test_too_many_failures_end_the_build(cfg: BuildStatesConfig, tmp_path: Path) -> None:
    with Proxy(answer=write) as proxy:
        cfg.llm = llm(proxy.url, tmp_path)
        with pytest.raises(ModelError, match="requests for cues to tiny@test failed, more than") as caught:
            build(cfg)
    assert "context length" in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_dry_run_asks_nothing_and_builds_nothing(
    cfg: BuildStatesConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Proxy(answer=write) as proxy:
        cfg.llm = llm(proxy.url, tmp_path)
        cfg.llm.dry_run = str(tmp_path / "asked.jsonl")

        assert build(cfg) == tmp_path / "asked.jsonl"
        assert proxy.hits == 0
    stages = [json.loads(line)["stage"] for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    assert (stages.count("strategy"), stages.count("summary")) == (2, 2)
    assert stages.count("cues") >= 2
    assert "nothing was asked" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "cache").rglob("cues-*"))
    cfg.llm.default = None
    with pytest.raises(ConfigError, match="a dry run needs"):
        build(cfg)
