"""Items from a chat model: one request for each cluster and dimension, replies checked against a schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from remind.core.progress import ProgressBar
from remind.data.dialogue import TEXT_DIMENSIONS, VISUAL_DIMENSIONS, Corpus, Dialogue
from remind.llm.request import ChatModel, Message, Reply, Request, code_for, fenced, from_template
from remind.llm.structured import NotValid, object_schema
from remind.refmem.cluster import Cluster
from remind.refmem.config import ItemsConfig
from remind.refmem.items import Item, shuffled, with_id
from remind.states import prompts
from remind.states.pyramid import line_of, one_line
from remind.text.words import guide

T = TypeVar("T")
TEMPLATE = "refmem_items"
MAX_TOKENS = 4096
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


def item_request(dialogue: Dialogue, cluster: Cluster, dimension: str, config: ItemsConfig) -> Request:
    """The request for a cluster's questions of one dimension. The passages are fenced as data."""
    turns = list(cluster.turns)
    if len(turns) > config.max_turns:
        step = len(turns) / config.max_turns
        turns = [turns[int(place * step)] for place in range(config.max_turns)]
    passages, session = [], ""
    for name in turns:
        turn, own = dialogue.turn(name), dialogue.session_of[name]
        if own.id != session:
            session = own.id
            passages.append(f"--- {own.time or 'session ' + own.id}")
        passages.append(f"[{name}] {line_of(turn)}")
        passages += [f"[image {image.index}] {one_line(image.caption or 'no caption')}" for image in turn.images]
    text = "\n".join(passages)
    code = code_for([text])
    ask = guide(dimension)
    return from_template(
        "questions",
        TEMPLATE,
        cluster.id,
        SCHEMA,
        MAX_TOKENS,
        demand=ask.demand,
        reasoning=ask.reasoning,
        visual=ask.visual,
        count=config.per_cluster,
        formats=config.formats,
        code=code,
        passages=fenced("passages", text, code),
    )


def read_reply(reply: Reply, cluster: Cluster, dimension: str, config: ItemsConfig, made_by: str) -> list[Item]:
    """The items of a reply, options in an order drawn from `config.seed`; invalid ones are left out.

    Raises:
        NotValid: the reply failed, or none of its items is valid.
    """
    if reply.failure is not None:
        raise NotValid(reply.message or reply.failure)
    items: list[Item] = []
    per_format: Counter[str] = Counter()
    reason = ""
    for row in reply.value["items"]:
        item = Item(
            id="",
            dialogue_id=cluster.dialogue_id,
            cluster_id=cluster.id,
            branch=cluster.branch,
            dimension=dimension,
            format=row["format"],
            question=one_line(row["question"]),
            options=tuple(map(one_line, row["options"])),
            answers=tuple(dict.fromkeys(map(one_line, row["answers"]))),
            candidates=tuple(dict.fromkeys(map(one_line, row["candidates"]))),
            evidence=tuple(dict.fromkeys(row["evidence"])),
            images=tuple(dict.fromkeys(row["images"])),
            made_by=made_by,
            prompt_id=prompts.prompt_id(TEMPLATE),
        )
        problem = item.problem() or ("" if item.format in config.formats else "a format not asked for")
        if problem:
            reason = reason or problem
            continue
        if item.format != "direct":
            item = replace(item, candidates=())
        per_format[item.format] += 1
        if per_format[item.format] <= config.per_cluster:
            items.append(shuffled(with_id(item), str(config.seed)))
    if reason and not items:
        raise NotValid(reason)
    return items


def write_questions(
    corpus: Corpus, clusters: Sequence[Cluster], chat: ChatModel, config: ItemsConfig
) -> tuple[list[Item], dict[str, int]]:
    """Items of all clusters from a chat model, and counts of its requests.

    A reply without a valid item is asked for once more with the reason, then dropped.

    Returns:
        The items, and {"requests", "retried", "dropped"}.

    Raises:
        ModelError: the endpoint as a whole cannot be used.
    """
    dimensions = {"text": TEXT_DIMENSIONS, "image": VISUAL_DIMENSIONS}
    tasks = [(cluster, dimension) for cluster in clusters for dimension in dimensions[cluster.branch]]
    requests = [item_request(corpus.dialogue(c.dialogue_id), c, dimension, config) for c, dimension in tasks]
    items, dropped, retried = ask_twice(
        chat, requests, lambda number, reply: read_reply(reply, *tasks[number], config, chat.name), "items"
    )
    unique: dict[str, Item] = {}
    for number in sorted(items):
        for item in items[number]:
            unique.setdefault(item.id, item)
    return list(unique.values()), {"requests": len(requests), "retried": retried, "dropped": len(dropped)}


def ask_twice(
    chat: ChatModel, requests: Sequence[Request], read: Callable[[int, Reply], T], title: str
) -> tuple[dict[int, T], dict[int, str], int]:
    """What is read of each reply; one that cannot be used is asked for once more with the reason.

    Args:
        read: takes the place of a request and its reply; raises NotValid for one of no use.

    Returns:
        By place what was read, by place why the rest was not, and how many were asked for again.

    Raises:
        ModelError: the endpoint as a whole cannot be used.
    """
    found: dict[int, T] = {}
    dropped: dict[int, str] = {}
    retried = 0
    pending = dict(enumerate(requests))
    while pending:
        with ProgressBar(title, len(pending)) as bar:
            replies = chat.complete(list(pending.values()), lambda *_: bar.step())
        again = {}
        for (number, request), reply in zip(pending.items(), replies, strict=True):
            try:
                found[number] = read(number, reply)
                dropped.pop(number, None)
            except NotValid as error:
                # the client has already repeated requests that failed
                if reply.failure in (None, "invalid") and number not in dropped:
                    why = f"That reply cannot be used: {error}. Give the same content again as one JSON value that "
                    why += "matches the required schema. Write nothing before or after it."
                    told = (Message("assistant", reply.text), Message("user", why))
                    again[number] = replace(request, messages=(*request.messages, *told))
                dropped[number] = str(error)
        pending, retried = again, retried + len(again)
    return found, dropped, retried
