"""Runs of `remind train-memory`: the folder, resuming to the same bits, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the extra rl")

from remind.alignment.config import LoraConfig
from remind.core.errors import ConfigError, ModelError
from remind.core.files import read_json, sha256_file
from remind.memory_training import pico, train
from remind.memory_training.config import MemoryWorldConfig, PolicyGradientConfig, RewardConfig, TrainMemoryConfig
from remind.memory_training.episodes import Scores
from remind.memory_training.rewards import ROLES, Pair

WORLD = MemoryWorldConfig(dialogues=2, sessions=2, evaluate=1)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "pico"
    pico.write_pico(folder, 0, layers=2, hidden_size=32)
    return folder


@pytest.fixture
def config(start: Path, tmp_path: Path) -> Callable[..., TrainMemoryConfig]:
    def make(method: Any, name: str, **changes: Any) -> TrainMemoryConfig:
        common: dict[str, Any] = {"model": str(start), "world": WORLD, "lr": 1e-2, "save_every": 1, "steps": 3}
        if method in ("adrpo", "salimory"):
            common |= {
                "rl": PolicyGradientConfig(group=4, inner_epochs=2, reply_tokens=6),
                "reward": RewardConfig(core_free=10, core_full=25, free_below=12),
                "batch_size": 2,
            }
        return TrainMemoryConfig(str(tmp_path / name), method, **common | changes)

    return make


class Killed(BaseException):
    pass


@pytest.mark.parametrize(("method", "place"), [("sft", 2), ("adrpo", 4), ("salimory", 3)])
def test_a_run_that_is_cut_off_ends_with_the_same_bits(
    method: str, place: int, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off before the metrics of this update are written; of adrpo it is the second of a generation."""

    class Words(train.MemBuilderTask):
        """Rewards every word of a reply: a policy with random weights never gets a valid one."""

        def score(self, row: int, outcomes: Any) -> Scores:
            return Scores({role: [float(len(set(one[n].split()))) for one in outcomes] for n, role in enumerate(ROLES)})

    class Numbers(train.SaliMoryTask):
        """Rewards rollouts by their number, and compares the filters of two."""

        def score(self, row: int, outcomes: Any) -> Scores:
            rewards = [float(n) for n in range(len(outcomes))]
            return Scores(dict.fromkeys(pico.SALIMORY, rewards), pairs=(Pair("utilizer", 0, 3, 0.5),))

    monkeypatch.setattr(train, "MemBuilderTask", Words)
    monkeypatch.setattr(train, "SaliMoryTask", Numbers)
    changes = {"lora": LoraConfig(2, 4)} if method == "sft" else {}
    whole = train.train_memory(config(method, "whole", **changes))
    cut = config(method, "cut", resume=True, **changes)
    inner = train._Recorder.on_log
    left = [place]

    def on_log(self: Any, args: Any, state: Any, *rest: Any, **named: Any) -> None:
        if left and self.offset + state.global_step == left[0]:
            left.clear()
            raise Killed
        inner(self, args, state, *rest, **named)

    monkeypatch.setattr(train._Recorder, "on_log", on_log)
    with pytest.raises(Killed):
        train.train_memory(cut)
    assert not left
    train.train_memory(cut)
    files = ("policy/model.safetensors", "checkpoints/step-00000003/optimizer.safetensors", "report.json")
    for name in files:
        assert sha256_file(whole / name) == sha256_file(Path(cut.out) / name)
    rows = [[json.loads(line) for line in (out / "metrics.jsonl").open()] for out in (whole, Path(cut.out))]
    times = {"seconds", "cpu_seconds", "step_time"}
    timeless, other = ([{name: row[name] for name in row.keys() - times} for row in own] for own in rows)
    assert timeless == other
    assert [row["step"] for row in timeless] == list(range(1, len(timeless) + 1))
    more = {"factual", "vague", "profile", "filter"} if "salimory" in method else {"held_out", "rewarded"}
    assert {"final", "valid", "words"} | more == read_json(whole / "report.json").keys()
    # what is trained moved, and nothing is left that another could unpickle
    assert sha256_file(whole / "policy/model.safetensors") != sha256_file(Path(cut.model) / "model.safetensors")
    names = {path.suffix for path in whole.rglob("*") if path.is_file()}
    assert names <= {".safetensors", ".json", ".jsonl", ".yaml", ".lock", ""}


def test_a_folder_is_not_run_over(config: Any, tmp_path: Path) -> None:
    cfg = config("sft", "run", steps=1)
    train.train_memory(cfg)
    with pytest.raises(ConfigError, match="already holds a run"):
        train.train_memory(cfg)
    with pytest.raises(ConfigError, match=r"other settings \(lr\)"):
        train.train_memory(replace(cfg, lr=0.5, resume=True))
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not of a run"):
        train.train_memory(replace(cfg, out=str(other)))
    with pytest.raises(ConfigError, match=r"not a multiple of rl\.micro_groups 2"):
        train.train_memory(config("adrpo", "odd", batch_size=3, rl=PolicyGradientConfig(group=4, micro_groups=2)))


@pytest.mark.parametrize(("model", "message"), [("/no/where", "no such folder"), ("minilm", "not a causal language")])
def test_a_model_that_cannot_be_a_policy(model: str, message: str, config: Any) -> None:
    cfg = config("sft", "run", model=model)
    with pytest.raises(ModelError, match=f"^{model}: {message}"):
        train.train_memory(cfg)
    assert not Path(cfg.out).exists()


def test_vllm_is_refused_where_it_cannot_run(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config("adrpo", "run", rl=PolicyGradientConfig(vllm="colocate"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^rl\.vllm colocate: vLLM samples on a GPU"):
        train.train_memory(cfg)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(import_module("trl.import_utils"), "is_vllm_available", lambda: False)
    with pytest.raises(ConfigError, match=r"needs the package vllm"):
        train.train_memory(cfg)
    assert not Path(cfg.out).exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"rl": {"group": 3}},
        {"reward": {"core_free": 400.0}},
        {"reward": {"low": 2.0}},
        {"rl": {"alpha": 0.0}},
        {"lora": {"r": 2}},
        {"dtype": "bfloat16"},
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any]) -> None:
    kinds: dict[str, Any] = {"rl": PolicyGradientConfig, "reward": RewardConfig, "lora": LoraConfig}
    with pytest.raises(ConfigError):
        TrainMemoryConfig("out", **{k: kinds[k](**v) if k in kinds else v for k, v in changes.items()})
