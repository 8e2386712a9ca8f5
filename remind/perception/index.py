"""What perception knows of a dialogue before a question is asked: segments, cues and their vectors, token counts.

u_n of Section 4.2: each session is cut into topical segments of contiguous turns. A boundary stands where the topic
shifts: the similarity of the turns before and after it dips below its surroundings (TextTiling's depth score, on
sentence vectors instead of word counts). κ_n: a cue for every segment, tailored to a kind of question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from remind.core.cache import Cache
from remind.core.errors import DataError
from remind.core.files import sha256_json
from remind.data.dialogue import Dialogue, Question
from remind.models.encoder import HELD, SentenceEncoder
from remind.perception.config import SegmentConfig
from remind.states.auxiliary import AuxiliaryLLM
from remind.states.pyramid import FactualState, Segment, Strategy, render, turn_text
from remind.text.words import stems

#: Of what a cached index holds, and of how it is made.
_VERSION = 5
#: How the prompt shows a gap inside a session.
_GAP = "[…]"


def content_key(dialogue: Dialogue, encoder: str, config: SegmentConfig, llm: str) -> str:
    """Hash of everything an index depends on: what is said, encoder, segmentation, and the LLM that writes the cues."""
    sessions = [
        [s.id, s.time, [[t.id, t.speaker, t.text, [image.caption for image in t.images]] for t in s.turns]]
        for s in dialogue.sessions
    ]
    return sha256_json([_VERSION, dialogue.id, sessions, encoder, asdict(config), llm])


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


def prompt_costs(dialogue: Dialogue, encoder: SentenceEncoder) -> Costs:
    """Tokens of every turn and session heading as the prompt renders them, in the encoder's vocabulary."""
    whole = tuple(Segment(first, end - 1) for first, end in _spans(dialogue) if end > first)
    rendered = render(FactualState(dialogue, Question("", dialogue.id, ""), whole, Strategy(())))
    turns = encoder.count_many([rendered.text[span.start : span.end] for span in rendered.turns])
    # a heading stands between the turn before a session's first and that turn
    ends = [rendered.dialogue[0], *(span.end for span in rendered.turns)]
    headings = [rendered.text[ends[part.start] : rendered.turns[part.start].start] for part in whole]
    counts = iter(encoder.count_many(headings))
    per_session = tuple(next(counts) if session.turns else 0 for session in dialogue.sessions)
    return Costs(tuple(turns), per_session, encoder.count_tokens(_GAP))


class BM25:
    """BM25 over stemmed documents (bm25s, Lucene's variant)."""

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        import bm25s

        self.n_documents = len(documents)
        self._model = bm25s.BM25()
        # sorted, so that sums do not depend on the order in which words occur
        numbers = {term: n for n, term in enumerate(sorted({term for words in documents for term in words}))}
        self._known = bool(numbers)
        if self._known:
            ids = [[numbers[term] for term in words] for words in documents]
            self._model.index((ids, numbers), create_empty_token=False, show_progress=False)

    def scores(self, query: Sequence[str]) -> np.ndarray:
        """Score of every document, float64 [n]; zeros if no query term occurs."""
        ids = self._model.get_tokens_ids(query) if self._known else []
        return np.asarray(self._model.get_scores_from_ids(ids), np.float64) if ids else np.zeros(self.n_documents)


@dataclass(frozen=True)
class Cues:
    """κ_n of every segment for one kind of question, and φ of each: unit rows [N, d]."""

    texts: tuple[str, ...]
    vectors: Tensor


