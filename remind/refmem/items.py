"""Draft items as JSON Lines: written by a chat model, one request for each cluster and dimension, and filtered before
annotation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, TypeAdapter, ValidationError

from remind.core.errors import DataError, ModelError
from remind.core.files import sha256_json, write_rows
from remind.core.progress import ProgressBar, warn
from remind.data.dialogue import (
    DIMENSIONS,
    TEXT_DIMENSIONS,
    VISUAL_DIMENSIONS,
    Corpus,
    Dialogue,
    Format,
    Question,
    spread,
)
from remind.data.readers.builder import Place, records
from remind.llm.request import ChatModel, Message, Reply, Request, from_template
from remind.llm.structured import NotValid, object_schema, read_value
from remind.refmem.cluster import Cluster
from remind.refmem.config import FilterConfig, ItemsConfig
from remind.states import prompts
from remind.states.pyramid import LETTERS, line_of, one_line
from remind.text.words import guide, stems, words
from sae.ranges import NonNegativeInt

K = TypeVar("K")
T = TypeVar("T")
TEMPLATE = "refmem_items"
MAX_TOKENS = 4096
#: Of an image that the chat model is shown, at most.
PIXELS = 512 * 512
_TEXTS = {"type": "array", "items": {"type": "string"}}
_ITEM = object_schema(
    format={"enum": ["single", "multi", "direct"]},
    question={"type": "string"},
    options=_TEXTS,
    answers={**_TEXTS, "minItems": 1},
    candidates=_TEXTS,
    evidence=_TEXTS,
    images={"type": "array", "items": {"type": "integer"}},
)
SCHEMA: Mapping[str, Any] = object_schema(items={"type": "array", "items": _ITEM})
#: Why items are removed, in order; an item is counted under the first that removes it.
REASONS = ("evidence", "leak", "uneven", "near_duplicate", "blind")
#: The prompt of the blind test.
BLIND_TEMPLATE = "refmem_blind"
_GUESS = object_schema(answers={**_TEXTS, "minItems": 1})


def _told(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank")
    return text


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


#: A text that is not blank, and lists without repeats, as files hold them.
Text = Annotated[str, AfterValidator(_told)]
Texts = Annotated[tuple[Text, ...], AfterValidator(_distinct)]
ImageIndices = Annotated[tuple[NonNegativeInt, ...], AfterValidator(_distinct)]


@dataclass(frozen=True)
class Item:
    """A question with its evidence, before annotation.

    Attributes:
        answers: letters for single and multi, acceptable phrases for direct.
        candidates: direct only: answers shown to annotators, including the accepted ones.
        evidence: turn ids. images: image indices.
        made_by: the chat model that wrote it. prompt_id: name and hash of the template.
    """

    id: Text
    dialogue_id: Text
    cluster_id: Text
    branch: Literal["text", "image"]
    dimension: str
    format: Format
    question: str
    options: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    images: ImageIndices = ()
    made_by: str = ""
    prompt_id: str = ""

    @property
    def gold(self) -> tuple[str, ...]:
        """The correct option texts, or the acceptable phrases."""
        if self.format == "direct":
            return self.answers
        return tuple(self.options[LETTERS.index(letter)] for letter in self.answers)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over what annotators see, to detect annotations of another build.

        The generated answer is not part of it: otherwise answers could be guessed by comparing hashes.
        """
        shown = [self.id, self.dialogue_id, self.dimension, self.format, self.question, list(self.options)]
        return sha256_json([*shown, sorted(self.candidates), sorted(self.evidence), sorted(self.images)])[:16]

    def problem(self) -> str | None:
        """Why this is not a valid item of its format; None if it is."""
        if self.dimension not in DIMENSIONS:
            return "unknown dimension"
        if not self.question.strip():
            return "no question"
        if not self.answers or len(set(self.answers)) < len(self.answers):
            return "no answer, or one twice"
        if self.format == "direct":
            if self.options or not all(answer.strip() for answer in self.answers):
                return "a direct item has no options and no blank answers"
            return None
        texts = {" ".join(option.lower().split()) for option in self.options}
        if len(self.options) != 4 or len(texts) < 4 or "" in texts:
            return "not four different options"
        if set(self.answers) - set(LETTERS[:4]):
            return "an answer that is no option"
        if self.format == "single" and len(self.answers) != 1:
            return "several answers to a single-choice question"
        return None

    def as_question(self, split: str | None = None) -> Question:
        """The item as the toolkit's question."""
        names = ("dialogue_id", "format", "options", "answers", "evidence", "images", "dimension")
        values = {name: getattr(self, name) for name in names}
        return Question(self.id, text=self.question, split=split, **values)


