"""Rewards of MemBuilder (arXiv 2601.05488, Eq. 5-10) and SaliMory (arXiv 2606.04120, Eq. 1-4). Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from math import isnan
from typing import Any, NamedTuple

from remind.memory.operations import Entry
from remind.memory_training.config import SaliMoryConfig
from remind.memory_training.episodes import Pair, Scores

#: MemBuilder's roles; ties of Eq. 9 are broken in this order.
ROLES = ("core", "episodic", "semantic", "procedural")
#: SaliMory's roles.
SALIMORY = ("filter", "booster", "utilizer")
#: Roles whose entries are retrieved.
RETRIEVED = ROLES[1:]
#: γ_l and γ_u of MemBuilder's Eq. 8: ratios to what the expert wrote that cost nothing; and γ_min and γ_max, beyond
#: which they cost 1: not in the paper, from the released configuration.
LOW, HIGH, LEAST, MOST = 0.5, 1.3, 0.2, 2.0


def task_reward(correct: Sequence[bool]) -> float:
    """Share of the session's questions that were answered correctly (MemBuilder, Eq. 5); there must be one."""
    return sum(correct) / len(correct)


def core_length_penalty(increment: float, free: float = 150, full: float = 400) -> float:
    """Penalty in [0, 1] on growth of the core block (MemBuilder, Eq. 7).

    Args:
        increment: tokens of the block after the operation minus before; may be negative.
        free: θ_min, increments up to it cost nothing.
        full: θ_max, increments from it cost 1.
    """
    return min(max((increment - free) / (full - free), 0.0), 1.0)


def length_penalty(written: int, expert: int, free_below: float = 200) -> float:
    """Penalty in [0, 1] on the tokens that a role wrote in this session (MemBuilder, Eq. 8).

    Where the expert wrote nothing the ratio is undefined: any difference of at least δ costs 1.

    Args:
        free_below: δ, differences in tokens that cost nothing.
    """
    if abs(written - expert) < free_below:
        return 0.0
    if not expert:
        return 1.0
    ratio = written / expert
    if ratio <= HIGH:
        return min(max((LOW - ratio) / (LOW - LEAST), 0.0), 1.0)
    return min((ratio - HIGH) / (MOST - HIGH), 1.0)


def role_reward(valid: bool, task: float, penalty: float, strength: float = 0.8) -> float:
    """Reward of one role in one rollout: 1[valid] · r_task · (1 − λ ℓ) (MemBuilder, Eq. 6)."""
    return task * (1 - strength * penalty) if valid else 0.0


def attribution(retrieved: Iterable[str], alpha: float = 4.0) -> dict[str, float]:
    """Gradient weights w by role: α for the dominant one, else 1 (MemBuilder, Eq. 9-10).

    Args:
        retrieved: role of each retrieved entry, one item per retrieval; core is always in context and does not count.
            The role with most is dominant, of equals the first in the order episodic, semantic, procedural.
    """
    counts = Counter(role for role in retrieved if role in RETRIEVED)
    chosen = max(RETRIEVED, key=lambda role: counts[role]) if counts else None
    return {role: alpha if role == chosen else 1.0 for role in ROLES}


def response_reward(accuracy: float, personalisation: float | None, bonus: float = 0.45) -> float:
    """R1 = α (1 + λ_p p), or α where personalisation does not apply (SaliMory, Eq. 1).

    Args:
        accuracy: α in [0, 1].
        personalisation: p in [0, 1]; None: not applicable.
        bonus: λ_p.
    """
    return accuracy if personalisation is None else accuracy * (1 + bonus * personalisation)


def memory_reward(factual: float | None, vague: float | None, salient: bool, cfg: SaliMoryConfig) -> float:
    """R2 = −λ_pen (1 − γ) + λ_bon γ with γ = φ_f (1 − φ_v) (SaliMory, Eq. 2).

    The judge's instructions (appendix E.2) give an empty bank vagueness 0 and factuality 1, thus the largest reward.
    Here an empty bank has γ = 0 if the episode holds anything worth keeping; else the reward is 0.

    Args:
        factual: φ_f, share of entries faithful to the dialogue; None: the bank is empty.
        vague: φ_v, share of entries without usable detail; None: the bank is empty.
        salient: whether the episode holds a turn worth keeping.
    """
    if factual is None or vague is None:
        if not (salient or cfg.e2_literal):
            return 0.0
        quality = 1.0 if cfg.e2_literal else 0.0
    else:
        quality = factual * (1 - vague)
    return -cfg.memory_penalty * (1 - quality) + cfg.memory_bonus * quality


