"""Sparse codes of a whole dialogue from windows of it, shared by all its questions (`windowed`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from remind.data.dialogue import Dialogue, Question
from remind.grounding.codes import LayerCodes, StateCodes
from remind.grounding.encode import SparseEncoder, turn_idf
from remind.grounding.places import token_places
from remind.grounding.store import CodeStore, RecentDialogues
from remind.states.pyramid import FactualState, Rendered, Segment, Span, Strategy, render
from sae import SparseCodes


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
        window_tokens: longest window. A window holds turns of one session; a turn longer than that is split.
        cached_dialogues: how many dialogues stay in memory (see `RecentDialogues`).
        folder: cache for other processes (see `CodeStore`); None: in memory only.
    """

    def __init__(
        self, encoder: SparseEncoder, window_tokens: int, cached_dialogues: int, folder: str | Path | None = None
    ) -> None:
        self.encoder = encoder
        self.window_tokens = min(window_tokens, encoder.max_tokens)
        self.store = None if folder is None else CodeStore(folder, encoder)
        self._recent = RecentDialogues(self._encode_dialogue, cached_dialogues)

    def dialogue_codes(self, dialogue: Dialogue) -> DialogueCodes:
        """Codes of the dialogue, from memory or disk where they are there."""
        return self._recent.get(dialogue)

    def state_codes(self, state: FactualState) -> StateCodes:
        """Codes of a state; idf is counted over all turns of its dialogue."""
        dialogue = self.dialogue_codes(state.dialogue)
        rendered = render(state)
        index_of = torch.full((len(state.dialogue.turns),), -1)
        index_of[torch.tensor(state.positions, dtype=torch.int64)] = torch.arange(len(state.positions))
        inside = (index_of[dialogue.turn] >= 0).nonzero().squeeze(-1)
        turn = index_of[dialogue.turn[inside]]
        starts = torch.tensor([span.start for span in rendered.turns], dtype=torch.int64)
        spans = (dialogue.spans[inside] + starts[turn, None]).tolist()
        reasoning, anchors = self._strategy_codes(rendered)
        layers = {
            layer: LayerCodes(
                dialogue=codes[inside], reasoning=reasoning[layer], anchors=anchors[layer], idf=dialogue.idf[layer]
            )
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
        ends = list(accumulate(len(session.turns) for session in dialogue.sessions))
        sessions = [(end - len(s.turns), end) for s, end in zip(dialogue.sessions, ends, strict=True)]
        segments = tuple(Segment(start, end - 1) for start, end in sessions if start < end)
        # the lines of a turn do not depend on the question, so any rendering has them
        rendered = render(FactualState(dialogue, Question("", dialogue.id, ""), segments, Strategy(())))
        ids: list[list[int]] = []
        spans: list[Span] = []
        turns: list[int] = []
        for position, span in enumerate(rendered.turns):
            tokens = self.encoder.backbone.tokenize(rendered.text[span.start : span.end])
            ids.append(tokens.ids)
            spans.extend(tokens.offsets)
            turns.extend([position] * len(tokens.ids))
        starts = [rendered.turns[position].start for position in turns]
        offsets = [(start + a, start + b) for start, (a, b) in zip(starts, spans, strict=True)]
        _, part = token_places(rendered, dialogue.turns, offsets)
        turn = torch.tensor(turns, dtype=torch.int64)
        windows = list(self._windows(ids, [end for _, end in sessions]))
        codes = (self.store or self.encoder).encode(windows)
        return DialogueCodes(
            turn=turn,
            part=part,
            spans=torch.tensor(spans, dtype=torch.int64).reshape(-1, 2),
            layers=codes,
            idf={layer: turn_idf(found, turn, self.encoder.saes[layer].d_sae) for layer, found in codes.items()},
        )

    def _windows(self, turns: Sequence[list[int]], session_ends: Sequence[int]) -> Iterator[list[int]]:
        """Token ids of all turns in order, cut into windows."""
        breaks, window = set(session_ends), list[int]()
        for position, ids in enumerate(turns):
            if window and (position in breaks or len(window) + len(ids) > self.window_tokens):
                yield window
                window = []
            pieces = [ids[start : start + self.window_tokens] for start in range(0, len(ids), self.window_tokens)]
            yield from pieces[:-1]
            window = window + pieces[-1] if pieces else window
        if window:
            yield window

    def _strategy_codes(self, rendered: Rendered) -> tuple[dict[int, SparseCodes], dict[int, SparseCodes]]:
        """Codes of C_reason and E_anchor, each span on its own, all in the same forwards."""
        kinds: list[list[list[int]]] = []
        for spans in (rendered.reasoning, rendered.anchors):
            ids = [self.encoder.backbone.tokenize(rendered.text[slice(*span)]).ids for span in spans]
            step = self.window_tokens
            kinds.append([one[start : start + step] for one in ids for start in range(0, len(one), step)])
        found = self.encoder.encode([*kinds[0], *kinds[1]])
        cut = sum(map(len, kinds[0]))
        return ({n: codes[:cut] for n, codes in found.items()}, {n: codes[cut:] for n, codes in found.items()})
