"""Which dialogues a model learns from and which it is tested on, and which of their questions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.chain.config import ChainConfig
from remind.core.errors import ConfigError
from remind.states.records import StateRecord


class Fold(NamedTuple):
    """Ids of dialogues by their part; labelled and pool are equal where PRA learns from the questions of SFT."""

    test: list[str]
    dev: list[str]
    labelled: list[str]
    pool: list[str]


def make_folds(inputs: Mapping[str, Sequence[str]], cfg: ChainConfig) -> list[Fold]:
    """Deal the dialogues of every input by themselves, so that each part has its share of each dataset.

    The order depends on the ids and `fold_seed` alone.

    Args:
        inputs: ids of the dialogues with questions, by input.

    Raises:
        ConfigError: too few dialogues for as many folds, dev dialogues and the two parts of training.
    """
    folds = [Fold([], [], [], []) for _ in range(cfg.folds)]
    for source, ids in inputs.items():
        order = sorted(ids, key=lambda name: hashlib.sha256(f"{cfg.fold_seed}:{name}".encode()).hexdigest())
        for number, fold in enumerate(folds):
            test = order[number :: cfg.folds]
            # dev and training differ from fold to fold, too
            rest = [name for name in order[number:] + order[:number] if name not in test]
            train = rest[cfg.dev_dialogues :]
            spare = int(cfg.pool == "others")
            if not test or len(train) < 1 + spare:
                raise ConfigError(
                    f"{source}: {len(ids)} dialogues are too few for {cfg.folds} folds as they are divided"
                )
            labelled = min(max(1, round(cfg.labelled * len(train))), len(train) - spare)
            fold.test.extend(test)
            fold.dev.extend(rest[: cfg.dev_dialogues])
            fold.labelled.extend(train[:labelled])
            fold.pool.extend(train[labelled:] if spare else train[:labelled])
    return folds


def choose(
    records: Sequence[StateRecord], dialogues: Sequence[str], most: int | None, categories: Sequence[str] | None
) -> list[StateRecord]:
    """At most so many questions of each dialogue, evenly apart: those with a gold answer and of these categories."""
    chosen = []
    for name in dialogues:
        own = [r for r in records if r.dialogue_id == name and r.target is not None and r.answers]
        own = [r for r in own if categories is None or r.category is None or r.category in categories]
        count = len(own) if most is None else min(most, len(own))
        chosen += [own[place * len(own) // count] for place in range(count)]
    return chosen
