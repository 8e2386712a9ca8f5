"""Instruction models as policies: the requests of `remind run-memory`, its reading of replies, adapters and folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scripted import ScriptedChat, services
from words import WordEncoder

from remind.alignment.config import LoraConfig
from remind.alignment.metrics import read_metrics
from remind.llm.request import Request
from remind.memory.base import Query
from remind.memory.membuilder import MemBuilderSystem
from remind.memory.operations import BANKS
from remind.memory.salimory import SaliMorySystem
from remind.memory_training import pico, train
from remind.memory_training import salimory as s
from remind.memory_training.config import (
    MemoryWorldConfig,
    PolicyGradientConfig,
    SaliMoryConfig,
    TrainMemoryConfig,
)
from remind.memory_training.episodes import Scores, together
from remind.memory_training.pico import Chat
from remind.memory_training.rewards import ROLES
from remind.models.backbone import load_backbone
from remind.testbed.memory_world import ORACLE, make_life

#: The core block and a semantic entry are updated in its second session.
LIFE = make_life(0, 21, 2)


# the same requests and replies as in use


def by_number(request: Request, view: pico.View, reply: str) -> str:
    """JSON whose references are the numbers of this request: a bank has its entries in another order."""
    ops, listed = json.loads(view.as_json(reply))["ops"], request.messages[1].text.splitlines()
    for op in (op for op in ops if "old" in op):
        text = view.entries[op["old"] - 1].text
        op["old"] = next(int(line.partition(".")[0]) for line in listed if line.endswith(text))
    return json.dumps({"ops": ops})


def test_a_bank_of_membuilder_asks_what_was_trained_on_and_takes_the_same_replies(tmp_path: Path) -> None:
    lessons = list(pico.lessons(LIFE, ORACLE, most=Chat.limits[0]))
    pairs = iter([pair for one in lessons for pair in zip(one.views, one.replies, strict=True)])
    scribe = ScriptedChat(lambda request: by_number(request, *next(pairs)))
    with MemBuilderSystem().open(tmp_path / "b", LIFE.id, services(WordEncoder(), scribe)) as bank:  # type: ignore[arg-type]
        for meeting in LIFE.meetings:
            bank.ingest(meeting.session)
            assert bank.lost == []
        state = bank.state()  # type: ignore[attr-defined]
    trained = [view.request() for one in lessons for view in one.views]
    assert [lines(one) for one in scribe.asked] == [lines(one) for one in trained]
    # commands and JSON make one memory
    last = lessons[-1]
    expected, _ = pico.remember(last.state, LIFE.id, list(zip(last.views, last.replies, strict=True)))
    for role in ROLES:
        assert [one.text for one in state.kept(role)] == [one.text for one in expected.kept(role)]


def lines(request: Request) -> list[list[str]]:
    """Of each message, without numbers of entries and the code of the fences, which is of all that they hold."""
    code = request.messages[0].text.split("that carry the code ")[1][:8]
    texts = (one.text.replace(code, "") for one in request.messages)
    return [sorted(line.split(". ")[-1] for line in text.splitlines()) for text in texts]


def test_a_bank_of_salimory_asks_what_was_trained_on_and_takes_the_same_replies(tmp_path: Path) -> None:
    run = s.rollout(LIFE.id, [s.told(meeting) for meeting in LIFE.meetings], LIFE.final, Chat.limits)
    ((outcome, traces),) = together([run], lambda shown: [s.expert_reply(one, ORACLE, Random(0)) for one in shown])
    replies = iter([one.as_json(reply) for one, reply in traces])
    scribe = ScriptedChat(lambda _: next(replies))
    with SaliMorySystem().open(tmp_path / "b", LIFE.id, services(WordEncoder(), scribe)) as bank:  # type: ignore[arg-type]
        for meeting in LIFE.meetings:
            bank.ingest(meeting.session)
            assert bank.lost == []
        for ask, profile in zip(LIFE.final, outcome.profiles, strict=True):
            used = bank.retrieve(Query(ask.text), k=1).trace["used"]
            assert len(used) == len(profile.used or ())
        state = bank.state()  # type: ignore[attr-defined]
    assert [one.messages for one in scribe.asked] == [one.request().messages for one, _ in traces]
    assert [one.text for one in state.current(*BANKS)] == [one.text for one in outcome.bank]


# training


class Lengths(train.MemBuilderTask):
    """Rewards that tell the replies of random weights apart."""

    def score(self, row: int, outcomes: Any) -> Scores:
        rewards = {role: [float(n) for n in range(len(outcomes))] for role in ROLES}
        return replace(super().score(row, outcomes), rewards=rewards)


@pytest.mark.parametrize(("method", "steps"), [("sft", 5), ("adrpo", 2)])
def test_adapters_alone_are_trained_and_the_folder_has_them_merged(
    method: Any, steps: int, chat: Path, tmp_path: Path
) -> None:
    world, rl = MemoryWorldConfig(1, 1, evaluate=1), PolicyGradientConfig(group=2, reply_tokens=8, inner_epochs=2)
    settings: dict[str, Any] = {"steps": steps, "batch_size": 1, "lr": 1e-2, "warmup": 0.0, "world": world, "rl": rl}
    settings |= {"lora": LoraConfig(2, 4, ("layers.1.self_attn.q_proj",)), "gradient_checkpointing": True}
    cfg = TrainMemoryConfig(str(tmp_path / "run"), method, str(chat), **settings)
    out = train.train_memory(cfg, Lengths if method == "adrpo" else None)
    one, two = (load_file(folder / "model.safetensors") for folder in (chat, out / "policy"))
    changed = {name for name, value in one.items() if not torch.equal(value, two[name])}
    assert changed == {"model.layers.1.self_attn.q_proj.weight"}
    rows = read_metrics(out)
    assert method != "sft" or rows[-1]["loss"] < rows[0]["loss"]
    # the reference is the model without its adapters, which begin with nothing
    assert method != "adrpo" or rows[0]["kl"] == 0


@pytest.mark.parametrize("method", ["salimory_sft", "salimory"])
def test_a_model_that_sees_images_is_trained_on_texts(method: Any, qwen35: Path, tmp_path: Path) -> None:
    """SaliMory's Qwen3.5: its text part learns, its vision tower stays, and the folder opens as it did."""
    world, rl = MemoryWorldConfig(1, 1, evaluate=1), PolicyGradientConfig(group=2, reply_tokens=4)
    cfg = TrainMemoryConfig(str(tmp_path / "run"), method, str(qwen35), steps=1, batch_size=1, world=world, rl=rl)
    out = train.train_memory(replace(cfg, salimory=SaliMoryConfig(turns=2), lr=1e-2, warmup=0.0))
    one, two = (load_file(folder / "model.safetensors") for folder in (qwen35, out / "policy"))
    changed = {name for name in one if not torch.equal(one[name], two[name])}
    # rewards of random weights do not differ
    assert bool(changed) == (method == "salimory_sft")
    assert not any("visual" in name for name in changed)
    assert load_backbone(out / "policy").kind == "vlm"