def with_id(item: Item) -> Item:
    """The item with an id derived from its question; the order of its options does not matter.

    The answer is not part of it: annotators see the id and could otherwise try the few possible answers.
    """
    content = [item.question, sorted(item.options), sorted(item.evidence), sorted(item.images)]
    values = [item.dialogue_id, item.dimension, item.format, *content]
    return replace(item, id="rm-" + hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12])


def shuffled(item: Item, key: str) -> Item:
    """The item with its options in an order drawn from `key` and its id."""
    if not item.options:
        return item
    order = list(range(len(item.options)))
    Random(f"{key}:{item.id}").shuffle(order)
    letters = sorted(LETTERS[order.index(LETTERS.index(letter))] for letter in item.answers)
    return replace(item, options=tuple(item.options[place] for place in order), answers=tuple(letters))


def anchors_missing(item: Item, dialogue: Dialogue) -> bool:
    """Whether the item has no evidence at all, or names a turn or image that the dialogue lacks."""
    turns = all(turn in dialogue.positions for turn in item.evidence)
    images = all(index < len(dialogue.images) for index in item.images)
    return not (item.evidence or item.images) or not turns or not images


def dialogue_of(item: Item, corpus: Corpus, path: str | Path | None = None) -> Dialogue:
    """The dialogue of an item. Raises DataError where that or the item's evidence is missing."""
    dialogue = corpus.dialogue(item.dialogue_id)
    if anchors_missing(item, dialogue):
        raise DataError("it has no evidence, or some that is not in the dialogue", path, item.id)
    return dialogue


