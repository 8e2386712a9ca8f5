"""What a policy remembers in the memory world when every session builds on its own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from remind.memory.operations import State
from remind.memory_training.episodes import together
from remind.memory_training.pico import LISTED, REPLY, SHOWN, correct, remember, view
from remind.memory_training.rewards import ROLES, filter_quality
from remind.memory_training.salimory import Outcome, rollout, shares, told
from remind.memory_training.speech import complete, sampling, speech_of
from remind.models.backbone import backbone_of
from remind.testbed.memory_world import Life

#: Prompts that are answered at once.
BATCH = 64

Answerer = Callable[[Sequence[Any]], list[str]]


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


def evaluate(answer: Answerer, lives: Iterable[Life], most: int = SHOWN) -> list[Report]:
    """Go through dialogues side by side, session by session; a report of each.

    Args:
        answer: replies to what is shown, in order.
        lives: of equally many sessions.
        most: entries of its store that a role is shown.
    """
    lives = list(lives)
    states = [State() for _ in lives]
    right = [{name: list[bool]() for name in ("final", "rewarded", "held_out", "valid")} for _ in lives]
    for number in range(len(lives[0].meetings)):
        both = list(zip((life.meetings[number] for life in lives), states, strict=True))
        views = [view(role, meeting, state, most) for meeting, state in both for role in ROLES]  # type: ignore[arg-type]
        replies = iter(zip(views, answer(views), strict=True))
        for n, life in enumerate(lives):
            states[n], proposed = remember(states[n], life.id, [next(replies) for _ in ROLES])
            right[n]["valid"] += [all(one.status == "applied" for one in own) for own in proposed]
            for kind in ("rewarded", "held_out"):
                right[n][kind] += correct(states[n], getattr(life.meetings[number], kind))
    for life, state, own in zip(lives, states, right, strict=True):
        own["final"] = correct(state, life.final)
    return [
        Report(
            **{name: sum(values) / len(values) for name, values in own.items()},
            words=sum(len(one.text.split()) for one in state.current(*ROLES)),
        )
        for state, own in zip(states, right, strict=True)
    ]


@dataclass(frozen=True)
class BankReport:
    """SaliMory's shares and counts of a dialogue, or their means over several.

    Attributes:
        final: share of right answers to the questions on whole dialogues.
        factual, vague: shares of the entries at the end; of an empty bank 1 and 0.
        profile, filter: μ, averaged over the final questions, and κ, where all facts are salient.
        valid: share of replies that could be read and applied.
        words: in the memory at the end.
    """

    final: float
    factual: float
    vague: float
    profile: float
    filter: float
    valid: float
    words: float


def evaluate_bank(
    answer: Answerer, lives: Iterable[Life], limits: tuple[int, int] = (SHOWN, LISTED)
) -> list[BankReport]:
    """As `evaluate`, for the roles of SaliMory; `limits` as of `rollout`."""
    lives = list(lives)
    outcomes = together(
        [rollout(one.id, [told(meeting) for meeting in one.meetings], one.final, limits) for one in lives], answer
    )
    return [_bank_report(life, outcome) for life, outcome in zip(lives, outcomes, strict=True)]


def _bank_report(life: Life, outcome: Outcome) -> BankReport:
    turns = {one.id: one for meeting in life.meetings for one in told(meeting)}
    factual, vague = shares(outcome.bank, turns)
    asked = list(zip(outcome.profiles, life.final, strict=True))
    salient = {one.id for one in turns.values() if one.said.store}
    return BankReport(
        final=sum(profile.answer(ask) == ask.answer for profile, ask in asked) / len(asked),
        factual=1.0 if factual is None else factual,
        vague=0.0 if vague is None else vague,
        profile=sum(profile.quality(ask) for profile, ask in asked) / len(asked),
        filter=filter_quality(outcome.flagged, salient) or 0.0,
        valid=sum(outcome.valid) / len(outcome.valid),
        words=sum(len(one.text.split()) for one in outcome.bank),
    )


def mean(reports: Sequence[Any]) -> dict[str, float]:
    """Every figure of some reports of one kind, averaged over dialogues."""
    rows = [asdict(report) for report in reports]
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def greedy(model: Any, tokenizer: Any, room: int = REPLY) -> Answerer:
    """The most likely replies of a policy, of at most `room` tokens."""
    speech, settings = speech_of(tokenizer), sampling(backbone_of(model, tokenizer), room)

    def answer(views: Sequence[Any]) -> list[str]:
        prompts = [speech.prompt(one) for one in views]
        starts = range(0, len(views), BATCH)
        replies = [ids for start in starts for ids in complete(model, prompts[start : start + BATCH], settings)]
        return [speech.reply(one, ids) for one, ids in zip(views, replies, strict=True)]

    return answer
