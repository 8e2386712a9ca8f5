"""What the nano backbone is trained on, the easy first: questions of worlds without the rule, as tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from remind.core.progress import track
from remind.data.dialogue import FORMATS, Dialogue, Format
from remind.llm.request import Reply
from remind.models.chat import end_token_id, prompt_ids, tokenize
from remind.perception.auxiliary import read_summary
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Strategy, render, segments_of
from remind.testbed.ladder import LadderConfig, make_state, mark_blocks, target
from remind.testbed.reader import compose, remarks, strategy, turns_of, understand
from remind.testbed.world import World, WorldConfig, WorldQuestion, lexicon, make_world

#: drill: the summary gives the answer in the words of an option. short: one remark of evidence. apart: among remarks
#: of other traits. marked: among contrary ones, mostly with markers. full: as questions are asked later. built: as the
#: pipeline renders them: three times as many turns, gaps, anchors, marks by relevance alone, summaries in three parts.
Kind = Literal["drill", "short", "apart", "marked", "full", "built"]
Range = tuple[int, int]


class Difficulty(NamedTuple):
    """Of a kind: its share of the lessons, weights of x0, x1 and x2, and what its worlds and states are drawn from."""

    share: float
    levels: tuple[float, float, float]
    contrary: tuple[Range, ...]
    evidence: tuple[Range, ...]
    decoys: tuple[int, ...]


KINDS: dict[Kind, Difficulty] = {
    "drill": Difficulty(0.12, (0, 0, 1), ((0, 0),), ((1, 1),), (0, 0, 1)),
    "short": Difficulty(0.12, (1, 1, 1), ((0, 0),), ((1, 1),), (0, 0, 1)),
    "apart": Difficulty(0.26, (1, 0.6, 0.2), ((0, 0),), ((1, 1), (1, 2), (2, 2)), (2, 2, 3, 4)),
    "marked": Difficulty(0.2, (0.2, 1, 0.1), ((1, 2), (1, 3)), ((1, 2), (2, 2)), (2, 3, 4)),
    "full": Difficulty(
        0.3, (1.2, 1, 0.4), ((0, 0), (0, 1), (1, 3), (1, 3)), ((1, 2), (2, 2), (2, 2), (2, 3)), (2, 4, 5)
    ),
    "built": Difficulty(1.0, (0, 1, 0.5), ((0, 0), (0, 1), (1, 3)), ((1, 2), (2, 2), (2, 3)), (0,)),
}
#: Turns of a built state.
_TURNS = (8, 34)


@dataclass(frozen=True)
class Lesson:
    """One question under one state, as tokens.

    Attributes:
        prompt, answer: ids, int16; the answer ends with the end token.
        options: position in the prompt of each option's words, and whether the option is right.
        focus: positions of the words the answer rests on: the cues of all remarks of the question's trait under x0, of
            the marked ones under x1; the word for the value in the summary under x2. int16.
        speaker: the target speaker.
        level: 0, 1 or 2.
    """

    prompt: Tensor
    answer: Tensor
    focus: Tensor
    options: tuple[tuple[int, bool], ...]
    speaker: str
    level: int
    format: Format


Lessons = dict[tuple[Kind, Format], list[Lesson]]


def mixture(
    progress: float, single: float, multi: float, easy: tuple[float, float]
) -> dict[Format, tuple[float, tuple[Kind, ...]]]:
    """For each format its weight and the kinds of its lessons, after a share `progress` of the steps.

    Args:
        single, multi: share of the steps after which these formats join direct answers.
        easy: shares of the time since a format joined: its lessons are short until the first, simple until the
            second.
    """
    weights: dict[Format, float] = {"direct": 1.0}
    if progress >= single:
        weights["single"] = 2.0
    if progress >= multi:
        weights |= {"single": 1.5, "multi": 2.5}
    joined: dict[Format, float] = {"direct": 0.0, "single": single, "multi": multi}
    result: dict[Format, tuple[float, tuple[Kind, ...]]] = {}
    for name, weight in weights.items():
        age = (progress - joined[name]) / max(0.05, 1 - joined[name])
        if age < easy[0]:
            result[name] = weight, ("short", "drill", "apart")
        elif age < easy[1]:
            result[name] = weight, ("short", "drill", "apart", "apart", "marked")
        else:
            result[name] = weight, ("full", "full", "apart", "marked")
    return result


def later_mixture() -> dict[Format, tuple[float, tuple[Kind, ...]]]:
    """`mixture` of a training that goes on from a checkpoint which has been through the first one."""
    kinds: tuple[Kind, ...] = ("full", "marked", "built", "built", "built", "built")
    return {name: (weight, kinds) for name, weight in zip(FORMATS, (1.0, 1.2, 1.0), strict=True)}


def make_lessons(tokenizer: Any, count: int, seed: int, kinds: Sequence[Kind]) -> Lessons:
    """About `count` lessons for each format, by kind. Direct answers have no drills: they have no letters."""
    keys: list[tuple[Kind, Format]] = [
        (kind, name) for name in FORMATS for kind in kinds if (kind, name) != ("drill", "direct")
    ]
    return {
        key: list(lessons_of(tokenizer, *key, int(count * KINDS[key[0]].share), seed))
        for key in track(keys, "lessons", len(keys))
    }


def lessons_of(tokenizer: Any, kind: Kind, name: Format, count: int, seed: int) -> Iterator[Lesson]:
    """`count` lessons of a kind, and a few more: the last dialogue is used up."""
    done = number = 0
    while done < count:
        rng = random.Random(f"remind-lessons:{seed}:{kind}:{name}:{number}")
        world, ladder = _small_world(kind, name, rng)
        dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
        for item in world.questions:
            dialogue = dialogues[item.question.dialogue_id]
            state = built_state(dialogue, item, rng) if kind == "built" else make_state(dialogue, item, ladder)
            if kind == "drill" and rng.random() < 0.7:
                state = ReflectiveState(state.attentional, _literal_summary(state.summary, item, rng))
            question = item.question
            if name == "direct" and rng.random() < 0.1:
                # now and then in other words, so that these are known as answers
                question = replace(question, answers=(rng.choice(question.answers[1:]),))
            level = rng.choices((0, 1, 2), KINDS[kind].levels)[0]
            yield make_lesson(tokenizer, state, replace(item, question=question), level)
            done += 1
        number += 1


def _small_world(kind: Kind, name: Format, rng: random.Random) -> tuple[World, LadderConfig]:
    """A small world without the rule, and what its states show."""

    def draw(choices: Sequence[Any]) -> Any:
        return choices[0] if len(choices) == 1 else rng.choice(choices)

    difficulty = KINDS[kind]
    contrary, evidence, decoys = draw(difficulty.contrary), draw(difficulty.evidence), draw(difficulty.decoys)
    seed = rng.randrange(2**40)
    config = WorldConfig(train=2, dev=0, test=0, rule="none", flag_at="reply", by_template=False, seed=seed)
    second_voice = 0.4 if kind == "full" and contrary[1] > 1 else 0.0
    config = replace(config, evidence=evidence, contrary=contrary, second_voice=second_voice, formats=(name,))
    return make_world(config), LadderConfig(decoys=decoys, seed=seed)


def built_state(dialogue: Dialogue, item: WorldQuestion, rng: random.Random) -> ReflectiveState:
    """States like those of the pipeline: most remarks of the trait among many turns that are not about it.

    Marks tell which turns are about the trait, and not which of them count; some are missing, many are wrong.
    """
    own = [turns for turns in item.remarks if rng.random() < 0.8]
    needed = [turns for turns, counts in zip(item.remarks, item.is_evidence, strict=True) if counts]
    if not any(turns in needed for turns in own):
        own.append(rng.choice(needed))
    positions = {dialogue.positions[turn] for turns in own for turn in turns}
    own_turns = set(positions)
    size = rng.randint(*_TURNS)
    while len(positions) < min(size, len(dialogue.turns)):
        start = rng.randrange(len(dialogue.turns))
        positions.update(range(start, min(start + rng.randint(1, 4), len(dialogue.turns))))
    question, asked = item.question, understand(item.question.text)
    anchors = strategy(asked)
    if rng.random() < 0.5:
        anchors["behavioural_focus"] = []
    plan = Strategy(
        tuple(anchors["reasoning"]),
        tuple(anchors["target_speaker"]),
        tuple(anchors["related_entities"]),
        tuple(anchors["behavioural_focus"]),
    )
    factual = FactualState(dialogue, question, segments_of(dialogue, sorted(positions)), plan)
    missed, wrong = rng.choice(((0.1, 0.1), (0.25, 0.15), (0.3, 0.2)))
    marked = {
        turn.id
        for place, turn in zip(factual.positions, factual.turns, strict=True)
        if (rng.random() >= missed if place in own_turns else rng.random() < wrong)
    }
    rendered = render(factual)
    turns = zip(turns_of(rendered.text[slice(*rendered.dialogue)]), factual.turns, strict=True)
    seen = [turn._replace(marked=shown.id in question.evidence) for turn, shown in turns]
    cues = [remark.cue for remark in remarks(asked, seen) if remark.marked]
    value = None if rng.random() < 0.05 else item.trait.value
    reply = Reply("", compose(asked, question.options, value, cues, rng))
    attentional = AttentionalState(factual, mark_blocks(factual, marked))
    return ReflectiveState(attentional, read_summary(attentional, reply))


def _literal_summary(summary: str, item: WorldQuestion, rng: random.Random) -> str:
    """The summary with the words of the answer, or of a right option, in place of its own."""
    question, entry = item.question, item.trait.words
    words = entry["label"][0]
    if question.format == "multi" and rng.random() < 0.5:
        words = rng.choice(
            [text for letter, text in zip("ABCD", question.options, strict=True) if letter in question.answers]
        )
    for gist in entry["gist"]:
        summary = summary.replace(gist, words)
    return summary


def make_lesson(tokenizer: Any, state: ReflectiveState, item: WorldQuestion, level: int) -> Lesson:
    """A question under one of its states as tokens, and where in them its answer lies."""
    question = item.question
    rendered = render((state.attentional.factual, state.attentional, state)[level])
    tokens = tokenize(tokenizer, rendered.text)
    prompt = prompt_ids(tokenizer, rendered.text)
    # what the chat template puts before the text
    offset = next(n for n in range(len(prompt)) if prompt[n : n + len(tokens.ids)] == tokens.ids)
    answer = [*tokenize(tokenizer, str(target(question))).ids, end_token_id(tokenizer)]
    options: list[tuple[int, bool]] = []
    if question.options:
        [heading] = tokenize(tokenizer, "Options:\n").ids
        start = len(prompt) - 1 - prompt[::-1].index(heading)
        # letter, words, line end: a token each
        options = [(start + 2 + 3 * n, "ABCD"[n] in question.answers) for n in range(len(question.options))]
    words = lexicon()["dimensions"][item.trait.dimension]
    if level == 2:
        # what is concluded, without what is said to each of the options
        start = rendered.text.rindex(state.summary) + max(0, state.summary.find("Conclusion: "))
        spans = [(start, rendered.text.rindex("\nQuestion: "))]
        roles: tuple[str, ...] = ("gist", "label", "fits")
    else:
        roles = ("cues",)
        own = {turn for remark in item.remarks for turn in remark}
        spans = [(turn.start, turn.end) for turn in rendered.turns if turn.turn_id in own]
        if level == 1:
            marks = list(zip(rendered.markers[::2], rendered.markers[1::2], strict=True))
            inside = [(s, e) for s, e in spans if any(first[1] <= s and e <= last[0] for first, last in marks)]
            spans = inside or spans
    telling = {word for entry in words["values"].values() for role in roles for word in entry.get(role, ())}
    telling |= {word for stance in ("keen", "averse") for word in words.get(stance, ())}
    focus = [
        offset + place
        for place, (start, end) in enumerate(tokens.offsets)
        if rendered.text[start:end] in telling and any(first <= start < last for first, last in spans)
    ]
    ids, answer_ids, places = (torch.tensor(values, dtype=torch.int16) for values in (prompt, answer, focus))
    return Lesson(ids, answer_ids, places, tuple(options), item.trait.speaker, level, question.format)
