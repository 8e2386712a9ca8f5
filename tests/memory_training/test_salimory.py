"""SaliMory's roles, rewards and pairs in the memory world, by hand-written replies and numbers worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from random import Random
from typing import Any

import pytest

from remind.memory_training import pico
from remind.memory_training import salimory as s
from remind.memory_training.config import SaliMoryConfig
from remind.memory_training.evaluate import evaluate_bank, mean, together
from remind.memory_training.rewards import Pair
from remind.testbed.memory_world import ORACLE, Ask, Expert, Said, make_life

DAY = date(2023, 3, 10)
PET, JOKE, TALK = Said("my pet is cat", "semantic", "pet"), Said("haha my food is rice", "", "food"), Said("time flies")
ZOO = Said("yesterday i visited the zoo with Ana", "episodic", "zoo")
SAID = (PET, JOKE, TALK, ZOO)
ASK = Ask("current", "pet", "cat")


def turns(*said: Said, day: date = DAY) -> list[s.Told]:
    return [s.Told(f"{day}:{n}", str(day), day, one) for n, one in enumerate(said, start=1)]


def play(
    replies: Sequence[str], *sessions: Sequence[s.Told], asks: Sequence[Ask] = (ASK,)
) -> tuple[s.Outcome, list[s.Asked]]:
    """A rollout with these replies in order, and what was asked."""
    left, asked = iter(replies), list[s.Asked]()

    def answer(shown: Sequence[s.Asked]) -> list[str]:
        asked.extend(shown)
        return [next(left) for _ in shown]

    (outcome,) = together([s.rollout("life", sessions, asks)], answer)
    assert not list(left)
    return outcome, asked


def test_roles_follow_each_other_and_see_what_the_one_before_left() -> None:
    verdicts = [s.YES, s.NO, "maybe <end>", s.YES]
    boosted = [
        "ADD PREFERENCE my pet is cat <end>",
        "ADD FACT i visited the zoo UPDATE m1 PREFERENCE my pet is dog <end>",
    ]
    outcome, asked = play([*verdicts, *boosted, "m2 <end>"], turns(*SAID))
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


def test_working_memory_ends_after_a_week() -> None:
    again = [turns(TALK, day=DAY + timedelta(days)) for days in (7, 8)]
    replies = [s.YES, "ADD WORKING time flies <end>", s.YES, "<end>", s.YES, "<end>", "<end>"]
    assert [one.store for one in play(replies[:4] + replies[-1:], turns(TALK), again[0])[0].bank] == ["working"]
    assert not play(replies, turns(TALK), *again)[0].bank


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("ADD FACT my pet is cat", "not JSON"),
        ("ADD <end>", "does not match"),
        ("ADD FACT <end>", "does not match"),
        ("UPDATE m9 FACT my pet <end>", "no entry"),
        ("DELETE m1 FACT my pet <end>", "was unexpected"),
        ("DELETE m1 WORKING <end>", "not of"),
        ("ADD FACT a ADD FACT b ADD FACT c ADD FACT d <end>", "more than 3"),
    ],
)
def test_replies_that_change_nothing(reply: str, why: str) -> None:
    outcome, _ = play([s.YES, s.YES, "ADD FACT my pet is cat <end>", reply, "<end>"], turns(PET, JOKE))
    occasion = s.Occasion("", "", None, ("1",))
    last = s.propose("booster", s.compile_reply(reply, DAY), occasion, outcome.bank[:1], 2)
    assert why in last[-1].why
    assert outcome.bank[0].text.endswith("my pet is cat")
    assert outcome.valid == (True, True, True, False, True)


@pytest.mark.parametrize(
    ("reply", "quality"),
    [
        ("m1 <end>", 1.0),
        ("m1 m2 <end>", 2 / 3),
        ("m2 <end>", 0.0),
        ("m1 m1 <end>", 0.0),
        ("m3 <end>", 0),
    ],
)
def test_the_utilizer_is_judged_by_what_it_was_shown(reply: str, quality: float) -> None:
    boosted = ["ADD FACT my pet is cat <end>", "ADD FACT i visited the zoo <end>"]
    outcome, _ = play([s.YES, s.YES, *boosted, reply, "<end>"], turns(PET, ZOO), asks=(ASK, Ask("when", "lake", "")))
    assert outcome.profiles[0].quality(ASK) == pytest.approx(quality)
    # nothing tells of the lake, and nothing was named
    assert outcome.profiles[1].quality(Ask("when", "lake", "")) == 1.0


def test_entries_are_faithful_to_what_was_said_and_vague_without_any_claim() -> None:
    boosted = [
        "ADD FACT my pet is cat ADD FACT my pet is dog ADD FACT my pet <end>",
        "ADD FACT haha my food is rice <end>",
        "ADD FACT yesterday i visited the zoo with Ana ADD FACT today i visited the zoo with Ana <end>",
    ]
    told = turns(PET, JOKE, ZOO)
    outcome, _ = play([s.YES] * 3 + boosted + ["<end>"], told)
    # true: the cat, the zoo yesterday, and what claims nothing; false: the dog, a joke, the zoo today
    assert s.shares(outcome.bank, {one.id: one for one in told}) == (3 / 6, 1 / 6)
    assert s.shares([], {}) == (None, None)


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
    assert {role: list(values) for role, values in scores.rewards.items()} == {
        role: pytest.approx(expected) for role in ("filter", "booster", "utilizer")
    }
    # R2 is .3, -.5, -.1, .3; μ is 1, 1, 2/3, 0, and half of the first memory is all of the last
    assert scores.pairs == (
        Pair("booster", 0, 1, pytest.approx(0.8)),
        Pair("utilizer", 0, 3, pytest.approx(1.0)),
    )
    assert scores.metrics["accuracy"] == 0.5
    assert scores.metrics["vague"] == pytest.approx(0.5 / 3)


def test_terms_can_be_left_out() -> None:
    answers = SaliMoryConfig(memory_penalty=0, memory_bonus=0, profile_weight=0, filter_weight=0)
    assert list(scored(answers).rewards["filter"]) == [1, 0, 1, 0]
    # memories that have less in common are not compared: of the first and third a third is the same
    assert [one.role for one in scored(SaliMoryConfig(similarity=0.99)).pairs] == ["booster"]


def test_appendix_e2_as_printed_prefers_the_empty_memory() -> None:
    ours, literal = scored(SaliMoryConfig()), scored(SaliMoryConfig(e2_literal=True))
    assert literal.rewards["booster"][1] - ours.rewards["booster"][1] == pytest.approx(0.8)
    assert literal.pairs[0] == Pair("booster", 0, 2, pytest.approx(0.4))


def test_a_memory_that_recalls_less_does_not_win_the_pair() -> None:
    """The first forgets the zoo, the second is vague on it."""
    told = tuple(turns(PET, ZOO))
    window = s.Window("life", told, (ASK, Ask("who", "zoo", "Ana")))
    pet = "ADD FACT my pet is cat <end>"
    outcomes = [
        play(replies, told)[0]
        for replies in ([s.YES, s.NO, pet, "<end>"], [s.YES, s.YES, pet, "ADD FACT i visited <end>", "<end>"])
    ]
    for literal, pairs in ((False, ()), (True, (Pair("booster", 0, 1, pytest.approx(0.4)),))):
        task = s.SaliMoryTask([window], pico.tokenizer(), SaliMoryConfig(e2_literal=literal))
        assert task.score(0, outcomes).pairs == pairs


def policy(kind: str) -> Callable[[Sequence[s.Asked]], list[str]]:
    def reply(asked: s.Asked) -> str:
        if kind in ("expert", "oracle"):
            return s.expert_reply(asked, ORACLE if kind == "oracle" else Expert(), Random(asked.prompt()))
        if kind == "nothing":
            return s.NO if asked.role == "filter" else pico.END
        if not asked.turn:
            return " ".join([*(f"m{n}" for n in range(1, len(asked.entries) + 1)), pico.END])
        text = {"questions": f"my {asked.turn.key} is", "claim": "the answer is right"}[kind]
        return s.YES if asked.role == "filter" else f"ADD FACT {text} {pico.END}"

    return lambda shown: list(map(reply, shown))


def test_the_expert_is_flawed_and_policies_of_no_use_are_worth_less() -> None:
    lives = [make_life(0, -1 - number) for number in range(8)]
    final = {}
    for kind in ("expert", "oracle", "nothing", "questions", "claim"):
        figures = mean(evaluate_bank(policy(kind), lives))
        final[kind] = figures["final"]
        assert figures["valid"] == 1.0
    assert final["oracle"] > 0.9 > final["expert"] + 0.3
    assert max(final["nothing"], final["questions"], final["claim"]) < 0.2 < final["expert"]
    rows = [window for life in lives[:2] for window in s.windows(life, 16)]
    assert all(len(one.told) <= 16 for one in rows)
    task = s.SaliMoryTask(rows, pico.tokenizer(), SaliMoryConfig())
    reward = {kind: sum(_rewards(task, kind)) for kind in ("expert", "oracle", "nothing", "questions", "claim")}
    assert reward["oracle"] > reward["expert"] > max(reward["nothing"], reward["questions"], reward["claim"])


def _rewards(task: s.SaliMoryTask, kind: str) -> Iterator[float]:
    for row, window in enumerate(task.rows):
        (outcome,) = together([s.rollout(window.life, [window.told], window.asks[:1])], policy(kind))
        yield task.score(row, [outcome, outcome]).rewards["filter"][0]


def test_the_experts_replies_are_words_of_pico_and_apply() -> None:
    known, roles = set(pico.words()), set()
    for asked, reply in s.lessons(make_life(0, 3), Expert(), 16):
        roles.add(asked.role)
        assert {*asked.prompt().split(), *reply.split()} <= known
        if asked.role == "booster":
            (op,) = json.loads(s.compile_reply(reply, DAY))["ops"]
            assert op["op"] in ("ADD", "UPDATE")
    assert roles == set(pico.SALIMORY)
