"""What the nano backbone learns from, the easy first: worlds without the rule, and drills for option letters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from remind.core.processes import spawned_pool
from remind.core.progress import track
from remind.data.dialogue import FORMATS, Format
from remind.models.chat import end_token_id, prompt_ids, tokenize
from remind.states.pyramid import ReflectiveState, render
from remind.testbed.ladder import LadderConfig, climb, target
from remind.testbed.world import Asked, WorldConfig, lexicon, make_world

#: drill: the summary gives the answer in the words of an option. short: one remark of evidence. apart: among remarks
#: of others. marked: among contrary ones, mostly with markers. full: as questions are asked later.
Kind = Literal["drill", "short", "apart", "marked", "full"]
_SHARES: dict[Kind, float] = {"drill": 0.12, "short": 0.12, "apart": 0.26, "marked": 0.2, "full": 0.3}
#: How often a lesson shows x0, x1 and x2.
_LEVELS: dict[Kind, tuple[float, float, float]] = {
    "drill": (0, 0, 1),
    "short": (1, 1, 1),
    "apart": (1, 0.6, 0.2),
    "marked": (0.2, 1, 0.1),
    "full": (1.2, 1, 0.4),
}
_LETTERS = "ABCD"


@dataclass(frozen=True)
class Lesson:
    """One question under one state, as tokens.

    Attributes:
        prompt, answer: ids, int16; the answer ends with the end token.
        options: position in the prompt of each option's words, and whether the option is right.
        focus: positions of the words the answer rests on: the cues of all remarks of the asked trait under x0, of the
            marked ones under x1; what the summary calls the value under x2. int16.
        speaker: the speaker asked about.
        level: 0, 1 or 2.
        format: of the question.
    """

    prompt: Tensor
    answer: Tensor
    focus: Tensor
    options: tuple[tuple[int, bool], ...]
    speaker: str
    level: int
    format: Format


@dataclass(frozen=True)
class Step:
    """How the lessons of one moment are mixed: weights of formats, and the kinds to draw from by format."""

    formats: dict[Format, float]
    kinds: dict[Format, tuple[Kind, ...]]


def step_at(progress: float, single: float, multi: float, easy: tuple[float, float]) -> Step:
    """The mixture after a share of the steps.

    Args:
        single, multi: share of the steps after which these formats join short answers.
        easy: shares of the time since a format joined: its lessons are short until the first, simple until the
            second.
    """
    formats: dict[Format, float] = {"direct": 1.0}
    if progress >= single:
        formats["single"] = 2.0
    if progress >= multi:
        formats |= {"single": 1.5, "multi": 2.5}
    joined: dict[Format, float] = {"direct": 0.0, "single": single, "multi": multi}
    kinds: dict[Format, tuple[Kind, ...]] = {}
    for name in formats:
        age = (progress - joined[name]) / max(0.05, 1 - joined[name])
        if age < easy[0]:
            kinds[name] = ("short", "drill", "apart")
        elif age < easy[1]:
            kinds[name] = ("short", "drill", "apart", "apart", "marked")
        else:
            kinds[name] = ("full", "full", "apart", "marked")
    return Step(formats, kinds)


Course = dict[tuple[Kind, Format], list[Lesson]]


def write_course(lessons: int, seed: int, workers: int = 1) -> Course:
    """About `lessons` lessons for each format, by kind. Short answers have no drills: they have no letters."""
    wanted = [
        (kind, name, int(lessons * share), seed)
        for name in FORMATS
        for kind, share in _SHARES.items()
        if not (kind == "drill" and name == "direct")
    ]
    with spawned_pool(workers) if workers > 1 else nullcontext() as pool:
        made = (pool.map if pool else map)(_rows, wanted)
        return {
            (kind, name): [_lesson(*row) for row in rows]
            for (kind, name, *_), rows in zip(wanted, track(made, "lessons", len(wanted)), strict=True)
        }


def _lesson(prompt: Any, answer: Any, focus: Any, *others: Any) -> Lesson:
    return Lesson(torch.from_numpy(prompt), torch.from_numpy(answer), torch.from_numpy(focus), *others)


def _rows(wanted: tuple[Kind, Format, int, int]) -> list[tuple[Any, ...]]:
    """Lessons with arrays in place of tensors, which would travel between processes as a file each."""
    from remind.models.nano import nano_tokenizer

    return [
        (x.prompt.numpy(), x.answer.numpy(), x.focus.numpy(), x.options, x.speaker, x.level, x.format)
        for x in lessons_of(nano_tokenizer(), *wanted)
    ]


def lessons_of(tokenizer: Any, kind: Kind, name: Format, count: int, seed: int) -> Iterator[Lesson]:
    """`count` lessons of a kind, and a few more: dialogues are used up."""
    frame = _frame(tokenizer)
    made = number = 0
    while made < count:
        rng = random.Random(f"remind-lessons:{seed}:{kind}:{name}:{number}")
        world, ladder = _difficulty(kind, name, rng)
        dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
        for asked in world.asked:
            state = climb(dialogues[asked.question.dialogue_id], asked, ladder)
            if kind == "drill" and rng.random() < 0.7:
                state = ReflectiveState(state.attentional, _told_outright(state.summary, asked, rng))
            question = asked.question
            if name == "direct" and rng.random() < 0.1:
                # now and then in other words, so that these are known as answers
                question = replace(question, answers=(rng.choice(question.answers[1:]),))
            level = rng.choices((0, 1, 2), _LEVELS[kind])[0]
            yield lesson(tokenizer, frame, state, replace(asked, question=question), level)
            made += 1
        number += 1


def _difficulty(kind: Kind, name: Format, rng: random.Random) -> tuple[Any, LadderConfig]:
    """A small world without the rule, and what its states show."""
    contrary, second = (0, 0), 0.0
    if kind in ("drill", "short"):
        evidence, decoys = (1, 1), rng.choice((0, 0, 1))
    elif kind == "apart":
        evidence, decoys = rng.choice(((1, 1), (1, 2), (2, 2))), rng.choice((2, 2, 3, 4))
    elif kind == "marked":
        contrary = rng.choice(((1, 2), (1, 3)))
        evidence, decoys = rng.choice(((1, 2), (2, 2))), rng.choice((2, 3, 4))
    else:
        contrary = rng.choice(((0, 0), (0, 1), (1, 3), (1, 3)))
        evidence, decoys = rng.choice(((1, 2), (2, 2), (2, 2), (2, 3))), rng.choice((2, 4, 5))
        second = 0.4 if contrary[1] > 1 else 0.0
    seed = rng.randrange(2**40)
    config = WorldConfig(
        train=2,
        dev=0,
        test=0,
        rule="none",
        flag_at="reply",
        by_template=False,
        contrary=contrary,
        second_voice=second,
        evidence=evidence,
        formats=(name,),
        seed=seed,
    )
    return make_world(config), LadderConfig(decoys=decoys, seed=seed)


def _told_outright(summary: str, asked: Asked, rng: random.Random) -> str:
    """The summary with the words of the answer, or of a right option, in place of its own."""
    question = asked.question
    words = asked.trait.words["label"][0]
    if question.format == "multi" and rng.random() < 0.5:
        right = [text for letter, text in zip(_LETTERS, question.options, strict=True) if letter in question.answers]
        words = rng.choice(right)
    for gist in asked.trait.words["gist"]:
        summary = summary.replace(gist, words)
    return summary


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the chat template puts before and after a prompt, as tokens."""
    word = lexicon()["names"][0]
    [token], whole = tokenize(tokenizer, word).ids, prompt_ids(tokenizer, word)
    place = whole.index(token)
    return whole[:place], whole[place + 1 :]


