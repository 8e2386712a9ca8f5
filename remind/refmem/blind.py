"""Answerable without the dialogue: a chat model without context, or rules that look at the items alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from remind.core.progress import Counter as Bar
from remind.evaluation.metrics import token_f1
from remind.llm.request import ChatModel, Message, Reply, Request, code_for, fenced
from remind.refmem.items import Item
from remind.states import prompts
from remind.states.pyramid import LETTERS, one_line
from remind.text.words import stems

TEMPLATE = "refmem_blind"
ROOM = 256
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"answers": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
    "required": ["answers"],
    "additionalProperties": False,
}
#: How often at least an option has been right elsewhere, and how much more often than the next, to be trusted.
_SEEN, _MARGIN = 4, 0.25
#: Token F1 from which a guess counts as a direct answer.
_SAME = 0.99


def shuffled(item: Item, seed: int, draw: int) -> Item:
    """The item with its options in the order of this draw."""
    if not item.options:
        return item
    order = list(range(len(item.options)))
    Random(f"{seed}:{draw}:{item.id}").shuffle(order)
    letters = sorted(LETTERS[order.index(LETTERS.index(letter))] for letter in item.answers)
    return replace(item, options=tuple(item.options[place] for place in order), answers=tuple(letters))


def guessed_by_rule(items: Sequence[Item], draws: int, seed: int) -> set[str]:
    """Ids of the items that rules get right in every draw.

    Two rules, of which the first that is sure speaks: the only options that share a word with the question; the options
    that have been right much more often than the others in items of other clusters, of which each draw sees a half.
    Direct items: the answer most common in that half among those to questions of the same wording's first words.
    """
    right: Counter[str] = Counter()
    for draw in range(draws):
        half = {
            cluster: Random(f"{seed}:{draw}:{cluster}").random() < 0.5
            for cluster in dict.fromkeys(item.cluster_id for item in items)
        }
        book = _Book([item for item in items if half[item.cluster_id]])
        for item in items:
            right[item.id] += _right(item, book)
    return {name for name, count in right.items() if draws and count == draws}


def _right(item: Item, book: _Book) -> bool:
    if item.format == "direct":
        guess = book.usual(item)
        return guess is not None and guess.lower() in {answer.lower() for answer in item.answers}
    told = set(stems(item.question))
    shared = {option for option in item.options if set(stems(option)) & told}
    guess_set = shared if 0 < len(shared) < len(item.options) else book.likely(item)
    return bool(guess_set) and guess_set == set(item.gold)


class _Book:
    """How often an option was offered and right, and which direct answers a kind of question had, by cluster."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.offered: Counter[str] = Counter()
        self.right: Counter[str] = Counter()
        self.own: dict[str, Counter[tuple[str, bool]]] = defaultdict(Counter)
        self.answers: dict[str, Counter[str]] = defaultdict(Counter)
        self.answers_of: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for item in items:
            if item.format == "direct":
                self.answers[_opening(item)].update(item.answers)
                self.answers_of[item.cluster_id, _opening(item)].update(item.answers)
                continue
            for option in item.options:
                hit = option in item.gold
                self.offered[option] += 1
                self.right[option] += hit
                self.own[item.cluster_id][option, hit] += 1

    def likely(self, item: Item) -> set[str]:
        """Options that are right far more often than the rest, in the items of other clusters; none if unsure."""
        rates = {}
        own = self.own.get(item.cluster_id, Counter())
        for option in item.options:
            seen = self.offered[option] - own[option, True] - own[option, False]
            if seen < _SEEN:
                return set()
            rates[option] = (self.right[option] - own[option, True]) / seen
        ordered = sorted(rates.values(), reverse=True)
        count = len(item.answers) if item.format == "single" else sum(rate >= 0.5 for rate in ordered)
        if not 0 < count < len(ordered) or ordered[count - 1] - ordered[count] < _MARGIN:
            return set()
        return {option for option, rate in rates.items() if rate >= ordered[count - 1]}

    def usual(self, item: Item) -> str | None:
        """The most common answer to such questions elsewhere; None if no answer has a third of them."""
        counts = self.answers[_opening(item)] - self.answers_of.get((item.cluster_id, _opening(item)), Counter())
        if sum(counts.values()) < _SEEN:
            return None
        best = min(counts, key=lambda answer: (-counts[answer], answer))
        return best if counts[best] >= sum(counts.values()) / 3 else None


def _opening(item: Item) -> str:
    return f"{item.dimension} {' '.join(item.question.split()[:3])}"


def blind_request(item: Item, temperature: float) -> Request:
    """The question and its options alone."""
    lines = [one_line(item.question), *(f"{a}. {one_line(b)}" for a, b in zip(LETTERS, item.options, strict=False))]
    text = "\n".join(lines)
    code = code_for([text])
    parts = prompts.blocks(TEMPLATE, format=item.format, code=code, question=fenced("question", text, code))
    messages = (Message("system", parts["system"]), Message("user", parts["user"]))
    return Request(messages, "answer", item.id, prompts.prompt_id(TEMPLATE), ROOM, temperature, SCHEMA)


def guessed_by_model(items: Sequence[Item], chat: ChatModel, draws: int, seed: int) -> tuple[set[str], int]:
    """Ids of the items a chat model gets right in every draw without the dialogue, and how many replies were no guess.

    Each draw has the options in another order. A direct item, which has none, is asked once: the same words are
    answered once.
    """
    cases = [
        (item, shuffled(item, seed, draw)) for item in items for draw in range(draws if item.options else min(draws, 1))
    ]
    with Bar("blind", len(cases)) as bar:
        replies = chat.complete([blind_request(shown, 0.0) for _, shown in cases], lambda *_: bar.step())
    wrong: set[str] = set()
    failed = 0
    for (item, shown), reply in zip(cases, replies, strict=True):
        answers = _answers(reply)
        failed += answers is None
        if answers is None or not _same(shown, answers):
            wrong.add(item.id)
    return {item.id for item, _ in cases} - wrong, failed


def _answers(reply: Reply) -> list[str] | None:
    if reply.failure is not None or not isinstance(reply.value, dict):
        return None
    answers = reply.value.get("answers")
    return [str(answer) for answer in answers] if isinstance(answers, list) and answers else None


def _same(item: Item, answers: list[str]) -> bool:
    if item.format == "direct":
        return token_f1(answers[0], item.answers) >= _SAME
    return {answer.strip(" .()").upper()[:1] for answer in answers} == set(item.answers)
