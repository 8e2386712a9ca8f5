"""Answers from memories: one function for all systems, and a reader that asks a chat model (LongMemEval, 5.5)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from remind.core.errors import ConfigError
from remind.data.dialogue import NO_INFORMATION
from remind.evaluation.parse import parse_answer
from remind.llm.auxiliary import plain, question_lines
from remind.llm.request import ChatModel, Message, Reply, Request, Stage
from remind.memory.bank import filled
from remind.memory.base import Memory, Query
from remind.states import prompts
from remind.states.pyramid import frame, one_line
from remind.text.thoughts import without_thoughts

#: direct: the answer alone. con: notes on all memories first, in the same reply (Chain-of-Note). con_separate: first a
#: request for a note on each memory. cite: the answer with the memories it rests on (RMM, D.2). respond: as one would
#: reply to the person; for questions that ask for advice. x0: the prompt of a factual state without a strategy, for
#: models trained on states.
Mode = Literal["direct", "con", "con_separate", "cite", "respond", "x0"]

#: Room for a reply in tokens, where the published code gives one.
ROOM = {"direct": 500, "con": 800, "con_separate": 800, "cite": 500, "respond": 800, "x0": 500}
_NOTE_ROOM = 500

_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
#: Not behind a word or a bracket, where it is an index; groups in a row are one. Longer numbers are years.
_GROUPS = re.compile(r"(?<![\w\])])((?:\[\s*\d{1,3}(?:\s*,\s*\d{1,3})*\s*\]\s*)+)")
_DATED = re.compile(r"\d{4}-\d\d")
_NO_CITE = re.compile(r"\[\s*NO_CITE\s*\]", re.IGNORECASE)
_ANSWER = re.compile(r"^\W*answer\W*:\W*(.*\S)", re.IGNORECASE | re.MULTILINE)
_EMPTY = re.compile(r"\W*empty\W*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader makes of memories.

    Attributes:
        text: the answer; "" where there is none.
        memories: what it was made of; of a bank that answers by itself.
        cited: places, in what was given, of the memories it rests on; empty: it says that none helped. None: it does
            not tell, so that nothing can be learned from it.
        tokens: of prompts and of replies, as the server counts them.
        failure: why there is no answer, in a line.
    """

    text: str
    memories: tuple[Memory, ...] = ()
    cited: frozenset[int] | None = None
    tokens: tuple[int, int] = (0, 0)
    failure: str | None = None


def tokens(replies: Sequence[Reply]) -> tuple[int, int]:
    """Of prompts and of replies, in all."""
    return sum(one.prompt_tokens for one in replies), sum(one.completion_tokens for one in replies)


class ChatOf(Protocol):
    """Finds the chat model of a stage; None: no endpoint is named. `Bank.chat` is one."""

    def __call__(self, stage: Stage) -> ChatModel | None: ...