class DialogueIndex:
    """The index of one dialogue, built once and read by every question; one safetensors file in the cache.

    What it holds depends on the dialogue and the settings alone, not on what else the process that built it encoded.

    Args:
        dialogue: n turns.
        encoder: φ; called for what the cache does not hold, and given the vectors of turns and cues to hold.
        llm: writes the cues.
        config: segmentation.
        cache: folder in which indexes are cached; None: in memory only.

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
        cache: Path | None,
    ) -> None:
        self.dialogue, self.encoder, self.llm, self.config = dialogue, encoder, llm, config
        # the tensors stay views of the file, whose pages are read when they are touched
        self._cache = None if cache is None else Cache(cache)
        self._key = content_key(dialogue, encoder.name, config, llm.name)
        self.session_of = tuple(n for n, session in enumerate(dialogue.sessions) for _ in session.turns)
        found = None if self._cache is None else self._cache.read("index", self._key)
        self._tensors: dict[str, Tensor] = found[0] if found else self._build()
        #: Texts of the cues by the name of their vectors.
        self._texts: dict[str, list[str]] = found[1] if found else {}
        if found is None:
            self._write()
        self.vectors = self._tensors["vectors"]
        self.segments = tuple(Segment(start, end) for start, end in self._tensors["segments"].tolist())
        prices, headings = (tuple(self._tensors[name].tolist()) for name in ("turns", "headings"))
        self.costs = Costs(prices, headings, int(self._tensors["gap"]))
        self._cues: dict[str, Cues] = {}
        last = dialogue.turns[-HELD:]
        encoder.hold([turn_text(turn) for turn in last], self.vectors[-len(last) :])

    def cues(self, dimension: str | None) -> Cues:
        """Cues tailored to the dimension (None: a plain factual question), written by the LLM when first asked for."""
        name = f"cues {dimension or 'factual'}"
        if name not in self._cues:
            if name not in self._texts:
                self._write_cues(name, dimension)
            cues = self._cues[name] = Cues(tuple(self._texts[name]), self._tensors[name])
            self.encoder.hold(cues.texts[-HELD:], cues.vectors[-HELD:])
        return self._cues[name]

    @cached_property
    def bm25(self) -> BM25:
        """BM25 over the turns."""
        return BM25([stems(turn_text(turn)) for turn in self.dialogue.turns])

    def cost(self, positions: Sequence[int]) -> int:
        """Tokens of the dialogue section that shows the turns at these ascending positions."""
        return self.costs.of(positions, self.session_of)

    def _build(self) -> dict[str, Tensor]:
        costs = prompt_costs(self.dialogue, self.encoder)
        vectors = self.encoder.encode_apart([turn_text(turn) for turn in self.dialogue.turns])
        segments = segment(self.dialogue, vectors, self.config, costs.turns)
        return {
            "vectors": vectors,
            "turns": torch.tensor(costs.turns),
            "headings": torch.tensor(costs.headings),
            "gap": torch.tensor(costs.gap),
            "segments": torch.tensor([[part.start, part.end] for part in segments]),
        }

    def _write_cues(self, name: str, dimension: str | None) -> None:
        failures = len(self.llm.failures)
        texts = self.llm.cues(self.dialogue, self.segments, dimension)
        if len(texts) != len(self.segments):
            what = f"{self.llm.name} wrote {len(texts)} cues for {len(self.segments)} segments"
            raise DataError(what, record=self.dialogue.id)
        # a cue may be a turn word for word, or that of another kind of question
        known = {turn_text(turn): vector for turn, vector in zip(self.dialogue.turns, self.vectors, strict=True)}
        for other in self._texts:
            known |= zip(self._texts[other], self._tensors[other], strict=True)
        new = [text for text in dict.fromkeys(texts) if text not in known]
        known |= zip(new, self.encoder.encode_apart(new), strict=True)
        self._texts[name], self._tensors[name] = list(texts), torch.stack([known[text] for text in texts])
        # written, an offline stand-in's cue would pass for the LLM's own in every later build
        if len(self.llm.failures) == failures:
            self._write()

    def _write(self) -> None:
        if self._cache is not None:
            self._cache.write("index", self._key, self._tensors, self._texts)


def _spans(dialogue: Dialogue) -> list[tuple[int, int]]:
    """First turn and last + 1 of every session."""
    ends = np.cumsum([0, *(len(session.turns) for session in dialogue.sessions)]).tolist()
    return list(pairwise(ends))


def segment(
    dialogue: Dialogue, turn_vectors: Tensor, config: SegmentConfig, turn_tokens: Sequence[int]
) -> list[Segment]:
    """Segments in time order that hold every turn exactly once; none crosses a session.

    Args:
        dialogue: n turns.
        turn_vectors: φ of every turn, unit rows [n, d].
        turn_tokens: tokens of every turn [n].
    """
    vectors = turn_vectors.detach().cpu().double().numpy()
    tokens = np.asarray(turn_tokens, dtype=np.int64)
    bounds = [(first, end) for first, end in _spans(dialogue) if end > first]
    similarities = [_gap_similarities(vectors[first:end], config.window) for first, end in bounds]
    depths = [_depths(similarity) for similarity in similarities]
    every = np.concatenate(depths)
    threshold = every.mean() + config.depth * every.std() if len(every) else np.inf

    segments: list[Segment] = []
    for (first, end), similarity, depth in zip(bounds, similarities, depths, strict=True):
        edges = [0, *_dips(depth, threshold, config.min_turns), end - first]
        for low, high in pairwise(edges):
            for a, b in _within_cap(low, high, similarity, tokens[first:end], config):
                segments.append(Segment(first + a, first + b - 1))
    return segments


def _gap_similarities(vectors: np.ndarray, window: int) -> np.ndarray:
    """Cosine between the summed turns before and after each of the n - 1 gaps of a session."""
    gaps = []
    for gap in range(1, len(vectors)):
        left = vectors[max(0, gap - window) : gap].sum(axis=0)
        right = vectors[gap : gap + window].sum(axis=0)
        norm = np.linalg.norm(left) * np.linalg.norm(right)
        gaps.append(float(left @ right / norm) if norm > 0 else 0.0)
    return np.asarray(gaps, dtype=np.float64)


def _depths(similarity: np.ndarray) -> np.ndarray:
    """How far each gap lies below the nearest peaks on its two sides, summed."""
    depths = np.zeros_like(similarity)
    for gap, value in enumerate(similarity):
        for step in (-1, 1):
            peak, here = value, gap + step
            while 0 <= here < len(similarity) and similarity[here] >= peak:
                peak = similarity[here]
                here += step
            depths[gap] += peak - value
    return depths


def _dips(depth: np.ndarray, threshold: float, min_turns: int) -> list[int]:
    """Boundaries (turn numbers that begin a segment): deepest first, none closer than `min_turns` to another."""
    taken = [0, len(depth) + 1]
    for gap in np.argsort(-depth, kind="stable"):
        cut = int(gap) + 1
        if depth[gap] < threshold or depth[gap] <= 0:
            break
        if all(abs(cut - other) >= min_turns for other in taken):
            taken.append(cut)
    return sorted(taken[2:])


def _within_cap(
    low: int, high: int, similarity: np.ndarray, tokens: np.ndarray, config: SegmentConfig
) -> list[tuple[int, int]]:
    """Turns low to high (exclusive) cut at their weakest gaps until each part fits the cap or is a single turn."""
    todo, done = [(low, high)], []
    while todo:
        a, b = todo.pop()
        if b - a == 1 or tokens[a:b].sum() <= config.max_tokens:
            done.append((a, b))
            continue
        allowed = range(a + config.min_turns, b - config.min_turns + 1) or range(a + 1, b)
        cut = min(allowed, key=lambda c: similarity[c - 1])
        todo += [(cut, b), (a, cut)]
    return done
