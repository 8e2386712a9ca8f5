"""The synthetic world: what it asks follows from what is said, and from nothing else."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from dataclasses import replace

import pytest
import solver
from scipy.stats import chi2_contingency
from solver import bank, from_dialogue, from_prompt, problems

from remind.core.errors import ConfigError
from remind.data.dialogue import DIMENSIONS, FORMATS
from remind.states.pyramid import render, render_answer
from remind.testbed.ladder import LadderConfig, make_state
from remind.testbed.world import World, WorldConfig, make_world

SMALL = WorldConfig(train=4, dev=2, test=3)
WORLDS = {
    "default": SMALL,
    "another seed": replace(SMALL, seed=77),
    "crowded": WorldConfig(
        train=3, dev=1, test=2, speakers=4, sessions=3, evidence=(1, 6), contrary=(0, 6), second_voice=1
    ),
    "six speakers": WorldConfig(train=2, dev=1, test=1, speakers=6, sessions=2, leads=1, by_template=False, seed=5),
    "flag in the reply": WorldConfig(train=6, dev=1, test=1, flag_at="reply", seed=4),
    "nothing contrary": WorldConfig(train=9, dev=2, test=2, contrary=(0, 0), second_voice=0, seed=3),
    "odd sessions": WorldConfig(
        train=2, dev=2, test=2, sessions=9, contrary=(4, 4), formats=("direct", "multi"), seed=4
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_an_independent_solver_finds_every_answer(name: str) -> None:
    """Evidence is all that counts, and only that."""
    world, kinds = make_world(WORLDS[name]), set()
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    for item, problem in problems(world):
        trait, question = item.trait, item.question
        assert (problem.dimension, problem.speaker, problem.topic) == (
            trait.dimension,
            trait.speaker,
            trait.topic or "",
        )
        assert solver.solve(problem) == render_answer(question), question.id
        kinds.add((problem.dimension, problem.format))
        dialogue, evidence = dialogues[question.dialogue_id], set(question.evidence)
        shown = solver.remarks(from_dialogue(dialogue, question, evidence))
        hidden = solver.remarks(from_dialogue(dialogue, question, {turn.id for turn in dialogue.turns} - evidence))
        assert (len(shown), len(hidden)) == (item.is_evidence.count(True), item.is_evidence.count(False))
        assert not any(remark.flagged for remark in shown)
        assert all(remark.flagged for remark in hidden)
        if name == "default":  # what a model sees is enough
            state = make_state(dialogue, item, LadderConfig())
            for level in (state.attentional.factual, state.attentional, state):
                assert solver.solve(from_prompt(render(level).text)) == render_answer(question), question.id
    assert kinds == {(dimension, kind) for dimension in DIMENSIONS for kind in WORLDS[name].formats}


@pytest.mark.parametrize(("place", "which"), [("cue", 0), ("reply", 1)])
def test_the_flag_of_a_remark_of_two_turns_stands_where_it_is_told(place: str, which: int) -> None:
    world = make_world(replace(SMALL, flag_at=place, train=20))  # type: ignore[arg-type]
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    pairs = 0
    for item in world.questions:
        for turns, counts in zip(item.remarks, item.is_evidence, strict=True):
            texts = [dialogues[item.question.dialogue_id].turn(turn).text for turn in turns]
            if len(texts) == 2:
                pairs += not counts
                assert texts[which].startswith(f"{bank()['flag']}, ") is not counts
                assert not texts[1 - which].startswith(f"{bank()['flag']}, ")
    assert pairs > 10


def test_without_the_rule_the_flag_word_tells_nothing() -> None:
    flagged: dict[bool, list[bool]] = {True: [], False: []}
    world = make_world(replace(SMALL, rule="none", train=20))
    for dialogue, item in ((d, i) for d in world.dialogues for i in world.questions if i.question.dialogue_id == d.id):
        for turns, counts in zip(item.remarks, item.is_evidence, strict=True):
            flagged[counts].append(any(dialogue.turn(turn).text.startswith(bank()["flag"]) for turn in turns))
    table = [[sum(seen), len(seen) - sum(seen)] for seen in flagged.values()]
    assert chi2_contingency(table).pvalue > 0.001
    assert 0.3 < sum(flagged[True]) / len(flagged[True]) < 0.6


def test_who_counts_every_remark_is_often_wrong() -> None:
    large = make_world(WorldConfig(train=0, dev=0, test=60))
    rng = random.Random(0)
    right: dict[str, list[bool]] = defaultdict(list)
    for item, problem in problems(large):
        right[problem.format].append(solver.guess(problem, rng, large.config.sessions) == render_answer(item.question))
    shares = {kind: sum(hits) / len(hits) for kind, hits in right.items()}
    assert set(shares) == set(FORMATS)
    assert all(0.3 < share < 0.7 for share in shares.values()), shares


def _frames(world: World, split: bool) -> set[str]:
    """Wordings of remarks and questions, in the training dialogues or in the others."""
    banks = bank()["dimensions"].items()
    forms = {
        text: re.compile(re.sub(r"\\\{\w+\\\}", r"[\\w-]+", re.escape(text)))
        for _, words in banks
        for kind in ("frames", "texts", "dodges", "frank")
        for text in words.get(kind, ())
    }
    forms |= {text: re.compile(re.escape(text)) for text in bank()["fillers"]}
    said = set()
    for dialogue in world.dialogues:
        if dialogue.id.startswith("train") == split:
            said |= {solver.bare(turn.text) for turn in dialogue.turns}
            said |= {image.caption for image in dialogue.images}
    asks = {form.pattern: form for _, form in solver.asks()}
    asked = {item.question.text for item in world.questions if (item.question.split == "train") == split}
    found = {name for name, form in forms.items() if any(form.fullmatch(text) for text in said)}
    unknown = [text for text in said if not any(form.fullmatch(text) for form in forms.values())]
    assert not unknown
    return found | {name for name, form in asks.items() if any(form.fullmatch(text) for text in asked)}


def test_training_shares_no_wording_with_dev_and_test() -> None:
    world = make_world(WorldConfig(train=12, dev=6, test=6))
    train, other = _frames(world, True), _frames(world, False)
    assert not train & other
    assert len({tuple(turn.text for turn in dialogue.turns) for dialogue in world.dialogues}) == 24
    mixed = make_world(replace(world.config, by_template=False))
    assert len(_frames(mixed, True) & _frames(mixed, False)) > 50
    # every wording is used somewhere: what is kept apart is not simply never used
    assert len(train | other) == len(_frames(make_world(WorldConfig(train=40, dev=0, test=0, by_template=False)), True))


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        # each number by itself: tests/core/test_ranges.py
        ({"speakers": 7}, "speakers must be at least 2 and at most 6, not 7"),
        ({"train": 0, "dev": 0, "test": 0}, "train, dev and test"),
        ({"evidence": (3, 2)}, "evidence must be"),
        ({"formats": ()}, "formats is"),
        ({"formats": ("single", "essay")}, "formats must be"),
    ],
)
def test_a_bad_value_is_named(bad: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)) as error:
        WorldConfig(**bad)
    assert "\n" not in str(error.value)


def test_a_dialogue_does_not_depend_on_how_many_there_are() -> None:
    few, many = make_world(WorldConfig(train=2, dev=1, test=1)), make_world(WorldConfig(train=4, dev=1, test=3))
    by_id = {dialogue.id: dialogue for dialogue in many.dialogues}
    assert all(by_id[dialogue.id] == dialogue for dialogue in few.dialogues)
    assert set(few.questions) <= set(many.questions)
