"""Dialogue and question to x0 = [C_ret, S_str] (Section 4.2): segments, cues, retrieval (Eq. 1), strategy.

u_n: each session is cut into topical segments of contiguous turns. A boundary stands where the topic shifts: the
similarity of the turns before and after it dips below its surroundings (TextTiling's depth score, on sentence vectors
instead of word counts). κ_n: a cue for every segment, tailored to a kind of question. C_ret: the segments whose cues
are closest to the question (`cue`, Eq. 1 as it stands); `hybrid` (not in the paper) takes single turns by BM25 and
cosine together, and spends exactly the tokens Eq. 1 would spend: z-scores over the dialogue's turns, mixed with a
Gaussian average over the neighbours in the session.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from remind.core.errors import DataError
from remind.core.files import Cache, sha256_json
from remind.data.dialogue import Dialogue, Question
from remind.models.encoder import HELD, SentenceEncoder
from remind.perception.auxiliary import AuxiliaryLLM
from remind.perception.config import PerceptionConfig, RetrieveConfig, SegmentConfig
from remind.states.pyramid import FactualState, Segment, Strategy, blind, render, segments_of, turn_text
from remind.text.words import stems

#: A spread of scores that is rounding alone.
_NO_SPREAD = 1e-9
#: hybrid: width in turns of the Gaussian over the neighbours in the session, and the shares of a turn's BM25 and cosine
#: that come from them.
SIGMA, LEXICAL_CONTEXT, DENSE_CONTEXT = 2.5, 0.8, 0.3
#: Of what a cached index holds, and of how it is made.
_VERSION = 7
#: How the prompt shows a gap inside a session.
_GAP = "[…]"


class Perception:
    """Builds factual states; each dialogue is indexed once and read by all its questions.

    Args:
        config: segmentation and retrieval.
        encoder: φ.
        llm: writes cues and strategies. It is given questions without any gold.
        cache: folder of the indexes; None: in memory only.
    """

    def __init__(
        self, config: PerceptionConfig, encoder: SentenceEncoder, llm: AuxiliaryLLM, cache: Path | None = None
    ) -> None:
        self.config, self.encoder, self.llm, self.cache = config, encoder, llm, cache
        self._index: DialogueIndex | None = None

    def index(self, dialogue: Dialogue) -> DialogueIndex:
        """The dialogue's index: that of the last call, else read from the cache, else built and written there."""
        if self._index is None or self._index.dialogue is not dialogue:
            self._index = DialogueIndex(dialogue, self.encoder, self.llm, self.config.segment, self.cache)
        return self._index

    def perceive(
        self, dialogue: Dialogue, questions: Sequence[Question], abstention: bool = True
    ) -> list[FactualState]:
        """x0 = [C_ret, S_str] of each question. Neither part depends on the questions' gold.

        Args:
            abstention: as in `FactualState`.

        Raises:
            DataError: an empty question, an unknown dimension, or a question about another dialogue.
        """
        for question in questions:
            if not question.text.strip():
                raise DataError("the question has no text", record=question.id)
            if question.dialogue_id != dialogue.id:
                raise DataError(f"it is about {question.dialogue_id!r}, not {dialogue.id!r}", record=question.id)
        asked = told(self.llm, questions, self.config.kind)
        index = self.index(dialogue)
        # one at a time: vectors differ in the last bits with the batch they were encoded in
        vectors = [self.encoder.encode([question.text])[0] for question in asked]
        retrieved = [
            retrieve(index, question.text, vector, question.dimension, self.config.retrieve)
            for question, vector in zip(asked, vectors, strict=True)
        ]
        strategies = self.llm.strategies(dialogue, asked)
        inferred = self.config.kind == "infer"
        return [
            FactualState(
                dialogue, question, found.segments, strategy, abstention, known if inferred else None, found.capped
            )
            for question, found, strategy, known in zip(questions, retrieved, strategies, asked, strict=True)
        ]


def told(llm: AuxiliaryLLM, questions: Sequence[Question], kind: str) -> list[Question]:
    """The questions as given to the LLM: blind, with the dimension that they are tailored to.

    Args:
        kind: "gold": their own dimension; "infer": the one `llm` takes each for.
    """
    bare = [blind(question) for question in questions]
    if kind == "gold":
        return bare
    bare = [replace(question, dimension=None) for question in bare]
    return [replace(question, dimension=name) for question, name in zip(bare, llm.kinds(bare), strict=True)]


# the index of a dialogue