def read_records(path: str | Path, kind: TypeAdapter[T]) -> Iterator[tuple[Place, T]]:
    """The records of a JSONL file, if any, each with its place; other fields are ignored.

    Raises:
        DataError: a file that cannot be read, or a record that is not of the kind.
    """
    for place, value in records(path):
        try:
            record = kind.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise place.error(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")) from None
        yield place, record


def write_items(path: str | Path, items: Sequence[Item]) -> None:
    """Items as JSONL."""
    write_rows(path, (asdict(item) for item in items))


def read_items(path: str | Path) -> list[Item]:
    """Items of a JSONL file. An empty file has none.

    Raises:
        DataError: as `read_records`; an item that is not valid in its format, or repeats an id.
    """
    items: dict[str, Item] = {}
    for place, item in read_records(path, TypeAdapter(Item)):
        if (problem := item.problem()) is not None:
            raise place.at(item.id).error(problem)
        if item.id in items:
            raise place.at(item.id).error("its id occurs twice")
        items[item.id] = item
    return list(items.values())


# writing


def item_request(dialogue: Dialogue, cluster: Cluster, dimension: str, config: ItemsConfig) -> Request:
    """The request for a cluster's questions of one dimension. The passages are fenced as data.

    With pixels each image of the cluster stands behind the line of its caption.
    """
    passages, pictures, session = list[str](), list[tuple[str, str]](), ""
    for name in spread(cluster.turns, config.max_turns):
        turn, own = dialogue.turn(name), dialogue.session_of[name]
        if own.id != session:
            session = own.id
            passages.append(f"--- {own.time or 'session ' + own.id}")
        passages.append(f"[{name}] {line_of(turn)}")
        for image in turn.images:
            passages.append(f"[image {image.index}] {one_line(image.caption or 'no caption')}")
            if config.images == "pixels" and image.path and image.index in cluster.images:
                pictures.append((f"\n{passages[-1]}\n", image.path))
    text = "\n".join(passages)
    ask = guide(dimension)
    asked = {"demand": ask.demand, "reasoning": ask.reasoning, "visual": ask.visual, "count": config.per_cluster}
    about = "questions", TEMPLATE, cluster.id, SCHEMA, MAX_TOKENS, {"passages": text}
    request = from_template(*about, formats=config.formats, **asked)
    system, user = request.messages
    parts, rest = list[dict[str, Any]](), str(user.text)
    for line, path in pictures:
        before, line, rest = rest.partition(line)
        parts += [{"type": "text", "text": before + line}, {"type": "image", "image": path, "max_pixels": PIXELS}]
    shown = replace(user, text=[*parts, {"type": "text", "text": rest}] if parts else rest)
    return replace(request, messages=(system, shown))


def read_reply(reply: Reply, cluster: Cluster, dimension: str, config: ItemsConfig, made_by: str) -> list[Item]:
    """The items of a reply, options in an order drawn from `config.seed`; invalid ones are left out.

    Raises:
        NotValid: none of its items is valid.
    """
    blank: dict[str, Any] = {"dialogue_id": cluster.dialogue_id, "cluster_id": cluster.id, "branch": cluster.branch}
    blank |= {"id": "", "dimension": dimension, "made_by": made_by, "prompt_id": prompts.prompt_id(TEMPLATE)}

    def read(row: Mapping[str, Any]) -> Item:
        options, answers = (list(map(one_line, row[name])) for name in ("options", "answers"))
        bare = [re.sub(rf"^{letter}[.):] ", "", one) for letter, one in zip(LETTERS, options, strict=False)]
        options = bare if all(map(str.__ne__, bare, options)) else options
        if row["format"] != "direct":
            # "b", "(B)", "B. the second option", or that option's text
            found = (re.fullmatch(r"\(?([A-Za-z])\)?(?:[.:)].*)?", one) for one in answers)
            named = zip(answers, found, strict=True)
            letters = dict(zip(options, LETTERS, strict=False))
            answers = [letters.get(one, letter[1].upper() if letter else one) for one, letter in named]
        item = Item(
            **blank,
            format=row["format"],
            question=one_line(row["question"]),
            options=tuple(options),
            answers=tuple(dict.fromkeys(answers)),
            candidates=tuple(dict.fromkeys(map(one_line, row["candidates"] if row["format"] == "direct" else ()))),
            evidence=tuple(dict.fromkeys(turn.strip(" []") for turn in row["evidence"])),
            images=tuple(dict.fromkeys(row["images"])),
        )
        if problem := item.problem() or ("" if item.format in config.formats else "a format not asked for"):
            raise NotValid(problem)
        return item

    kept, per_format = list[Item](), Counter[str]()
    for item in entries(reply, SCHEMA, read)[0]:
        per_format[item.format] += 1
        if per_format[item.format] <= config.per_cluster:
            kept.append(shuffled(with_id(item), str(config.seed)))
    return kept


def write_questions(
    corpus: Corpus, clusters: Sequence[Cluster], chat: ChatModel, config: ItemsConfig
) -> tuple[list[Item], dict[str, int]]:
    """Items of all clusters from a chat model, and counts of its requests.

    A reply without a valid item is asked for once more with the reason, then dropped.

    Returns:
        The items, and {"requests", "retried", "dropped"}.

    Raises:
        ModelError: the endpoint as a whole cannot be used, or more than half of its replies.
    """
    dimensions = {"text": TEXT_DIMENSIONS, "image": VISUAL_DIMENSIONS}
    requests = {
        (cluster, dimension): item_request(corpus.dialogue(cluster.dialogue_id), cluster, dimension, config)
        for cluster in clusters
        for dimension in dimensions[cluster.branch]
    }
    found, dropped, retried = ask_twice(
        chat, requests, lambda task, reply: read_reply(reply, *task, config, chat.name), "items"
    )
    if 2 * len(dropped) > len(requests):
        why = next(iter(dropped.values()))
        raise ModelError(
            f"{len(dropped)} of {len(requests)} replies of {chat.name} could not be used; the first: {why}"
        )
    unique = {item.id: item for items in found.values() for item in items}
    return list(unique.values()), {"requests": len(requests), "retried": retried, "dropped": len(dropped)}


def entries(reply: Reply, schema: Mapping[str, Any], read: Callable[[Any], T]) -> tuple[list[T], list[tuple[Any, str]]]:
    """What is read of each entry of the list in a reply, and the other entries, each with why it is of no use.

    What a server is told of an entry is asked of that entry alone; a list that it lacks is empty.

    Args:
        schema: of an object with this list alone.

    Raises:
        NotValid: there is no list, or nothing in it is of use.
    """
    ((name, items),) = ((name, one["items"]) for name, one in schema["properties"].items())
    empty = {key: list[Any]() for key, one in items["properties"].items() if one.get("type") == "array"}
    found, rejected = list[T](), list[tuple[Any, str]]()
    listed = object_schema(**{name: {"type": "array", "items": {}}})
    for entry in read_value(reply.text, listed, reply.finished)[name]:
        given = {key: value for key, value in entry.items() if value is not None} if isinstance(entry, dict) else {}
        try:
            found.append(read(read_value(json.dumps({**empty, **given}), items)))
        except NotValid as error:
            rejected.append((entry, str(error)))
    if rejected and not found:
        raise NotValid(rejected[0][1])
    return found, rejected


def counted(model: ChatModel, told: Callable[[], object]) -> Any:
    """The model, which calls `told` after each reply."""

    def complete(requests: Sequence[Request], on_reply: Callable[[int, Reply], object] | None = None) -> list[Reply]:
        def put(index: int, reply: Reply) -> None:
            told()
            if on_reply is not None:
                on_reply(index, reply)

        return model.complete(requests, put)

    return SimpleNamespace(name=model.name, complete=complete)


def ask_twice(
    chat: ChatModel, requests: Mapping[K, Request], read: Callable[[K, Reply], T], title: str
) -> tuple[dict[K, T], dict[K, str], int]:
    """What is read of each reply; one that cannot be used is asked for once more with the reason.

    Args:
        read: takes the key of a request and the text of its reply; raises NotValid for one of no use.

    Returns:
        By key what was read and why the rest was not, in the order of the requests; how many were asked for again.

    Raises:
        ModelError: the endpoint as a whole cannot be used.
    """
    found: dict[K, T] = {}
    dropped: dict[K, str] = {}
    again: dict[K, Request] = {}
    for pending in (requests, again):
        if not pending:
            break
        with ProgressBar(title, len(pending)) as bar:
            replies = chat.complete(list(pending.values()), lambda *_: bar.step())
        for (key, request), reply in zip(pending.items(), replies, strict=True):
            try:
                # what is no value of the schema as a whole may hold some that are
                if reply.failure not in (None, "invalid"):
                    raise NotValid(reply.message or reply.failure)
                found[key] = read(key, reply)
                dropped.pop(key, None)
            except NotValid as error:
                dropped[key] = str(error)
                # the client has already repeated requests that failed
                if pending is requests and reply.failure in (None, "invalid"):
                    why = f"That reply cannot be used: {error}. Give the same content again as one JSON value that "
                    why += "matches the required schema. Write nothing before or after it."
                    told = (Message("assistant", reply.text), Message("user", why))
                    again[key] = replace(request, messages=(*request.messages, *told))
    if dropped:
        warn(f"{len(dropped)} of {len(requests)} replies for {title} could not be used: {next(iter(dropped.values()))}")
    ordered = {key: found[key] for key in requests if key in found}
    return ordered, {key: dropped[key] for key in requests if key in dropped}, len(again)


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


def near_pairs(items: Sequence[Item], threshold: float) -> list[tuple[int, int]]:
    """Pairs (i < j) of items of one dialogue and format that ask nearly the same and have nearly the same answers.

    Jaccard similarity over stems reaches `threshold` for the questions and, separately, for the correct answers: the
    same wording about two subjects makes two questions.
    """
    blocks: dict[tuple[str, str], list[int]] = defaultdict(list)
    bags = []
    for number, item in enumerate(items):
        blocks[item.dialogue_id, item.format].append(number)
        bags.append([set(stems(item.question)), {stem for answer in item.gold for stem in stems(answer, frozenset())}])

    def alike(i: int, j: int) -> bool:
        pairs = zip(bags[i], bags[j], strict=True)
        return all(one & other and len(one & other) >= threshold * len(one | other) for one, other in pairs)

    return sorted(pair for block in blocks.values() for pair in combinations(block, 2) if alike(*pair))


def blind_request(question: Question) -> Request:
    """The question and its options alone: nothing of the dialogue."""
    options = zip(LETTERS, question.options, strict=False)
    text = "\n".join([one_line(question.text), *(f"{a}. {one_line(b)}" for a, b in options)])
    return from_template("answer", BLIND_TEMPLATE, question.id, _GUESS, 256, {"question": text}, format=question.format)


def answered_blind(items: Sequence[Item], chat: ChatModel, draws: int, seed: int) -> tuple[set[str], int]:
    """Ids of the items a chat model gets right in every draw without the dialogue, and the number of unusable replies.

    Each draw has the options in another order. A direct item is asked once, as its prompt would be the same each time.
    """
    cases = [
        shuffled(item, f"{seed}:{draw}") for item in items for draw in range(draws if item.options else min(draws, 1))
    ]
    with ProgressBar("blind", len(cases)) as bar:
        replies = chat.complete([blind_request(item.as_question()) for item in cases], lambda *_: bar.step())
    wrong: set[str] = set()
    unusable = 0
    for item, reply in zip(cases, replies, strict=True):
        answers = [] if reply.failure is not None else list(reply.value["answers"])
        unusable += not answers
        if item.format == "direct":
            right = bool(answers) and words(answers[0]) in map(words, item.answers)
        else:
            right = {answer.strip(" .()").upper()[:1] for answer in answers} == set(item.answers)
        if not right:
            wrong.add(item.id)
    return {item.id for item in cases} - wrong, unusable


def apply_filters(
    items: Sequence[Item], corpus: Corpus, config: FilterConfig, chat: ChatModel | None = None
) -> tuple[dict[str, str], int]:
    """Why items are removed (`REASONS`) by id; of items that are nearly the same, the first stays.

    Args:
        chat: tries to answer without the dialogue, `config.blind_draws` times; None: that filter is skipped.

    Returns:
        The reasons, and how many replies of the chat model could not be read as a guess.

    Raises:
        DataError: an item of an unknown dialogue.
        ModelError: the endpoint as a whole cannot be used.
    """
    reasons: dict[str, str] = {}

    def left() -> list[Item]:
        return [item for item in items if item.id not in reasons]

    def drop(reason: str, test: Callable[[Item], bool]) -> None:
        reasons.update({item.id: reason for item in left() if test(item)})

    drop("evidence", lambda item: anchors_missing(item, corpus.dialogue(item.dialogue_id)))
    drop("leak", leaks)
    drop("uneven", lambda item: uneven(item, config))
    rest = left()
    for i, j in near_pairs(rest, config.near_duplicate):
        if rest[i].id not in reasons:
            reasons[rest[j].id] = "near_duplicate"
    no_guess = 0
    if chat is not None:
        answered, no_guess = answered_blind(left(), chat, config.blind_draws, config.seed)
        drop("blind", lambda item: item.id in answered)
    return reasons, no_guess
