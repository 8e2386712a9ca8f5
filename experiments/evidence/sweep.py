"""How much each setting of the resonance matters, one at a time (Figure 5 of the paper, in terms of evidence)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from experiments.evidence.methods import Setting, plain_ratio
from experiments.evidence.prepare import Prepared, View
from experiments.evidence.resonance import salience
from remind.core.progress import track
from remind.grounding.config import GroundingConfig

VALUES: dict[str, tuple[Any, ...]] = {
    "alpha": (0.0, 1.0, 3.0, 6.0, 12.0),
    "beta": (0.0, 2.0, 4.0, 8.0, 16.0),
    "lam": (0.0, 0.15, 0.3, 0.5, 1.0),
    "sigma": (0.0, 0.5, 1.0, 2.0, 4.0),
    "agg": ("mean", "top3", "top5", "top10", "max"),
    "anchor_idf": (True, False),
    "idf": ("auto", "none"),
}


def sweep(
    dialogues: Sequence[Prepared], config: GroundingConfig, setting: Setting, budget: int
) -> list[dict[str, Any]]:
    """Ratio of resonance alone over the full history, each setting moved away from `config` by itself.

    The summed resonance (Eq. 3 to 5), since the one by words has none of these settings; all layers, unless the layers
    are what is moved.

    Args:
        setting: smoothing and thrift that go with it.
    """
    base = replace(config, match="summed")
    every = sorted(dialogues[0].codes.dialogue.layers)
    jobs = [(name, value, replace(base, **{name: value}), every) for name in VALUES for value in VALUES[name]]
    jobs += [("layers", "+".join(map(str, chosen)), base, chosen) for chosen in [*([n] for n in every), every]]
    found = []
    for name, value, moved, layers in track(jobs, "sweep", len(jobs)):
        means: dict[str, list[np.ndarray]] = {}
        for one in dialogues:
            view = one.views["full"]
            signals = {"resonance": salience(one.codes, moved, view.run, layers), "length": view.signals["length"]}
            moved_view = replace(one, views={"full": View(view.run, signals)})
            ratio = plain_ratio(moved_view, "full", "resonance", replace(setting, resonance="resonance"), [budget])
            means.setdefault(one.asked.dataset, []).append(ratio[:, 0])
        default = asdict(base).get(name)
        found.append(
            {
                "setting": name,
                "value": value,
                "default": value == default if name in VALUES else layers == every,
                "budget": budget,
                "ratio": {dataset: float(np.concatenate(parts).mean()) for dataset, parts in means.items()},
            }
        )
    return found