def content_key(dialogue: Dialogue, encoder: str, config: SegmentConfig, llm: str) -> str:
    """Hash of everything an index depends on: what is said, encoder, segmentation, and the LLM that writes the cues."""
    sessions = [
        [s.id, s.time, [[t.id, t.speaker, t.text, [image.caption for image in t.images]] for t in s.turns]]
        for s in dialogue.sessions
    ]
    return sha256_json([_VERSION, dialogue.id, sessions, encoder, asdict(config), llm])


@dataclass(frozen=True)
class Costs:
    """Tokens the dialogue section of a prompt takes: each turn with its captions, each session heading, a gap line.

    Attributes:
        session_of: number of the session of every turn.
    """

    turns: Sequence[int]
    headings: Sequence[int]
    gap: int
    session_of: Sequence[int]

    def of(self, positions: Sequence[int]) -> int:
        """Tokens of the dialogue section that shows the turns at these ascending positions."""
        total, previous, session = 0, None, None
        for position in positions:
            here = self.session_of[position]
            if here != session:
                total += self.headings[here]
            elif position - 1 != previous:
                total += self.gap
            total += self.turns[position]
            previous, session = position, here
        return total


def prompt_costs(dialogue: Dialogue, encoder: SentenceEncoder) -> Costs:
    """Tokens of every turn and session heading as the prompt renders them, in the encoder's vocabulary."""
    whole = segments_of(dialogue, range(len(dialogue.turns)))  # one for each session with turns
    rendered = render(FactualState(dialogue, Question("", dialogue.id, ""), whole, Strategy(())))
    turns = encoder.count_many([rendered.text[span.start : span.end] for span in rendered.turns])
    # a heading stands between the turn before a session's first and that turn
    ends = [rendered.dialogue[0], *(span.end for span in rendered.turns)]
    headings = [rendered.text[ends[part.start] : rendered.turns[part.start].start] for part in whole]
    counts = iter(encoder.count_many(headings))
    per_session = [next(counts) if session.turns else 0 for session in dialogue.sessions]
    session_of = [n for n, session in enumerate(dialogue.sessions) for _ in session.turns]
    return Costs(turns, per_session, encoder.count_many([_GAP])[0], session_of)


