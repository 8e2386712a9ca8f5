"""Which dialogues a model learns from and which it is tested on, and which of their questions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from experiments.chain.config import ChainConfig
from remind.core.errors import ConfigError
from remind.states.records import StateRecord

T = TypeVar("T")


@dataclass(frozen=True)
class Fold:
    """Ids of dialogues by their part. labelled and pool are equal where PRA learns from the questions of SFT."""

    test: tuple[str, ...]
    dev: tuple[str, ...]
    labelled: tuple[str, ...]
    pool: tuple[str, ...]


def make_folds(inputs: Mapping[str, Sequence[str]], cfg: ChainConfig) -> list[Fold]:
    """Deal the dialogues of every input by themselves, so that each part has its share of each dataset.

    The order depends on the ids and `fold_seed` alone.

    Args:
        inputs: ids of the dialogues with questions, by input.

    Raises:
        ConfigError: too few dialogues for as many folds, dev dialogues and the two parts of training.
    """
    folds = []
    for number in range(cfg.folds):
        parts: dict[str, list[str]] = {name: [] for name in ("test", "dev", "labelled", "pool")}
        for source, ids in inputs.items():
            order = sorted(ids, key=lambda name: hashlib.sha256(f"{cfg.fold_seed}:{name}".encode()).hexdigest())
            test = order[number :: cfg.folds]
            # dev and training differ from fold to fold, too
            rest = [name for name in order[number:] + order[:number] if name not in test]
            dev, train = rest[: cfg.dev_dialogues], rest[cfg.dev_dialogues :]
            spare = int(cfg.pool == "others")
            if not test or len(train) < 1 + spare:
                raise ConfigError(
                    f"{source}: {len(ids)} dialogues are too few for {cfg.folds} folds as they are divided"
                )
            labelled = min(max(1, round(cfg.labelled * len(train))), len(train) - spare)
            parts["test"] += test
            parts["dev"] += dev
            parts["labelled"] += train[:labelled]
            parts["pool"] += train[labelled:] if spare else train[:labelled]
        folds.append(Fold(**{name: tuple(ids) for name, ids in parts.items()}))
    return folds


def spread(items: Sequence[T], most: int | None) -> list[T]:
    """At most so many, evenly apart; None: all."""
    if most is None or len(items) <= most:
        return list(items)
    return [items[number * len(items) // most] for number in range(most)]


def choose(
    records: Sequence[StateRecord], dialogues: Sequence[str], most: int | None, categories: Sequence[str] | None
) -> list[StateRecord]:
    """At most so many questions of each of these dialogues: those with a gold answer and of these categories."""
    chosen = []
    for name in dialogues:
        own = [r for r in records if r.dialogue_id == name and r.target is not None and r.answers]
        own = [r for r in own if categories is None or r.category is None or r.category in categories]
        chosen += spread(own, most)
    return chosen
