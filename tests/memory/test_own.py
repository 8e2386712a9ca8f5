"""REMIND's own retrieval as a memory system, against perception and grounding called without a bank."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remind import read
from remind.data.dialogue import Dialogue, Question
from remind.data.sample import sample_path
from remind.grounding import Grounder, GroundingConfig
from remind.grounding.config import FusionConfig
from remind.grounding.ground import load_saes
from remind.memory.bank import Bank
from remind.memory.base import Memory, Query, Services, System
from remind.memory.systems import make_system
from remind.models.backbone import load_backbone
from remind.models.encoder import SentenceEncoder
from remind.perception import Perception, PerceptionConfig, RetrieveConfig
from remind.perception.auxiliary import OfflineLLM
from remind.states.pyramid import FactualState
from sae import TopKSAE, layer_folder

ASKED = "What does the dog like to do at the lake in summer?"
HYBRID = {"perception": {"retrieve": {"method": "hybrid", "whole_tokens": 0}}}


@pytest.fixture(scope="module")
def dialogue() -> Dialogue:
    """Six sessions, 75 turns, 10 images."""
    return read(sample_path() / "test.jsonl").dialogues[0]


@pytest.fixture(scope="module")
def saes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained ones of two layers of MiniLM."""
    folder = tmp_path_factory.mktemp("saes")
    for layer in (4, 5):
        coder = TopKSAE(384, 256, 8, generator=torch.Generator().manual_seed(layer))
        coder.save(layer_folder(folder, layer))
    return folder


def filled(system: System, folder: Path, dialogue: Dialogue, encoder: SentenceEncoder) -> Bank:
    bank: Bank = system.open(folder, dialogue.id, Services(encoder))
    for session in dialogue.sessions:
        bank.ingest(session)
    bank.finish()
    return bank


def turns(memories: Iterable[Memory]) -> list[str]:
    return [turn for memory in memories for turn in memory.sources or ()]


def x0(dialogue: Dialogue, encoder: SentenceEncoder, **retrieve: Any) -> tuple[Perception, FactualState]:
    config = PerceptionConfig(retrieve=RetrieveConfig(**{"whole_tokens": 0, **retrieve}))
    perception = Perception(config, encoder, OfflineLLM(encoder))
    return perception, perception.perceive(dialogue, [Question("q", dialogue.id, ASKED)])[0]


def test_turns_come_in_the_order_of_their_segments(
    tmp_path: Path, encoder: SentenceEncoder, dialogue: Dialogue
) -> None:
    perception, _ = x0(dialogue, encoder)
    index = perception.index(dialogue)
    question = encoder.encode([ASKED])[0].double().numpy()
    cue = index.cues(None).vectors.double().numpy() @ question
    own = index.vectors.double().numpy() @ question
    expected: list[int] = []
    for number in np.argsort(-cue, kind="stable"):
        start, end = index.segments[number].start, index.segments[number].end
        expected += sorted(range(start, end + 1), key=lambda place: -own[place])
    with filled(make_system("remind"), tmp_path, dialogue, encoder) as bank:
        memories = bank.retrieve(Query(ASKED), k=1000).memories
    assert turns(memories) == [dialogue.turns[place].id for place in expected]
    assert memories[0].score == pytest.approx(cue.max(), abs=1e-6)


@pytest.mark.parametrize("name", ["remind_x1", "remind_recommended"])
def test_turns_come_by_salience_then_as_retrieved(
    name: str, tmp_path: Path, encoder: SentenceEncoder, dialogue: Dialogue, saes: Path
) -> None:
    """x1's marked turns come first; as recommended, all turns of the conversation by fused salience."""
    fused = name == "remind_recommended"
    grounding: dict[str, Any] = {"fuse": FusionConfig(), "anchor_codes": "question", "window": 0}
    grounding |= {"budget_tokens": 10**9, "budget_share": 1.0, "context_codes": "windowed"}
    if not fused:
        grounding = {"budget_tokens": 90, "window": 1}
    options = {"sae": str(saes)} if fused else {"sae": str(saes), "grounding": grounding, **HYBRID}
    with filled(make_system(name, options), tmp_path / name, dialogue, encoder) as bank:
        retrieval = bank.retrieve(Query(ASKED), k=1000)
    with filled(make_system("remind", HYBRID), tmp_path / "x0", dialogue, encoder) as plain:
        behind = turns(plain.retrieve(Query(ASKED), k=1000).memories)
    whole = {"top_share": 1.0, "max_context_tokens": None} if fused else {}
    _, state = x0(dialogue, encoder, method="hybrid", **whole)
    grounder = Grounder(load_backbone("minilm"), *load_saes(saes), GroundingConfig(**grounding), encoder)
    x1 = grounder.ground(state)
    salience = {state.turns[n].id: x1.salience[n] for a, b in x1.blocks for n in range(a, b + 1)}
    assert 1 < len(salience) <= len(state.turns)
    assert (len(salience) == len(dialogue.turns)) == fused
    first = sorted(salience, key=lambda turn: -salience[turn])
    assert turns(retrieval.memories) == [*first, *(turn for turn in behind if turn not in salience)]
    assert first != behind[: len(first)], "the marks change nothing here"
    assert json.loads(json.dumps(retrieval.trace["marked"])) == pytest.approx(salience)
