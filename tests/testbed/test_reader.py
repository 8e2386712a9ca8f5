"""The simulated LLM reads prompts as text: what it concludes is checked against the world it was not told of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from remind.perception.auxiliary import ChatLLM
from remind.reflect import summarise
from remind.states.dataset import read_states
from remind.states.pyramid import AttentionalState, ReflectiveState
from remind.states.records import blocks_of
from remind.testbed.built import BuiltConfig, Marks, build_world, marked, train_saes
from remind.testbed.ladder import LadderConfig, make_states
from remind.testbed.reader import Reader, ReaderConfig
from remind.testbed.world import World, WorldConfig, lexicon, make_world
from sae.config import SAETrainConfig


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(WorldConfig(train=1, dev=0, test=2, seed=3))


@pytest.fixture(scope="module")
def states(world: World) -> list[ReflectiveState]:
    return make_states(world, LadderConfig(missed_marks=0.0, false_marks=0.3))


def concluded(world: World, states: list[AttentionalState], config: ReaderConfig) -> list[str | None]:
    """The value that each summary's conclusion names; None: it names none."""
    llm = ChatLLM({"summary": Reader(config)})
    summaries = [state.summary for state in summarise(llm, states)]
    assert not llm.failures
    values = []
    for item, summary in zip(world.questions, summaries, strict=True):
        conclusion = summary.split("Conclusion: ")[1]
        entries = lexicon()["dimensions"][item.trait.dimension]["values"]
        named = [value for value, entry in entries.items() if any(gist in conclusion for gist in entry["gist"])]
        values.append(named[0] if named else None)
    return values


def test_it_concludes_from_what_it_is_shown(world: World, states: list[ReflectiveState]) -> None:
    attentional = [state.attentional for state in states]
    truth = [item.trait.value for item in world.questions]
    # no gold answer is needed
    robbed = [
        replace(one, factual=replace(one.factual, question=replace(one.factual.question, answers=(), evidence=())))
        for one in attentional
    ]
    assert concluded(world, attentional, ReaderConfig()) == concluded(world, robbed, ReaderConfig()) == truth
    # errors name another value, and are always the same
    always, half = (concluded(world, attentional, ReaderConfig(errors=share)) for share in (1.0, 0.5))
    assert not any(a == b for a, b in zip(always, truth, strict=True))
    assert half == concluded(world, attentional, ReaderConfig(errors=0.5))
    assert 0.25 < sum(a == b for a, b in zip(half, truth, strict=True)) / len(truth) < 0.75
    # what it overlooks lies outside of the marks
    bare = [replace(state, blocks=()) for state in attentional]
    assert set(concluded(world, bare, ReaderConfig(overlooked=1.0))) == {None}
    assert concluded(world, attentional, ReaderConfig(overlooked=1.0)) == truth


@pytest.mark.slow
def test_built_states_come_from_the_files_and_marks_are_what_they_are_called(tmp_path: Path) -> None:
    world = make_world(WorldConfig(train=1, dev=0, test=1, sessions=2, contrary=(0, 1), second_voice=0.0))
    cfg = BuiltConfig(layers=(2,), sae=SAETrainConfig(d_sae=64, k=4, steps=2, batch_size=64), talk=1)
    saes = train_saes(cfg, "nano", tmp_path / "sae")
    folder = build_world(cfg, world, "nano", saes, tmp_path / "states", tmp_path / "cache")
    rows = [json.loads(line) for line in (tmp_path / "states.jsonl").read_text().splitlines()]
    train = [row for row in rows if row.get("split") == "train"]
    assert train
    assert not any(row.get("answers") or row.get("evidence") or row.get("images") for row in train)
    records = list(read_states(folder))
    variants: dict[Marks, list[int]] = {}
    for marks in ("built", "random", "none", "gold"):
        other = marked(records, world, marks, cfg.reader)
        assert [record.x0 for record in other] == [record.x0 for record in records]
        assert all(record.target and record.answers for record in other)
        variants[marks] = [sum(end - start + 1 for start, end in blocks_of(record.x1)) for record in other]
        if marks == "built":
            assert [record.x2.text for record in other] == [record.x2.text for record in records]
        if marks == "gold":
            assert variants[marks] == [len(record.evidence_found) for record in other]
    assert variants["random"] == variants["built"] != variants["none"] == [0] * len(records)