class BM25:
    """BM25 over stemmed documents (bm25s, Lucene's variant)."""

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        import bm25s

        self.n_documents, self._model = len(documents), bm25s.BM25()
        self._known = any(documents)
        if self._known:
            self._model.index([list(words) for words in documents], create_empty_token=False, show_progress=False)

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
    """

    def __init__(
        self, dialogue: Dialogue, encoder: SentenceEncoder, llm: AuxiliaryLLM, config: SegmentConfig, cache: Path | None
    ) -> None:
        self.dialogue, self.encoder, self.llm = dialogue, encoder, llm
        # the tensors stay views of the file, whose pages are read when they are touched
        self._cache = None if cache is None else Cache(cache)
        self._key = content_key(dialogue, encoder.name, config, llm.name)
        found = None if self._cache is None else self._cache.read("index", self._key)
        if found is None:
            costs = prompt_costs(dialogue, encoder)
            vectors = encoder.encode_apart([turn_text(turn) for turn in dialogue.turns])
            segments = segment(dialogue, vectors, config, costs.turns)
            ends = [[part.start, part.end] for part in segments]
            found = {"turns": vectors}, {"segments": ends, "costs": asdict(costs), "cues": {}}
            if self._cache is not None:
                self._cache.write("index", self._key, *found)
        # vectors of turns and cues; all that is no vector
        self._vectors: dict[str, Tensor]
        self._about: dict[str, Any]
        self._vectors, self._about = found
        #: Texts of the cues by the name of their vectors.
        self._texts: dict[str, list[str]] = self._about["cues"]
        self._unsure: set[str] = set()
        self.vectors = self._vectors["turns"]
        self.segments = tuple(Segment(start, end) for start, end in self._about["segments"])
        self.costs = Costs(**self._about["costs"])
        last = dialogue.turns[-HELD:]
        encoder.hold([turn_text(turn) for turn in last], self.vectors[-len(last) :])

    @cached_property
    def bm25(self) -> BM25:
        """BM25 over the turns."""
        return BM25([stems(turn_text(turn)) for turn in self.dialogue.turns])

    def cues(self, dimension: str | None) -> Cues:
        """Cues tailored to the dimension (None: a plain factual question), written by the LLM when first asked for."""
        name = f"cues {dimension or 'factual'}"
        if name not in self._texts:
            # written, an offline stand-in's cue would pass for the LLM's own in every later build
            failures = len(self.llm.failures)
            texts = self.llm.cues(self.dialogue, self.segments, dimension)
            if len(texts) != len(self.segments):
                what = f"{self.llm.name} wrote {len(texts)} cues for {len(self.segments)} segments"
                raise DataError(what, record=self.dialogue.id)
            # a cue may be a turn word for word, or that of another kind of question
            known = {turn_text(turn): vector for turn, vector in zip(self.dialogue.turns, self.vectors, strict=True)}
            for other in self._texts:
                known |= zip(self._texts[other], self._vectors[other], strict=True)
            new = [text for text in dict.fromkeys(texts) if text not in known]
            if new:
                known |= zip(new, self.encoder.encode_apart(new), strict=True)
            self._texts[name], self._vectors[name] = list(texts), torch.stack([known[text] for text in texts])
            if len(self.llm.failures) > failures:
                self._unsure.add(name)
            elif self._cache is not None:
                vectors = {kind: some for kind, some in self._vectors.items() if kind not in self._unsure}
                sure = {kind: some for kind, some in self._texts.items() if kind not in self._unsure}
                self._cache.write("index", self._key, vectors, {**self._about, "cues": sure})
        cues = Cues(tuple(self._texts[name]), self._vectors[name])
        self.encoder.hold(cues.texts[-HELD:], cues.vectors[-HELD:])
        return cues


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
    sessions = [slice(one.start, one.end + 1) for one in segments_of(dialogue, range(len(dialogue.turns)))]
    gaps = [_gaps(vectors[session], config.window) for session in sessions]
    every = np.concatenate([depth for _, depth in gaps])
    threshold = every.mean() + config.depth * every.std() if len(every) else np.inf
    return [
        Segment(session.start + low, session.start + high - 1)
        for session, (similarity, depth) in zip(sessions, gaps, strict=True)
        for low, high in _cut_session(similarity, depth, threshold, tokens[session], config)
    ]


def _gaps(vectors: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each of the n - 1 gaps of a session, the cosine between the summed turns before and after, and its depth.

    Its depth is how far that cosine lies below the nearest peaks on its two sides, summed.
    """
    similarity = np.zeros(len(vectors) - 1)
    for gap in range(1, len(vectors)):
        left = vectors[max(0, gap - window) : gap].sum(axis=0)
        right = vectors[gap : gap + window].sum(axis=0)
        norm = np.linalg.norm(left) * np.linalg.norm(right)
        similarity[gap - 1] = left @ right / norm if norm > 0 else 0.0
    depths = np.zeros_like(similarity)
    for gap, value in enumerate(similarity):
        for step in (-1, 1):
            peak, here = value, gap + step
            while 0 <= here < len(similarity) and similarity[here] >= peak:
                peak = similarity[here]
                here += step
            depths[gap] += peak - value
    return similarity, depths


def _cut_session(
    similarity: np.ndarray, depth: np.ndarray, threshold: float, tokens: np.ndarray, config: SegmentConfig
) -> list[tuple[int, int]]:
    """Turns of a session as (first, last + 1): cut at its dips, then at the weakest gaps of what exceeds the cap.

    The deepest dips come first, none closer than `min_turns` to another; a single turn stays whole at any length.
    """
    edges = [0, len(tokens)]
    for gap in by_falling(depth):
        if depth[gap] < threshold or depth[gap] <= 0:
            break
        if all(abs(gap + 1 - other) >= config.min_turns for other in edges):
            edges.append(gap + 1)
    todo, done, cap = list(pairwise(sorted(edges)))[::-1], [], config.max_tokens
    while todo:
        low, high = todo.pop()
        if cap is None or high - low == 1 or tokens[low:high].sum() <= cap:
            done.append((low, high))
            continue
        allowed = range(low + config.min_turns, high - config.min_turns + 1) or range(low + 1, high)
        cut = min(allowed, key=lambda place: similarity[place - 1])
        todo += [(cut, high), (low, cut)]
    return done


# retrieval


class Retrieved(NamedTuple):
    """C_ret in time order, and whether `max_context_tokens` left out what the share of Eq. 1 would keep."""

    segments: tuple[Segment, ...]
    capped: bool


def relevance(question: Tensor, cues: Tensor) -> np.ndarray:
    """Eq. 1: η_n, cosine of φ(q) [d] and φ(κ_n), unit rows [N, d] → float64 [N]."""
    return np.asarray((cues @ question).double().numpy())


