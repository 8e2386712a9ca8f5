"""The index of one dialogue: turn vectors, segments, cues and their vectors. Built once, read by every question.

What it holds depends on the dialogue and the settings alone, not on what else the process that built it had encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remind.core.cache import Cache
from remind.core.errors import DataError
from remind.core.files import sha256_json
from remind.core.progress import part
from remind.data.dialogue import Dialogue
from remind.models.encoder import HELD, SentenceEncoder
from remind.perception.bm25 import BM25
from remind.perception.config import SegmentConfig
from remind.perception.costs import Costs, prompt_costs
from remind.perception.scan import Scan, encode_rows
from remind.perception.segment import segment
from remind.states.auxiliary import AuxiliaryLLM
from remind.states.pyramid import Segment, turn_text
from remind.text.words import stems

#: Of the cached tensors.
_FORMAT_VERSION = 4
#: Cues encoded together. Dimensions differ in few of a dialogue's cues, and a group that is known is not encoded again.
_TOGETHER = 4


def content_key(dialogue: Dialogue, encoder: str, config: SegmentConfig, llm: str) -> str:
    """Hash of everything an index depends on: what is said, encoder, segmentation, and the LLM that writes the cues."""
    sessions = [
        [s.id, s.time, [[t.id, t.speaker, t.text, [image.caption for image in t.images]] for t in s.turns]]
        for s in dialogue.sessions
    ]
    return sha256_json([_FORMAT_VERSION, dialogue.id, sessions, encoder, asdict(config), llm])


#: Tensors, and the texts they belong to.
Entry = tuple[dict[str, Tensor], Any]


@dataclass(frozen=True)
class Cues:
    """κ_n of every segment for one kind of question, and φ of each: unit rows [N, d]."""

    texts: tuple[str, ...]
    vectors: Tensor
    scan: Scan


class DialogueIndex:
    """What perception knows of a dialogue before any question is asked.

    Args:
        dialogue: n turns.
        encoder: φ; called for what the folder does not hold, and given the vectors of turns and cues to hold.
        llm: writes the cues.
        config: segmentation.
        cache: folder in which indexes are cached; None: in memory only.

    Attributes:
        vectors: φ of every turn, unit rows [n, d].
        segments: u_1 … u_N in time order.
        costs: tokens of the parts of the dialogue.
        session_of, sessions: number of the session of every turn [n], as a tuple and as an array.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        encoder: SentenceEncoder,
        llm: AuxiliaryLLM,
        config: SegmentConfig,
        cache: Path | None,
    ) -> None:
        self.dialogue, self.encoder, self.llm, self.config = dialogue, encoder, llm, config
        # not checked: the tensors stay views of the files, whose pages are read when they are touched
        self._cache = None if cache is None else Cache(cache)
        self._key = "" if cache is None else content_key(dialogue, encoder.name, config, llm.name)
        self.session_of = tuple(
            number for number, session in enumerate(dialogue.sessions) for _ in range(len(session.turns))
        )
        self.sessions = np.array(self.session_of, dtype=np.int64)
        self._cues: dict[str | None, Cues] = {}
        #: Vectors by the texts encoded together.
        self._encoded: dict[tuple[str, ...], Tensor] = {}
        tensors, _ = self._read("turns") or self._build_turns()
        self.vectors = tensors["vectors"]
        #: First and last turn of every segment [N, 2], and tokens of every turn [n].
        self.bounds, self.prices = tensors["segments"].numpy(), tensors["turns"].numpy()
        self.segments = tuple(Segment(start, end) for start, end in self.bounds.tolist())
        self.costs = Costs(tuple(self.prices.tolist()), tuple(tensors["headings"].tolist()), int(tensors["gap"]))
        last = dialogue.turns[-HELD:]
        encoder.hold([turn_text(turn) for turn in last], self.vectors[-len(last) :])

    def cues(self, dimension: str | None) -> Cues:
        """Cues tailored to the dimension (None: a plain factual question), written by the LLM when first asked for."""
        if dimension not in self._cues:
            name = f"cues-{dimension or 'factual'}"
            tensors, texts = self._read(name) or self._build_cues(name, dimension)
            cues = Cues(tuple(texts), tensors["vectors"], Scan(tensors["vectors"], tensors))
            self.encoder.hold(cues.texts[-HELD:], cues.vectors[-HELD:])
            self._cues[dimension] = cues
        return self._cues[dimension]

    @cached_property
    def bm25(self) -> BM25:
        """BM25 over the turns, built when first asked for."""
        if (entry := self._read("bm25")) is None:
            built = BM25([stems(turn_text(turn)) for turn in self.dialogue.turns])
            entry = self._write("bm25", built.tensors(), built.terms)
        tensors, terms = entry
        return BM25.from_tensors(len(self.dialogue.turns), terms, tensors)

    @cached_property
    def norms(self) -> Tensor:
        """Length of every turn's vector [n]; computing it takes as long as the cosines themselves."""
        return self.vectors.norm(dim=-1)

    @cached_property
    def follows(self) -> np.ndarray:
        """Whether a turn is in the session of the one before it [n + 1]; the last entry is False."""
        alike = self.sessions[1:] == self.sessions[:-1]
        return np.concatenate([[False], alike, [False]])

    @cached_property
    def headings(self) -> np.ndarray:
        """Tokens of every session's heading, as an array."""
        return np.array(self.costs.headings, dtype=np.int64)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every segment's turns [N]."""
        sums = np.concatenate([[0], np.cumsum(self.prices)])
        return np.asarray(sums[self.bounds[:, 1] + 1] - sums[self.bounds[:, 0]])

    def cost(self, positions: Sequence[int]) -> int:
        """Tokens of the dialogue section that shows the turns at these ascending positions."""
        return self.costs.of(positions, self.session_of)

    def _read(self, kind: str) -> Entry | None:
        return None if self._cache is None else self._cache.read(kind, self._key)

    def _write(self, kind: str, tensors: dict[str, Tensor], about: list[str] | None = None) -> Entry:
        """Cache an entry and return it, its tensors as views of the file, so that memory holds no second copy."""
        if self._cache is not None:
            self._cache.write(kind, self._key, tensors, about)
        return self._read(kind) or (tensors, about)

    def _build_turns(self) -> Entry:
        costs = prompt_costs(self.dialogue, self.encoder)
        vectors = self.encoder.encode_apart([turn_text(turn) for turn in self.dialogue.turns])
        segments = segment(self.dialogue, vectors, self.config, costs.turns)
        tensors = {
            "vectors": vectors,
            "turns": torch.tensor(costs.turns),
            "headings": torch.tensor(costs.headings),
            "gap": torch.tensor(costs.gap),
            "segments": torch.tensor([[part.start, part.end] for part in segments]),
        }
        return self._write("turns", tensors)

    def _build_cues(self, name: str, dimension: str | None) -> Entry:
        failures = len(self.llm.failures)
        texts = self.llm.cues(self.dialogue, self.segments, dimension)
        if len(texts) != len(self.segments):
            raise DataError(
                f"{self.llm.name} wrote {len(texts)} cues for {len(self.segments)} segments", record=self.dialogue.id
            )
        vectors = self._encode_cues(texts)
        tensors = {"vectors": vectors, **encode_rows(vectors)}
        # written, an offline stand-in's cue would pass for the LLM's own in every later build
        return (tensors, texts) if len(self.llm.failures) > failures else self._write(name, tensors, list(texts))

    def _encode_cues(self, texts: Sequence[str]) -> Tensor:
        """Their vectors; a cue that is a turn word for word has that turn's."""
        rows = {turn_text(turn): row for row, turn in enumerate(self.dialogue.turns)}
        vectors, count = [self.vectors], len(self.vectors)
        for first in range(0, len(texts), _TOGETHER):
            group = tuple(dict.fromkeys(text for text in texts[first : first + _TOGETHER] if text not in rows))
            if not group:
                continue
            if group not in self._encoded:
                # whole groups alone: last bits depend on what is encoded together
                with part(first / len(texts), min(1.0, (first + _TOGETHER) / len(texts))):
                    self._encoded[group] = self.encoder.encode_apart(group)
            vectors.append(self._encoded[group])
            rows |= {text: count + place for place, text in enumerate(group)}
            count += len(group)
        return torch.cat(vectors)[[rows[text] for text in texts]]
