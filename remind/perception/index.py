"""The index of one dialogue: turn vectors, segments, cues and their vectors. Built once, read by every question."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from remind.dialogue import Dialogue, Question
from remind.errors import DataError
from remind.io import atomic_path, read_json, sha256_json, write_json
from remind.llm.base import AuxiliaryLLM
from remind.perception.encode import SentenceEncoder
from remind.perception.lexical import BM25, stems
from remind.perception.segment import SegmentConfig, segment, turn_text
from remind.pyramid import FactualState, Segment, Strategy, render

FORMAT_VERSION = 1
#: How the prompt shows a gap inside a session.
GAP = "[…]"
T = TypeVar("T")
_log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Costs:
    """Tokens the dialogue section of a prompt takes: each turn with its captions, each session heading, a gap line."""

    turns: tuple[int, ...]
    headings: tuple[int, ...]
    gap: int

    def of(self, positions: Sequence[int], session_of: Sequence[int]) -> int:
        """Tokens of the dialogue section that shows the turns at these ascending positions.

        Args:
            session_of: number of the session of every turn.
        """
        total, previous, session = 0, None, None
        for position in positions:
            here = session_of[position]
            if here != session:
                total += self.headings[here]
            elif position - 1 != previous:
                total += self.gap
            total += self.turns[position]
            previous, session = position, here
        return total


class DialogueIndex:
    """What perception knows of a dialogue before any question is asked.

    Args:
        dialogue: n turns.
        encoder: φ; called for what the folder does not hold.
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
        self.dialogue, self.encoder, self.llm, self.config, self.folder = dialogue, encoder, llm, config, folder
        self.session_of = tuple(
            number for number, session in enumerate(dialogue.sessions) for _ in range(len(session.turns))
        )
        self._cues: dict[str | None, Cues] = {}
        self.vectors: Tensor
        self.segments: tuple[Segment, ...]
        self.costs: Costs
        self.vectors, self.segments, self.costs = self._stored("turns", self._read_turns) or self._build_turns()

    def cues(self, dimension: str | None) -> Cues:
        """Cues tailored to the dimension (None: a plain factual question), written by the LLM when first asked for."""
        if dimension not in self._cues:
            name = f"cues-{dimension or 'factual'}"
            stored = self._stored(name, lambda: self._read_cues(name))
            self._cues[dimension] = stored or self._build_cues(name, dimension)
        return self._cues[dimension]

    @cached_property
    def bm25(self) -> BM25:
        """BM25 over the turns; in memory only, since it takes no encoder to build."""
        return BM25([stems(turn_text(turn)) for turn in self.dialogue.turns])

    def cost(self, positions: Sequence[int]) -> int:
        """Tokens of the dialogue section that shows the turns at these ascending positions."""
        return self.costs.of(positions, self.session_of)

    def _stored(self, name: str, load: Callable[[], T]) -> T | None:
        """What `load` gives, or None where there is nothing on disk or what is there cannot be used."""
        if self.folder is None or not (self.folder / f"{name}.json").is_file():
            return None
        try:
            return load()
        except (DataError, SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            _log.warning("%s: %s cannot be used (%s); it is built again", self.folder, name, reason)
            return None

    def _read(self, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """JSON and tensors of that name, which must have been written together. Raises DataError otherwise."""
        assert self.folder is not None
        text = read_json(self.folder / f"{name}.json")
        with safe_open(self.folder / f"{name}.safetensors", framework="pt") as file:
            stamp = (file.metadata() or {}).get("json")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if stamp != sha256_json(text):
            raise DataError("text and tensors do not belong together")
        return text, tensors

    def _write(self, name: str, text: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if self.folder is None:
            return
        with atomic_path(self.folder / f"{name}.safetensors") as temporary:
            save_file(
                {key: value.contiguous() for key, value in tensors.items()},
                temporary,
                metadata={"json": sha256_json(text)},
            )
        write_json(self.folder / f"{name}.json", text)

    def _read_turns(self) -> tuple[Tensor, tuple[Segment, ...], Costs]:
        text, tensors = self._read("turns")
        vectors, costs = tensors["vectors"], tensors["turns"].tolist()
        segments = tuple(Segment(start, end) for start, end in tensors["segments"].tolist())
        covered = [position for part in segments for position in range(part.start, part.end + 1)]
        n = len(self.dialogue.turns)
        if vectors.shape != (n, self.encoder.dimension) or len(costs) != n or covered != list(range(n)):
            raise DataError("it is of another dialogue or encoder")
        self.encoder.hold([turn_text(turn) for turn in self.dialogue.turns], vectors)
        return vectors, segments, Costs(tuple(costs), tuple(tensors["headings"].tolist()), int(text["gap"]))

    def _build_turns(self) -> tuple[Tensor, tuple[Segment, ...], Costs]:
        costs = prompt_costs(self.dialogue, self.encoder)
        vectors = self.encoder.encode([turn_text(turn) for turn in self.dialogue.turns])
        segments = tuple(segment(self.dialogue, vectors, self.config, costs.turns))
        text = {
            "format": "remind-index",
            "format_version": FORMAT_VERSION,
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
        self._write("turns", text, tensors)
        return vectors, segments, costs

    def _read_cues(self, name: str) -> Cues:
        text, tensors = self._read(name)
        cues, vectors = tuple(text["cues"]), tensors["vectors"]
        if vectors.shape != (len(self.segments), self.encoder.dimension) or len(cues) != len(self.segments):
            raise DataError("it is of other segments or another encoder")
        return Cues(cues, vectors)

    def _build_cues(self, name: str, dimension: str | None) -> Cues:
        failed = len(self.llm.failures)
        texts = tuple(self.llm.cues(self.dialogue, self.segments, dimension))
        if len(texts) != len(self.segments):
            raise DataError(
                f"{self.llm.name} wrote {len(texts)} cues for {len(self.segments)} segments", record=self.dialogue.id
            )
        cues = Cues(texts, self.encoder.encode(texts))
        # kept, a stand-in's cue would pass for the LLM's own in every later build
        if len(self.llm.failures) == failed:
            self._write(name, {"dimension": dimension, "cues": list(texts)}, {"vectors": cues.vectors})
        return cues


def prompt_costs(dialogue: Dialogue, encoder: SentenceEncoder) -> Costs:
    """Tokens of every turn and session heading as the prompt renders them, in the encoder's vocabulary."""
    whole, start = [], 0
    for session in dialogue.sessions:
        if session.turns:
            whole.append(Segment(start, start + len(session.turns) - 1))
        start += len(session.turns)
    state = FactualState(dialogue, Question("", dialogue.id, ""), tuple(whole), Strategy(()))
    rendered = render(state)
    turns = encoder.count_many([rendered.text[span.start : span.end] for span in rendered.turns])
    headings, before = [], rendered.dialogue[0]
    firsts = {part.start for part in whole}
    for position, span in enumerate(rendered.turns):
        if position in firsts:
            headings.append(rendered.text[before : span.start])
        before = span.end
    counted = iter(encoder.count_many(headings))
    per_session = tuple(next(counted) if session.turns else 0 for session in dialogue.sessions)
    return Costs(tuple(turns), per_session, encoder.count_tokens(GAP))
