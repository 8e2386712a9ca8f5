"""Sparse codes of texts and of prepared inputs, token by token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple, overload

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor, nn

from sae import hooks
from sae.errors import ActivationError, ConfigError, LayerError, ShapeError
from sae.harvest import TokenChoice, on_device
from sae.topk import SparseCodes, TopKSAE

#: Batches of texts tokenised at a time and sorted by length, so that there is little padding.
_LOOK_AHEAD = 8


@dataclass(frozen=True, eq=False, repr=False)
class Encoded:
    """One text and its codes, on the CPU: T tokens, none of them padding; on special tokens and sinks all values are 0.

    Attributes:
        text: the text; of prepared inputs their decoded ids.
        ids: [T] int64.
        tokens: T strings, as in the text; special tokens that the tokenizer added by their name.
        offsets: [T, 2] int64, start and end in characters of `text`; (0, 0) for special tokens that were added.
        codes: layer to codes [T, k].
        special, sink, visual: [T] bool; sinks as in `sae.harvest`, visual tokens stand for pixels.
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
        """Codes [T, k] of that layer. Raises LayerError if it was not encoded."""
        if layer not in self.codes:
            raise LayerError(f"layer {layer} was not encoded, only {sorted(self.codes)}")
        return self.codes[layer]

    def tokens_in(self, start: int, end: int) -> Tensor:
        """[T] bool: tokens that share at least one character with text[start:end]."""
        if not 0 <= start < end <= len(self.text):
            raise ConfigError(f"characters {start} to {end} are not a span of a text of {len(self.text)} characters")
        first, last = self.offsets.unbind(1)
        return (first < end) & (last > start) & (last > first)

    def to_text(self, n: int = 5) -> str:
        """The text, and for each layer the n features with the largest activation, one per line."""
        lines = [repr(self)]
        for layer in self.codes:
            lines.append(f"layer {layer}")
            lines += [f"  {feature}" for feature in top_features(self, layer, n=n)]
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
        tokens: or tokens by number, as of an image.
        n: features at most; only active ones.
        by: value of a feature: largest activation, mean over the tokens that count (0 where inactive), or sum.
        idf: [d_sae], weights of the ranking (`sae.load_idf`); None: 1.

    Returns:
        By falling score, among equals the lower feature first; the peak is the first of equal tokens.

    Raises ConfigError for a span outside the text, LayerError for another layer, ShapeError for idf that does not fit.
    """
    if by not in ("max", "mean", "sum"):
        raise ConfigError(f"by = {by!r}: must be 'max', 'mean' or 'sum'")
    codes = encoded.layer(layer)
    chosen = torch.ones(len(encoded), dtype=torch.bool) if span is None else encoded.tokens_in(*span)
    if tokens is not None:
        chosen = torch.zeros_like(chosen)
        chosen[tokens] = True
    where = (chosen & encoded.counted).nonzero().squeeze(-1)
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


def decoded(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text of ids, and start and end of each in it. Tokens that share a character share its span.

    Without a tokenizer the text is the ids as numbers.
    """
    stream, text = DecodeStream(skip_special_tokens=False), ""
    spans: list[tuple[int, int]] = []
    for number, token in enumerate(ids, start=1):
        piece = f" {token}" if tokenizer is None else stream.step(tokenizer.backend_tokenizer, token)
        if piece is None and number == len(ids):  # it ends within a character
            piece = "\ufffd"
        if piece is not None:
            spans += [(len(text), len(text) + len(piece))] * (number - len(spans))
            text += piece
    return text, spans


def check_coders(model: nn.Module, coders: Mapping[int, TopKSAE]) -> None:
    """Raise LayerError for a layer the model does not have (or none), ShapeError for a coder of another width."""
    hooks.check_layers(model, hooks.find_blocks(model), list(coders))
    width = getattr(hooks.text_config(model), "hidden_size", None)
    for layer, coder in coders.items():
        if width is not None and coder.d_in != width:
            raise ShapeError(f"layer {layer}: the coder is for hidden states of {coder.d_in}, the model has {width}")


