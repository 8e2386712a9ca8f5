"""Sparse codes of a state's tokens (Eq. 2) and where each token stands: from one forward of the prompt, or windows."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from remind.core.errors import ModelError
from remind.core.files import Cache, sha256_json
from remind.data.dialogue import Dialogue, Question, Turn
from remind.models.backbone import Backbone, modality
from remind.models.images import Pictures, places_of
from remind.states.pyramid import FactualState, Rendered, Span, Strategy, one_line, render, segments_of
from remind.states.records import pictures_of
from sae import SAEError, SparseCodes

#: Of the codes that `WindowedCodes` keeps on disk: a change of what they are made from makes another.
CODES_VERSION = 2
#: Dialogues of which what is computed stays in memory.
CACHED_DIALOGUES = 4
#: Numbers of [tokens, d_sae] that a coder computes at a time on a CPU: 16 MB in float32, which the allocator keeps.
#: Larger blocks come fresh from the system each time, and filling those pages costs as much as the product itself.
_CHUNK = 1 << 22
#: Entries of a model's configuration that say where it comes from rather than what it computes.
_ORIGIN = ("_name_or_path", "transformers_version", "architectures")
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


class Part(IntEnum):
    """What a token belongs to. OTHER: instructions, headers, caption labels, line ends, placeholders."""

    OTHER = 0
    SPEAKER = 1
    TEXT = 2
    CAPTION = 3
    REASONING = 4
    ANCHOR = 5


def first_character(text: str, span: Span) -> int:
    """Position of the span's first character that is not white space; its start if there is none."""
    start, end = span
    piece = text[start:end]
    rest = len(piece.lstrip())
    return start + len(piece) - rest if rest else start