def by_falling(scores: np.ndarray) -> list[int]:
    """Positions by falling score; ties: earlier first."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order


def retrieve(
    index: DialogueIndex, question: str, vector: Tensor, dimension: str | None, config: RetrieveConfig
) -> Retrieved:
    """C_ret, at most `max_context_tokens` long unless a single turn is longer; short dialogues whole.

    Args:
        question, vector: the question's text and φ of it [d].
        dimension: which cues Eq. 1 compares with.
    """
    whole = range(len(index.vectors))
    if index.costs.of(whole) <= min(config.whole_tokens, config.max_context_tokens or config.whole_tokens):
        return Retrieved(segments_of(index.dialogue, whole), False)
    ranked = by_falling(relevance(vector, index.cues(dimension).vectors))
    retrieved = take_segments(index, ranked, vector, config)
    if config.method == "cue":
        return retrieved
    budget = index.costs.of([p for segment in retrieved.segments for p in range(segment.start, segment.end + 1)])
    turns = take_turns(index, by_falling(turn_scores(index, question, vector)), budget)
    return Retrieved(segments_of(index.dialogue, turns), retrieved.capped)


def take_segments(index: DialogueIndex, ranked: list[int], vector: Tensor, config: RetrieveConfig) -> Retrieved:
    """The top share of segments, less the lowest while they exceed the cap.

    Where the best segment alone exceeds it, those of its turns that are closest to the question are taken.

    Args:
        ranked: numbers of segments, the best first.
    """
    limit = math.inf if config.max_context_tokens is None else config.max_context_tokens
    # k_1 = ceil(share × N); the product is rounded so that 0.2 × 15 is 3 and nothing above
    count = max(1, math.ceil(round(config.top_share * len(ranked), 9)))
    top = [index.segments[number] for number in ranked[:count]]
    chosen, fitting = list[int](), 0
    for count, segment in enumerate(top, start=1):
        chosen += range(segment.start, segment.end + 1)
        if limit == math.inf or index.costs.of(sorted(chosen)) <= limit:
            fitting = count
    if fitting == 0:
        closeness = relevance(vector, index.vectors[top[0].start : top[0].end + 1])
        turns = take_turns(index, [top[0].start + number for number in by_falling(closeness)], limit)
        return Retrieved(segments_of(index.dialogue, turns), True)
    return Retrieved(tuple(sorted(top[:fitting], key=lambda segment: segment.start)), fitting < len(top))


def turn_scores(index: DialogueIndex, question: str, vector: Tensor) -> np.ndarray:
    """Score of every turn [n]: z-scores of BM25 and of the cosine, each mixed with those of the turns around."""
    lexical = standardise(index.bm25.scores(stems(question)))
    dense = standardise(relevance(vector, index.vectors))
    # one average for both, which is linear
    around = LEXICAL_CONTEXT * lexical + DENSE_CONTEXT * dense
    # the difference is exactly 0 without an average, so that ties stay ties
    return lexical + dense + (session_average(around, np.array(index.costs.session_of), SIGMA) - around)


def take_turns(index: DialogueIndex, ranked: Sequence[int], budget: float) -> list[int]:
    """Positions, ascending, of the best turns that fit a budget of prompt tokens together.

    At least the best one. A turn that does not fit is passed over for lower ones that do. What a turn costs depends on
    those chosen before: the first of a session brings the heading, one away from the others a gap line, one between two
    of them removes one.
    """
    costs, spent, chosen, opened = index.costs, 0, set[int](), set[int]()
    for position in ranked:
        session = costs.session_of[position]
        touching = sum(p in chosen and costs.session_of[p] == session for p in (position - 1, position + 1))
        price = costs.turns[position] + ((1 - touching) * costs.gap if session in opened else costs.headings[session])
        if not chosen or spent + price <= budget:
            spent += price
            chosen.add(position)
            opened.add(session)
    return sorted(chosen)


def standardise(values: np.ndarray) -> np.ndarray:
    """z-scores [n]; zeros where all values are the same."""
    deviation = values.std()
    return (values - values.mean()) / deviation if deviation > _NO_SPREAD else np.zeros_like(values)


def session_average(values: np.ndarray, sessions: np.ndarray, sigma: float) -> np.ndarray:
    """Gaussian average of each value over its session; zeros beyond its ends.

    Args:
        values: one for every turn, float64 [n].
        sessions: number of the session of every turn, ascending [n].
        sigma: width of the Gaussian in turns.
    """
    reach = math.ceil(3 * sigma)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    own = np.split(values, np.flatnonzero(np.diff(sessions)) + 1)
    return np.concatenate([np.convolve(part, kernel / kernel.sum())[reach : reach + len(part)] for part in own])