class Probe:
    """Encodes texts and prepared inputs with a model and its coders.

    Args:
        model: a Hugging Face model in eval mode.
        tokenizer: its fast tokenizer, or a processor that has one.
        coders: layer to coder; `sae.load_layers` gives such a mapping.
        special_ids: tokens that do not count; None: tokenizer.all_special_ids. Visual tokens count in any case.
        sink_factor: as in `sae.harvest`, but each text has a median of its own; None: sinks count.
        add_special_tokens: whether the tokenizer frames each text ([CLS], a BOS).
        batch_size, batch_tokens: texts and tokens with padding per forward, at most; a longer text is encoded alone.

    Attributes:
        max_length: the longest text in tokens that configuration and tokenizer allow; None: no limit.

    Raises ConfigError, LayerError or ShapeError for a tokenizer without offsets, or coders that do not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        coders: Mapping[int, TopKSAE],
        *,
        special_ids: Collection[int] | None = None,
        sink_factor: float | None = 10.0,
        add_special_tokens: bool = True,
        batch_size: int = 16,
        batch_tokens: int = 16384,
    ) -> None:
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(f"{type(tokenizer).__name__} has no character offsets; load the fast tokenizer")
        check_coders(model, coders)
        self.model, self.tokenizer, self.coders = model, tokenizer, dict(coders)
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.max_length = _longest(model, tokenizer)
        self.add_special_tokens = add_special_tokens
        specials = tokenizer.all_special_ids if special_ids is None else special_ids
        self._choice = TokenChoice(model, special_ids=specials, sink_factor=sink_factor)

    @overload
    def encode(self, text: str) -> Encoded: ...  # type: ignore[overload-overlap]
    @overload
    def encode(self, text: Sequence[str]) -> list[Encoded]: ...
    def encode(self, text: str | Sequence[str]) -> Encoded | list[Encoded]:
        """Codes of one text, or of each of several, in their order.

        Raises ShapeError for a text longer than the model takes, ActivationError for hidden states that are not finite,
        ConfigError for a model in training mode.
        """
        return next(self.stream([text])) if isinstance(text, str) else list(self.stream(text))

    def stream(self, texts: Iterable[str]) -> Iterator[Encoded]:
        """As `encode`, one by one; reads at most 8 batches ahead."""
        texts, first = iter(texts), 0
        while chunk := list(islice(texts, _LOOK_AHEAD * self.batch_size)):
            yield from self._encode(chunk, first)
            first += len(chunk)

    def encode_inputs(self, inputs: Mapping[str, Any]) -> list[Encoded]:
        """Codes of inputs as a processor prepares them, in one forward; one `Encoded` per row, without its padding.

        Args:
            inputs: input_ids [B, T], optionally attention_mask [B, T], and whatever else the model's forward takes.

        Returns:
            The text of each is its decoded ids, with special tokens. Errors as `encode`; ShapeError also for an
            attention mask that is not [B, T].
        """
        inputs = on_device(self.model, inputs, "inputs")
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        lengths = [ids.shape[1]] * len(ids) if mask is None else mask.bool().sum(1).tolist()
        self._check_lengths("row", 0, lengths)
        rows = []
        for encoded in self._forward(inputs, "row", list(range(len(ids)))):
            text, spans = decoded(self.tokenizer, encoded.ids.tolist())
            tokens = tuple(text[start:end] for start, end in spans)
            rows.append(replace(encoded, text=text, tokens=tokens, offsets=_offsets(spans)))
        return rows

    def _encode(self, texts: list[str], first: int) -> list[Encoded]:
        options = {"padding": False, "truncation": False, "verbose": False, "return_offsets_mapping": True}
        framed = self.tokenizer(texts, add_special_tokens=self.add_special_tokens, **options)
        ids: list[list[int]] = framed["input_ids"]
        self._check_lengths("text", first, map(len, ids))
        rows: dict[int, Encoded] = {}
        for batch in self._batches([len(row) for row in ids]):
            width = len(ids[batch[0]])
            # on the right, where padding moves no position, whatever side the tokenizer prefers
            padded = torch.full((len(batch), width), self.tokenizer.pad_token_id or 0)
            mask = torch.zeros_like(padded)
            for row, number in enumerate(batch):
                padded[row, : len(ids[number])] = torch.tensor(ids[number], dtype=torch.int64)
                mask[row, : len(ids[number])] = 1
            device = hooks.device_of(self.model)
            inputs = {"input_ids": padded.to(device), "attention_mask": mask.to(device)}
            rows.update(zip(batch, self._forward(inputs, "text", [first + number for number in batch]), strict=True))
        results = []
        for number, (text, spans) in enumerate(zip(texts, framed["offset_mapping"], strict=True)):
            names = self.tokenizer.convert_ids_to_tokens(ids[number])
            tokens = tuple(text[a:b] if b > a else name for (a, b), name in zip(spans, names, strict=True))
            results.append(replace(rows[number], text=text, tokens=tokens, offsets=_offsets(spans)))
        return results

    def _batches(self, lengths: list[int]) -> list[list[int]]:
        """Indices of the texts of each forward, the longest text first."""
        batches: list[list[int]] = []
        for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            last = batches[-1] if batches else []
            if last and len(last) < self.batch_size and (len(last) + 1) * lengths[last[0]] <= self.batch_tokens:
                last.append(number)
            else:
                batches.append([number])
        return batches

    @torch.no_grad()
    def _forward(self, inputs: Mapping[str, Any], kind: str, numbers: list[int]) -> list[Encoded]:
        """The rows without padding, still without text, tokens and offsets. kind, numbers: of the rows, for errors."""
        if self.model.training:
            raise ConfigError(f"{type(self.model).__name__} is in training mode (dropout); call model.eval() first")
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        states: dict[int, Tensor] = {}
        keep, wanted, visual = (torch.zeros_like(real) for _ in range(3))
        if ids.numel():
            states = hooks.hidden_states(self.model, list(self.coders), **inputs)
            for row in range(len(ids)):
                # each text alone, so that its sinks do not depend on other texts
                one = slice(row, row + 1)
                chosen = self._choice(ids[one], real[one], {layer: state[one] for layer, state in states.items()})
                keep[one], wanted[one], visual[one] = chosen
        codes = {layer: self._codes(layer, states.get(layer), keep, kind, numbers) for layer in self.coders}
        ids, keep, wanted, visual, real = (x.cpu() for x in (ids, keep, wanted, visual, real))
        return [
            Encoded(
                text="",
                ids=ids[row][tokens],
                tokens=(),
                offsets=_offsets([]),
                codes={layer: part[row][tokens] for layer, part in codes.items()},
                special=~wanted[row][tokens],
                sink=(wanted & ~keep)[row][tokens],
                visual=visual[row][tokens],
            )
            for row, tokens in enumerate(real)
        ]

    def _codes(self, layer: int, state: Tensor | None, keep: Tensor, kind: str, numbers: list[int]) -> SparseCodes:
        """[B, T, k] on the CPU, inactive where `keep` is not."""
        coder = self.coders[layer]
        values = torch.zeros(*keep.shape, coder.k, dtype=coder.W_enc.dtype)
        indices = torch.arange(coder.k).repeat(*keep.shape, 1)
        if state is not None:
            used = state[keep].to(coder.W_enc.device)
            broken = ~torch.isfinite(used).all(-1)
            if bool(broken.any()):
                row = int(keep.nonzero()[broken.to(keep.device)][0, 0])
                place = f"{kind} {numbers[row]}: hidden states of layer {layer}"
                raise ActivationError(f"{place} are not finite; load the model in bfloat16 or float32")
            codes, where = coder.encode(used), keep.cpu()
            values[where], indices[where] = codes.values.cpu(), codes.indices.cpu()
        return SparseCodes(values, indices)

    def _check_lengths(self, kind: str, first: int, lengths: Iterable[int]) -> None:
        for number, length in enumerate(lengths, first):
            if self.max_length is not None and length > self.max_length:
                raise ShapeError(f"{kind} {number} has {length} tokens, the model takes {self.max_length}; split it")


def _offsets(spans: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)


def _longest(model: nn.Module, tokenizer: Any) -> int | None:
    limits = (getattr(hooks.text_config(model), "max_position_embeddings", None), tokenizer.model_max_length)
    # a tokenizer without a limit has 1e30
    return min((int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < 1e9), default=None)
