"""Items from a chat model: one request for a cluster and a dimension, replies checked against a schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from remind.core.progress import Counter as Bar
from remind.data.dialogue import TEXT_DIMENSIONS, VISUAL_DIMENSIONS, Corpus, Dialogue
from remind.llm.request import ChatModel, Message, Reply, Request, code_for, fenced
from remind.llm.structured import NotValid, read_value, repair
from remind.refmem.cluster import Cluster
from remind.refmem.config import ItemsConfig
from remind.refmem.items import Item, with_id
from remind.states import prompts
from remind.states.pyramid import line_of, one_line
from remind.text.strategy import guide

TEMPLATE = "refmem_items"
#: Room for a reply, in tokens.
ROOM = 4096
_TEXTS = {"type": "array", "items": {"type": "string"}}
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "format": {"enum": ["single", "multi", "direct"]},
                    "question": {"type": "string"},
                    "options": _TEXTS,
                    "answers": {**_TEXTS, "minItems": 1},
                    "candidates": _TEXTS,
                    "evidence": _TEXTS,
                    "images": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["format", "question", "options", "answers", "candidates", "evidence", "images"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["items"],
    "additionalProperties": False,
}


def dimensions_of(cluster: Cluster) -> tuple[str, ...]:
    """The dimensions a cluster's branch asks about."""
    return TEXT_DIMENSIONS if cluster.branch == "text" else VISUAL_DIMENSIONS


def item_request(dialogue: Dialogue, cluster: Cluster, dimension: str, config: ItemsConfig) -> Request:
    """What a chat model is asked for a cluster's questions of one dimension. The passages are fenced as data."""
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
    parts = prompts.blocks(
        TEMPLATE,
        demand=ask.demand,
        reasoning=ask.reasoning,
        visual=ask.visual,
        count=config.per_cluster,
        formats=config.formats,
        code=code,
        passages=fenced("passages", text, code),
    )
    messages = (Message("system", parts["system"]), Message("user", parts["user"]))
    return Request(messages, "questions", cluster.id, prompts.prompt_id(TEMPLATE), ROOM, schema=SCHEMA)


def read_reply(reply: Reply, cluster: Cluster, dimension: str, config: ItemsConfig, by: str) -> list[Item]:
    """The items of a reply; one that is no item of its format, or of a format not asked for, is left out.

    Raises:
        NotValid: the reply failed, is not the JSON asked for, or holds items of which none can be used.
    """
    if reply.failure is not None:
        raise NotValid(reply.message or reply.failure)
    value = reply.value if reply.value is not None else read_value(reply.text, SCHEMA, reply.finished)
    items: list[Item] = []
    made: Counter[str] = Counter()
    reason = ""
    for row in value["items"]:
        item = Item(
            "",
            cluster.dialogue_id,
            cluster.id,
            cluster.branch,
            dimension,
            row["format"],
            one_line(row["question"]),
            tuple(map(one_line, row["options"])),
            tuple(dict.fromkeys(map(one_line, row["answers"]))),
            tuple(dict.fromkeys(map(one_line, row["candidates"]))),
            tuple(dict.fromkeys(row["evidence"])),
            tuple(dict.fromkeys(row["images"])),
            by,
            prompts.prompt_id(TEMPLATE),
        )
        problem = item.problem() or ("" if item.format in config.formats else "a format not asked for")
        if problem:
            reason = reason or problem
            continue
        if item.format != "direct":
            item = replace(item, answers=tuple(sorted(item.answers)), candidates=())
        made[item.format] += 1
        if made[item.format] <= config.per_cluster:
            items.append(with_id(item))
    if value["items"] and not items:
        raise NotValid(reason)
    return items


def write_asked(
    corpus: Corpus, clusters: Sequence[Cluster], chat: ChatModel, config: ItemsConfig
) -> tuple[list[Item], dict[str, int]]:
    """Items of all clusters as a chat model writes them, and counts of what became of the requests.

    A reply that cannot be used is asked for once more with the reason; if that fails too, it is dropped. Nobody writes
    in the model's place.

    Returns:
        The items, and {"requests", "retried", "dropped"}.

    Raises:
        ModelError: the endpoint as a whole cannot be used.
    """
    asked = [(cluster, dimension) for cluster in clusters for dimension in dimensions_of(cluster)]
    requests = [item_request(corpus.dialogue(c.dialogue_id), c, dimension, config) for c, dimension in asked]
    found: dict[int, list[Item]] = {}
    again: dict[int, Request] = {}

    def read(number: int, reply: Reply) -> NotValid | None:
        try:
            found[number] = read_reply(reply, *asked[number], config, chat.name)
        except NotValid as error:
            return error
        return None

    with Bar("items", len(requests)) as bar:
        replies = chat.complete(requests, lambda *_: bar.step())
    for number, reply in enumerate(replies):
        error = read(number, reply)
        # a failed reply was tried again where that helps: the model behind it repairs what its schema refuses
        if error is not None and reply.failure is None:
            messages = (*requests[number].messages, *repair(reply.text, str(error)))
            again[number] = replace(requests[number], messages=messages)
    if again:
        for number, reply in zip(again, chat.complete(list(again.values())), strict=True):
            read(number, reply)
    unique: dict[str, Item] = {}
    for number in sorted(found):
        for item in found[number]:
            unique.setdefault(item.id, item)
    counts = {"requests": len(requests), "retried": len(again), "dropped": len(requests) - len(found)}
    return list(unique.values()), counts
