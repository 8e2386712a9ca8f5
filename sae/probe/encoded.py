"""A text with its sparse codes, and the features that stand out in it or in a span of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sae.errors import ConfigError, LayerError, ShapeError
from sae.topk import SparseCodes


@dataclass(frozen=True, eq=False, repr=False)
class Encoded:
    """One text and its codes, on the CPU. T tokens, none of them padding.

    A token that does not count (special or sink) has values 0, so that no feature is active on it.

    Attributes:
        text: the text, or for prepared inputs what their ids decode to.
        ids: [T] int64.
        tokens: T strings, as they stand in the text; special tokens that the tokenizer added by their name.
        offsets: [T, 2] int64, start and end in characters of `text`; (0, 0) for special tokens that were added.
        codes: layer to codes [T, k].
        special, sink, visual: [T] bool. A sink has a norm many times the median of the text, at any layer; visual
            tokens stand for pixels.
    """

    text: str
    ids: Tensor
    tokens: tuple[str, ...]
    offsets: Tensor
    codes: dict[int, SparseCodes]
    special: Tensor
    sink: Tensor
    visual: Tensor

    @property
    def counted(self) -> Tensor:
        """[T] bool: tokens whose codes count, neither special nor sinks."""
        return ~(self.special | self.sink)

    def __len__(self) -> int:
        return len(self.ids)

    def layer(self, layer: int) -> SparseCodes:
        """Codes [T, k] of that layer. Raises LayerError where it was not encoded."""
        if layer not in self.codes:
            raise LayerError(f"layer {layer} was not encoded; there are {sorted(self.codes)}")
        return self.codes[layer]

    def tokens_in(self, start: int, end: int) -> Tensor:
        """[T] bool: tokens that share at least one character with text[start:end]."""
        if not 0 <= start < end <= len(self.text):
            raise ConfigError(f"characters {start} to {end} are no span of a text of {len(self.text)} characters")
        first, last = self.offsets.unbind(1)
        return (first < end) & (last > start) & (last > first)

    def to_text(self, n: int = 5) -> str:
        """The text, and for each layer the n features with the largest activation, one per line."""
        lines = [repr(self)]
        for layer in self.codes:
            lines.append(f"layer {layer}")
            lines += [f"  {found}" for found in top_features(self, layer, n=n)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return f"Encoded({len(self)} tokens, layers {', '.join(map(str, self.codes))}: {text!r})"

    __str__ = to_text


class FeatureActivation(NamedTuple):
    """A feature over some tokens: `score` = `value` x idf; it fires on `fires` tokens and peaks at token `peak`."""

    feature: int
    score: float
    value: float
    fires: int
    peak: int
    token: str

    def __str__(self) -> str:
        return f"{self.feature:>6}  {self.value:9.4g}  on {self.fires:>3} tokens, peak at {self.peak} {self.token!r}"


def top_features(
    encoded: Encoded,
    layer: int,
    span: tuple[int, int] | None = None,
    tokens: slice | None = None,
    n: int = 10,
    by: Literal["max", "mean", "sum"] = "max",
    idf: Tensor | None = None,
) -> list[FeatureActivation]:
    """The strongest features of a text, or of a part of it.

    Args:
        encoded: from a `Probe`.
        layer: one of its layers.
        span: characters [start, end) of the text; tokens that share a character with it are taken.
        tokens: or tokens by number.
        n: features at most; those that are nowhere active are not given.
        by: value of a feature over the tokens: largest activation, mean over the tokens that count (0 where inactive),
            or sum. In units of the coder.
        idf: [d_sae], weights of the ranking (`sae.load_idf`); None: 1.

    Returns:
        By falling score, among equals the lower feature first. The peak is the first token with the largest activation.

    Raises:
        ConfigError: span and tokens at once, a span outside the text, or another `by`.
        LayerError: a layer that was not encoded.
        ShapeError: idf of another length.
    """
    if by not in ("max", "mean", "sum"):
        raise ConfigError(f"by = {by!r}: must be 'max', 'mean' or 'sum'")
    if span is not None and tokens is not None:
        raise ConfigError("give a span of characters or a slice of tokens, not both")
    codes = encoded.layer(layer)
    chosen = torch.ones(len(encoded), dtype=torch.bool) if span is None else encoded.tokens_in(*span)
    if tokens is not None:
        chosen = torch.zeros_like(chosen)
        chosen[tokens] = True
    chosen &= encoded.counted
    where = chosen.nonzero().squeeze(-1)
    active = codes.active()[where]
    if not bool(active.any()):
        return []
    value, token = codes.values[where][active], where[:, None].expand_as(active)[active]
    feature, group = codes.indices[where][active].unique(return_inverse=True)
    if idf is not None and (idf.ndim != 1 or int(feature[-1]) >= len(idf)):
        raise ShapeError(f"idf {list(idf.shape)} must be [d_sae], and feature {int(feature[-1])} is active")
    largest = value.new_zeros(len(feature)).scatter_reduce(0, group, value, "amax")
    peak = torch.full_like(feature, len(encoded)).scatter_reduce(
        0, group, torch.where(value == largest[group], token, len(encoded)), "amin"
    )
    fires = torch.bincount(group)
    total = value.new_zeros(len(feature)).index_add(0, group, value)
    worth = {"max": largest, "sum": total, "mean": total / len(where)}[by].double()
    score = worth if idf is None else worth * idf.detach().cpu().double()[feature]
    best = score.sort(descending=True, stable=True).indices[: max(n, 0)]
    rows = zip(*(x[best].tolist() for x in (feature, score, worth, fires, peak)), strict=True)
    return [FeatureActivation(f, s, w, c, at, encoded.tokens[at]) for f, s, w, c, at in rows]
