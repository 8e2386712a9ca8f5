"""What a policy remembers in the memory world when every session builds on its own memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from remind.memory.operations import State
from remind.memory_training import pico
from remind.memory_training.config import Method
from remind.memory_training.episodes import together
from remind.memory_training.rewards import ROLES, filter_quality
from remind.memory_training.salimory import rollout, shares, told
from remind.models.backbone import backbone_of
from remind.testbed.memory_world import Life

#: Prompts that are answered at once.
BATCH = 64

Answerer = Callable[[Sequence[Any]], list[str]]


#: Shares and counts of a dialogue by name, or their means over several.
Figures = dict[str, float]


def evaluate(answer: Answerer, lives: Iterable[Life], most: int = pico.SHOWN) -> list[Figures]:
    """Go through dialogues side by side, session by session, each with the memory that the replies make.

    Args:
        answer: replies to what is shown, in order.
        most: entries of its store that a role is shown.

    Returns:
        Of each dialogue `final`: share of right answers to the questions on it; `rewarded`, `held_out`: the same to the
        two kinds of questions on sessions, each asked after its session; `valid`: share of replies all of whose
        operations were applied; `words`: in the memory at the end.
    """
    return [figures for figures, _ in together([_lived(life, most) for life in lives], answer)]


def _lived(life: Life, most: int) -> Generator[list[Any], list[str], Figures]:
    state, right = State(), {name: list[bool]() for name in ("final", "rewarded", "held_out", "valid")}
    for meeting in life.meetings:
        views = [pico.view(role, meeting, state, most) for role in ROLES]  # type: ignore[arg-type]
        replies = yield views
        state, proposed = pico.remember(state, life.id, list(zip(views, replies, strict=True)))
        right["valid"] += [all(one.status == "applied" for one in own) for own in proposed]
        for kind in ("rewarded", "held_out"):
            right[kind] += pico.correct(state, getattr(meeting, kind))
    right["final"] = pico.correct(state, life.final)
    words = sum(len(one.text.split()) for one in state.current(*ROLES))
    return {**{name: sum(values) / len(values) for name, values in right.items()}, "words": words}


def evaluate_bank(
    answer: Answerer, lives: Iterable[Life], limits: tuple[int, int] = pico.Commands.limits
) -> list[Figures]:
    """As `evaluate`, for the roles of SaliMory; `limits` as of `rollout`.

    Returns:
        Of each dialogue `final`, `valid` and `words`; `factual`, `vague`: shares of the entries at the end, of an empty
        bank 1 and 0; `profile`, `filter`: μ, averaged over the final questions, and κ, where all facts are salient.
    """
    lives = list(lives)
    sessions = [[told(meeting) for meeting in one.meetings] for one in lives]
    runs = [rollout(one.id, own, one.final, limits) for one, own in zip(lives, sessions, strict=True)]
    found = []
    for life, own, (outcome, _) in zip(lives, sessions, together(runs, answer), strict=True):
        turns = {one.id: one for session in own for one in session}
        factual, vague = shares(outcome.bank, turns)
        asked = list(zip(outcome.profiles, life.final, strict=True))
        salient = {one.id for one in turns.values() if one.said.store}
        figures: Figures = {
            "final": sum(profile.answer(ask) == ask.answer for profile, ask in asked) / len(asked),
            "factual": 1.0 if factual is None else factual,
            "vague": vague or 0.0,
            "profile": sum(profile.quality(ask) for profile, ask in asked) / len(asked),
            "filter": filter_quality(outcome.flagged, salient),
            "valid": sum(outcome.valid) / len(outcome.valid),
            "words": sum(len(one.text.split()) for one in outcome.bank),
        }
        found.append(figures)
    return found


def remembered(
    method: Method, answer: Answerer, lives: Iterable[Life], speech: type[pico.Commands] | pico.Commands = pico.Commands
) -> list[Figures]:
    """Figures of each dialogue, by the roles that a method trains."""
    limits = speech.limits
    return evaluate_bank(answer, lives, limits) if method.startswith("salimory") else evaluate(answer, lives, limits[0])


def mean(reports: Sequence[Figures]) -> Figures:
    """Every figure of some reports of one kind, averaged over dialogues."""
    return {name: sum(one[name] for one in reports) / len(reports) for name in reports[0]}


def greedy(model: Any, tokenizer: Any, room: int = pico.REPLY) -> Answerer:
    """The most likely replies of a policy, of at most `room` tokens."""
    speech, settings = pico.speech_of(tokenizer), pico.sampling(backbone_of(model, tokenizer), room)

    def answer(views: Sequence[Any]) -> list[str]:
        prompts = [speech.prompt(one) for one in views]
        starts = range(0, len(views), BATCH)
        replies = [ids for start in starts for ids in pico.complete(model, prompts[start : start + BATCH], settings)]
        return [speech.reply(one, ids) for one, ids in zip(views, replies, strict=True)]

    return answer
