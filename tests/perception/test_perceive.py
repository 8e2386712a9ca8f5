"""Segments, the index and retrieval, against a plain reading of the definition: all cosines, costs and orders."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpus import talk

from remind.core.errors import DataError
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.models.encoder import SentenceEncoder
from remind.perception import Perception, PerceptionConfig, RetrieveConfig, SegmentConfig
from remind.perception.auxiliary import Failure, OfflineLLM
from remind.perception.perceive import DENSE_CONTEXT, LEXICAL_CONTEXT, SIGMA, DialogueIndex, retrieve, segment
from remind.states.pyramid import FactualState, Segment, Strategy, render, turn_text
from remind.text.words import stems

PARK = talk(
    [
        "Ana: I adopted a greyhound called Pixel from the shelter last week.",
        "Ben: Lovely! Is Pixel shy?",
        "Ana: Very shy. The vet says it takes months.",
        "Ben: By the way, my pottery class started on Monday.",
        "Ben: A crooked bowl, glazed blue. | a blue bowl on a wooden table",
        "Ana: Looks great.",
    ],
    [
        "Ben: We are moving to Lisbon in October because of my new job.",
        "Ana: Wow. What will you do there?",
        "Ben: I will run the night desk of a newspaper.",
    ],
    name="park",
)
CONFIG = PerceptionConfig(SegmentConfig(max_tokens=40), RetrieveConfig(method="hybrid", whole_tokens=0))


class Loose:
    """An encoder of random unit vectors, the same for the same text; `seen` are the texts that it was given."""

    name = "loose"

    def __init__(self, dimension: int = 32) -> None:
        self.dimension, self.seen = dimension, list[str]()

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        self.seen += texts
        seeds = [sum(ord(letter) * 31**place for place, letter in enumerate(text[:40])) % 2**31 for text in texts]
        rows = [torch.randn(self.dimension, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.nn.functional.normalize(torch.stack(rows), dim=-1)

    encode_apart = encode

    def hold(self, texts: Sequence[str], vectors: torch.Tensor) -> None:
        pass

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def count_many(self, texts: Sequence[str]) -> list[int]:
        return [self.count_tokens(text) for text in texts]


# the index


def index_hash(encoder: SentenceEncoder, folder: Path | None) -> str:
    """Hash of all the bits that an index, its cues of two kinds, its questions and its retrieval come to."""
    perception = Perception(CONFIG, encoder, OfflineLLM(), folder)
    digest = hashlib.sha256()
    for dimension in (None, "belief_modeling"):
        for text in ("What is the dog called?", "Who moves to Lisbon?", "Ana: Looks great."):
            state = perception.perceive(PARK, [Question("q", PARK.id, text, dimension=dimension)])[0]
            digest.update(repr((state.segments, state.strategy)).encode())
            digest.update(encoder.encode([text]).numpy().tobytes())
        cues = perception.index(PARK).cues(dimension)
        digest.update(repr(cues.texts).encode() + cues.vectors.numpy().tobytes())
    digest.update(perception.index(PARK).vectors.numpy().tobytes())
    return digest.hexdigest()


def test_the_same_bits_whatever_was_encoded_before_and_read_back(tmp_path: Path) -> None:
    encoder = SentenceEncoder()
    built = index_hash(encoder, tmp_path)
    for folder in (tmp_path, None):  # read back, and in memory
        encoder.encode(["Ben: Lovely! Is Pixel shy?", "Ana: Looks great.", "quite another text"])
        encoder.forget()
        assert index_hash(encoder, folder) == built


def ask(text: str = "What is the dog called?", **fields: Any) -> Question:
    return Question("q", **{"dialogue_id": PARK.id, "text": text, **fields})


def test_what_is_cached_is_not_encoded_again(tmp_path: Path) -> None:
    encoder: Any = Loose()

    def perceive(**fields: Any) -> FactualState:
        return Perception(CONFIG, encoder, OfflineLLM(), tmp_path).perceive(PARK, [ask(**fields)])[0]

    first = perceive()
    assert len(encoder.seen) > len(PARK.turns)
    encoder.seen.clear()
    assert perceive() == first
    assert encoder.seen == ["What is the dog called?"]
    # cues of another kind are added to the file
    perceive(dimension="belief_modeling")
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert not any(text.startswith("Ben: Lovely! Is Pixel shy?\n") for text in encoder.seen)


def test_what_stood_in_for_a_cue_is_never_cached(tmp_path: Path) -> None:
    """Nor with the cues of another kind, which the LLM wrote itself."""

    class Shaky(OfflineLLM):
        fails, asked = True, 0

        def cues(self, dialogue: Dialogue, segments: Sequence[Segment], dimension: str | None) -> list[str]:
            self.asked += 1
            if self.fails and dimension is None:
                self.failures = (*self.failures, Failure("cues", "q", "server", "down"))
                return ["stood in"] * len(segments)
            return super().cues(dialogue, segments, dimension)

    encoder: Any = Loose()
    for fails, asked in ((True, 2), (False, 1), (False, 0)):
        llm = Shaky()
        llm.fails = fails
        index = Perception(CONFIG, encoder, llm, tmp_path).index(PARK)
        stood_in = "stood in" in index.cues(None).texts
        index.cues("belief_modeling")
        assert (stood_in, llm.asked) == (fails, asked)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "  "}, "has no text"),
        ({"dimension": "astrology"}, "unknown dimension 'astrology'"),
        ({"dialogue_id": "elsewhere"}, "about 'elsewhere'"),
    ],
)
def test_questions_that_cannot_be_asked(fields: dict[str, str], message: str) -> None:
    encoder: Any = Loose()
    with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
        Perception(CONFIG, encoder, OfflineLLM()).perceive(PARK, [ask(**fields)])


@pytest.mark.parametrize("method", ["cue", "hybrid"])
def test_gold_changes_nothing(method: Any) -> None:
    encoder: Any = Loose()
    config = PerceptionConfig(CONFIG.segment, RetrieveConfig(method=method, whole_tokens=0))
    gold = ask(answers=("Pixel",), evidence=("1:3",), images=(0,), category=5, split="test")
    plain, told = Perception(config, encoder, OfflineLLM()).perceive(PARK, [ask(), gold])
    assert (plain.segments, plain.strategy) == (told.segments, told.strategy)
    assert told.question is gold


def test_anchors_name_what_to_look_for() -> None:
    people = talk(
        ["Melanie Green: I paint.", "Caroline: Nice.", "Mae O'Brien: A kayak trip, then paint.", "Carl: Paint."]
    )
    texts = (
        'When did Caroline visit the kayak club in June 2023 with "Old Tom"?',
        "Is there paint or a kayak or a zebra?",
    )
    told, rare = OfflineLLM().strategies(people, [Question("q", "d", text) for text in texts])
    assert (told.speakers, told.focus, told.scope) == (("Caroline",), ("visit",), ("June 2023",))
    assert told.entities == ("Old Tom", "kayak club")
    # rarer ones first: kayak occurs once, paint three times, zebra never
    assert rare.entities == ("kayak", "paint", "zebra")


# segments


def dialogue_of(lengths: Sequence[int], texts: Sequence[str] = (), times: Sequence[str | None] = ()) -> Dialogue:
    """Sessions of so many turns."""
    sessions, place = [], 0
    for number, length in enumerate(lengths):
        said = texts[place : place + length] if texts else ["word"] * length
        turns = tuple(Turn(f"{place + n}", "AB"[n % 2], text) for n, text in enumerate(said))
        sessions.append(Session(f"s{number}", times[number] if times else None, turns))
        place += length
    return Dialogue("d", tuple(sessions))


@settings(max_examples=80)
@given(data=st.data())
def test_every_turn_once_within_its_session_and_the_cap(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 14), min_size=1, max_size=5).filter(any))
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
    parts = segment(dialogue_of(lengths), torch.tensor(vectors), config, tokens)
    assert within(parts) == list(range(n))
    session = np.repeat(np.arange(len(lengths)), lengths)
    for part in parts:
        assert session[part.start] == session[part.end]
        assert part.start == part.end or sum(tokens[part.start : part.end + 1]) <= config.max_tokens


def test_boundary_stands_where_the_topic_changes() -> None:
    # three turns on each of three topics: orthogonal directions, a little noise
    topics = np.repeat(np.eye(3), 3, axis=0) + 0.05 * np.random.default_rng(0).normal(size=(9, 3))
    parts = segment(dialogue_of([9]), torch.tensor(topics), SegmentConfig(max_tokens=1000), [1] * 9)
    assert [(part.start, part.end) for part in parts] == [(0, 2), (3, 5), (6, 8)]


# retrieval

WORDS = ["dog", "cat", "boat", "violin", "rain", "moon", "tea", "bread", "river", "stone", "lamp", "coat"]


def section(index: DialogueIndex, positions: Sequence[int]) -> int:
    return index.costs.of(sorted(positions))


def rendered_cost(index: DialogueIndex, positions: Sequence[int]) -> int:
    """Tokens of the dialogue section as it is really rendered."""
    single = tuple(Segment(position, position) for position in positions)
    rendered = render(FactualState(index.dialogue, Question("q", "d", "?"), single, Strategy(())))
    return index.encoder.count_tokens(rendered.text[slice(*rendered.dialogue)])


def within(segments: Sequence[Segment]) -> list[int]:
    return [p for part in segments for p in range(part.start, part.end + 1)]


def cosines(vector: torch.Tensor, rows: torch.Tensor) -> np.ndarray:
    norms = vector.norm() * rows.norm(dim=-1)
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


def smoothed(index: DialogueIndex, values: np.ndarray, share: float) -> np.ndarray:
    reach = math.ceil(3 * SIGMA)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / SIGMA) ** 2)
    kernel /= kernel.sum()
    smooth, start = np.empty_like(values), 0
    for session in index.dialogue.sessions:
        end = start + len(session.turns)
        smooth[start:end] = np.convolve(values[start:end], kernel)[reach : reach + end - start]
        start = end
    return (1 - share) * values + share * smooth


def bm25(index: DialogueIndex, question: str) -> np.ndarray:
    model, documents = bm25s.BM25(), [stems(turn_text(turn)) for turn in index.dialogue.turns]
    if not any(documents):  # bm25s itself fails on documents without a word
        return np.zeros(len(documents))
    model.index(documents, show_progress=False)
    known = [term for term in stems(question) if term in model.vocab_dict]
    return model.get_scores(known).astype(float) if known else np.zeros(len(index.dialogue.turns))


def greedy(index: DialogueIndex, scores: np.ndarray, budget: int) -> list[int]:
    """Taken by falling score; what each adds is read off the cost of the whole section."""
    chosen: list[int] = []
    for position in np.argsort(-scores, kind="stable").tolist():
        if not chosen or section(index, [*chosen, position]) <= budget:
            chosen.append(position)
    return sorted(chosen)


def expected(index: DialogueIndex, question: str, vector: torch.Tensor, config: RetrieveConfig) -> list[int]:
    everything = list(range(len(index.dialogue.turns)))
    if section(index, everything) <= min(config.whole_tokens, cap_of(config)):
        return everything
    kept = within(by_eq_1(index, vector, config))
    if config.method == "cue":
        return kept
    lexical = smoothed(index, z(bm25(index, question)), LEXICAL_CONTEXT)
    dense = smoothed(index, z(cosines(vector, index.vectors)), DENSE_CONTEXT)
    return greedy(index, lexical + dense, section(index, kept))


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_random_dialogues(seed: int, data: st.DataObject) -> None:
    """Many turns here have the same words, so that ties are common."""
    rng = np.random.default_rng(seed)
    lengths = data.draw(st.lists(st.integers(1, 29), min_size=1, max_size=8))
    texts = [" ".join(rng.choice(WORDS, size=int(rng.integers(0, 9)))) for _ in range(sum(lengths))]
    dialogue = dialogue_of(lengths, texts, [rng.choice(["monday", None]) for _ in lengths])
    encoder: Any = Loose(data.draw(st.sampled_from([7, 64])))
    tokens = data.draw(st.sampled_from([8, 30, 128]))
    index = DialogueIndex(dialogue, encoder, OfflineLLM(), SegmentConfig(max_tokens=tokens), None)
    for question in ("dog tea violin", "the", "rain moon rain"):
        config = RetrieveConfig(
            method=data.draw(st.sampled_from(["cue", "hybrid"])),
            top_share=data.draw(st.sampled_from([0.05, 0.2, 1.0])),
            max_context_tokens=data.draw(st.sampled_from([40, 200, 7200, None])),
            whole_tokens=data.draw(st.sampled_from([0, 150, 1000])),
        )
        vector = encoder.encode([question])[0]
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
