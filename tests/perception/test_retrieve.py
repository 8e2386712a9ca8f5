"""What is retrieved, against a plain reading of the definition: every cosine, every cost and every order in full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.perception import RetrieveConfig, SegmentConfig
from remind.perception.auxiliary import OfflineLLM
from remind.perception.perceive import (
    DENSE_CONTEXT,
    LEXICAL_CONTEXT,
    SIGMA,
    DialogueIndex,
    by_falling,
    relevance,
    retrieve,
)
from remind.states.pyramid import FactualState, Segment, Strategy, render, turn_text
from remind.text.words import stems
from tests.perception.conftest import Bag

WORDS = ["dog", "cat", "boat", "violin", "rain", "moon", "tea", "bread", "river", "stone", "lamp", "coat"]


def section(index: DialogueIndex, positions: Sequence[int]) -> int:
    return index.costs.of(sorted(positions))


def rendered_cost(index: DialogueIndex, positions: Sequence[int]) -> int:
    """Tokens of the dialogue section as it is really rendered."""
    single = tuple(Segment(position, position) for position in positions)
    rendered = render(FactualState(index.dialogue, Question("q", "random", "?"), single, Strategy(())))
    return index.encoder.count_tokens(rendered.text[slice(*rendered.dialogue)])


def within(segments: Sequence[Segment]) -> list[int]:
    return [p for part in segments for p in range(part.start, part.end + 1)]


def cosines(vector: torch.Tensor, rows: torch.Tensor) -> np.ndarray:
    norms = (vector.norm() * rows.norm(dim=-1)).clamp_min(1e-12)
    return ((rows @ vector) / norms).double().numpy()


def cap_of(config: RetrieveConfig) -> float:
    return math.inf if config.max_context_tokens is None else config.max_context_tokens


def by_eq_1(index: DialogueIndex, vector: torch.Tensor, config: RetrieveConfig) -> list[Segment]:
    n = len(index.segments)
    order = np.argsort(-cosines(vector, index.cues(None).vectors), kind="stable")
    ranked = [index.segments[number] for number in order[: max(1, math.ceil(round(config.top_share * n, 9)))]]
    while len(ranked) > 1 and section(index, within(ranked)) > cap_of(config):
        ranked.pop()
    return sorted(ranked, key=lambda part: part.start)


def z(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / values.std() if values.std() > 1e-9 else np.zeros_like(values)


def smoothed(index: DialogueIndex, values: np.ndarray, sigma: float, share: float) -> np.ndarray:
    if sigma == 0 or share == 0:
        return values
    reach = math.ceil(3 * sigma)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    smooth, start = np.empty_like(values), 0
    for session in index.dialogue.sessions:
        end = start + len(session.turns)
        if end > start:
            smooth[start:end] = np.convolve(values[start:end], kernel)[reach : reach + end - start]
        start = end
    return (1 - share) * values + share * smooth


def bm25(index: DialogueIndex, question: str) -> np.ndarray:
    import bm25s

    model = bm25s.BM25()
    model.index([stems(turn_text(turn)) for turn in index.dialogue.turns], show_progress=False)
    known = [term for term in stems(question) if term in model.vocab_dict]
    return model.get_scores(known).astype(float) if known else np.zeros(len(index.dialogue.turns))


def greedy(index: DialogueIndex, scores: np.ndarray, budget: int) -> list[int]:
    """Taken by falling score; what each adds is read off the cost of the whole section."""
    costs, session_of, n = index.costs, index.costs.session_of, len(scores)
    chosen, opened, spent = np.zeros(n, dtype=bool), set(), 0
    for position in np.argsort(-scores, kind="stable").tolist():
        session = session_of[position]
        around = [p for p in (position - 1, position + 1) if 0 <= p < n and session_of[p] == session]
        price = costs.turns[position]
        price += (1 - int(chosen[around].sum())) * costs.gap if session in opened else costs.headings[session]
        if spent and spent + price > budget:
            continue
        chosen[position] = True
        opened.add(session)
        spent += price
    kept = np.flatnonzero(chosen).tolist()
    assert spent == section(index, kept)
    return kept


def expected(index: DialogueIndex, question: str, vector: torch.Tensor, config: RetrieveConfig) -> list[int]:
    everything = list(range(len(index.dialogue.turns)))
    if section(index, everything) <= min(config.whole_tokens, cap_of(config)):
        return everything
    kept = within(by_eq_1(index, vector, config))
    if config.method == "cue":
        return kept
    lexical = smoothed(index, z(bm25(index, question)), SIGMA, LEXICAL_CONTEXT)
    dense = smoothed(index, z(cosines(vector, index.vectors)), SIGMA, DENSE_CONTEXT)
    return greedy(index, lexical + dense, section(index, kept))


class Loose(Bag):
    """An encoder of random unit vectors, the same for the same text."""

    name = "loose"

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.dimension = dimension

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        rows = [torch.randn(self.dimension, generator=torch.Generator().manual_seed(hash_of(t))) for t in texts]
        return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


def hash_of(text: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(text[:40])) % 2**31


def random_dialogue(seed: int, turns: int) -> Dialogue:
    rng = np.random.default_rng(seed)
    sessions, place = [], 0
    while place < turns:
        count = int(rng.integers(1, 30))
        spoken = [" ".join(rng.choice(WORDS, size=int(rng.integers(0, 9)))) for _ in range(count)]
        made = tuple(Turn(f"{place + n}", "AB"[n % 2], text) for n, text in enumerate(spoken))
        sessions.append(Session(f"s{place}", "monday" if rng.random() < 0.7 else None, made))
        place += count
    return Dialogue("random", tuple(sessions))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_random_dialogues(seed: int, data: st.DataObject) -> None:
    """Many turns here have the same words, so that ties are common."""
    dialogue = random_dialogue(seed, data.draw(st.integers(1, 250)))
    encoder = Loose(data.draw(st.sampled_from([7, 64])))
    tokens = data.draw(st.sampled_from([8, 30, 128]))
    index = DialogueIndex(dialogue, encoder, OfflineLLM(), SegmentConfig(max_tokens=tokens), None)  # type: ignore[arg-type]
    for question in ("dog tea violin", "the", "rain moon rain"):
        config = RetrieveConfig(
            method=data.draw(st.sampled_from(["cue", "hybrid"])),
            top_share=data.draw(st.sampled_from([0.05, 0.2, 1.0])),
            max_context_tokens=data.draw(st.sampled_from([40, 200, 7200, None])),
            whole_tokens=data.draw(st.sampled_from([0, 150, 1000])),
        )
        vector = encoder.encode([question])[0] * 3
        wanted = expected(index, question, vector, config)
        assert section(index, wanted) == rendered_cost(index, wanted)
        found = retrieve(index, question, vector, None, config)
        retrieved = within(found.segments)
        without = by_eq_1(index, vector, replace(config, max_context_tokens=None))
        whole = retrieved == list(range(len(dialogue.turns))) and section(index, retrieved) <= config.whole_tokens
        assert found.capped == (section(index, within(without)) > cap_of(config) and not whole)
        if section(index, wanted) <= cap_of(config):
            assert retrieved == wanted
        elif config.method == "cue":
            # the closest turns of the best segment
            assert set(retrieved) <= set(wanted)
            assert len(retrieved) == 1 or section(index, retrieved) <= cap_of(config)


def test_relevance_is_the_cosine_of_eq_1() -> None:
    rng = np.random.default_rng(0)
    q, cues = rng.normal(size=7), rng.normal(size=(20, 7))
    q, cues = q / np.linalg.norm(q), cues / np.linalg.norm(cues, axis=1, keepdims=True)
    expected = [float(np.dot(q, k) / math.sqrt(np.dot(q, q)) / math.sqrt(np.dot(k, k))) for k in cues]
    found = relevance(torch.tensor(q), torch.tensor(cues))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    single = relevance(torch.tensor(q, dtype=torch.float32), torch.tensor(cues, dtype=torch.float32))
    np.testing.assert_allclose(single, expected, rtol=1e-5, atol=1e-6)
    assert by_falling(np.array([1.0, 3.0, 1.0, 2.0])) == [1, 3, 0, 2]
