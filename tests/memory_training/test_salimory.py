"""SaliMory's roles, rewards and pairs in the memory world, by hand-written replies and numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

import pytest

from remind.memory_training import pico
from remind.memory_training import salimory as s
from remind.memory_training.config import SaliMoryConfig
from remind.memory_training.episodes import Pair, together
from remind.testbed.memory_world import Ask, Said

DAY = date(2023, 3, 10)
PET, JOKE, TALK = Said("my pet is cat", "semantic", "pet"), Said("haha my food is rice", "", "food"), Said("time flies")
ZOO = Said("yesterday i visited the zoo with Ana", "episodic", "zoo")
ASK = Ask("current", "pet", "cat")


def turns(*said: Said, day: date = DAY) -> list[s.Told]:
    return [s.Told(f"{day}:{n}", str(day), day, one) for n, one in enumerate(said, start=1)]


def play(
    replies: Sequence[str], *sessions: Sequence[s.Told], asks: Sequence[Ask] = (ASK,)
) -> tuple[s.Played, list[s.Asked]]:
    """A rollout with these replies in order, and what was asked."""
    left, run = iter(replies), s.rollout("life", sessions, asks)
    ((outcome, traces),) = together([run], lambda shown: [next(left) for _ in shown])
    assert not list(left)
    return outcome, [one for one, _ in traces]


def test_roles_follow_each_other_and_see_what_the_one_before_left() -> None:
    boosted = [
        "ADD PREFERENCE my pet is cat <end>",
        "ADD FACT i visited the zoo UPDATE m1 PREFERENCE my pet is dog <end>",
    ]
    outcome, asked = play([s.YES, s.NO, "maybe <end>", s.YES, *boosted, "m2 <end>"], turns(PET, JOKE, TALK, ZOO))
    assert [one.prompt() for one in asked[4:]] == [
        "<booster> my pet is cat <ops>",
        "<booster> PREFERENCE my pet is cat m1 yesterday i visited the zoo with Ana <ops>",
        "<utilizer> FACT i visited the zoo m1 PREFERENCE my pet is dog m2 current pet <ops>",
    ]
    assert outcome.flagged == (f"{DAY}:1", f"{DAY}:4")
    assert outcome.valid == (True, True, False, True, True, True, True)
    assert [(one.store, one.text, one.sources) for one in outcome.bank] == [
        ("fact", "2023-03-10: i visited the zoo", (f"{DAY}:4",)),
        ("preference", "2023-03-10: my pet is dog", (f"{DAY}:1", f"{DAY}:4")),
    ]
    (profile,) = outcome.profiles
    assert (profile.answer(ASK), profile.quality(ASK)) == ("dog", 1.0)


def scored(cfg: SaliMoryConfig) -> Any:
    """Of four rollouts: all right; keeps nothing; the right fact and a vague one; the right fact, which is not told."""
    told = tuple(turns(PET, JOKE, ZOO))
    window = s.Window("life", told, (ASK, Ask("who", "zoo", "Ana")))
    pet, zoo = "ADD FACT my pet is cat <end>", "ADD FACT yesterday i visited the zoo with Ana <end>"
    replies = [
        [s.YES, s.NO, s.YES, pet, zoo, "m1 <end>"],
        [s.NO, s.NO, s.NO, "<end>"],
        [s.YES, s.NO, s.YES, pet, "ADD FACT i visited <end>", "m1 m2 <end>"],
        [s.YES, s.YES, s.NO, pet, "<end>", "<end>"],
    ]
    task = s.SaliMoryTask([window], pico.tokenizer(), cfg)
    return task.score(0, [play(one, told)[0] for one in replies])


def test_rewards_are_those_of_the_equations() -> None:
    scores = scored(SaliMoryConfig())
    # R1; R2 = .8 γ - .5; R3 = .15 μ + .1 (.4 precision + .6 recall)
    expected = [
        1 + 0.3 + 0.15 + 0.1,
        0 - 0.5 + 0.15 + 0,
        1 + (0.8 * 0.5 - 0.5) + 0.15 * 2 / 3 + 0.1,
        0 + 0.3 + 0 + 0.1 * (0.4 * 0.5 + 0.6 * 0.5),
    ]
    for role in ("filter", "booster", "utilizer"):
        assert list(scores.rewards[role]) == pytest.approx(expected)
    # R2 is .3, -.5, -.1, .3; μ is 1, 1, 2/3, 0, and half of the first memory is all of the last
    utilizers = Pair("utilizer", 0, 3, pytest.approx(1.0))
    assert scores.pairs == (Pair("booster", 0, 1, pytest.approx(0.8)), utilizers)
    # memories that have less in common are not compared
    assert [one.role for one in scored(SaliMoryConfig(similarity=0.99)).pairs] == ["booster"]
    # as printed the empty memory wins
    assert scored(SaliMoryConfig(e2_literal=True)).pairs[0] == Pair("booster", 0, 2, pytest.approx(0.4))
