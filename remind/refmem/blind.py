"""The blind test: which items a chat model answers without the dialogue."""

from __future__ import annotations

from collections.abc import Sequence

from remind.core.progress import Counter as Bar
from remind.evaluation.metrics import token_f1
from remind.llm.request import ChatModel, Request, code_for, fenced, from_template
from remind.llm.structured import object_schema
from remind.refmem.items import Item, shuffled
from remind.states.pyramid import LETTERS, one_line

TEMPLATE = "refmem_blind"
MAX_TOKENS = 256
SCHEMA = object_schema(answers={"type": "array", "items": {"type": "string"}, "minItems": 1})
#: Token F1 from which a guess counts as a direct answer.
_SAME = 0.99


def blind_request(item: Item) -> Request:
    """The question and its options alone."""
    lines = [one_line(item.question), *(f"{a}. {one_line(b)}" for a, b in zip(LETTERS, item.options, strict=False))]
    text = "\n".join(lines)
    code = code_for([text])
    shown = {"format": item.format, "code": code, "question": fenced("question", text, code)}
    return from_template("answer", TEMPLATE, item.id, SCHEMA, MAX_TOKENS, **shown)


def answered_blind(items: Sequence[Item], chat: ChatModel, draws: int, seed: int) -> tuple[set[str], int]:
    """Ids of the items a chat model gets right in every draw without the dialogue, and the number of unusable replies.

    Each draw has the options in another order. A direct item is asked once, as its prompt would be the same each time.
    """
    cases = [
        (item, shuffled(item, f"{seed}:{draw}"))
        for item in items
        for draw in range(draws if item.options else min(draws, 1))
    ]
    with Bar("blind", len(cases)) as bar:
        replies = chat.complete([blind_request(shown) for _, shown in cases], lambda *_: bar.step())
    wrong: set[str] = set()
    unusable = 0
    for (item, shown), reply in zip(cases, replies, strict=True):
        answers = [] if reply.failure is not None else list(reply.value["answers"])
        unusable += not answers
        if not answers or not _correct(shown, answers):
            wrong.add(item.id)
    return {item.id for item, _ in cases} - wrong, unusable


def _correct(item: Item, answers: list[str]) -> bool:
    if item.format == "direct":
        return token_f1(answers[0], item.answers) >= _SAME
    return {answer.strip(" .()").upper()[:1] for answer in answers} == set(item.answers)
