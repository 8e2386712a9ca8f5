"""Activations for training: one forward feeds all layers, useless tokens are dropped, the rest is shuffled.

Dropped are padding, special tokens and attention sinks: tokens whose norm is many times the median. They carry little
text and much variance, and cost a coder explained variance and live features. A token dropped for one layer is dropped
for all, so that every layer sees the same tokens in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sae.errors import ActivationError, ShapeError
from sae.hooks import device_of, hidden_states


@dataclass(frozen=True)
class TokenBatch:
    """The kept tokens of one forward, row by row.

    Attributes:
        activations: layer to [N, d].
        visual: [N] bool, image or video tokens.
        rows, positions: [N] int64, where each token stood in the batch [B, T].
        batch: number of the batch, from 0.
    """

    activations: dict[int, Tensor]
    visual: Tensor
    rows: Tensor
    positions: Tensor
    batch: int


@dataclass
class HarvestStats:
    """Counts of a harvest. `tokens` = kept + padding + special + sinks + those of `skipped` batches."""

    batches: int = 0
    tokens: int = 0
    kept: int = 0
    visual: int = 0
    padding: int = 0
    special: int = 0
    sinks: int = 0
    skipped: int = 0


def harvest(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    layers: Sequence[int],
    *,
    special_ids: Collection[int] = (),
    visual_ids: Collection[int] | None = None,
    sink_factor: float | None = 10.0,
    skip_nonfinite: bool = False,
    device: torch.device | str | None = None,
    stats: HarvestStats | None = None,
    start: int = 0,
) -> Iterator[TokenBatch]:
    """Run the model over `batches` without gradient and yield the kept tokens of each.

    Args:
        model: a Hugging Face model, in eval mode.
        batches: inputs of the model: input_ids [B, T], optionally attention_mask [B, T] (1 for tokens) and anything
            else its forward takes (position_ids, pixel_values, image_grid_thw, ...), passed through.
        layers: as in `sae.hooks`.
        special_ids: tokens to drop ([CLS], <|im_start|>, ...). Visual tokens are kept even where listed here.
        visual_ids: tokens that stand for pixels; None: what the configuration names (image_token_id, video_token_id).
        sink_factor: a token is a sink where, at any layer, its norm exceeds this many times the median norm of the kept
            text (or visual) tokens of its batch; None: keep all.
        skip_nonfinite: leave out a batch with values that are not finite, and count it, instead of raising.
        device: where the activations go; None: they stay with the model.
        stats: counts to add to; a batch number counted before is not counted again.
        start: number of the first batch.

    Raises:
        ActivationError: values that are not finite, naming batch and layer.
        LayerError: a layer out of range.
        ShapeError: an attention mask that is not [B, T].
    """
    choice = TokenChoice(model, special_ids=special_ids, visual_ids=visual_ids, sink_factor=sink_factor)
    for number, batch in enumerate(batches, start):
        counts = stats if stats is not None and number >= stats.batches else HarvestStats()
        inputs = {
            name: value.to(device_of(model)) if isinstance(value, Tensor) else value for name, value in batch.items()
        }
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        if mask is not None and mask.shape != ids.shape:
            raise ShapeError(f"batch {number}: attention_mask {list(mask.shape)} for input_ids {list(ids.shape)}")
        with torch.no_grad():
            states = hidden_states(model, layers, **inputs)
        counts.batches += 1
        counts.tokens += ids.numel()
        chosen = choice(ids, mask, states)
        broken = [layer for layer, state in states.items() if not bool(torch.isfinite(state[chosen.wanted]).all())]
        if broken:
            if not skip_nonfinite:
                raise ActivationError(
                    f"batch {number}: hidden states of layer {broken[0]} are not finite; load the model in bfloat16 or "
                    "float32, or skip such batches (skip_nonfinite)"
                )
            counts.skipped += 1
            continue
        keep, visual = chosen.keep, chosen.visual
        wanted, real = int(chosen.wanted.sum()), ids.numel() if mask is None else int(mask.bool().sum())
        rows, positions = keep.nonzero(as_tuple=True)
        counts.padding += ids.numel() - real
        counts.special += real - wanted
        counts.kept += len(rows)
        counts.sinks += wanted - len(rows)
        counts.visual += int(visual[keep].sum())
        if len(rows):
            target = rows.device if device is None else device
            yield TokenBatch(
                activations={layer: state[keep].to(target) for layer, state in states.items()},
                visual=visual[keep].to(target),
                rows=rows.to(target),
                positions=positions.to(target),
                batch=number,
            )


class Chosen(NamedTuple):
    """[B, T] bool each: tokens used; the same before sinks were dropped; image and video tokens."""

    keep: Tensor
    wanted: Tensor
    visual: Tensor


class TokenChoice:
    """Which tokens of a batch a coder learns from and is judged on; the arguments are those of `harvest`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        special_ids: Collection[int] = (),
        visual_ids: Collection[int] | None = None,
        sink_factor: float | None = 10.0,
    ) -> None:
        self._special = _ids(special_ids, model)
        self._visual = _ids(_visual_ids(model) if visual_ids is None else visual_ids, model)
        self._sink_factor = sink_factor

    def __call__(self, ids: Tensor, mask: Tensor | None, states: Mapping[int, Tensor]) -> Chosen:
        """ids, mask: [B, T]; states: layer to [B, T, d]."""
        visual = torch.isin(ids, self._visual)
        wanted = visual | ~torch.isin(ids, self._special)
        if mask is not None:
            wanted &= mask.bool()
        keep = wanted
        if self._sink_factor is not None:
            keep = wanted & ~_sinks(states, wanted, visual, self._sink_factor)
        return Chosen(keep, wanted, visual)


def _sinks(states: Mapping[int, Tensor], keep: Tensor, visual: Tensor, factor: float) -> Tensor:
    """[B, T] bool. Text and visual tokens live on different scales, so each kind has its own median."""
    sinks = torch.zeros_like(keep)
    for state in states.values():
        norms = torch.linalg.vector_norm(state, dim=-1, dtype=torch.promote_types(state.dtype, torch.float32))
        for kind in (keep & visual, keep & ~visual):
            if bool(kind.any()):
                sinks |= kind & (norms > factor * norms[kind].median())
    return sinks


def _visual_ids(model: nn.Module) -> list[int]:
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
    return [token for token in found if isinstance(token, int)]


def _ids(ids: Collection[int], model: nn.Module) -> Tensor:
    return torch.tensor(sorted(ids), dtype=torch.int64, device=device_of(model))
