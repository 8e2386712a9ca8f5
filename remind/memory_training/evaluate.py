"""What a policy remembers in the memory world when every session builds on its own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from remind.memory.operations import State
from remind.memory_training.pico import REPLY, View, remember, view
from remind.memory_training.rewards import ROLES
from remind.testbed.memory_world import Ask, Life, read

#: Prompts that are answered at once.
BATCH = 64
Answerer = Callable[[Sequence[View]], list[str]]


@dataclass(frozen=True)
class Report:
    """Shares and counts of a dialogue, or their means over several.

    Attributes:
        final: share of right answers to the questions on whole dialogues.
        rewarded, held_out: the same to the two kinds of questions on sessions, each asked after its session.
        valid: share of replies all of whose operations were applied.
        words: in the memory at the end.
    """

    final: float
    rewarded: float
    held_out: float
    valid: float
    words: float


def evaluate(answer: Answerer, lives: Iterable[Life]) -> list[Report]:
    """Go through dialogues side by side, session by session; a report of each.

    Args:
        answer: replies to views, in order.
        lives: of equally many sessions.
    """
    lives = list(lives)
    states = [State() for _ in lives]
    right = [{name: list[bool]() for name in ("final", "rewarded", "held_out", "valid")} for _ in lives]
    for number in range(len(lives[0].meetings)):
        views = [view(role, life.meetings[number], s) for life, s in zip(lives, states, strict=True) for role in ROLES]  # type: ignore[arg-type]
        replies = iter(zip(views, answer(views), strict=True))
        for n, life in enumerate(lives):
            states[n], proposed = remember(states[n], life.id, [next(replies) for _ in ROLES])
            right[n]["valid"] += [all(one.status == "applied" for one in own) for own in proposed]
            for kind in ("rewarded", "held_out"):
                right[n][kind] += _right(states[n], getattr(life.meetings[number], kind))
    for life, state, own in zip(lives, states, right, strict=True):
        own["final"] = _right(state, life.final)
    return [
        Report(
            **{name: sum(values) / len(values) for name, values in own.items()},
            words=sum(len(one.text.split()) for one in state.current(*ROLES)),
        )
        for state, own in zip(states, right, strict=True)
    ]


def _right(state: State, asks: Sequence[Ask]) -> list[bool]:
    return [ask.answer == one.answer for ask, one in zip(asks, read(state, asks), strict=True)]


def mean(reports: Sequence[Report]) -> Report:
    """Every figure, averaged over dialogues."""
    rows = [asdict(report) for report in reports]
    return Report(**{name: sum(row[name] for row in rows) / len(rows) for name in rows[0]})


def greedy(model: Any, tokenizer: Any) -> Answerer:
    """The most likely replies of a policy."""

    @torch.no_grad()
    def answer(views: Sequence[View]) -> list[str]:
        model.eval()
        replies: list[str] = []
        for start in range(0, len(views), BATCH):
            prompts = [one.prompt() for one in views[start : start + BATCH]]
            batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
            ids = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=REPLY,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )[:, batch["input_ids"].shape[1] :]
            end = tokenizer.eos_token
            texts = tokenizer.batch_decode(ids)
            replies += [text.partition(end)[0] + end if end in text else text for text in texts]
        return replies

    return answer
