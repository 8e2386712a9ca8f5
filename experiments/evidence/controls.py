"""What stands in an SAE's place to show what the SAE is worth: null controls, simpler features, ablations.

All but `cosine` give sparse codes and go where an SAE goes: `Grounder(backbone, controls_for(name, saes, sample), None,
config)`. Their features are not those of the trained SAE, so its saved idf does not fit them: pass None, and idf is
counted over the dialogue.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from remind.grounding.codes import Coder, SparseEncoder
from remind.models.backbone import Backbone
from sae import SparseCodes, TopKSAE

Control = Literal["untrained", "shuffled", "pca", "neurons", "cosine"]
CONTROLS: tuple[Control, ...] = get_args(Control)


def ablations() -> dict[str, dict[str, Any]]:
    """Name to the fields of `GroundingConfig` that switch one part of the method off, all else as it is."""
    return {
        "no_idf": {"idf": "none"},
        "no_broadcast": {"beta": 0.0},
        "no_smoothing": {"sigma": 0.0, "smooth_turns": 0.0},
    }


def controls_for(
    name: Control, saes: Mapping[int, TopKSAE], sample: Mapping[int, Tensor], seed: int = 0
) -> dict[int, Coder]:
    """The control in place of every SAE, with its k (as far as there are that many features).

    untrained: an SAE of the same size with random weights and the sample's mean as b_dec.
    shuffled: `Shuffled`. pca: `principal_directions`. neurons: `neurons`.
    cosine: `neurons` that keep every dimension, for cosines of hidden states (`variations`).

    Args:
        sample: layer to hidden states [N, d_in], of `hidden_sample`; for untrained and pca.
        seed: of the random weights and of the shuffling.
    """
    return {layer: _control(name, coder, sample[layer], seed + layer) for layer, coder in sorted(saes.items())}


def _control(name: Control, coder: TopKSAE, sample: Tensor, seed: int) -> Coder:
    if name == "shuffled":
        return Shuffled(coder, seed)
    if name == "neurons":
        return neurons(coder.d_in, min(coder.k, coder.d_in))
    if name == "cosine":
        return neurons(coder.d_in, coder.d_in)
    if name == "untrained":
        return untrained(coder.d_sae, coder.k, sample.mean(0), seed)
    return principal_directions(sample, min(coder.k, coder.d_in))


def untrained(d_sae: int, k: int, mean: Tensor, seed: int) -> TopKSAE:
    """An SAE as it is before training: random unit directions, b_enc 0, b_dec = mean [d_in]."""
    coder = TopKSAE(len(mean), d_sae, k, generator=torch.Generator().manual_seed(seed)).requires_grad_(False)
    coder.b_dec.copy_(mean)
    return coder


class Shuffled(nn.Module):
    """A trained SAE whose features change their names from token to token: values stay, identity is lost.

    Every occurrence of a token draws a one-to-one map of the features of its own, j → (a j + b) mod d_sae with b
    uniform and a coprime to d_sae. So each token keeps how many features are active and how strongly, and two tokens
    share features as often as random sets do (k² / d_sae on average) whatever they mean. One permutation for all tokens
    would be no null: which features coincide would stay as it was.

    Maps depend on the seed, on the codes of one call and on the place in it: a run gives the same again, but another
    batch size gives another draw.

    Args:
        coder: the trained SAE.
        seed: of the draws.
    """

    coprime: Tensor
    seed: Tensor

    def __init__(self, coder: TopKSAE, seed: int) -> None:
        super().__init__()
        self.coder = coder
        self.d_in, self.d_sae, self.k = coder.d_in, coder.d_sae, coder.k
        factors = torch.arange(1, coder.d_sae + 1)
        self.register_buffer("coprime", factors[torch.gcd(factors, torch.tensor(coder.d_sae)) == 1])
        self.register_buffer("seed", torch.tensor(seed))

    def encode(self, h: Tensor) -> SparseCodes:
        """Codes [..., k] under one map per token; features in ascending order."""
        codes = self.coder.encode(h)
        content = hashlib.sha256(codes.indices.cpu().contiguous().numpy().data).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(content[:6], "big") ^ int(self.seed))
        shape = (*codes.indices.shape[:-1], 1)
        factor = self.coprime.cpu()[torch.randint(len(self.coprime), shape, generator=generator)]
        shift = torch.randint(self.d_sae, shape, generator=generator)
        indices, order = ((codes.indices.cpu() * factor + shift) % self.d_sae).sort(dim=-1)
        return SparseCodes(codes.values.gather(-1, order.to(h.device)), indices.to(h.device))


class SignedProjection(nn.Module):
    """The k directions along which a token lies farthest from the mean, either way.

    With m directions, feature j < m says how far the token lies along direction j, feature m + j how far against it;
    at most one of the two is active. Values are lengths in units of the hidden state.

    Args:
        directions: orthonormal rows [m, d]; None: the d axes themselves.
        mean: [d].
        k: features per token, at most m.
    """

    directions: Tensor | None
    mean: Tensor

    def __init__(self, directions: Tensor | None, mean: Tensor, k: int) -> None:
        super().__init__()
        self.d_in, m = len(mean), len(mean) if directions is None else len(directions)
        self.d_sae, self.k = 2 * m, k
        self.register_buffer("directions", directions)
        self.register_buffer("mean", mean)

    def encode(self, h: Tensor) -> SparseCodes:
        """[..., d] to codes [..., k]; features in ascending order."""
        centred = h.to(self.mean.dtype) - self.mean
        along = centred if self.directions is None else centred @ self.directions.T
        chosen = along.abs().topk(self.k, dim=-1).indices
        values = along.gather(-1, chosen)
        indices, order = torch.where(values < 0, chosen + self.d_sae // 2, chosen).sort(dim=-1)
        return SparseCodes(values.abs().gather(-1, order), indices)

    def dense(self, codes: SparseCodes) -> Tensor:
        """Coordinates along the m directions, [..., m], zero where not kept."""
        along, against = codes.dense(self.d_sae).split(self.d_sae // 2, dim=-1)
        return along - against


def neurons(d_in: int, k: int) -> SignedProjection:
    """Raw hidden dimensions as features, each sign one of its own."""
    return SignedProjection(None, torch.zeros(d_in), k)


def principal_directions(sample: Tensor, k: int) -> SignedProjection:
    """The principal directions of a sample of hidden states [N, d], falling variance, about the sample's mean.

    Args:
        k: features per token.
    """
    exact = sample.double()
    mean = exact.mean(0)
    centred = exact - mean
    directions = torch.linalg.eigh(centred.T @ centred).eigenvectors.T.flip(0)
    return SignedProjection(directions.float().contiguous(), mean.float(), k)


class Remembering(Backbone):
    """A backbone that keeps the hidden states it gave: controls read the same windows as the SAEs do.

    Memory: as many numbers as the texts have tokens, times layers and width.
    """

    @classmethod
    def of(cls, backbone: Backbone) -> Remembering:
        return cls(backbone.name, backbone.model, backbone.tokenizer, backbone.processor, backbone.kind)

    @cached_property
    def _given(self) -> dict[tuple[object, ...], dict[int, Tensor]]:
        return {}

    def hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor | None, layers: Sequence[int], **kwargs: Any
    ) -> dict[int, Tensor]:
        if kwargs:
            return super().hidden_states(input_ids, attention_mask, layers, **kwargs)
        mask = None if attention_mask is None else attention_mask.numpy().tobytes()
        key = (input_ids.numpy().tobytes(), input_ids.shape, mask, tuple(layers))
        if key not in self._given:
            self._given[key] = super().hidden_states(input_ids, attention_mask, layers)
        return self._given[key]


def hidden_sample(
    backbone: Backbone, texts: Sequence[str], layers: Sequence[int], sink_ratio: float = 10.0, window_tokens: int = 256
) -> dict[int, Tensor]:
    """Hidden states of texts, each cut into windows, without attention sinks: layer to float32 [N, d], on the CPU."""
    every = neurons(backbone.hidden_size, backbone.hidden_size)
    encoder = SparseEncoder(backbone, dict.fromkeys(layers, every), sink_ratio, 8)
    window = min(window_tokens, encoder.max_tokens)
    tokenized = [backbone.tokenize(text).ids for text in texts]
    windows = [ids[start : start + window] for ids in tokenized for start in range(0, len(ids), window)]
    states = {}
    for layer, codes in encoder.encode(windows).items():
        dense = every.dense(codes)
        states[layer] = dense[dense.any(-1)]
    return states
