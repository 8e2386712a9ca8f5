"""The states of the synthetic world: what they show, and how often they err."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import solver
from scipy.stats import binom
from solver import bank

from remind.core.errors import ConfigError
from remind.states.dataset import StateRecord, read_states
from remind.testbed.ladder import LadderConfig, records, write_states
from remind.testbed.world import World, WorldConfig, WorldQuestion, make_world

MARKER = "[ATTENTION]"


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(WorldConfig(train=20, dev=5, test=15))


@pytest.fixture(scope="module")
def small() -> World:
    return make_world(WorldConfig(train=2, dev=1, test=2, seed=8))


def conversation(prompt: str) -> list[str]:
    return prompt.split("\nConversation\n")[1].split("\n\n")[0].splitlines()


def marked_turns(record: StateRecord) -> list[str]:
    """Ids of the turns between markers, by their places in the text."""
    cuts = [found.start() for found in re.finditer(re.escape(MARKER + "\n"), record.x1.text[: record.x1.dialogue[1]])]
    cuts = [cut for cut in cuts if cut >= record.x1.dialogue[0]]
    return [turn.turn_id for turn in record.x1.turns if sum(cut < turn.start for cut in cuts) % 2]


def remarks(item: WorldQuestion, config: LadderConfig) -> list[tuple[tuple[str, ...], bool]]:
    """The remarks of x0, and which of them are evidence."""
    own = zip(item.remarks, item.is_evidence, strict=True)
    return [*own, *((turns, False) for turns in item.decoys[: config.decoys])]


def summary_value(record: StateRecord) -> str:
    """The value that the summary names, by the lexicon."""
    dimension, speaker, topic = solver.understand(record.question)
    words = bank()["dimensions"][dimension]
    text = summary(record)
    found = [
        value
        for value, entry in words["values"].items()
        for gist in entry["gist"]
        for form in words["gist"]
        if form.replace("{S}", speaker).replace("{topic}", topic).replace("{gist}", gist) == text
    ]
    assert len(found) == 1, text
    return found[0]


def summary(record: StateRecord) -> str:
    return record.x2.text.split("\nReflection\n")[1].split("\n\nQuestion: ")[0].splitlines()[-1]


def within(count: int, of: int, share: float) -> bool:
    low, high = binom.interval(0.999, of, share)
    return low <= count <= high


@pytest.mark.parametrize("decoys", [0, 3, 4, 9])
def test_the_factual_state_holds_all_remarks_to_the_point_and_the_decoys(small: World, decoys: int) -> None:
    config = LadderConfig(decoys=decoys)
    for item, record in zip(small.questions, records(small, config), strict=True):
        assert record.evidence_found == record.evidence == item.question.evidence
        assert record.images_found == record.images == item.question.images
        shown = [turn.turn_id for turn in record.x0.turns]
        assert sorted(shown) == sorted(turn for turns, _ in remarks(item, config) for turn in turns)
        assert len(remarks(item, config)) == len(item.remarks) + decoys
        assert set(record.evidence_lines) <= set(conversation(record.x0.text))
        assert not set(item.remarks) & set(item.decoys)
        answers = item.question.answers
        answer = f"[{','.join(answers)}]" if item.question.format == "multi" else answers[0]
        assert record.target == f"<answer>{answer}</answer><explanation></explanation>"


@pytest.mark.parametrize("config", [LadderConfig(), LadderConfig(missed_marks=0.4, false_marks=0.03, seed=5)])
def test_shares_of_missed_and_false_marks_are_those_asked_for(world: World, config: LadderConfig) -> None:
    counts = {True: [0, 0], False: [0, 0]}
    for item, record in zip(world.questions, records(world, config), strict=True):
        marks = set(marked_turns(record))
        for turns, counting in remarks(item, config):
            assert len(marks & set(turns)) in (0, len(turns))
            counts[counting][0] += turns[0] in marks
            counts[counting][1] += 1
    (hit, evidence), (false, others) = counts[True], counts[False]
    assert min(evidence, others) > 1000
    assert within(evidence - hit, evidence, config.missed_marks)
    assert within(false, others, config.false_marks)


def test_states_of_a_question_depend_on_seed_and_question_alone(small: World) -> None:
    alone = World(small.config, small.dialogues, small.questions[7:8])
    made = records(small, LadderConfig())
    assert records(alone, LadderConfig()) == made[7:8]
    assert records(small, LadderConfig()) == made
    other = records(small, LadderConfig(seed=1))
    assert [record.x0 for record in other] == [record.x0 for record in made]
    assert [marked_turns(record) for record in other] != [marked_turns(record) for record in made]
    assert [summary(record) for record in other] != [summary(record) for record in made]


def test_a_folder_of_states_reads_back_and_is_not_overwritten(small: World, tmp_path: Path) -> None:
    out = write_states(small, tmp_path / "states", LadderConfig())
    assert read_states(out) == records(small, LadderConfig())
    with pytest.raises(ConfigError, match="exists"):
        write_states(small, out, LadderConfig(seed=1))
    assert read_states(out) == records(small, LadderConfig())


def test_half_of_the_decoys_come_from_the_same_dimension(world: World) -> None:
    own = defaultdict(set)
    for item in world.questions:
        own[item.question.dialogue_id, item.trait.dimension].update(item.remarks)
    # remarks about boundaries are also made as small talk
    asked = [item for item in world.questions if item.trait.dimension != "implicit_boundary_modeling"]
    near = sum(t in own[i.question.dialogue_id, i.trait.dimension] for i in asked for t in i.decoys[:4])
    assert 0.45 < near / (4 * len(asked)) < 0.55


@pytest.mark.parametrize("share", [0, 1, 0.5])
def test_markers_enclose_evidence_unless_they_err(small: World, share: float) -> None:
    for record in records(small, LadderConfig(missed_marks=share, false_marks=share)):
        plain = conversation(record.x0.text)
        assert MARKER not in plain
        for level in (record.x1, record.x2):
            assert [line for line in conversation(level.text) if line != MARKER] == plain
        if share != 0.5:
            others = [turn.turn_id for turn in record.x1.turns if turn.turn_id not in record.evidence]
            assert marked_turns(record) == (others if share else list(record.evidence))


def test_wrong_summaries_are_as_many_as_asked_for_nested_and_change_nothing_else(world: World) -> None:
    right = records(world, LadderConfig())
    wrong: dict[float, dict[str, str]] = {}
    for share in (0.0, 0.2, 0.4, 1.0):
        states = records(world, LadderConfig(wrong_summaries=share))
        named = {record.question_id: summary_value(record) for record in states}
        wrong[share] = {
            i.question.id: named[i.question.id] for i in world.questions if named[i.question.id] != i.trait.value
        }
        for split in ("train", "dev", "test"):
            count = sum(record.split == split for record in states)
            assert within(sum(name.startswith(split) for name in wrong[share]), count, share), split
        for one, other in zip(right, states, strict=True):
            assert replace(other, x2=one.x2) == one
            assert other.x2.text.replace(summary(other), summary(one)) == one.x2.text
            # no label, cue or option of its value is repeated
            words = bank()["dimensions"][str(other.dimension)]
            entry = words["values"][named[other.question_id]]
            texts = [text for kind in ("label", "cues", "fits") for text in entry.get(kind, ())]
            texts += [*words.get("keen", ()), *words.get("averse", ()), *words.get("fits", ())]
            # "what blooms" and the label "blooms" are two tokens that have nothing in common to the nano backbone
            hits = [text for text in texts if re.search(rf"\b{re.escape(text)}\b", summary(other))]
            assert set(hits) <= {"blooms"}
    assert wrong[0.0].items() <= wrong[0.2].items() <= wrong[0.4].items() <= wrong[1.0].items()
