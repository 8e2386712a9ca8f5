"""What SaliMory's rollouts are worth, from what rules or judges say of them (arXiv 2606.04120, Eq. 1-5)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isnan

from remind.memory.operations import Entry
from remind.memory_training.config import SaliMoryConfig
from remind.memory_training.episodes import Scores
from remind.memory_training.pico import SALIMORY
from remind.memory_training.rewards import (
    bank_similarity,
    contrastive_pair,
    filter_quality,
    memory_reward,
    response_reward,
    utilization_reward,
)


@dataclass(frozen=True)
class Judged:
    """One rollout. A NaN is a figure that could not be had.

    Attributes:
        accuracy, personalisation: α and p of Eq. 1; p is None where it does not apply.
        shares: φ_f and φ_v of Eq. 2; None: the memory is empty.
        profile: μ of Eq. 3.
        flagged: ids of the turns that the filter let through.
        bank: the entries at the end.
        valid: share of replies that could be read and applied.
    """

    accuracy: float
    personalisation: float | None
    shares: tuple[float | None, float | None]
    profile: float
    flagged: Collection[str]
    bank: Sequence[Entry]
    valid: float


def scores(judged: Sequence[Judged], gold: Collection[str], cfg: SaliMoryConfig) -> Scores:
    """R1 + R2 + R3 of each rollout (Eq. 1-3), and the pairs of booster and utilizer (Eq. 4-5).

    Args:
        gold: ids of the salient turns.
    """
    banks = [[(entry.store, entry.text) for entry in one.bank] for one in judged]
    memory = [
        memory_reward(*one.shares, bool(gold), cfg.memory_penalty, cfg.memory_bonus, cfg.e2_literal) for one in judged
    ]
    profile = [one.profile for one in judged]
    filtering = [filter_quality(one.flagged, gold, cfg.recall_weight) for one in judged]
    rewards = [
        response_reward(one.accuracy, one.personalisation)
        + r2
        + utilization_reward(one.profile, kappa, cfg.profile_weight, cfg.filter_weight)
        for one, r2, kappa in zip(judged, memory, filtering, strict=True)
    ]
    recalled = [len({*gold} & {turn for entry in one.bank for turn in entry.sources}) for one in judged]
    pairs = (
        contrastive_pair("booster", memory, lambda w, l: cfg.e2_literal or recalled[w] >= recalled[l]),  # noqa: E741
        contrastive_pair("utilizer", profile, lambda w, l: bank_similarity(banks[w], banks[l]) > cfg.similarity),  # noqa: E741
    )
    figures: dict[str, Sequence[float | None]] = {
        "accuracy": [one.accuracy for one in judged],
        "profile": profile,
        "filter": [one or 0.0 for one in filtering],
        "entries": [float(len(bank)) for bank in banks],
        "valid": [one.valid for one in judged],
        "factual": [one.shares[0] for one in judged],
        "vague": [one.shares[1] for one in judged],
    }
    known = {name: [v for v in values if v is not None and not isnan(v)] for name, values in figures.items()}
    return Scores(
        dict.fromkeys(SALIMORY, rewards),
        pairs=tuple(pair for pair in pairs if pair is not None),
        metrics={name: sum(values) / len(values) for name, values in known.items() if values},
    )
