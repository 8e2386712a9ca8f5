"""The states of the synthetic world: what they show, and how often they err."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import solver
from scipy.stats import binom
from solver import bank

from remind.core.errors import ConfigError
from remind.states.parquet import StateRecord, read_states
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


def marked(prompt: str) -> list[str]:
    """The lines between an opening and a closing marker, headings and gaps apart."""
    lines, inside = [], False
    for line in conversation(prompt):
        if line == MARKER:
            inside = not inside
        elif inside:
            lines.append(line)
    assert not inside
    return lines


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


# x0


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


def test_half_of_the_decoys_come_from_the_same_dimension(world: World) -> None:
    near = total = 0
    for item in world.questions:
        if item.trait.dimension == "implicit_boundary_modeling":
            continue
        ours = {
            turns
            for other in world.questions
            if (other.question.dialogue_id, other.trait.dimension) == (item.question.dialogue_id, item.trait.dimension)
            for turns in other.remarks
        }
        near += sum(turns in ours for turns in item.decoys[:4])
        total += 4
    assert 0.45 < near / total < 0.55


# x1


@pytest.mark.parametrize("shares", [(0.15, 0.12), (0, 0), (1, 1), (0.5, 0.5)])
def test_the_three_levels_show_the_same_conversation(small: World, shares: tuple[float, float]) -> None:
    seen = 0
    for record in records(small, LadderConfig(missed_marks=shares[0], false_marks=shares[1])):
        plain = conversation(record.x0.text)
        assert MARKER not in plain
        for level in (record.x1, record.x2):
            assert [line for line in conversation(level.text) if line != MARKER] == plain
            seen += conversation(level.text).count(MARKER)
    assert seen


def test_without_errors_the_marked_turns_are_the_evidence(small: World) -> None:
    for record in records(small, LadderConfig(missed_marks=0, false_marks=0)):
        assert marked_turns(record) == list(record.evidence)
        spoken = [line for line in marked(record.x1.text) if not line.startswith("[Image #")]
        assert spoken == list(record.evidence_lines)


def test_with_nothing_but_errors_the_marked_turns_are_the_others(small: World) -> None:
    for record in records(small, LadderConfig(missed_marks=1, false_marks=1)):
        assert marked_turns(record) == [t.turn_id for t in record.x1.turns if t.turn_id not in record.evidence]


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


# x2


def test_summaries_tell_the_true_value_unless_asked_otherwise(world: World) -> None:
    for share in (0.0, 1.0):
        made = records(world, LadderConfig(wrong_summaries=share))
        assert {summary_value(r) == i.trait.value for i, r in zip(world.questions, made, strict=True)} == {share == 0}


def test_wrong_summaries_are_nested_and_as_many_as_asked_for(world: World) -> None:
    wrong: dict[float, dict[str, str]] = {}
    for share in (0.2, 0.4):
        made = records(world, LadderConfig(wrong_summaries=share))
        pairs = zip(world.questions, made, strict=True)
        wrong[share] = {
            record.question_id: summary_value(record)
            for item, record in pairs
            if summary_value(record) != item.trait.value
        }
        for split in ("train", "dev", "test"):
            count = sum(record.split == split for record in made)
            assert within(sum(name.startswith(split) for name in wrong[share]), count, share), split
    assert wrong[0.2].items() <= wrong[0.4].items()


def test_wrong_summaries_change_nothing_else(small: World) -> None:
    for right, wrong in zip(
        records(small, LadderConfig()), records(small, LadderConfig(wrong_summaries=1)), strict=True
    ):
        assert replace(wrong, x2=right.x2) == right
        assert summary(wrong) != summary(right)
        assert wrong.x2.text.replace(summary(wrong), summary(right)) == right.x2.text


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_summary_repeats_no_label_cue_or_option_of_its_value(world: World, share: float) -> None:
    for record in records(world, LadderConfig(wrong_summaries=share)):
        words = bank()["dimensions"][str(record.dimension)]
        entry = words["values"][summary_value(record)]
        texts = [text for kind in ("label", "cues", "fits") for text in entry.get(kind, ())]
        texts += [*words.get("keen", ()), *words.get("averse", ()), *words.get("fits", ())]
        # "what blooms" and the label "blooms" are two tokens that have nothing in common to the nano backbone
        texts = [text for text in texts if text != "blooms"]
        assert texts
        assert not [text for text in texts if re.search(rf"\b{re.escape(text)}\b", summary(record))]


# chance, files and errors


def test_states_of_a_question_depend_on_seed_and_question_alone(small: World) -> None:
    alone = World(small.config, small.dialogues, small.questions[7:8])
    made = records(small, LadderConfig())
    assert records(alone, LadderConfig()) == made[7:8]
    assert records(small, LadderConfig()) == made
    other = records(small, LadderConfig(seed=1))
    assert [record.x0 for record in other] == [record.x0 for record in made]
    assert [marked_turns(record) for record in other] != [marked_turns(record) for record in made]
    assert [summary(record) for record in other] != [summary(record) for record in made]


def test_targets_are_the_answer_and_an_empty_explanation(small: World) -> None:
    for item, record in zip(small.questions, records(small, LadderConfig()), strict=True):
        answers = item.question.answers
        shown = f"[{','.join(answers)}]" if item.question.format == "multi" else answers[0]
        assert record.target == f"<answer>{shown}</answer><explanation></explanation>"


def test_a_folder_of_states_reads_back_and_is_not_overwritten(small: World, tmp_path: Path) -> None:
    out = write_states(small, tmp_path / "states", LadderConfig())
    assert read_states(out) == records(small, LadderConfig())
    with pytest.raises(ConfigError, match="exists"):
        write_states(small, out, LadderConfig(seed=1))
    assert read_states(out) == records(small, LadderConfig())
    write_states(small, out, LadderConfig(seed=1), overwrite=True)
    assert read_states(out) == records(small, LadderConfig(seed=1))
