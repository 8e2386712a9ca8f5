"""Answers from memories: one function for all systems, and a reader that asks a chat model (LongMemEval, 5.5)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from remind.core.errors import ConfigError
from remind.data.dialogue import NO_INFORMATION, VISUAL_DIMENSIONS
from remind.evaluation.parse import parse_answer
from remind.llm.request import ChatModel, Message, Request, Stage, from_template
from remind.memory.base import Memory, Query
from remind.perception.auxiliary import question_lines
from remind.states import prompts
from remind.states.pyramid import frame, one_line
from remind.text.days import day_of, spans
from remind.text.thoughts import without_thoughts

#: direct: the answer alone. con: notes on all memories first, in the same reply (Chain-of-Note). cite: the answer with
#: the memories it rests on (RMM, D.2). respond: as one would reply to the person; for questions that ask for advice.
#: x0: the prompt of a factual state without a strategy (Tables 9, 10): the answer with the evidence that explains it.
Mode = Literal["direct", "con", "cite", "respond", "x0"]

#: Room for a reply in tokens, where the published code gives one.
ROOM = {"direct": 500, "con": 800, "cite": 500, "respond": 800, "x0": 500}

#: Not behind a word or a bracket, where it is an index; groups in a row are one. Longer numbers are years.
_GROUPS = re.compile(r"(?<![\w\])])((?:\[\s*\d{1,3}(?:\s*,\s*\d{1,3})*\s*\]\s*)+)")
_NO_CITE = re.compile(r"\[\s*NO_CITE\s*\]", re.IGNORECASE)
_ANSWER = re.compile(r"^\W*answer\W*:[\s*_]*", re.IGNORECASE | re.MULTILINE)
#: An item of a list, and a line that tells of something else ("Explanation: …").
_ITEM, _ASIDE = re.compile(r"\s*(?:[-*•]|\d+[.)])\s"), re.compile(r"\W*\w\w+:\s")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader makes of memories.

    Attributes:
        text: the answer; "" where there is none.
        output: the reply as it came, where it tags answer and explanation (x0).
        cited: places, in what was given, of the memories it rests on; empty: it says that none helped. None: it does
            not tell, so that nothing can be learned from it.
        tokens: of prompts and of replies, as the server counts them.
        failure: why there is no answer, in a line.
    """

    text: str
    output: str = ""
    cited: frozenset[int] | None = None
    tokens: tuple[int, int] = (0, 0)
    failure: str | None = None


#: Finds the chat model of a stage; None: no endpoint is named. `Bank.chat` is one.
ChatOf = Callable[[Stage], ChatModel | None]


@dataclass(frozen=True)
class ChatReader:
    """Asks the chat model of the stage read.

    Attributes:
        mode: how memories are read.
    """

    mode: Mode = "con"

    def read_all(self, tasks: Sequence[tuple[Query, Sequence[Memory]]], chat: ChatOf) -> list[Reading]:
        """What is made of each query with its memories; their requests go to the model together.

        Raises:
            ConfigError: no endpoint is named for what is asked.
        """
        if (model := chat("read")) is None:
            raise ConfigError("no endpoint is named for the stage read; set --llm.answer or --llm.default")
        orders = [in_order(memories) for _, memories in tasks]
        requests = [
            self.request(query, [memories[place] for place in order])
            for (query, memories), order in zip(tasks, orders, strict=True)
        ]
        readings = []
        for reply, shown in zip(model.complete(requests), orders, strict=True):
            text, output, cited = without_thoughts(reply.text).strip(), "", None
            counts = (reply.prompt_tokens, reply.completion_tokens)
            if reply.failure is not None:
                readings.append(Reading("", tokens=counts, failure=f"{reply.failure}: {reply.message}"))
                continue
            if self.mode == "cite":
                text, cited = citations(text, len(shown))
            elif self.mode == "x0":
                text, output = parse_answer(text).answer, text
            elif self.mode != "direct" and (last := _ANSWER.split(text)[-1].strip()):
                text = last if last == text else _before_more(last)
            places = None if cited is None else frozenset(shown[one] for one in cited)
            readings.append(Reading(text, output, places, counts))
        return readings

    def request(self, query: Query, memories: Sequence[Memory]) -> Request:
        """The prompt that is answered from; memories are numbered from 0 as they are shown."""
        if self.mode == "x0":
            # memories in place of its turns; of all dimensions the prompt only tells whether images are asked for
            asked = replace(query.question(), dimension=VISUAL_DIMENSIONS[0] if query.visual else None)
            text = as_turns(memories).join(frame(asked, True))
            return Request((Message("user", text),), "read", query.id, prompts.prompt_id("answer"), ROOM["x0"])
        rows = [
            {"memory": number, "date": one_line(memory.time or "unknown"), "content": memory.text}
            for number, memory in enumerate(memories)
        ]
        data = {"memories": json.dumps(rows, ensure_ascii=False, indent=1), **question_lines(query.question())}
        told: dict[str, Any] = {"abstention": "" if query.options else NO_INFORMATION, "mode": self.mode}
        return from_template("read", "memory_read", query.id, None, ROOM[self.mode], data, format=query.format, **told)


def _before_more(text: str) -> str:
    """An answer without what follows it: behind a blank line, which may stand in a list and before one, or a label."""
    kept, gap = list[str](), False
    for line in text.splitlines():
        if kept and _ASIDE.match(line):
            break
        if gap and not (_ITEM.match(line) and (_ITEM.match(kept[-1]) or kept[-1].rstrip("*_ ").endswith(":"))):
            break
        gap = not line.strip()
        kept += [] if gap else [line]
    return "\n".join(kept)


def in_order(memories: Sequence[Memory]) -> list[int]:
    """Places of the memories in the order of the dialogue; those whose turns are not known last, as they were."""
    known = [memory.position for memory in memories]
    return sorted(range(len(known)), key=lambda place: (known[place] is None, known[place] or 0))


def as_turns(memories: Sequence[Memory]) -> str:
    """Memories in place of the turns of a state, those of each day under a head."""
    lines, day, heads = list[str](), "", 0
    for memory in memories:
        when = one_line(memory.time or "")
        named = (one.start for one in spans(when, None) if one.start == one.end)
        when_day = str(day_of(when) or next(named, when))
        if not lines or when_day != day:
            day, heads = when_day, heads + 1
            lines.append(f"[Session {heads}, {when}]" if when else f"[Session {heads}]")
        lines += map(one_line, memory.text.splitlines())
    return "".join(f"{line}\n" for line in lines)


def citations(text: str, count: int) -> tuple[str, frozenset[int] | None]:
    """A reply without its citations, and the memories it cites, numbered from 0.

    `[0, 2]` and `[0][2]` cite both; numbers of no memory are passed over, and brackets right behind a word are
    no citations. Empty: it says [NO_CITE]. None: it cites none that there is, or says [NO_CITE] and cites.

    Args:
        count: number of memories.
    """
    groups = [*_GROUPS.finditer(text), *(none := list(_NO_CITE.finditer(text)))]
    numbers = {int(number) for group in groups for number in re.findall(r"\d+", group[0])}
    cited = frozenset(number for number in numbers if number < count)
    for group in sorted(groups, key=lambda match: -match.start()):
        before, after = text[: group.start()].rstrip(), text[group.end() :].lstrip()
        text = f"{before} {after}" if after[:1].isalnum() else before + after
    answer = text.strip()
    if none:
        return answer, None if numbers else frozenset()
    return answer, cited or None
