"""Ablations of the resonance and null controls in the SAEs' place, measured as `resonance` is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.evidence.controls import CONTROLS, ablations, controls_for, hidden_sample, neurons
from experiments.evidence.crossval import best_settings
from experiments.evidence.methods import grid, plain_ratio
from experiments.evidence.prepare import Prepared, View, resonance_name, resonances
from experiments.evidence.resonance import QuestionCodes, encode_questions, turn_scores
from remind.core.progress import track
from remind.grounding.config import GroundingConfig
from remind.grounding.encode import SparseEncoder
from remind.grounding.windowed import WindowedCodes
from remind.states.pyramid import turn_text
from sae import TopKSAE

#: Every so manieth turn lends its hidden states to the directions of `pca` and the mean of `untrained`.
STRIDE = 8
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
        measure(f"resonance, {name}", lambda one, cfg=without: resonances(one.codes, cfg, one.views["full"].run), ready)
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
