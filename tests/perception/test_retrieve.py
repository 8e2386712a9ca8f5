from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remind.core.errors import ConfigError
from remind.data.dialogue import Dialogue, Question
from remind.llm.offline import OfflineLLM
from remind.perception.config import RetrieveConfig, SegmentConfig
from remind.perception.index import DialogueIndex
from remind.perception.ranking import falling
from remind.perception.retrieve import relevance, retrieve, retrieve_segments, top_count
from remind.states.pyramid import FactualState, Segment, Strategy, render


def index_of(dialogue: Dialogue, encoder: object, **segment: int) -> DialogueIndex:
    return DialogueIndex(dialogue, encoder, OfflineLLM(), SegmentConfig(**segment), None)  # type: ignore[arg-type]


def positions(segments: tuple[Segment, ...]) -> list[int]:
    return [p for part in segments for p in range(part.start, part.end + 1)]


def by_scores(
    index: DialogueIndex, scores: np.ndarray, vector: torch.Tensor, config: RetrieveConfig
) -> tuple[Segment, ...]:
    return retrieve_segments(index, lambda first: falling(scores, first), vector, config)


def rendered_cost(index: DialogueIndex, segments: tuple[Segment, ...]) -> int:
    """Tokens of the dialogue section as it is really rendered."""
    state = FactualState(index.dialogue, Question("q", index.dialogue.id, "?"), segments, Strategy(()))
    rendered = render(state)
    return index.encoder.count_tokens(rendered.text[rendered.dialogue[0] : rendered.dialogue[1]])


@pytest.fixture(scope="session")
def park_index(park: Dialogue, bag: object) -> DialogueIndex:
    return index_of(park, bag, max_tokens=30)