def token_places(rendered: Rendered, turns: Sequence[Turn], offsets: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Turn and part of tokens by their character offsets; a token stands where its first non-space character does.

    A caption that only says that there is none is OTHER: it describes nothing.

    Args:
        rendered: the prompt. turns: its turns, in order.
        offsets: [T] character spans in `rendered.text`.

    Returns:
        Index into `turns`, -1 outside of them, int64 [T]; `Part`, int64 [T].
    """
    size = len(rendered.text) + 1
    turn_at = np.full(size, -1, dtype=np.int64)
    part_at = np.full(size, Part.OTHER, dtype=np.int64)
    for index, (span, turn) in enumerate(zip(rendered.turns, turns, strict=True)):
        turn_at[span.start : span.end] = index
        part_at[slice(*span.speaker)] = Part.SPEAKER
        part_at[slice(*span.text)] = Part.TEXT
        for caption, image in zip(span.captions, turn.images, strict=True):
            if one_line(image.caption or ""):
                part_at[slice(*caption)] = Part.CAPTION
    for part, spans in ((Part.REASONING, rendered.reasoning), (Part.ANCHOR, rendered.anchors)):
        for strategy_span in spans:
            part_at[slice(*strategy_span)] = part
    first = np.fromiter((first_character(rendered.text, span) for span in offsets), np.int64, count=len(offsets))
    return torch.from_numpy(turn_at[first]), torch.from_numpy(part_at[first])


def turn_idf(codes: SparseCodes, turn: Tensor, d_sae: int) -> Tensor:
    """w_idf of Eq. 3 with turns as documents: ln((1 + N) / (1 + df_j)); float32 [d_sae].

    Args:
        codes: [T, k]. turn: int64 [T].
    """
    pairs = torch.unique((turn[:, None] * d_sae + codes.indices)[codes.active()])
    df = torch.bincount(pairs % d_sae, minlength=d_sae)
    return torch.log((1 + len(turn.unique())) / (1 + df.double())).float()


class SparseEncoder:
    """Token ids to sparse codes at every layer that has an SAE.

    Args:
        backbone: gives the hidden states.
        saes: by layer number, or a control in an SAE's place; moved to the backbone's device.
        sink_ratio: tokens with a hidden state longer than this many times the median of their sequence get no codes.
        batch_size: sequences in one forward.

    Attributes:
        max_tokens: tokens of text that the backbone takes at once.
    """

    def __init__(self, backbone: Backbone, saes: Mapping[int, Coder], sink_ratio: float, batch_size: int) -> None:
        self.backbone = backbone
        self.saes = {layer: saes[layer].to(backbone.device) for layer in sorted(saes)}
        self.sink_ratio, self.batch_size = sink_ratio, batch_size
        self.max_tokens = backbone.max_length - sum(map(len, backbone.frame))

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
        if not sequences:
            return {n: SparseCodes(torch.zeros(0, sae.k), torch.zeros(0, sae.k).long()) for n, sae in self.saes.items()}
        lengths = [len(sequence) for sequence in sequences]
        if max(lengths) > self.max_tokens:
            raise ModelError(
                f"{self.backbone.name}: {max(lengths)} tokens at once, but it takes {self.max_tokens}; "
                "set grounding.context_codes to windowed, or perception.retrieve.max_context_tokens lower"
            )
        before, after = self.backbone.frame
        found: dict[int, list[SparseCodes]] = {layer: [] for layer in self.saes}
        for start in range(0, len(sequences), self.batch_size):
            chosen = [[*before, *one, *after] for one in sequences[start : start + self.batch_size]]
            sizes, width = lengths[start : start + self.batch_size], max(map(len, chosen))
            ids = torch.full((len(chosen), width), self.backbone.tokenizer.pad_token_id or 0)
            for row, framed in zip(ids, chosen, strict=True):
                row[: len(framed)] = torch.tensor(framed)
            ends, place = len(before) + torch.tensor(sizes)[:, None], torch.arange(width)
            mask = place < ends + len(after)
            images: dict[str, Any] = dict(pixels or {})
            visual = ids == (self.backbone.model.config.image_token_id if images else -1)
            if images:
                images["mm_token_type_ids"] = modality(self.backbone.model, ids)
            attention = None if bool(mask.all()) else mask.long()
            hidden = self.backbone.hidden_states(ids, attention, list(self.saes), **images)
            inside = (place >= len(before)) & (place < ends)
            for layer, states in hidden.items():
                found[layer].append(self._sparse(layer, states[inside.to(states.device)], sizes, visual[inside]))
        return {
            layer: SparseCodes(torch.cat([one.values for one in parts]), torch.cat([one.indices for one in parts]))
            for layer, parts in found.items()
        }

    def _sparse(self, layer: int, states: Tensor, sizes: list[int], visual: Tensor) -> SparseCodes:
        """Eq. 2 for the tokens [sum of sizes, d] of several sequences; sinks get no values.

        Args:
            visual: bool [sum of sizes], tokens of images. Their norms have a scale of their own, as in `sae.harvest`.
        """
        coder = self.saes[layer]
        rows = max(1, _CHUNK // coder.d_sae) if states.device.type == "cpu" else len(states)
        try:
            parts = [coder.encode(part) for part in states.split(rows)]
        except SAEError as error:
            raise ModelError(f"{self.backbone.name}, layer {layer}: {error}") from None
        norms = torch.linalg.vector_norm(states, dim=-1, dtype=torch.promote_types(states.dtype, torch.float32))
        limits = torch.empty_like(norms)
        pieces = (limits.split(sizes), norms.split(sizes), visual.to(norms.device).split(sizes))
        for limit, part, seen in zip(*pieces, strict=True):
            for kind in (seen, ~seen):
                if bool(kind.any()):
                    limit[kind] = self.sink_ratio * part[kind].median()
        values = torch.cat([part.values for part in parts]) * (norms <= limits)[:, None]
        return SparseCodes(values, torch.cat([part.indices for part in parts])).to("cpu")


@dataclass(frozen=True)
class LayerCodes:
    """One layer's codes of a state, on the CPU.

    Attributes:
        dialogue: [T, k], tokens of the retrieved turns.
        reasoning, anchors: [·, k], tokens of C_reason and E_anchor.
        idf: float32 [d_sae], counted over the turns at hand.
    """

    dialogue: SparseCodes
    reasoning: SparseCodes
    anchors: SparseCodes
    idf: Tensor


@dataclass(frozen=True)
class StateCodes:
    """Codes of a state and where its T dialogue tokens stand; strategy and headers are not among them.

    Attributes:
        text: the prompt of x0.
        spans: characters of each token in `text`.
        turn: int64 [T], index into `FactualState.turns`, ascending.
        part: int64 [T], `Part`.
        turn_tokens: int64 [n_turns].
        layers: by layer number.
    """

    text: str
    spans: tuple[Span, ...]
    turn: Tensor
    part: Tensor
    turn_tokens: Tensor
    layers: dict[int, LayerCodes]

    def speakers(self, layer: int) -> list[SparseCodes]:
        """For each turn the codes of its speaker-marker tokens P_k."""
        marked = self.part == Part.SPEAKER
        codes = self.layers[layer].dialogue[marked]
        sizes = torch.bincount(self.turn[marked], minlength=len(self.turn_tokens)).tolist()
        pairs = zip(codes.values.split(sizes), codes.indices.split(sizes), strict=True)
        return [SparseCodes(values, indices) for values, indices in pairs]


def joint_codes(encoder: SparseEncoder, state: FactualState, pictures: Pictures | None = None) -> StateCodes:
    """One forward of the x0 prompt up to the end of the strategy, as the strategy stands after the dialogue.

    Idf is counted over the retrieved turns.

    Args:
        pictures: show images that have a file as pixels, in place of their captions; their tokens are of part CAPTION.

    Raises:
        ModelError: the prompt is longer than the model takes. ImagePathError: an image that cannot be used.
    """
    rendered, question, pixels = render(state), state.question.id, dict[str, Tensor]()
    places = () if pictures is None else places_of(rendered, pictures_of(state.turns), question, "x0")
    if pictures is not None and places:
        pixels = pictures.tensors([place.path for place in places], question)
        tokens = pictures.tokens(encoder.backbone.tokenizer, rendered.text, places)
    else:
        tokens = encoder.backbone.tokenize(rendered.text)
    turn, part = token_places(rendered, state.turns, tokens.offsets)
    if places:
        ids, config = torch.tensor(tokens.ids), encoder.backbone.model.config
        part[ids == config.image_token_id] = Part.CAPTION
        part[(ids == config.vision_start_token_id) | (ids == config.vision_end_token_id)] = Part.OTHER
    # nothing behind the strategy is read; offsets ascend, so a cut keeps a prefix
    length = bisect_left(tokens.offsets, rendered.strategy_end - 1, key=lambda span: span[0])
    turn, part = turn[:length], part[:length]
    inside = (turn >= 0).nonzero().squeeze(-1)
    layers = {}
    for layer, found in encoder.encode([tokens.ids[:length]] if length else [], pixels).items():
        layers[layer] = LayerCodes(
            dialogue=found[inside],
            reasoning=found[part == Part.REASONING],
            anchors=found[part == Part.ANCHOR],
            idf=turn_idf(found[inside], turn[inside], encoder.saes[layer].d_sae),
        )
    return StateCodes(
        text=rendered.text,
        spans=tuple(tokens.offsets[position] for position in inside.tolist()),
        turn=turn[inside],
        part=part[inside],
        turn_tokens=torch.bincount(turn[inside], minlength=len(state.turns)),
        layers=layers,
    )


@dataclass(frozen=True)
class DialogueCodes:
    """Codes of a whole dialogue, whatever the question.

    Attributes:
        turn: int64 [T], position in `Dialogue.turns`, ascending.
        part: int64 [T], `Part`.
        spans: int64 [T, 2], characters relative to the start of the token's turn.
        layers: layer to [T, k].
        idf: layer to float32 [d_sae], over the dialogue's turns.
    """

    turn: Tensor
    part: Tensor
    spans: Tensor
    layers: dict[int, SparseCodes]
    idf: dict[int, Tensor]


class WindowedCodes:
    """The dialogue in windows of whole turns, cached for its next question; each strategy span on its own.

    Args:
        encoder: its weights must not change while this is in use; they are hashed once.
        window_tokens: longest window. A window holds turns of one session; a turn longer than that is split.
        folder: keeps the codes for other processes, one file a dialogue: `<layer>.values` [T, k], `<layer>.indices`
            int32 [T, k]; None: in memory only.
    """

    def __init__(self, encoder: SparseEncoder, window_tokens: int, folder: str | Path | None = None) -> None:
        self.encoder = encoder
        self.window_tokens = min(window_tokens, encoder.max_tokens)
        self.cache = None if folder is None else Cache(folder)
        #: Hash of all that codes depend on but the tokens: model and SAEs, wherever they were loaded from; not of
        #: `batch_size`, which changes rounding alone.
        self._made_by = ""
        if folder is not None:
            backbone, saes = encoder.backbone, encoder.saes
            config = {key: value for key, value in backbone.model.config.to_dict().items() if key not in _ORIGIN}
            weights = tensors_hash(backbone.model.state_dict())
            model = [json.dumps(config, sort_keys=True, default=str), backbone.kind, backbone.frame, weights]
            coders = {str(n): [type(sae).__name__, sae.k, tensors_hash(sae.state_dict())] for n, sae in saes.items()}
            self._made_by = sha256_json([model, coders, encoder.sink_ratio, str(backbone.dtype), backbone.device.type])
        #: Codes of a dialogue, from memory or disk where they are there.
        self.dialogue_codes = lru_cache(CACHED_DIALOGUES)(self._encode_dialogue)

    def state_codes(self, state: FactualState) -> StateCodes:
        """Codes of a state; idf is counted over all turns of its dialogue."""
        dialogue, rendered = self.dialogue_codes(state.dialogue), render(state)
        index_of = torch.full((len(state.dialogue.turns),), -1)
        index_of[torch.tensor(state.positions, dtype=torch.int64)] = torch.arange(len(state.positions))
        inside = (index_of[dialogue.turn] >= 0).nonzero().squeeze(-1)
        turn = index_of[dialogue.turn[inside]]
        starts = torch.tensor([span.start for span in rendered.turns], dtype=torch.int64)
        spans = (dialogue.spans[inside] + starts[turn, None]).tolist()
        # each span of the strategy on its own, all in the same forwards
        strategy: list[list[list[int]]] = []
        for kind in (rendered.reasoning, rendered.anchors):
            ids = [self.encoder.backbone.tokenize(rendered.text[slice(*span)]).ids for span in kind]
            step = self.window_tokens
            strategy.append([one[start : start + step] for one in ids for start in range(0, len(one), step)])
        asked = self.encoder.encode([*strategy[0], *strategy[1]])
        cut = sum(map(len, strategy[0]))
        layers = {
            layer: LayerCodes(codes[inside], asked[layer][:cut], asked[layer][cut:], dialogue.idf[layer])
            for layer, codes in dialogue.layers.items()
        }
        return StateCodes(
            text=rendered.text,
            spans=tuple((start, end) for start, end in spans),
            turn=turn,
            part=dialogue.part[inside],
            turn_tokens=torch.bincount(turn, minlength=len(state.turns)),
            layers=layers,
        )

    def _encode_dialogue(self, dialogue: Dialogue) -> DialogueCodes:
        segments = segments_of(dialogue, range(len(dialogue.turns)))  # one for each session with turns
        starts = {one.start for one in segments}
        # the lines of a turn do not depend on the question, so any rendering has them
        rendered = render(FactualState(dialogue, Question("", dialogue.id, ""), segments, Strategy(())))
        ids: list[list[int]] = []
        spans: list[Span] = []
        offsets: list[Span] = []
        for place in rendered.turns:
            tokens = self.encoder.backbone.tokenize(rendered.text[place.start : place.end])
            ids.append(tokens.ids)
            spans += tokens.offsets
            offsets += [(place.start + start, place.start + end) for start, end in tokens.offsets]
        _, part = token_places(rendered, dialogue.turns, offsets)
        turn = torch.repeat_interleave(torch.tensor([len(one) for one in ids], dtype=torch.int64))
        windows, window, step = list[list[int]](), list[int](), self.window_tokens
        for position, one in enumerate(ids):
            if window and (position in starts or len(window) + len(one) > step):
                windows.append(window)
                window = []
            pieces = [one[start : start + step] for start in range(0, len(one), step)]
            windows += pieces[:-1]
            window = window + pieces[-1] if pieces else window
        codes = self.encode_windows([*windows, window] if window else windows)
        return DialogueCodes(
            turn=turn,
            part=part,
            spans=torch.tensor(spans, dtype=torch.int64).reshape(-1, 2),
            layers=codes,
            idf={layer: turn_idf(found, turn, self.encoder.saes[layer].d_sae) for layer, found in codes.items()},
        )

    def encode_windows(self, windows: list[list[int]]) -> dict[int, SparseCodes]:
        """`SparseEncoder.encode(windows)`, from disk where it is there, bit for bit what was computed then."""
        if self.cache is None:
            return self.encoder.encode(windows)
        key = [CODES_VERSION, self._made_by, windows]
        if (entry := self.cache.read("codes", key)) is not None:
            read = entry[0]
            return {n: SparseCodes(read[f"{n}.values"], read[f"{n}.indices"].long()) for n in self.encoder.saes}
        codes = self.encoder.encode(windows)
        tensors = {f"{layer}.values": one.values for layer, one in codes.items()}
        tensors |= {f"{layer}.indices": one.indices.int() for layer, one in codes.items()}
        self.cache.write("codes", key, tensors)
        return codes


def tensors_hash(tensors: Mapping[str, Any]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes; other values are hashed as text."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {value}\n".encode())
    return digest.hexdigest()
