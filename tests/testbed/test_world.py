"""The synthetic world: what it asks follows from what is said, and from nothing else."""

from __future__ import annotations

import pytest
import solver
from solver import from_dialogue, from_prompt, problems

from remind.core.errors import ConfigError
from remind.data.dialogue import DIMENSIONS
from remind.states.pyramid import render, render_answer
from remind.testbed.ladder import LadderConfig, make_state
from remind.testbed.world import WorldConfig, make_world

SMALL = WorldConfig(train=4, dev=2, test=3)
WORLDS = {
    "default": SMALL,
    "flag in the reply": WorldConfig(
        train=4, dev=1, test=1, sessions=9, flag_at="reply", contrary=(4, 4), formats=("direct", "multi"), seed=4
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_an_independent_solver_finds_every_answer(name: str) -> None:
    """Evidence is all that counts, and only that."""
    world, kinds = make_world(WORLDS[name]), set()
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    for item, problem in problems(world):
        trait, question = item.trait, item.question
        assert problem.asked.dimension == trait.dimension
        assert solver.solve(problem) == render_answer(question), question.id
        kinds.add((problem.asked.dimension, problem.format))
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


def test_a_bad_value_is_named() -> None:
    with pytest.raises(ConfigError, match="evidence must"):
        WorldConfig(evidence=(3, 2))