def test_relevance_is_the_cosine_of_eq_1() -> None:
    rng = np.random.default_rng(0)
    q, cues = rng.normal(size=7) * 3, rng.normal(size=(20, 7)) * rng.uniform(0.1, 9, size=(20, 1))
    expected = [float(np.dot(q, k) / math.sqrt(np.dot(q, q)) / math.sqrt(np.dot(k, k))) for k in cues]
    found = relevance(torch.tensor(q), torch.tensor(cues))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    single = relevance(torch.tensor(q, dtype=torch.float32), torch.tensor(cues, dtype=torch.float32))
    np.testing.assert_allclose(single.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert relevance(torch.tensor(q), torch.zeros(2, 7, dtype=torch.float64)).tolist() == [0.0, 0.0]


def test_top_count_is_the_exact_ceiling() -> None:
    for n in range(1, 3000):
        assert top_count(n, 0.2) == -(-n // 5)
        assert top_count(n, 0.1) == -(-n // 10)
        assert top_count(n, 1.0) == n
    assert top_count(3, 1e-12) == 1


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_segments_are_the_top_share_less_the_lowest(park_index: DialogueIndex, data: st.DataObject) -> None:
    index = park_index
    n = len(index.segments)
    scores = np.array(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)), dtype=float)
    share = data.draw(st.sampled_from([0.05, 0.2, 0.5, 1.0]))
    cap = data.draw(st.integers(1, 260))
    config = RetrieveConfig(top_share=share, max_context_tokens=cap)
    kept = by_scores(index, scores, torch.ones(32), config)

    ranked = sorted(range(n), key=lambda i: (-scores[i], i))[: math.ceil(share * n - 1e-9)]
    while len(ranked) > 1 and rendered_cost(index, tuple(index.segments[i] for i in sorted(ranked))) > cap:
        ranked.pop()
    best = index.segments[ranked[0]]
    if len(ranked) > 1 or rendered_cost(index, (best,)) <= cap:
        assert kept == tuple(index.segments[i] for i in sorted(ranked))
    else:
        (part,) = kept
        assert best.start <= part.start <= part.end <= best.end
        assert part.start == part.end or rendered_cost(index, kept) <= cap


def test_cost_is_what_the_prompt_takes(encoder: object, park: Dialogue) -> None:
    index = index_of(park, encoder)
    for chosen in ((Segment(0, 15),), (Segment(0, 1), Segment(3, 3), Segment(8, 9)), (Segment(15, 15),)):
        assert index.cost(positions(chosen)) == rendered_cost(index, chosen)


@pytest.mark.parametrize("method", ["cue", "hybrid"])
def test_finds_the_turns_a_question_is_about(
    method: str, encoder: object, bag: object, park: Dialogue, make_dialogue: Callable[..., Dialogue]
) -> None:
    index = index_of(park, encoder, max_tokens=40)
    config = RetrieveConfig(method=method)  # type: ignore[arg-type]
    for question, wanted in (
        ("What is the name of Ana's greyhound?", "1:3"),
        ("Which bowl did Ben make in pottery class?", "1:8"),
        ("With whom does Ben share the flat in Lisbon?", "2:5"),
    ):
        vector = index.encoder.encode([question])[0]
        segments = retrieve(index, question, vector, None, config)
        assert wanted in {park.turns[p].id for p in positions(segments)}
        assert segments == retrieve(index, question, vector, None, config)
    # no word of the dialogue
    assert retrieve(index, "¿Qué?", index.encoder.encode(["¿Qué?"])[0], None, config)
    single = index_of(make_dialogue(["Ana: hello"]), bag)
    assert retrieve(single, "hello?", torch.ones(32), None, config) == (Segment(0, 0),)


def test_hybrid_spends_no_more_than_eq_1(encoder: object, park: Dialogue) -> None:
    index = index_of(park, encoder, max_tokens=40)
    question = "Where is Ben moving?"
    vector = index.encoder.encode([question])[0]
    cheapest = min(rendered_cost(index, (Segment(p, p),)) for p in range(16))
    for cap in (30, 60, 7200):
        cue = retrieve(index, question, vector, None, RetrieveConfig(max_context_tokens=cap))
        hybrid = retrieve(index, question, vector, None, RetrieveConfig(method="hybrid", max_context_tokens=cap))
        assert rendered_cost(index, hybrid) <= max(rendered_cost(index, cue), cheapest)
        assert rendered_cost(index, cue) <= cap


def test_a_turn_longer_than_the_cap_is_kept_and_logged(
    bag: object, make_dialogue: Callable[..., Dialogue], caplog: pytest.LogCaptureFixture
) -> None:
    index = index_of(make_dialogue(["Ana: hi", f"Ben: {'words ' * 50}", "Ana: bye"]), bag, max_tokens=20)
    scores = np.array([float(part.start <= 1 <= part.end) for part in index.segments])
    with caplog.at_level(logging.WARNING):
        kept = by_scores(index, scores, torch.ones(32), RetrieveConfig(max_context_tokens=10))
    assert kept == (Segment(1, 1),)
    assert "turn 1:2 takes" in caplog.text


def test_the_best_segment_is_cut_round_the_closest_turn(bag: object, make_dialogue: Callable[..., Dialogue]) -> None:
    dialogue = make_dialogue([f"Ana: {word} {word} {word}" for word in ("red", "green", "blue", "grey", "pink")])
    index = index_of(dialogue, bag, max_tokens=1000)
    assert index.segments == (Segment(0, 4),)
    vector = index.encoder.encode(["grey grey grey"])[0]
    heading = index.costs.headings[0]
    (kept,) = by_scores(index, np.ones(1), vector, RetrieveConfig(max_context_tokens=heading + 8))
    assert kept.start <= 3 <= kept.end
    assert kept.end - kept.start == 1


@pytest.mark.parametrize(
    "wrong", [{"method": "best"}, {"top_share": 0}, {"top_share": 1.5}, {"max_context_tokens": 0}, {"sigma": -1}]
)
def test_configuration_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RetrieveConfig(**wrong)  # type: ignore[arg-type]
