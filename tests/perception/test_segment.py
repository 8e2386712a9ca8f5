from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remind.data.dialogue import Dialogue, Session, Turn
from remind.perception.config import SegmentConfig
from remind.perception.perceive import segment


def dialogue_of(lengths: list[int]) -> Dialogue:
    return Dialogue(
        "d",
        tuple(
            Session(f"s{s}", None, tuple(Turn(f"{s}:{t}", "AB"[t % 2], "word", None) for t in range(n)))
            for s, n in enumerate(lengths)
        ),
    )


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_turn_once_within_its_session_and_the_cap(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 14), min_size=1, max_size=5).filter(any))
    dialogue = dialogue_of(lengths)
    n = sum(lengths)
    vectors = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(n, 6))
    if data.draw(st.booleans()):
        vectors[:] = vectors[0]
    tokens = data.draw(st.lists(st.integers(0, 60), min_size=n, max_size=n))
    config = SegmentConfig(
        max_tokens=data.draw(st.integers(1, 120)),
        min_turns=data.draw(st.integers(1, 5)),
        window=data.draw(st.integers(1, 4)),
        depth=data.draw(st.floats(-1, 3)),
    )
    parts = segment(dialogue, torch.tensor(vectors), config, tokens)
    assert [p for part in parts for p in range(part.start, part.end + 1)] == list(range(n))
    session = np.repeat(np.arange(len(lengths)), lengths)
    for part in parts:
        assert session[part.start] == session[part.end]
        assert part.start == part.end or sum(tokens[part.start : part.end + 1]) <= config.max_tokens
    assert parts == segment(dialogue, torch.tensor(vectors), config, tokens)


def test_boundary_stands_where_the_topic_changes() -> None:
    # three turns on each of three topics: orthogonal directions, a little noise
    rng = np.random.default_rng(0)
    topics = np.repeat(np.eye(3), 3, axis=0) + 0.05 * rng.normal(size=(9, 3))
    parts = segment(dialogue_of([9]), torch.tensor(topics), SegmentConfig(max_tokens=1000), [1] * 9)
    assert [(part.start, part.end) for part in parts] == [(0, 2), (3, 5), (6, 8)]