def filter_quality(flagged: Collection[str], gold: Collection[str], recall_weight: float = 0.6) -> float:
    """κ = (1 − w_r) precision + w_r recall of the turns that the filter lets through (SaliMory, Section 3.3).

    Returns:
        1 where nothing is flagged and nothing is gold; 0 where only one is empty.
    """
    chosen, right = set(flagged), set(gold)
    if not chosen or not right:
        return float(chosen == right)
    hits = len(chosen & right)
    return (1 - recall_weight) * hits / len(chosen) + recall_weight * hits / len(right)


def bank_similarity(one: Iterable[tuple[str, str]], other: Iterable[tuple[str, str]]) -> float:
    """Jaccard similarity of two banks of (store, text) (SaliMory, Eq. 4); two empty banks are equal.

    Entries are equal if they are in the same store and their texts differ in case and white space alone.
    """
    left, right = ({(store, " ".join(text.casefold().split())) for store, text in bank} for bank in (one, other))
    return len(left & right) / len(left | right) if left | right else 1.0


def contrastive_pair(
    role: str, scores: Sequence[float], allowed: Callable[[int, int], bool] = lambda winner, loser: True
) -> Pair | None:
    """The two rollouts of a group that differ most in a role's own score (SaliMory, Section 3.4); None: no two differ.

    Args:
        scores: R2 for the booster, μ for the utilizer, one per rollout; a NaN is left out.
        allowed: whether (winner, loser) may be compared; of those that may the first with the largest gap is taken.
    """
    order = range(len(scores))
    pairs = [Pair(role, w, l, scores[w] - scores[l]) for w in order for l in order if scores[w] > scores[l]]  # noqa: E741
    return max((pair for pair in pairs if allowed(pair.winner, pair.loser)), key=lambda pair: pair.gap, default=None)


class Played(NamedTuple):
    """What SaliMory's roles made of an episode.

    Attributes:
        bank: the entries at the end.
        flagged: ids of the turns that the filter let through.
        valid: of every reply, whether it could be read and applied.
        profiles: what the utilizer made of it: of the memory world a `Profile` for each question, else a text, which is
            empty where it wrote nothing, or nothing that can be read.
    """

    bank: tuple[Entry, ...]
    flagged: tuple[str, ...]
    valid: tuple[bool, ...]
    profiles: Any


class Judged(NamedTuple):
    """One rollout. A NaN is a figure that could not be had.

    Attributes:
        accuracy, personalisation: α and p of Eq. 1; p is None where it does not apply.
        shares: φ_f and φ_v of Eq. 2; None: the memory is empty.
        profile: μ of Eq. 3.
    """

    played: Played
    accuracy: float
    personalisation: float | None
    shares: tuple[float | None, float | None]
    profile: float


def scores(judged: Sequence[Judged], gold: Collection[str], cfg: SaliMoryConfig) -> Scores:
    """R1 + R2 + R3 of each rollout (Eq. 1-3), and the pairs of booster and utilizer (Eq. 4-5).

    Args:
        gold: ids of the salient turns.
    """
    banks = [[(entry.store, entry.text) for entry in one.played.bank] for one in judged]
    memory = [memory_reward(*one.shares, bool(gold), cfg) for one in judged]
    profile = [one.profile for one in judged]
    filtering = [filter_quality(one.played.flagged, gold) for one in judged]
    response = [response_reward(one.accuracy, one.personalisation, cfg.personalisation) for one in judged]
    rewards = [
        r1 + r2 + cfg.profile_weight * mu + cfg.filter_weight * kappa
        for r1, r2, mu, kappa in zip(response, memory, profile, filtering, strict=True)
    ]
    recalled = [len({*gold} & {turn for entry in one.played.bank for turn in entry.sources}) for one in judged]
    pairs = (
        contrastive_pair("booster", memory, lambda w, l: cfg.e2_literal or recalled[w] >= recalled[l]),  # noqa: E741
        contrastive_pair("utilizer", profile, lambda w, l: bank_similarity(banks[w], banks[l]) > cfg.similarity),  # noqa: E741
    )
    figures: dict[str, Sequence[float | None]] = {
        "accuracy": [one.accuracy for one in judged],
        "profile": profile,
        "filter": filtering,
        "entries": [float(len(bank)) for bank in banks],
        "valid": [sum(one.played.valid) / len(one.played.valid) for one in judged],
        "factual": [one.shares[0] for one in judged],
        "vague": [one.shares[1] for one in judged],
    }
    known = {name: [v for v in values if v is not None and not isnan(v)] for name, values in figures.items()}
    return Scores(
        dict.fromkeys(SALIMORY, rewards),
        pairs=tuple(pair for pair in pairs if pair is not None),
        metrics={name: sum(values) / len(values) for name, values in known.items() if values},
    )
