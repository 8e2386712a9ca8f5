"""The text branch up to its vectors: topical segments of every dialogue and φ of each (Appendix D.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from remind.core.files import write_rows
from remind.core.progress import track
from remind.data.dialogue import Corpus, Dialogue
from remind.data.readers.source import Source
from remind.perception.segment import SegmentConfig, segment, turn_text

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder


@dataclass(frozen=True)
class Piece:
    """A topical segment: turns `start` to `end` (inclusive) of a dialogue."""

    dialogue_id: str
    start: int
    end: int

    def turns(self, dialogue: Dialogue) -> list[str]:
        """Ids of its turns."""
        return [turn.id for turn in dialogue.turns[self.start : self.end + 1]]


def make_segments(folder: Path, corpus: Corpus, encoder: SentenceEncoder, config: SegmentConfig) -> dict[str, Any]:
    """Write segments.jsonl and vectors.npy (float32 [segments, d], unit rows, in the same order)."""
    rows, vectors = [], []
    for dialogue in track(corpus.dialogues, "segments", len(corpus.dialogues)):
        texts = [turn_text(turn) for turn in dialogue.turns]
        pieces = segment(dialogue, encoder.encode(texts), config, encoder.count_many(texts))
        rows += [{"dialogue_id": dialogue.id, "start": piece.start, "end": piece.end} for piece in pieces]
        vectors.append(encoder.encode(["\n".join(texts[piece.start : piece.end + 1]) for piece in pieces]).numpy())
    write_rows(folder / "segments.jsonl", rows)
    np.save(folder / "vectors.npy", np.concatenate(vectors).astype(np.float32), allow_pickle=False)
    return {"segments": len(rows), "encoder": encoder.name}


def read_segments(folder: Path) -> tuple[list[Piece], np.ndarray]:
    """Segments and their vectors, float32 [segments, d]."""
    return read_pieces(folder / "segments.jsonl"), np.load(folder / "vectors.npy", allow_pickle=False)


def read_pieces(path: str | Path) -> list[Piece]:
    """Segments of a file. Raises DataError for a file that cannot be read, or a record that is no segment."""
    pieces = []
    for place, value in Source(Path(path)).any_records:
        row = place.mapping(value, "a segment")
        name, start, end = place.name(row.get("dialogue_id"), "dialogue_id"), row.get("start"), row.get("end")
        if type(start) is not int or type(end) is not int or not 0 <= start <= end:
            raise place.error("start and end should be the first and last turn of a segment")
        pieces.append(Piece(name, start, end))
    return pieces


def of_dialogue(pieces: Sequence[Piece], dialogue_id: str) -> list[int]:
    """Numbers of a dialogue's segments."""
    return [number for number, piece in enumerate(pieces) if piece.dialogue_id == dialogue_id]
