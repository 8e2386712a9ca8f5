"""Token ids to sparse codes, through the backbone and its SAEs (Eq. 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from remind.core.errors import ModelError
from remind.models.backbone import Backbone, modality
from sae import DocumentFrequency, SAEError, SparseCodes

#: Numbers of [tokens, d_sae] that a coder computes at a time on a CPU: 16 MB in float32, which the allocator keeps.
#: Larger blocks come fresh from the system each time, and filling those pages costs as much as the product itself.
_CHUNK = 1 << 22
#: Entries of [turns, d_sae] counted at a time.
_SEEN = 1 << 25
C = TypeVar("C", bound="Coder")


class Coder(Protocol):
    """What takes hidden states to sparse codes: an SAE, or a control in its place.

    Modules, so that they move between devices and so that `state_dict` says all there is to know of their codes.
    """

    d_in: int
    d_sae: int
    k: int

    def encode(self, h: Tensor) -> SparseCodes:
        """[..., d_in] to codes [..., k]."""
        ...

    def to(self: C, device: Any) -> C: ...

    def state_dict(self) -> Mapping[str, Any]: ...


def turn_idf(codes: SparseCodes, turn: Tensor, d_sae: int) -> Tensor:
    """w_idf of Eq. 3 with turns as documents; float32 [d_sae].

    Args:
        codes: [T, k]. turn: int64 [T], ascending.
    """
    frequency = DocumentFrequency(d_sae)
    # the same counts as `add` gives, without its sort of all (turn, feature) pairs
    present, document = turn.unique_consecutive(return_inverse=True)
    step = max(1, _SEEN // d_sae)
    for first in range(0, len(present), step):
        low, high = torch.searchsorted(document, torch.tensor([first, first + step])).tolist()
        part = codes[low:high]
        pairs = (document[low:high, None] - first) * d_sae + part.indices
        seen = torch.zeros(min(step, len(present) - first), d_sae, dtype=torch.bool)
        seen.view(-1)[pairs[part.active()]] = True
        frequency.df += seen.sum(0)
    frequency.n_documents = len(present)
    return frequency.idf()


def split_codes(codes: SparseCodes, sizes: Sequence[int]) -> list[SparseCodes]:
    """Split [T, k] into consecutive pieces."""
    pairs = zip(codes.values.split(list(sizes)), codes.indices.split(list(sizes)), strict=True)
    return [SparseCodes(values, indices) for values, indices in pairs]


def join_codes(parts: Sequence[SparseCodes]) -> SparseCodes:
    """Concatenate several [·, k]."""
    return SparseCodes(torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts]))


class SparseEncoder:
    """Token ids to sparse codes at every layer that has an SAE.

    Args:
        backbone: gives the hidden states.
        saes: by layer number, or a control in an SAE's place; moved to the backbone's device.
        sink_ratio: tokens with a hidden state longer than this many times the median of their sequence get no codes.
        batch_size: sequences in one forward.
    """

    def __init__(self, backbone: Backbone, saes: Mapping[int, Coder], sink_ratio: float, batch_size: int) -> None:
        self.backbone = backbone
        self.saes = {layer: saes[layer].to(backbone.device) for layer in sorted(saes)}
        self.sink_ratio = sink_ratio
        self.batch_size = batch_size

    @property
    def max_tokens(self) -> int:
        """Tokens of text that the backbone takes at once."""
        return self.backbone.max_length - sum(map(len, self.backbone.frame))

    @torch.no_grad()
    def encode(
        self, sequences: Sequence[Sequence[int]], pixels: Mapping[str, Tensor] | None = None
    ) -> dict[int, SparseCodes]:
        """Codes of all sequences' tokens, in order, each sequence seeing only itself and the tokenizer's frame.

        The frame ([CLS] and [SEP], a BOS) is what the SAEs saw in training; its own codes are left out.

        Args:
            sequences: non-empty lists of token ids, at most `max_tokens` long.
            pixels: pixel_values and image_grid_thw of the images of the only sequence.

        Returns:
            Layer to [sum of lengths, k], on the CPU.

        Raises:
            ModelError: a sequence that is too long, or hidden states that are not finite.
        """
        longest = max(map(len, sequences), default=0)
        if longest > self.max_tokens:
            raise ModelError(
                f"{self.backbone.name}: {longest} tokens at once, but it takes {self.max_tokens}; "
                "set grounding.context_codes to windowed, or perception.retrieve.max_context_tokens lower"
            )
        # neighbours of like length waste little on padding
        order = sorted(range(len(sequences)), key=lambda number: len(sequences[number]))
        pieces: dict[int, dict[int, SparseCodes]] = {layer: {} for layer in self.saes}
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        for chosen in batches:
            for layer, batch in self._encode_batch([sequences[number] for number in chosen], pixels or {}).items():
                pieces[layer].update(zip(chosen, batch, strict=True))
        if not sequences:
            empty = {layer: (torch.zeros(0, sae.k), torch.zeros(0, sae.k).long()) for layer, sae in self.saes.items()}
            return {layer: SparseCodes(*pair) for layer, pair in empty.items()}
        return {layer: join_codes([found[n] for n in range(len(sequences))]) for layer, found in pieces.items()}

    def _encode_batch(
        self, sequences: Sequence[Sequence[int]], pixels: Mapping[str, Tensor]
    ) -> dict[int, list[SparseCodes]]:
        before, after = self.backbone.frame
        sizes = [len(sequence) for sequence in sequences]
        width = max(sizes) + len(before) + len(after)
        ids = torch.full((len(sizes), width), self.backbone.tokenizer.pad_token_id or 0)
        for row, sequence in zip(ids, sequences, strict=True):
            framed = [*before, *sequence, *after]
            row[: len(framed)] = torch.tensor(framed)
        lengths = torch.tensor(sizes)[:, None]
        place = torch.arange(width)[None]
        mask = place < lengths + len(before) + len(after)
        inside = (place >= len(before)) & (place < lengths + len(before))
        images: dict[str, Any] = dict(pixels)
        if images:
            images["mm_token_type_ids"] = modality(self.backbone.model, ids)
        attention = None if bool(mask.all()) else mask.long()
        hidden = self.backbone.hidden_states(ids, attention, list(self.saes), **images)
        whole = bool(inside.all())
        return {
            layer: self._sparse(layer, states.flatten(0, 1) if whole else states[inside.to(states.device)], sizes)
            for layer, states in hidden.items()
        }

    def _sparse(self, layer: int, states: Tensor, sizes: list[int]) -> list[SparseCodes]:
        """Eq. 2 for the tokens [sum of sizes, d] of several sequences; sinks get no values."""
        coder = self.saes[layer]
        rows = max(1, _CHUNK // coder.d_sae) if states.device.type == "cpu" else len(states)
        try:
            parts = [coder.encode(part) for part in states.split(rows)]
        except SAEError as error:
            raise ModelError(f"{self.backbone.name}, layer {layer}: {error}") from None
        codes = parts[0] if len(parts) == 1 else join_codes(parts)
        norms = torch.linalg.vector_norm(states, dim=-1, dtype=torch.promote_types(states.dtype, torch.float32))
        limits = [self.sink_ratio * part.median() for part in norms.split(sizes)]
        kept = torch.cat([part <= limit for part, limit in zip(norms.split(sizes), limits, strict=True)])
        return split_codes(SparseCodes(codes.values * kept[:, None], codes.indices).to("cpu"), sizes)
