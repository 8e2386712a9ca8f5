"""Answers from memories: one function for all systems, and a reader that asks a chat model (LongMemEval, 5.5)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from remind.core.errors import ConfigError
from remind.data.dialogue import NO_INFORMATION, Question
from remind.evaluation.parse import parse_answer
from remind.llm.asking import plain, question_lines
from remind.llm.request import ChatModel, Message, Reply, Request, Stage, code_for, fenced, from_template
from remind.memory.base import Memory, Query, Retrieval
from remind.states import prompts
from remind.states.pyramid import frame, one_line
from remind.text.thoughts import without_thoughts
from sae.ranges import PositiveInt, check_ranges

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
class Usage:
    """What reading took.

    Attributes:
        calls: HTTP requests sent; 0 where all replies were cached.
        prompt_tokens, completion_tokens: as the server counts them.
        seconds: of all requests together.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @staticmethod
    def of(replies: Iterable[Reply]) -> Usage:
        """The sum over replies."""
        replies = list(replies)
        return Usage(
            sum(reply.calls for reply in replies),
            sum(reply.prompt_tokens for reply in replies),
            sum(reply.completion_tokens for reply in replies),
            sum(reply.seconds for reply in replies),
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader makes of memories.

    Attributes:
        text: the answer; "" where there is none.
        cited: places, in what was given, of the memories it rests on; empty: it says that none helped. None: it does
            not tell, so that nothing can be learned from it.
        usage: what it took.
        failure: why there is no answer, in a line.
    """

    text: str
    cited: frozenset[int] | None = None
    usage: Usage = Usage()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A reading, and the retrieval it is of. Unless `cited` is None, both go into `Bank.feedback`."""

    text: str
    cited: frozenset[int] | None
    retrieval: Retrieval
    usage: Usage
    failure: str | None = None


class ChatOf(Protocol):
    """Finds the chat model of a stage; None: no endpoint is named. `Bank.chat` is one."""

    def __call__(self, stage: Stage) -> ChatModel | None: ...


@runtime_checkable
class Answers(Protocol):
    """A bank that answers by itself."""

    def answer(self, query: Query) -> Answer: ...


@dataclass(frozen=True)
class ChatReader:
    """Asks the chat models of the stages read and note.

    Attributes:
        mode: how memories are read.
        style: memories as JSON, or each under a heading.
        context: tokens that the model reads and writes; the lowest memories are left out until the others fit, counted
            in the vocabulary of the run's encoder. None: all are shown.
        abstention: whether the prompt says what to answer if the memories do not contain it.
    """

    mode: Mode = "con"
    style: Literal["json", "nl"] = "json"
    context: PositiveInt | None = None
    abstention: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)

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
            usage = Usage.of([*before, reply])
            text, cited = without_thoughts(reply.text).strip(), None
            if reply.failure is not None:
                readings.append(Reading("", None, usage, f"{reply.failure}: {reply.message}"))
                continue
            if self.mode == "cite":
                text, cited = citations(text, len(shown))
            elif self.mode == "x0":
                text = parse_answer(text).answer
            elif self.mode != "direct" and (found := _ANSWER.findall(text)):
                text = found[-1].strip()
            readings.append(Reading(text, None if cited is None else frozenset(shown[one] for one in cited), usage))
        return readings

    def _noted(
        self, query: Query, memories: Sequence[Memory], chat: ChatOf
    ) -> tuple[list[int], dict[int, str] | None, list[Reply]]:
        """Places of what is shown, the notes that stand for it, and the replies these are from."""
        shown = self.shown(memories)
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

    def shown(self, memories: Sequence[Memory]) -> list[int]:
        """Places of the memories that fit the context, in the order of the dialogue.

        Those whose turns are not known come last, in the order of their dates.
        """
        # room for the prompt's own words
        left = None if self.context is None else self.context - ROOM[self.mode] - 1000
        count = 0
        for memory in memories:
            if left is not None:
                left -= memory.tokens
                if left < 0:
                    break
            count += 1
        return in_order(memories[:count])

    def request(
        self, query: Query, memories: Sequence[Memory], shown: Sequence[int], notes: dict[int, str] | None = None
    ) -> Request:
        """The prompt that is answered from; memories are numbered from 0 as they are shown.

        Args:
            shown: places of memories.
            notes: what stands for their texts.
        """
        if self.mode == "x0":
            text, asked = self._state(query, [memories[place] for place in shown]), prompts.prompt_id("answer")
            return Request((Message("user", text),), "read", query.id, asked, ROOM["x0"])
        texts = [memories[place].text if notes is None else notes[place] for place in shown]
        times = [one_line(memories[place].time or "unknown") for place in shown]
        if self.style == "json":
            rows = [
                {"memory": number, "date": time, "content": text}
                for number, (time, text) in enumerate(zip(times, texts, strict=True))
            ]
            history = json.dumps(rows, ensure_ascii=False, indent=1)
        else:
            history = "\n\n".join(
                f"### Memory [{number}]\nDate: {time}\n{text}"
                for number, (time, text) in enumerate(zip(times, texts, strict=True))
            )
        question, options = _question(query)
        code = code_for([history, question, options])
        return from_template(
            "read",
            "memory_read",
            query.id,
            None,
            ROOM[self.mode],
            code=code,
            mode=self.mode,
            notes=notes is not None,
            format=query.format,
            abstention=NO_INFORMATION if self.abstention and not query.options else "",
            memories=fenced("memories", history, code),
            question=fenced("question", question, code),
            options=fenced("options", options, code) if options else "",
        )

    def _state(self, query: Query, memories: Sequence[Memory]) -> str:
        """The prompt of x0 with memories for its turns, those of each day under a head."""
        return as_turns(memories).join(frame(_as_question(query), self.abstention))


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
    question, options = _question(query)
    question = f"{question}\n{options}" if options else question
    code = code_for([text, question])
    parts = {"memory": fenced("memory", text, code), "question": fenced("question", question, code)}
    return from_template("note", "memory_note", query.id, None, _NOTE_ROOM, code=code, **parts)


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


def _question(query: Query) -> tuple[str, str]:
    """The question with its day, and its options a line each."""
    return question_lines(_as_question(query))


def _as_question(query: Query) -> Question:
    return Question(query.id, "", query.text, query.format, query.options, time=query.time)


def _model(chat: ChatOf, stage: Stage) -> ChatModel:
    model = chat(stage)
    if model is None:
        raise ConfigError(f"no endpoint is named for the stage {stage}; set --llm.memory or --llm.default")
    return model
