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

from remind.core.errors import DataError
from remind.core.files import sha256_json
from remind.data.dialogue import Dialogue
from remind.models.encoder import HELD, SentenceEncoder
from remind.perception.bm25 import BM25
from remind.perception.config import SegmentConfig
from remind.perception.costs import Costs, prompt_costs
from remind.perception.scan import Scan, encode_rows
from remind.perception.segment import segment
from remind.perception.store import FORMAT_VERSION, IndexFolder
from remind.states.auxiliary import AuxiliaryLLM
from remind.states.pyramid import Segment, turn_text
from remind.text.words import stems


def content_key(dialogue: Dialogue, encoder: str, config: SegmentConfig, llm: str) -> str:
    """Hash of everything an index depends on: what is said, encoder, segmentation, and the LLM that writes the cues."""
    sessions = [
        [s.id, s.time, [[t.id, t.speaker, t.text, [image.caption for image in t.images]] for t in s.turns]]
        for s in dialogue.sessions
    ]
    return sha256_json([FORMAT_VERSION, dialogue.id, sessions, encoder, asdict(config), llm])


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
        folder: where the index lives on disk; None: in memory only. A file that cannot be used is built again, and a
            warning is logged.

    Attributes:
        vectors: φ of every turn, unit rows [n, d].
        segments: u_1 … u_N in time order.
        costs: tokens of the parts of the dialogue.
        session_of: number of the session of every turn [n].
    """

    def __init__(
        self,
        dialogue: Dialogue,
        encoder: SentenceEncoder,
        llm: AuxiliaryLLM,
        config: SegmentConfig,
        folder: Path | None,
    ) -> None:
        self.dialogue, self.encoder, self.llm, self.config = dialogue, encoder, llm, config
        self.folder = IndexFolder(folder)
        self.session_of = tuple(
            number for number, session in enumerate(dialogue.sessions) for _ in range(len(session.turns))
        )
        self._cues: dict[str | None, Cues] = {}
        #: Vectors by the texts encoded together: cues are often the same for several dimensions.
        self._encoded: dict[tuple[str, ...], Tensor] = {}
        gap, tensors = self.folder.load("turns", self._parse_turns) or self._build_turns()
        self.vectors = tensors["vectors"]
        #: First and last turn of every segment [N, 2], and tokens of every turn [n].
        self.bounds, self.prices = tensors["segments"].numpy(), tensors["turns"].numpy()
        self.segments = tuple(Segment(start, end) for start, end in self.bounds.tolist())
        self.costs = Costs(tuple(self.prices.tolist()), tuple(tensors["headings"].tolist()), gap)
        last = dialogue.turns[-HELD:]
        encoder.hold([turn_text(turn) for turn in last], self.vectors[-len(last) :])

    def cues(self, dimension: str | None) -> Cues:
        """Cues tailored to the dimension (None: a plain factual question), written by the LLM when first asked for."""
        if dimension not in self._cues:
            name = f"cues-{dimension or 'factual'}"
            cues = self.folder.load(name, self._parse_cues) or self._build_cues(name, dimension)
            self.encoder.hold(cues.texts[-HELD:], cues.vectors[-HELD:])
            self._cues[dimension] = cues
        return self._cues[dimension]

    @cached_property
    def bm25(self) -> BM25:
        """BM25 over the turns, built when first asked for."""
        n = len(self.dialogue.turns)

        def parse(text: dict[str, Any], tensors: dict[str, Tensor]) -> BM25:
            if int(text["turns"]) != n:
                raise DataError("it is of another dialogue")
            return BM25.from_tensors(n, text["terms"], tensors)

        if loaded := self.folder.load("bm25", parse):
            return loaded
        built = BM25([stems(turn_text(turn)) for turn in self.dialogue.turns])
        return parse(*self.folder.write("bm25", {"turns": n, "terms": built.terms}, built.tensors()))

    @cached_property
    def norms(self) -> Tensor:
        """Length of every turn's vector [n]; computing it takes as long as the cosines themselves."""
        return self.vectors.norm(dim=-1)

    @cached_property
    def sessions(self) -> np.ndarray:
        """`session_of` as an array [n]."""
        return np.array(self.session_of, dtype=np.int64)

    @cached_property
    def follows(self) -> np.ndarray:
        """Whether a turn stands in the session of the one before it [n + 1]; the last entry is none."""
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
        found: np.ndarray = sums[self.bounds[:, 1] + 1] - sums[self.bounds[:, 0]]
        return found

    def cost(self, positions: Sequence[int]) -> int:
        """Tokens of the dialogue section that shows the turns at these ascending positions."""
        return self.costs.of(positions, self.session_of)

    def _parse_turns(self, text: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
        n, bounds = len(self.dialogue.turns), tensors["segments"].numpy()
        covered = (
            bounds.shape[1:] == (2,)
            and bounds[0, 0] == 0
            and bounds[-1, 1] == n - 1
            and bool((bounds[:, 0] <= bounds[:, 1]).all())
            and np.array_equal(bounds[1:, 0], bounds[:-1, 1] + 1)
        )
        if tensors["vectors"].shape != (n, self.encoder.dimension) or len(tensors["turns"]) != n or not covered:
            raise DataError("it is of another dialogue or encoder")
        if len(tensors["headings"]) != len(self.dialogue.sessions):
            raise DataError("it is of other sessions")
        return int(text["gap"]), tensors

    def _build_turns(self) -> tuple[int, dict[str, Tensor]]:
        costs = prompt_costs(self.dialogue, self.encoder)
        vectors = self.encoder.encode_apart([turn_text(turn) for turn in self.dialogue.turns])
        segments = tuple(segment(self.dialogue, vectors, self.config, costs.turns))
        text = {
            "dialogue": self.dialogue.id,
            "encoder": self.encoder.name,
            "llm": self.llm.name,
            "segment": asdict(self.config),
            "turns": len(costs.turns),
            "segments": len(segments),
            "gap": costs.gap,
        }
        tensors = {
            "vectors": vectors,
            "turns": torch.tensor(costs.turns),
            "headings": torch.tensor(costs.headings),
            "segments": torch.tensor([[part.start, part.end] for part in segments]),
        }
        _, tensors = self.folder.write("turns", text, tensors)
        return costs.gap, tensors

    def _parse_cues(self, text: dict[str, Any], tensors: dict[str, Tensor]) -> Cues:
        cues, vectors = tuple(text["cues"]), tensors["vectors"]
        if vectors.shape != (len(self.segments), self.encoder.dimension) or len(cues) != len(self.segments):
            raise DataError("it is of other segments or another encoder")
        return Cues(cues, vectors, Scan(vectors, tensors))

    def _build_cues(self, name: str, dimension: str | None) -> Cues:
        failures = len(self.llm.failures)
        texts = tuple(self.llm.cues(self.dialogue, self.segments, dimension))
        if len(texts) != len(self.segments):
            raise DataError(
                f"{self.llm.name} wrote {len(texts)} cues for {len(self.segments)} segments", record=self.dialogue.id
            )
        vectors = self._encode_cues(texts)
        tensors = {"vectors": vectors, **encode_rows(vectors)}
        # written, an offline stand-in's cue would pass for the LLM's own in every later build
        if len(self.llm.failures) == failures:
            _, tensors = self.folder.write(name, {"dimension": dimension, "cues": list(texts)}, tensors)
        return Cues(texts, tensors["vectors"], Scan(tensors["vectors"], tensors))

    def _encode_cues(self, texts: Sequence[str]) -> Tensor:
        """Their vectors; a cue that is a turn word for word has that turn's."""
        rows = {turn_text(turn): row for row, turn in enumerate(self.dialogue.turns)}
        new = tuple(dict.fromkeys(text for text in texts if text not in rows))
        rows |= {text: len(self.vectors) + row for row, text in enumerate(new)}
        if new and new not in self._encoded:
            # whole sets alone: last bits depend on what is encoded together
            self._encoded[new] = self.encoder.encode_apart(new)
        both = torch.cat([self.vectors, self._encoded[new]]) if new else self.vectors
        return both[[rows[text] for text in texts]]
