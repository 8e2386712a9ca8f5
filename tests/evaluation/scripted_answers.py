"""A chat model and a judge with fixed replies, an encoder that needs no model, and the rows of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from scripted_chat import Scripted

from remind.evaluation.answerers import ChatAnswers
from remind.evaluation.config import EvaluateConfig
from remind.llm.request import Reply
from remind.text.words import Verdict

RIGHT: dict[str, Reply | str] = {
    "s1": "<answer>B</answer><explanation>Ana: s1 line 1</explanation>",
    "m1": "<answer>[A,D]</answer><explanation></explanation>",
    "v1": "<answer>A</answer><explanation>[0]</explanation>",
    "d1": "<answer>hiking</answer><explanation></explanation>",
    "d2": "<answer>No information available</answer><explanation></explanation>",
    "m2": "<answer>[C]</answer><explanation></explanation>",
}


class Lines:
    """A sentence encoder to which different lines are orthogonal."""

    def __init__(self, *_: Any) -> None:
        self.places: dict[str, int] = {}

    def encode(self, lines: Sequence[str]) -> torch.Tensor:
        return torch.eye(200)[[self.places.setdefault(line, len(self.places)) for line in lines]]


class Chat(Scripted):
    """A chat model with a reply for every question id."""

    def __init__(self, replies: dict[str, Reply | str] = RIGHT, name: str = "chat@test") -> None:
        super().__init__(lambda request: replies[request.sample], name)

    @property
    def ids(self) -> list[str]:
        return [request.sample for request in self.requests]


def by(chat: Chat) -> ChatAnswers:
    return ChatAnswers(chat, 6)


@dataclass
class Judge:
    """Accepts an answer that equals a reference; gives no verdict on those in `fails`."""

    fails: tuple[str, ...] = ()
    name: str = "equal"
    asked: list[str] = field(default_factory=list)

    def verdicts(
        self, cases: Sequence[tuple[str, Sequence[str], str]], samples: Sequence[str] | None = None
    ) -> list[Verdict]:
        self.asked += [prediction for _, _, prediction in cases]
        return [Verdict(None, "neither") if said in self.fails else Verdict(said in refs) for _, refs, said in cases]


def rows(cfg: EvaluateConfig) -> dict[str, dict[str, Any]]:
    lines = (Path(cfg.out) / "predictions.jsonl").read_text().splitlines()
    return {row["question_id"]: row for row in map(json.loads, lines)}
