"""What stands in an SAE's place to show what the SAE is worth: null controls and ablations.

Controls give sparse codes and go where an SAE goes: `Grounder(backbone, controls_for(name, saes, sample), None,
config)`. Their features are not those of the trained SAE, so its saved idf does not fit them: pass None, and idf is
counted over the dialogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from experiments.evidence.crossval import best_settings
from experiments.evidence.methods import Prepared, grid, plain_ratio, resonances
from experiments.evidence.resonance import encode_questions
from remind.core.progress import track
from remind.grounding.codes import Coder, SparseEncoder, WindowedCodes
from remind.grounding.config import GroundingConfig
from remind.models.backbone import Backbone
from remind.states.pyramid import turn_text
from sae import SparseCodes, TopKSAE

Control = Literal["untrained", "neurons"]
CONTROLS: tuple[Control, ...] = get_args(Control)
#: Every so manieth turn lends its hidden states to the mean of `untrained`.
STRIDE = 8


def controls_for(
    name: Control, saes: Mapping[int, TopKSAE], sample: Mapping[int, Tensor], seed: int = 0
) -> dict[int, Coder]:
    """The control in place of every SAE, with its k (as far as there are that many features).

    untrained: an SAE of the same size with random weights and the sample's mean as b_dec. neurons: `Neurons`.

    Args:
        sample: layer to hidden states [N, d_in], of `hidden_sample`; for untrained.
        seed: of the random weights.
    """
    if name == "neurons":
        return {layer: Neurons(coder.d_in, min(coder.k, coder.d_in)) for layer, coder in saes.items()}
    return {
        layer: untrained(coder.d_sae, coder.k, sample[layer].mean(0), seed + layer) for layer, coder in saes.items()
    }


def untrained(d_sae: int, k: int, mean: Tensor, seed: int) -> TopKSAE:
    """An SAE as it is before training: random unit directions, b_enc 0, b_dec = mean [d_in]."""
    coder = TopKSAE(len(mean), d_sae, k, generator=torch.Generator().manual_seed(seed)).requires_grad_(False)
    coder.b_dec.copy_(mean)
    return coder


class Neurons(nn.Module):
    """Raw hidden dimensions as features: the k that are farthest from 0, each sign a feature of its own.

    Feature j < d says how far a token lies along axis j, feature d + j how far against it.
    """

    def __init__(self, d_in: int, k: int) -> None:
        super().__init__()
        self.d_in, self.d_sae, self.k = d_in, 2 * d_in, k

    def encode(self, h: Tensor) -> SparseCodes:
        """[..., d] to codes [..., k]; features in ascending order."""
        h = h.float()
        chosen = h.abs().topk(self.k, dim=-1).indices
        values = h.gather(-1, chosen)
        indices, order = torch.where(values < 0, chosen + self.d_in, chosen).sort(dim=-1)
        return SparseCodes(values.abs().gather(-1, order), indices)

    def dense(self, codes: SparseCodes) -> Tensor:
        """The dimensions [..., d], zero where not kept."""
        along, against = codes.dense(self.d_sae).split(self.d_in, dim=-1)
        return along - against


def hidden_sample(
    backbone: Backbone, texts: Sequence[str], layers: Sequence[int], sink_ratio: float = 10.0, window_tokens: int = 256
) -> dict[int, Tensor]:
    """Hidden states of texts, each cut into windows, without attention sinks: layer to float32 [N, d], on the CPU."""
    every = Neurons(backbone.hidden_size, backbone.hidden_size)
    encoder = SparseEncoder(backbone, dict.fromkeys(layers, every), sink_ratio, 8)
    window = min(window_tokens, encoder.max_tokens)
    tokenized = [backbone.tokenize(text).ids for text in texts]
    windows = [ids[start : start + window] for ids in tokenized for start in range(0, len(ids), window)]
    states = {}
    for layer, codes in encoder.encode(windows).items():
        dense = every.dense(codes)
        states[layer] = dense[dense.any(-1)]
    return states


def null_ratios(
    ready: Sequence[Prepared],
    encoder: SparseEncoder,
    saes: Mapping[int, TopKSAE],
    config: GroundingConfig,
    budgets: Sequence[int],
) -> dict[str, list[np.ndarray]]:
    """Ratios over the full history of the resonance without one of its parts, and with a control for SAEs.

    Smoothing, thrift, match and layers are chosen for each of them as for `resonance`. The control untrained
    sees hidden states of the very dialogues, which can only flatter it.

    Args:
        encoder: of the SAEs, with their backbone.

    Returns:
        Name → for each dialogue [Q, budgets].
    """
    ratios: dict[str, list[np.ndarray]] = {}

    def measure(name: str, signals: Callable[[Prepared], dict[str, Tensor]], dialogues: Iterable[Prepared]) -> None:
        moved = []
        for one in dialogues:
            moved.append(replace(one, signals={**signals(one), "length": one.signals["length"]}))
        ratios[name] = _held_out(moved, budgets)

    for name, without in (
        ("no_idf", replace(config, idf="none")),
        ("no_broadcast", replace(config, beta=0.0)),
        ("no_smoothing", replace(config, sigma=0.0)),
    ):
        measure(f"resonance, {name}", partial(_resonances, config=without), ready)
    turns = [turn for one in ready for turn in one.asked.dialogue.turns][::STRIDE]
    texts = [turn_text(turn) for turn in turns]
    sample = hidden_sample(encoder.backbone, texts, sorted(saes), config.sink_ratio, config.window_tokens)
    for control in CONTROLS:
        coders = controls_for(control, saes, sample)
        other = SparseEncoder(encoder.backbone, coders, config.sink_ratio, encoder.batch_size)
        signals = partial(_of_control, encoder=other, config=config)
        measure(f"{control} for SAE", signals, track(ready, control, len(ready)))
    return ratios


def _resonances(one: Prepared, config: GroundingConfig) -> dict[str, Tensor]:
    return resonances(one.codes, config, one.run)


def _of_control(one: Prepared, encoder: SparseEncoder, config: GroundingConfig) -> dict[str, Tensor]:
    asked = one.asked
    codes = WindowedCodes(encoder, config.window_tokens).dialogue_codes(asked.dialogue)
    texts = [question.text for question in asked.questions]
    held = encode_questions(encoder, codes, asked.dialogue, texts, one.strategies)
    return resonances(held, config, one.run)


def _held_out(dialogues: Sequence[Prepared], budgets: Sequence[int]) -> list[np.ndarray]:
    """Ratios [Q, budgets] of the resonance of the dialogues, each under settings chosen without it."""
    names = [name for name in dialogues[0].signals if name.startswith("resonance/")]
    table = {
        setting: [plain_ratio(one, "resonance", setting, budgets) for one in dialogues]
        for setting in grid("resonance", names)
    }
    datasets, everyone = [one.asked.dataset for one in dialogues], range(len(dialogues))
    ratios = []
    for held in everyone:
        best = best_settings(table, datasets, [n for n in everyone if n != held])
        ratios.append(np.stack([table[setting][held][:, b] for b, setting in enumerate(best)], 1))
    return ratios
