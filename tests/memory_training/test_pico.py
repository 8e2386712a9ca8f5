"""Pico's grammar and prompts, and what rewards make of replies; degenerate ones are worth less than the expert's."""

from __future__ import annotations

from datetime import date
from functools import partial
from random import Random

import pytest

from remind.memory.operations import State
from remind.memory_training import evaluate, pico
from remind.memory_training.config import PolicyGradientConfig, RewardConfig
from remind.memory_training.episodes import Lesson
from remind.memory_training.membuilder import MemBuilderTask, Scorer
from remind.memory_training.pico import View
from remind.memory_training.rewards import ROLES
from remind.testbed.memory_world import ORACLE, Ask, Expert, Meeting, Said, make_life

TURNS = (Said("my city is rome", "core", "city"), Said("my pet is cat", "semantic", "pet"), Said("time flies so fast"))
ASKS = (Ask("current", "city", "rome"), Ask("current", "pet", "cat"))
MEETING = Meeting("S1", date(2023, 3, 10), TURNS, ASKS, ASKS)


def views(state: State | None = None, meeting: Meeting = MEETING) -> tuple[View, ...]:
    return tuple(pico.view(role, meeting, state or State()) for role in ROLES)  # type: ignore[arg-type]


def after(*replies: str) -> tuple[State, list[list[str]]]:
    """The memory after the replies of the roles, and the reason of each rejection."""
    state, ops = pico.remember(State(), "life", list(zip(views(), replies, strict=True)))
    return state, [[one.why for one in own] for own in ops]


def test_replies_become_entries_and_later_ones_refer_to_what_is_shown() -> None:
    state, why = after("ADD t1 <end>", "ADD t1 ADD t3 <end>", "ADD t2 <end>", "<end>")
    assert why == [[""], ["", ""], [""], []]
    assert [(one.text, one.sources) for one in state.current("semantic")] == [("2023-03-10: my pet is cat", ("S1:2",))]
    later = Meeting("S2", date(2023, 4, 1), (Said("my city is now oslo"), Said("my pet is now dog")), ASKS, ASKS)
    shown = views(state, later)
    words = "my city is rome m1 time flies so fast m2 my city is now oslo t1 my pet is now dog t2"
    assert shown[1].prompt() == f"<episodic> {words} <ops>"
    replies = ("UPDATE m1 t1 <end>", "MERGE m1 m2 <end>", "UPDATE m1 t2 <end>", "<end>")
    state, ops = pico.remember(state, "life", list(zip(shown, replies, strict=True)))
    assert not [one.why for own in ops for one in own if one.why]
    episodes = "2023-03-10: my city is rome | 2023-03-10: time flies so fast"
    told = {"2023-04-01: my city is now oslo", episodes, "2023-04-01: my pet is now dog"}
    assert {one.text for one in state.current(*ROLES)} == told


def test_a_bad_reply_changes_nothing() -> None:
    state, why = after("ADD t1 UPDATE m1 t2 <end>", "ADD m1 <end>", "UPDATE m1 t1 <end>", "<end>")
    assert [any(own) for own in why] == [True, True, True, False]
    assert not state.current(*ROLES)


def test_rewards_of_a_rollout_by_hand() -> None:
    replies, examined = ("ADD t1 <end>", "<end>", "ADD t2 <end>", "<end>"), partial(pico.examined, MEETING)
    lesson = Lesson("life", State(), views(), replies, [], 2, examined)
    scorer = Scorer(lesson, RewardConfig(core_free=2, core_full=7, free_below=2), lambda text: len(text.split()))
    assert scorer.expert == {"core": 5, "episodic": 0, "semantic": 5, "procedural": 0}
    # the expert's own: core grew by 5 words, (5 - 2) / (7 - 2) = .6
    other_replies = ("<end>", "ADD t2 <end>", "<end>", "SKIP t1 <end>")
    own, other = scorer.results([replies, other_replies])
    assert own.rewards == pytest.approx({"core": 0.52, "episodic": 1.0, "semantic": 1.0, "procedural": 1.0})
    # episodic wrote where the expert did not, semantic nothing where it wrote five words; the pet is in episodic
    assert other.rewards == pytest.approx({"core": 0.5, "episodic": 0.1, "semantic": 0.1, "procedural": 0.0})
    task = MemBuilderTask([lesson], pico.tokenizer(), RewardConfig(), PolicyGradientConfig(alpha=4.0))
    scores = task.score(0, [replies, ("<end>",) * 4])
    assert scores.weights == {"core": [1, 1], "episodic": [1, 1], "semantic": [4, 1], "procedural": [1, 1]}
    assert scores.metrics == {"task": 0.5, "held_out": 0.5, "valid": 1.0}
    # of sessions without a task reward what is valid and no longer than the expert's is right, whatever it tells
    task = MemBuilderTask([lesson] * 200, pico.tokenizer(), scorer.cfg, PolicyGradientConfig(density=0.25))
    unpaid = [row for row, one in enumerate(task.scorers) if not one.lesson.asks]
    assert 125 < len(unpaid) < 175
    scores = task.score(unpaid[0], [("<end>", "<end>", "ADD t3 <end>", "UPDATE m1 t1 <end>"), replies])
    assert [scores.rewards[role] for role in ("semantic", "procedural")] == [[1.0, 1.0], [0.0, 1.0]]


def test_an_evaluation_chains_the_policys_own_memories() -> None:
    lives = [make_life(0, -1 - number, 4) for number in range(6)]
    final = {}
    for name, who in (("expert", Expert()), ("oracle", ORACLE), ("nobody", Expert(1, 1, 0))):
        replies = partial(lambda who, shown: [pico.expert_reply(one, who, Random(one.prompt())) for one in shown], who)
        report = evaluate.mean(evaluate.evaluate(replies, lives))
        assert report["valid"] == 1.0
        final[name] = report["final"]
    assert final["oracle"] > 0.9 > 0.8 > final["expert"] > final["nobody"]
