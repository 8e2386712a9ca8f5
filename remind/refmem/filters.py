"""Filters before annotation; each counts the items it removed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from remind.core.files import write_rows
from remind.core.progress import ProgressBar
from remind.data.dialogue import Corpus, Question
from remind.evaluation.metrics import token_f1
from remind.llm.request import ChatModel, Request, code_for, fenced, from_template
from remind.llm.structured import object_schema
from remind.refmem.config import FilterConfig
from remind.refmem.items import Item, anchors_missing, shuffled, write_items
from remind.states.pyramid import LETTERS, one_line
from remind.text.words import stems, words

#: In the order in which they are applied; an item is counted under the first that removes it.
REASONS = ("malformed", "evidence", "leak", "uneven", "duplicate", "near_duplicate", "blind")
#: The prompt of the blind test.
BLIND_TEMPLATE = "refmem_blind"
_GUESS = object_schema(answers={"type": "array", "items": {"type": "string"}, "minItems": 1})
#: Token F1 from which a guess counts as a direct answer.
_SAME = 0.99


@dataclass(frozen=True)
class Filtered:
    """Items that stay, and those removed with the reason, in the order of the input.

    Attributes:
        counts: removed items by reason, for all reasons.
        no_guess: replies of the chat model that could not be read as a guess.
    """

    kept: tuple[Item, ...]
    removed: tuple[tuple[Item, str], ...]
    counts: dict[str, int]
    no_guess: int = 0


def leaks(item: Item) -> bool:
    """Whether the question gives a correct answer away.

    An answer leaks if all its content words are in the question, or the answer itself is; but not if the same is true
    of every option.
    """
    question_stems, question = set(stems(item.question)), words(item.question)

    def given(text: str) -> bool:
        content, whole = set(stems(text)), words(text)
        quoted = any(question[start : start + len(whole)] == whole for start in range(len(question)))
        return bool(content and content <= question_stems) or bool(whole and quoted)

    return any(map(given, item.gold)) and not (item.options and all(map(given, item.options)))


def uneven(item: Item, config: FilterConfig) -> bool:
    """Whether the lengths of the options differ so much that they could tell the answer."""
    if not item.options:
        return False
    lengths = [len(" ".join(option.split())) for option in item.options]
    difference = max(lengths) - min(lengths)
    return difference > config.length_slack and max(lengths) > config.length_ratio * min(lengths)


def _similar(bags: Sequence[frozenset[str]], threshold: float) -> set[tuple[int, int]]:
    """Pairs (i < j) of bags whose Jaccard similarity is at least `threshold`; empty bags match nothing."""
    from sklearn.preprocessing import MultiLabelBinarizer

    table = MultiLabelBinarizer(sparse_output=True).fit_transform(bags)
    common = (table @ table.T).tocoo()
    return {
        (int(i), int(j))
        for i, j, shared in zip(common.row, common.col, common.data, strict=True)
        if i < j and shared >= threshold * (len(bags[i]) + len(bags[j]) - shared)
    }


def near_pairs(items: Sequence[Item], threshold: float) -> list[tuple[int, int]]:
    """Pairs (i < j) of items of one dialogue and format that ask nearly the same and have nearly the same answers.

    Jaccard similarity over stems reaches `threshold` for the questions and, separately, for the correct answers: the
    same wording about two subjects makes two questions.
    """
    blocks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        blocks[item.dialogue_id, item.format].append(number)
    pairs = []
    for block in blocks.values():
        questions = [frozenset(stems(items[number].question)) for number in block]
        gold = [frozenset(s for answer in items[number].gold for s in stems(answer, frozenset())) for number in block]
        alike = _similar(questions, threshold) & _similar(gold, threshold)
        pairs += [(block[i], block[j]) for i, j in alike]
    return sorted(pairs)


def blind_request(question: Question) -> Request:
    """The question and its options alone: nothing of the dialogue."""
    options = zip(LETTERS, question.options, strict=False)
    text = "\n".join([one_line(question.text), *(f"{a}. {one_line(b)}" for a, b in options)])
    code = code_for([text])
    shown = {"format": question.format, "code": code, "question": fenced("question", text, code)}
    return from_template("answer", BLIND_TEMPLATE, question.id, _GUESS, 256, **shown)


def _answered_blind(items: Sequence[Item], chat: ChatModel, draws: int, seed: int) -> tuple[set[str], int]:
    """Ids of the items a chat model gets right in every draw without the dialogue, and the number of unusable replies.

    Each draw has the options in another order. A direct item is asked once, as its prompt would be the same each time.
    """
    cases = [
        (item, shuffled(item, f"{seed}:{draw}"))
        for item in items
        for draw in range(draws if item.options else min(draws, 1))
    ]
    with ProgressBar("blind", len(cases)) as bar:
        replies = chat.complete([blind_request(shown.as_question()) for _, shown in cases], lambda *_: bar.step())
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


def apply_filters(
    items: Sequence[Item], corpus: Corpus, config: FilterConfig, chat: ChatModel | None = None
) -> Filtered:
    """Remove items for `REASONS`; of items that are the same, the first stays.

    Args:
        chat: tries to answer without the dialogue, `config.blind_draws` times; None: that filter is skipped.

    Raises:
        DataError: an item of an unknown dialogue.
        ModelError: the endpoint as a whole cannot be used.
    """
    reasons: dict[int, str] = {}

    def left() -> list[int]:
        return [number for number in range(len(items)) if number not in reasons]

    def drop(reason: str, test: Callable[[Item], bool]) -> None:
        reasons.update({number: reason for number in left() if test(items[number])})

    drop("malformed", lambda item: item.problem() is not None)
    drop("evidence", lambda item: anchors_missing(item, corpus.dialogue(item.dialogue_id)))
    drop("leak", leaks)
    drop("uneven", lambda item: uneven(item, config))
    seen: set[tuple[Any, ...]] = set()
    for number in left():
        item = items[number]
        gold = sorted(" ".join(words(answer)) for answer in item.gold)
        content = (item.dialogue_id, item.format, " ".join(words(item.question)), *gold)
        if content in seen:
            reasons[number] = "duplicate"
        seen.add(content)
    rest = left()
    for i, j in near_pairs([items[number] for number in rest], config.near_duplicate):
        if rest[i] not in reasons:
            reasons.setdefault(rest[j], "near_duplicate")
    no_guess = 0
    if chat is not None:
        answered, no_guess = _answered_blind(
            [items[number] for number in left()], chat, config.blind_draws, config.seed
        )
        drop("blind", lambda item: item.id in answered)
    counts = Counter(reasons.values())
    return Filtered(
        tuple(items[number] for number in left()),
        tuple((items[number], reasons[number]) for number in sorted(reasons)),
        {reason: counts[reason] for reason in REASONS},
        no_guess,
    )


def make_filtered(
    folder: Path, items: Sequence[Item], corpus: Corpus, config: FilterConfig, chat: ChatModel | None
) -> dict[str, Any]:
    """Write items.jsonl (what stays) and removed.jsonl; returns the counts."""
    done = apply_filters(items, corpus, config, chat)
    write_items(folder / "items.jsonl", done.kept)
    removed = ({**asdict(item), "reason": reason} for item, reason in done.removed)
    write_rows(folder / "removed.jsonl", removed)
    return {
        "in": len(items),
        "kept": len(done.kept),
        "removed": done.counts,
        "blind_by": None if chat is None else chat.name,
        "no_guess": done.no_guess,
    }
