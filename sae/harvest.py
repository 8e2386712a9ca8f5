"""Activations for training: one forward feeds all layers, and tokens that are useless for training are dropped.

Dropped are padding, special tokens and attention sinks (tokens whose norm is many times the median), which carry little
text and much variance. A token dropped for one layer is dropped for all, so that all see the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sae.errors import ActivationError, ShapeError
from sae.hooks import device_of, hidden_states


@dataclass(frozen=True)
class TokenBatch:
    """The kept tokens of one forward, row by row: layer to [N, d], and [N] bool, which are image or video tokens.

    `rows` and `positions` [N] say where each token stood in the batch [B, T] of number `batch`.
    """

    activations: dict[int, Tensor]
    visual: Tensor
    rows: Tensor
    positions: Tensor
    batch: int


@dataclass
class HarvestStats:
    """Counts of a harvest. `tokens` = kept + padding + special + sinks."""

    batches: int = 0
    tokens: int = 0
    kept: int = 0
    visual: int = 0
    padding: int = 0
    special: int = 0
    sinks: int = 0


def harvest(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    layers: Sequence[int],
    *,
    special_ids: Collection[int] = (),
    sink_factor: float | None = 10.0,
    stats: HarvestStats | None = None,
    start: int = 0,
) -> Iterator[TokenBatch]:
    """Run the model over `batches` without gradient and yield the kept tokens of each.

    Args:
        model: a Hugging Face model, in eval mode.
        batches: inputs of the model: input_ids [B, T], optionally attention_mask [B, T] (1 for tokens) and anything
            else its forward takes.
        layers: as in `sae.hooks`.
        special_ids: tokens to drop. Visual tokens (image_token_id, video_token_id of the configuration) are kept.
        sink_factor: a token is a sink where, at any layer, its norm exceeds this many times the median norm of the kept
            text (or visual) tokens of its batch; None: keep all.
        stats: counts to add to; a batch number counted before is not counted again.
        start: number of the first batch.

    Raises ActivationError for values that are not finite, LayerError or ShapeError for layers or masks that do not fit.
    """
    choice = TokenChoice(model, special_ids=special_ids, sink_factor=sink_factor)
    for number, batch in enumerate(batches, start):
        counts = stats if stats is not None and number >= stats.batches else HarvestStats()
        inputs = on_device(model, batch, f"batch {number}")
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        with torch.no_grad():
            states = hidden_states(model, layers, **inputs)
        counts.batches += 1
        counts.tokens += ids.numel()
        keep, wanted, visual = choice(ids, mask, states)
        broken = [layer for layer, state in states.items() if not bool(torch.isfinite(state[wanted]).all())]
        if broken:
            where = f"batch {number}: hidden states of layer {broken[0]}"
            raise ActivationError(f"{where} are not finite; load the model in bfloat16 or float32")
        n_wanted, n_real = int(wanted.sum()), ids.numel() if mask is None else int(mask.bool().sum())
        rows, positions = keep.nonzero(as_tuple=True)
        counts.padding += ids.numel() - n_real
        counts.special += n_real - n_wanted
        counts.kept += len(rows)
        counts.sinks += n_wanted - len(rows)
        counts.visual += int(visual[keep].sum())
        if len(rows):
            activations = {layer: state[keep] for layer, state in states.items()}
            yield TokenBatch(activations, visual[keep], rows, positions, number)


def on_device(model: nn.Module, inputs: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The inputs with their tensors on the device of the model.

    Raises ShapeError for input_ids that are not [B, T], or an attention mask of another shape.
    """
    device = device_of(model)
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
    ids, mask = moved["input_ids"], moved.get("attention_mask")
    if ids.ndim != 2 or (mask is not None and mask.shape != ids.shape):
        shape = "none" if mask is None else list(mask.shape)
        raise ShapeError(f"{name}: input_ids {list(ids.shape)} and attention_mask {shape} must both be [B, T]")
    return moved


class TokenChoice:
    """Which tokens of a batch a coder is trained and evaluated on; the arguments are those of `harvest`."""

    def __init__(
        self, model: nn.Module, *, special_ids: Collection[int] = (), sink_factor: float | None = 10.0
    ) -> None:
        config, device = getattr(model, "config", None), device_of(model)
        ids = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
        visual = [token for token in ids if isinstance(token, int)]
        self._visual = torch.tensor(visual, dtype=torch.int64, device=device)
        self._special = torch.tensor(sorted(special_ids), dtype=torch.int64, device=device)
        self._sink_factor = sink_factor

    def __call__(self, ids: Tensor, mask: Tensor | None, states: Mapping[int, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """From ids, mask [B, T] and layer to states [B, T, d]: tokens used, the same with sinks, visual tokens."""
        visual = torch.isin(ids, self._visual)
        wanted = visual | ~torch.isin(ids, self._special)
        if mask is not None:
            wanted &= mask.bool()
        keep = wanted
        if self._sink_factor is not None:
            keep = wanted & ~_sinks(states, wanted, visual, self._sink_factor)
        return keep, wanted, visual


def _sinks(states: Mapping[int, Tensor], keep: Tensor, visual: Tensor, factor: float) -> Tensor:
    """[B, T] bool. Text and visual tokens have norms of different scale, so each kind has its own median."""
    sinks = torch.zeros_like(keep)
    for state in states.values():
        norms = torch.linalg.vector_norm(state, dim=-1, dtype=torch.promote_types(state.dtype, torch.float32))
        for kind in (keep & visual, keep & ~visual):
            if bool(kind.any()):
                sinks |= kind & (norms > factor * norms[kind].median())
    return sinks
