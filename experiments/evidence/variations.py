"""Variations of the resonance: one part left out, null controls in the SAEs' place, one setting moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.evidence.controls import CONTROLS, ablations, controls_for, hidden_sample, neurons
from experiments.evidence.crossval import best_settings
from experiments.evidence.methods import Setting, grid, plain_ratio
from experiments.evidence.prepare import Prepared, View, resonance_name, resonances
from experiments.evidence.resonance import QuestionCodes, encode_questions, salience, turn_scores
from remind.core.progress import track
from remind.grounding.codes import SparseEncoder, WindowedCodes
from remind.grounding.config import GroundingConfig
from remind.states.pyramid import turn_text
from sae import TopKSAE

#: Every so manieth turn lends its hidden states to the directions of `pca` and the mean of `untrained`.
STRIDE = 8
#: What the sweep tries.
VALUES: dict[str, tuple[Any, ...]] = {
    "alpha": (0.0, 1.0, 3.0, 6.0, 12.0),
    "beta": (0.0, 2.0, 4.0, 8.0, 16.0),
    "lam": (0.0, 0.15, 0.3, 0.5, 1.0),
    "sigma": (0.0, 0.5, 1.0, 2.0, 4.0),
    "agg": ("mean", "top3", "top5", "top10", "max"),
    "anchor_idf": (True, False),
    "idf": ("auto", "none"),
}
Ratios = dict[tuple[str, str], list[np.ndarray]]


def null_ratios(
    ready: Sequence[Prepared],
    encoder: SparseEncoder,
    saes: Mapping[int, TopKSAE],
    config: GroundingConfig,
    budgets: Sequence[int],
) -> Ratios:
    """Ratios over the full history of the resonance without one of its parts, and with a control for SAEs.

    Smoothing, thrift, match and layers are chosen for each of them as for `resonance`. The controls pca and untrained
    see hidden states of the very dialogues, which can only flatter them.

    Args:
        encoder: of the SAEs, with their backbone.

    Returns:
        (name, "full") → for each dialogue [Q, budgets].
    """
    ratios: Ratios = {}

    def measure(name: str, signals: Callable[[Prepared], dict[str, Tensor]], dialogues: Iterable[Prepared]) -> None:
        moved = []
        for one in dialogues:
            view = one.views["full"]
            own = View(view.run, {**signals(one), "length": view.signals["length"]})
            moved.append(replace(one, views={"full": own}))
        ratios[name, "full"] = _held_out(moved, budgets)

    for name, fields in ablations().items():
        without = replace(config, **{key: value for key, value in fields.items() if key != "smooth_turns"})
        measure(f"resonance, {name}", partial(_full_resonances, config=without), ready)
    own = partial(_strategy_anchors, encoder=encoder, config=config)
    measure("resonance, strategy_anchors", own, ready)
    turns = [turn for one in ready for turn in one.asked.dialogue.turns][::STRIDE]
    texts = [turn_text(turn) for turn in turns]
    sample = hidden_sample(encoder.backbone, texts, sorted(saes), config.sink_ratio, config.window_tokens)
    for control in CONTROLS:
        coders = controls_for(control, saes, sample)
        other = SparseEncoder(encoder.backbone, coders, config.sink_ratio, encoder.batch_size)
        signals = partial(_of_control, encoder=other, config=config, cosine=control == "cosine")
        measure(f"{control} for SAE", signals, track(ready, control, len(ready)))
    return ratios


def _full_resonances(one: Prepared, config: GroundingConfig) -> dict[str, Tensor]:
    return resonances(one.codes, config, one.views["full"].run)


def _strategy_anchors(one: Prepared, encoder: SparseEncoder, config: GroundingConfig) -> dict[str, Tensor]:
    """Resonance with the strategies' anchors, each seen alone, in place of the questions' own words."""
    asked = one.asked
    texts = [question.text for question in asked.questions]
    held = encode_questions(encoder, one.codes.dialogue, asked.dialogue, texts, one.strategies, "strategy")
    return resonances(held, config, one.views["full"].run)


def _of_control(one: Prepared, encoder: SparseEncoder, config: GroundingConfig, cosine: bool) -> dict[str, Tensor]:
    asked = one.asked
    codes = WindowedCodes(encoder, config.window_tokens, 0).dialogue_codes(asked.dialogue)
    texts = [question.text for question in asked.questions]
    held = encode_questions(encoder, codes, asked.dialogue, texts, one.strategies)
    run = one.views["full"].run
    return _cosines(held, config, run) if cosine else resonances(held, config, run)


def _cosines(held: QuestionCodes, config: GroundingConfig, run: Tensor) -> dict[str, Tensor]:
    """`hidden_cosine` of every token with the mean of a question's content tokens, in the place of Eq. 4."""
    every = sorted(held.dialogue.layers)
    parts = {}
    for layer in every:
        codes, asked = held.dialogue.layers[layer], held.anchors[layer]
        dense = neurons(codes.k, codes.k).dense
        sums = torch.zeros(held.questions, codes.k).index_add_(0, held.owner, dense(asked))
        # the mean points where the sum does
        parts[layer] = F.normalize(dense(codes), dim=-1) @ F.normalize(sums, dim=-1).T
    whole = run.expand(-1, held.questions)
    kinds = {"all": every, "last": every[-1:]} if len(every) > 1 else {"last": every}
    return {
        resonance_name("summed", name): turn_scores(held, config, whole, [parts[layer] for layer in layers])
        for name, layers in kinds.items()
    }


def _held_out(dialogues: Sequence[Prepared], budgets: Sequence[int]) -> list[np.ndarray]:
    """Ratios [Q, budgets] of the resonance in the dialogues' views, each under settings chosen without it."""
    names = [name for name in dialogues[0].views["full"].signals if name.startswith("resonance/")]
    table = {
        setting: [plain_ratio(one, "full", "resonance", setting, budgets) for one in dialogues]
        for setting in grid("resonance", names)
    }
    datasets, everyone = [one.asked.dataset for one in dialogues], range(len(dialogues))
    ratios = []
    for held in everyone:
        best = best_settings(table, datasets, [n for n in everyone if n != held])
        ratios.append(np.stack([table[setting][held][:, b] for b, setting in enumerate(best)], 1))
    return ratios


def sweep(
    dialogues: Sequence[Prepared], config: GroundingConfig, setting: Setting, budget: int
) -> list[dict[str, Any]]:
    """Ratio of resonance alone over the full history, each setting moved away from `config` by itself (Figure 5).

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
