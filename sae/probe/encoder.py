"""Probe a model with its coders: sparse codes of texts and of prepared inputs, token by token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from sae import hooks
from sae.errors import ActivationError, ConfigError, ShapeError
from sae.harvest import TokenChoice
from sae.probe.encoded import Encoded, FeatureActivation, top_features
from sae.probe.pieces import Pieces
from sae.topk import SparseCodes, TopKSAE

__all__ = ["Encoded", "FeatureActivation", "Probe", "check_coders", "top_features"]

#: Texts tokenised at a time, in batches: they are sorted by length, so that little is padded.
_LOOK_AHEAD = 8


def check_coders(model: nn.Module, coders: Mapping[int, TopKSAE]) -> None:
    """Raises LayerError for a layer the model has not (or none), ShapeError for a coder of another width."""
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
        visual_ids: tokens that stand for pixels; None: what the configuration names.
        sink_factor: as in `sae.harvest`, but each text has a median of its own; None: sinks count.
        add_special_tokens: whether the tokenizer frames each text ([CLS], a BOS).
        batch_size: texts per forward, at most.
        batch_tokens: tokens per forward with padding, at most; a single longer text still has its forward.
        max_length: longest text, in tokens; None: what configuration and tokenizer say.

    Raises:
        ConfigError: a tokenizer without character offsets, or sizes below 1.
        LayerError, ShapeError: coders that do not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        coders: Mapping[int, TopKSAE],
        *,
        special_ids: Collection[int] | None = None,
        visual_ids: Collection[int] | None = None,
        sink_factor: float | None = 10.0,
        add_special_tokens: bool = True,
        batch_size: int = 16,
        batch_tokens: int = 16384,
        max_length: int | None = None,
    ) -> None:
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(f"{type(tokenizer).__name__} knows no character offsets; load the fast tokenizer")
        if min(batch_size, batch_tokens, 1 if max_length is None else max_length) < 1:
            raise ConfigError(f"batch_size {batch_size}, batch_tokens {batch_tokens}, max_length {max_length}: below 1")
        check_coders(model, coders)
        self.model, self.tokenizer, self.coders = model, tokenizer, dict(coders)
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.max_length = _longest(model, tokenizer) if max_length is None else max_length
        self.add_special_tokens = add_special_tokens
        specials = tokenizer.all_special_ids if special_ids is None else special_ids
        self._choice = TokenChoice(model, special_ids=specials, visual_ids=visual_ids, sink_factor=sink_factor)
        self._pieces = Pieces(tokenizer)

    @overload
    def encode(self, text: str) -> Encoded: ...  # type: ignore[overload-overlap]
    @overload
    def encode(self, text: Sequence[str]) -> list[Encoded]: ...
    def encode(self, text: str | Sequence[str]) -> Encoded | list[Encoded]:
        """Codes of one text, or of each of several, in their order.

        Raises:
            ShapeError: a text of more tokens than the model takes.
            ActivationError: hidden states that are not finite.
            ConfigError: a model in training mode, or something that is no string.
        """
        return next(self.stream([text])) if isinstance(text, str) else list(self.stream(text))

    def stream(self, texts: Iterable[str]) -> Iterator[Encoded]:
        """As `encode`, one by one; reads no further ahead than 8 batches."""
        texts, first = iter(texts), 0
        while chunk := list(islice(texts, _LOOK_AHEAD * self.batch_size)):
            yield from self._encode(chunk, first)
            first += len(chunk)

    def encode_inputs(self, inputs: Mapping[str, Any]) -> list[Encoded]:
        """Codes of inputs as a processor prepares them, in one forward; one `Encoded` per row, without its padding.

        Args:
            inputs: input_ids [B, T], optionally attention_mask [B, T], and whatever else the model's forward takes
                (pixel_values, image_grid_thw, position_ids, ...).

        Returns:
            The text of each is what its ids decode to, with special tokens; `visual` flags image and video tokens.

        Raises:
            ShapeError: an attention mask that is not [B, T]. Other errors as `encode`.
        """
        device = hooks.device_of(self.model)
        inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        if ids.ndim != 2 or (mask is not None and mask.shape != ids.shape):
            what = "none" if mask is None else list(mask.shape)
            raise ShapeError(f"input_ids {list(ids.shape)} must be [B, T], and the attention_mask ({what}) as well")
        lengths = [ids.shape[1]] * len(ids) if mask is None else mask.bool().sum(1).tolist()
        for row, length in enumerate(lengths):
            self._check_length(f"row {row}", length)
        found = []
        for got in self._forward(inputs, "row", list(range(len(ids)))):
            text, spans = self._pieces.join(got.ids.tolist())
            tokens = tuple(text[start:end] for start, end in spans)
            found.append(Encoded(text, got.ids, tokens, _offsets(spans), got.codes, got.special, got.sink, got.visual))
        return found

    def _encode(self, texts: list[str], first: int) -> list[Encoded]:
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise ConfigError(f"text {first + number} is a {type(text).__name__}, not a string")
        framed = self.tokenizer(
            texts,
            add_special_tokens=self.add_special_tokens,
            return_offsets_mapping=True,
            padding=False,
            truncation=False,
            verbose=False,
        )
        ids: list[list[int]] = framed["input_ids"]
        for number, length in enumerate(map(len, ids)):
            self._check_length(f"text {first + number}", length)
        rows: dict[int, _Row] = {}
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
        return [self._with_text(text, framed["offset_mapping"][i], rows[i]) for i, text in enumerate(texts)]

    def _with_text(self, text: str, spans: list[tuple[int, int]], row: _Row) -> Encoded:
        names = self.tokenizer.convert_ids_to_tokens(row.ids.tolist())
        tokens = tuple(text[a:b] if b > a else name for (a, b), name in zip(spans, names, strict=True))
        return Encoded(text, row.ids, tokens, _offsets(spans), row.codes, row.special, row.sink, row.visual)

    def _batches(self, lengths: list[int]) -> list[list[int]]:
        """Numbers of the texts of each forward, longest text first in each."""
        batches: list[list[int]] = []
        for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            last = batches[-1] if batches else None
            fits = last and len(last) < self.batch_size and (len(last) + 1) * lengths[last[0]] <= self.batch_tokens
            if last is not None and fits:
                last.append(number)
            else:
                batches.append([number])
        return batches

    @torch.no_grad()
    def _forward(self, inputs: Mapping[str, Any], kind: str, numbers: list[int]) -> list[_Row]:
        if self.model.training:
            raise ConfigError(f"{type(self.model).__name__} is in training mode (dropout); call model.eval() first")
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        states: dict[int, Tensor] = {}
        # a forward over no token at all fails in most models
        if ids.numel():
            states = hooks.hidden_states(self.model, list(self.coders), **inputs)
        keep, wanted, visual = torch.zeros_like(real), torch.zeros_like(real), torch.zeros_like(real)
        for row in range(len(ids) if ids.numel() else 0):
            # each text alone, so that its company does not decide what is a sink
            one = slice(row, row + 1)
            chosen = self._choice(ids[one], real[one], {layer: state[one] for layer, state in states.items()})
            keep[one], wanted[one], visual[one] = chosen
        codes = {layer: self._codes(layer, states.get(layer), keep, kind, numbers) for layer in self.coders}
        ids, keep, wanted, visual, real = (x.cpu() for x in (ids, keep, wanted, visual, real))
        return [
            _Row(
                ids[row][one],
                {layer: found[row][one] for layer, found in codes.items()},
                special=~wanted[row][one],
                sink=(wanted & ~keep)[row][one],
                visual=visual[row][one],
            )
            for row, one in enumerate(real)
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
                raise ActivationError(
                    f"{kind} {numbers[row]}: hidden states of layer {layer} are not finite; load the model in bfloat16 "
                    "or float32"
                )
            found, where = coder.encode(used), keep.cpu()
            values[where], indices[where] = found.values.cpu(), found.indices.cpu()
        return SparseCodes(values, indices)

    def _check_length(self, what: str, length: int) -> None:
        if self.max_length is not None and length > self.max_length:
            raise ShapeError(f"{what} has {length} tokens, the model takes {self.max_length}; split it")


class _Row(NamedTuple):
    ids: Tensor
    codes: dict[int, SparseCodes]
    special: Tensor
    sink: Tensor
    visual: Tensor


def _offsets(spans: Sequence[tuple[int, int]]) -> Tensor:
    return torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)


def _longest(model: nn.Module, tokenizer: Any) -> int | None:
    # a tokenizer that knows no limit says 1e30
    limits = (getattr(hooks.text_config(model), "max_position_embeddings", None), tokenizer.model_max_length)
    known = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < 1e9]
    return min(known, default=None)