def lesson(
    tokenizer: Any, frame: tuple[list[int], list[int]], state: ReflectiveState, asked: Asked, level: int
) -> Lesson:
    """A question under one of its states as tokens, and where in them its answer lies."""
    question = asked.question
    rendered = render((state.attentional.factual, state.attentional, state)[level])
    tokens = tokenize(tokenizer, rendered.text)
    before, after = frame
    prompt = [*before, *tokens.ids, *after]
    answer = [*tokenize(tokenizer, str(target(question))).ids, end_token_id(tokenizer)]
    options: list[tuple[int, bool]] = []
    if question.options:
        [heading] = tokenize(tokenizer, "Options:\n").ids
        start = len(prompt) - 1 - prompt[::-1].index(heading)
        # letter, words, line end: a token each
        options = [(start + 2 + 3 * n, _LETTERS[n] in question.answers) for n in range(len(question.options))]
    bank = lexicon()["dimensions"][asked.trait.dimension]
    if level == 2:
        start = rendered.text.rindex(state.summary)
        spans = [(start, start + len(state.summary))]
        kinds: tuple[str, ...] = ("gist", "label", "fits")
    else:
        kinds = ("cues",)
        own = {turn for unit in asked.own for turn in unit}
        spans = [(turn.start, turn.end) for turn in rendered.turns if turn.turn_id in own]
        if level == 1:
            marks = list(zip(rendered.markers[::2], rendered.markers[1::2], strict=True))
            inside = [(s, e) for s, e in spans if any(first[1] <= s and e <= last[0] for first, last in marks)]
            spans = inside or spans
    telling = {word for entry in bank["values"].values() for kind in kinds for word in entry.get(kind, ())}
    telling |= {word for stance in ("keen", "averse") for word in bank.get(stance, ())}
    focus = [
        len(before) + place
        for place, (start, end) in enumerate(tokens.offsets)
        if rendered.text[start:end] in telling and any(first <= start < last for first, last in spans)
    ]

    def short(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int16)

    return Lesson(
        short(prompt), short(answer), short(focus), tuple(options), asked.trait.speaker, level, question.format
    )
