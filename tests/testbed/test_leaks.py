"""What a question shows besides its evidence tells nothing of the answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import solver
from solver import Problem, bank, from_dialogue, problems, values_of

from remind.testbed.ladder import LadderConfig, make_state
from remind.testbed.world import World, WorldConfig, WorldQuestion, make_world


@cache
def make(kind: str) -> World:
    """loud: so many contrary remarks that their cues repeat."""
    if kind == "large":
        return make_world(WorldConfig(train=0, dev=0, test=300))
    return make_world(
        WorldConfig(train=0, dev=0, test=200, contrary=(3, 6), second_voice=1, formats=("single", "direct"))
    )


@cache
def blind(kind: str) -> list[tuple[WorldQuestion, Problem]]:
    """Every question of a world with what its factual state shows besides the evidence."""
    world = make(kind)
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    found = []
    for item in world.questions:
        dialogue = dialogues[item.question.dialogue_id]
        shown = {turn.id for turn in make_state(dialogue, item, LadderConfig()).attentional.factual.turns}
        found.append((item, from_dialogue(dialogue, item.question, shown - set(item.question.evidence))))
    return found


@cache
def votes(problem: Problem, sessions: int) -> dict[str, int]:
    """For each value that can be answered, how many remarks speak for it."""
    heard = solver.remarks(problem)
    entries = bank()["dimensions"][problem.dimension]["values"]
    counts = {}
    for value in values_of(problem.dimension):
        if problem.dimension == "temporal_dynamics":
            phases = entries[value]["phases"]
            counts[value] = sum(remark.value == phases[remark.session > sessions // 2] for remark in heard)
        else:
            counts[value] = sum(remark.value == value for remark in heard)
    return {value: count for value, count in counts.items() if solver.answer(problem, value) is not None}


def deviation(cases: Sequence[tuple[str, int, str]]) -> float:
    """Hits, in standard errors from chance. A case: what was guessed, how many values to guess from, the true one."""
    hits = sum(guessed == truth for guessed, _, truth in cases)
    expected = sum(1 / pool for _, pool, _ in cases)
    return (hits - expected) / sum(1 / pool * (1 - 1 / pool) for _, pool, _ in cases) ** 0.5


#: What one could guess from how many remarks speak for each value.
CHOICES: dict[str, Callable[[dict[str, int]], list[str]]] = {
    "top": lambda counts: [value for value, count in counts.items() if count == max(counts.values())],
    "least": lambda counts: [value for value, count in counts.items() if count == min(counts.values())],
    "heard": lambda counts: [value for value, count in counts.items() if count] or list(counts),
}


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("kind", ["large", "loud", "options"])
def test_a_guess_without_evidence_is_at_chance(kind: str, choose: str) -> None:
    """From the other remarks of x0, or (options) from how many letters each value would have as its answer."""
    rng = random.Random(0)
    cases: dict[bool, list[tuple[str, int, str]]] = {True: [], False: []}
    world = make("loud" if kind == "loud" else "large")
    for item, problem in problems(world) if kind == "options" else blind(kind):
        if (problem.format == "multi") != (kind == "options"):
            continue
        if kind == "options":
            answers = {value: solver.answer(problem, value) for value in values_of(problem.dimension)}
            counts = {value: letters.count(",") + 1 for value, letters in answers.items() if letters}
        else:
            counts = votes(problem, world.config.sessions)
        cases[problem.dimension == "temporal_dynamics"].append(
            (rng.choice(CHOICES[choose](counts)), len(counts), item.trait.value)
        )
    least = (350, 350) if kind == "options" else (600, 2000)
    for some, fewest in zip((cases[True], cases[False]), least, strict=True):
        assert len(some) >= fewest
        assert abs(deviation(some)) < 3
