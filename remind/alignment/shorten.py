"""Contexts too long for the model, by explicit wish: the oldest turns are left out, the same ones in every state."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from remind.models.chat import end_token_id, prompt_ids, tokenize
from remind.states.parquet import StateRecord
from remind.states.pyramid import LEVELS, Rendered, shown_images

_HEADER = re.compile(r"^\[Session [^\n]*\]\n", re.MULTILINE)


def shortened(tokenizer: Any, record: StateRecord, limit: int, reserve: int) -> tuple[StateRecord, int]:
    """The record without as many of its oldest turns as it takes to fit, and their number. One turn always stays.

    y* loses the evidence that is no longer there. Spans of the turns that stay are not kept up.

    Args:
        limit: most tokens of a prompt, in any state, with its answer.
        reserve: tokens for the answer where the record has none.
    """
    turns = record.x0.turns
    excess = _length(tokenizer, record, reserve) - limit
    if excess <= 0 or len(turns) < 2:
        return record, 0
    sizes = [len(tokenize(tokenizer, record.x0.text[turn.start : turn.end]).ids) for turn in turns]
    most = len(turns) - 1
    # a guess by the sizes of the turns, then as it really is: markers, headers and evidence go or stay with them
    count = next((n for n in range(1, most) if sum(sizes[:n]) >= excess), most)
    while count < most and _length(tokenizer, _without(record, count), reserve) > limit:
        count += 1
    while count > 1 and _length(tokenizer, _without(record, count - 1), reserve) <= limit:
        count -= 1
    return _without(record, count), count


def _length(tokenizer: Any, record: StateRecord, reserve: int) -> int:
    target = record.target
    answer = reserve if target is None else len([*tokenize(tokenizer, target).ids, end_token_id(tokenizer)])
    return max(len(prompt_ids(tokenizer, record.level(level).text)) for level in LEVELS) + answer


def _without(record: StateRecord, count: int) -> StateRecord:
    gone = {turn.turn_id for turn in record.x0.turns[:count]}
    x0, x1, x2 = (_cut(record.level(level), count) for level in LEVELS)
    target = record.target
    if target is not None and record.visual:
        target = _without_images(target, {n for turn in record.x0.turns[:count] for n in shown_images(record.x0, turn)})
    elif target is not None:
        lines = dict(zip(record.evidence, record.evidence_lines, strict=False))
        target = _without_lines(target, {lines[turn] for turn in gone & lines.keys()})
    return replace(record, x0=x0, x1=x1, x2=x2, target=target)


def _cut(rendered: Rendered, count: int) -> Rendered:
    """Without the first `count` turns; the session they stood in and a block that goes on are named again."""
    begin, start = rendered.dialogue[0], rendered.turns[count].start
    ends = [begin, *(turn.end for turn in rendered.turns[:count])]
    # headers stand between turns; what a turn says can look like one
    between = [rendered.text[end : turn.start] for end, turn in zip(ends, rendered.turns, strict=False)]
    headers = _HEADER.findall("".join(between))
    before = [span for span in rendered.markers if span[1] <= start]
    # an odd number of markers: the cut goes through a block
    marker = rendered.text[slice(*before[-1])] if len(before) % 2 else ""
    text = rendered.text[:begin] + (headers[-1] if headers else "") + marker + rendered.text[start:]
    return replace(rendered, text=text)


def _without_lines(target: str, lines: set[str]) -> str:
    head, opened, rest = target.partition("<explanation>")
    body, closed, tail = rest.rpartition("</explanation>")
    kept = "\n".join(line for line in body.split("\n") if line not in lines)
    return f"{head}{opened}{kept}{closed}{tail}"


def _without_images(target: str, numbers: set[int]) -> str:
    head, opened, rest = target.partition("<explanation>[")
    body, closed, tail = rest.partition("]")
    kept = ", ".join(part for part in body.split(", ") if not part.isdigit() or int(part) not in numbers)
    return f"{head}{opened}{kept}{closed}{tail}"