@dataclass(frozen=True)
class ChatReader:
    """Asks the chat models of the stages read and note.

    Attributes:
        mode: how memories are read.
    """

    mode: Mode = "con"

    def read(self, query: Query, memories: Sequence[Memory], chat: ChatOf) -> Reading:
        return self.read_all([(query, memories)], chat)[0]

    def read_all(self, tasks: Sequence[tuple[Query, Sequence[Memory]]], chat: ChatOf) -> list[Reading]:
        """What `read` makes of each query with its memories; their requests go to the model together.

        Raises:
            ConfigError: no endpoint is named for what is asked.
        """
        model = _model(chat, "read")
        noted = [self._noted(query, memories, chat) for query, memories in tasks]
        requests = [self.request(*task, shown, notes) for task, (shown, notes, _) in zip(tasks, noted, strict=True)]
        readings = []
        for reply, (shown, _, before) in zip(model.complete(requests), noted, strict=True):
            spent = tokens([*before, reply])
            text, cited = without_thoughts(reply.text).strip(), None
            if reply.failure is not None:
                readings.append(Reading("", tokens=spent, failure=f"{reply.failure}: {reply.message}"))
                continue
            if self.mode == "cite":
                text, cited = citations(text, len(shown))
            elif self.mode == "x0":
                text = parse_answer(text).answer
            elif self.mode != "direct" and (found := _ANSWER.findall(text)):
                text = found[-1].strip()
            places = None if cited is None else frozenset(shown[one] for one in cited)
            readings.append(Reading(text, cited=places, tokens=spent))
        return readings

    def _noted(
        self, query: Query, memories: Sequence[Memory], chat: ChatOf
    ) -> tuple[list[int], dict[int, str] | None, list[Reply]]:
        """Places of what is shown, the notes that stand for it, and the replies these are from."""
        shown = in_order(memories)
        if self.mode != "con_separate" or not shown:
            return shown, None, []
        replies = _model(chat, "note").complete([note_request(query, memories[place]) for place in shown])
        notes = {}
        for place, reply in zip(shown, replies, strict=True):
            note = plain(reply.text)
            if reply.failure is not None or not note:
                # better the memory itself than nothing of it
                notes[place] = memories[place].text
            elif not _EMPTY.fullmatch(note):
                notes[place] = note
        return list(notes), notes, replies

    def request(
        self, query: Query, memories: Sequence[Memory], shown: Sequence[int], notes: dict[int, str] | None = None
    ) -> Request:
        """The prompt that is answered from; memories are numbered from 0 as they are shown.

        Args:
            shown: places of memories.
            notes: what stands for their texts.
        """
        if self.mode == "x0":
            # memories in place of its turns
            text = as_turns([memories[place] for place in shown]).join(frame(query.question(), True))
            return Request((Message("user", text),), "read", query.id, prompts.prompt_id("answer"), ROOM["x0"])
        rows = [
            {
                "memory": number,
                "date": one_line(memories[place].time or "unknown"),
                "content": memories[place].text if notes is None else notes[place],
            }
            for number, place in enumerate(shown)
        ]
        data = {"memories": json.dumps(rows, ensure_ascii=False, indent=1), **question_lines(query.question())}
        told: dict[str, Any] = {
            "notes": notes is not None,
            "abstention": "" if query.options else NO_INFORMATION,
            "mode": self.mode,
        }
        return filled(query.id, "read", "memory_read", data, ROOM[self.mode], format=query.format, **told)


def in_order(memories: Sequence[Memory]) -> list[int]:
    """Places of the memories in the order of the dialogue; those whose turns are not known last, by their dates."""

    def order(place: int) -> tuple[int, str]:
        memory = memories[place]
        if memory.position is not None:
            return memory.position, ""
        # a time in words has no order
        return sys.maxsize, memory.time if memory.time and _DATED.match(memory.time) else "~"

    return sorted(range(len(memories)), key=order)


def as_turns(memories: Sequence[Memory]) -> str:
    """Memories in place of the turns of a state, those of each day under a head."""
    lines, day, heads = list[str](), "", 0
    for memory in memories:
        when = one_line(memory.time or "")
        if not lines or when[:10] != day:
            day, heads = when[:10], heads + 1
            lines.append(f"[Session {heads}, {when}]" if when else f"[Session {heads}]")
        lines += map(one_line, memory.text.splitlines())
    return "".join(f"{line}\n" for line in lines)


def note_request(query: Query, memory: Memory) -> Request:
    """What in one memory bears on the question (Appendix E, Chain-of-Note)."""
    text = f"Date: {one_line(memory.time or 'unknown')}\n{memory.text}"
    data = {"memory": text, "question": "\n".join(filter(None, question_lines(query.question()).values()))}
    return filled(query.id, "note", "memory_note", data, _NOTE_ROOM)


def citations(text: str, count: int) -> tuple[str, frozenset[int] | None]:
    """A reply without its citations, and the memories it cites, numbered from 0.

    `[0, 2]` and `[0][2]` cite both; numbers of no memory are passed over, and brackets in code or right behind a word
    are no citations. Empty: it says [NO_CITE]. None: it cites none that there is, or says [NO_CITE] and cites.

    Args:
        count: number of memories.
    """
    # code keeps its length, so that places in both are the same
    bare = _CODE.sub(lambda match: "x" * len(match[0]), text)
    groups = [*_GROUPS.finditer(bare), *(none := list(_NO_CITE.finditer(bare)))]
    numbers = {int(number) for group in groups for number in re.findall(r"\d+", group[0])}
    cited = frozenset(number for number in numbers if number < count)
    for group in sorted(groups, key=lambda match: -match.start()):
        before, after = text[: group.start()].rstrip(), text[group.end() :].lstrip()
        text = f"{before} {after}" if after[:1].isalnum() else before + after
    answer = text.strip()
    if none:
        return answer, None if numbers else frozenset()
    return answer, cited or None


def _model(chat: ChatOf, stage: Stage) -> ChatModel:
    model = chat(stage)
    if model is None:
        raise ConfigError(f"no endpoint is named for the stage {stage}; set --llm.memory or --llm.default")
    return model
