"""MemAgent (Yu et al., 2025, Section 3) and MEM1 (Zhou et al., 2025): nothing is prepared; for each question a model
reads the dialogue in chunks, or searches it in rounds, and from step to step only what it writes anew goes on.

The authors train models for this by reinforcement learning. Any chat model can be put in their place; `prompts` is for
their checkpoints.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from remind.core.errors import DataError
from remind.data.dialogue import Session
from remind.llm.request import Message, Request
from remind.memory.bank import Bank
from remind.memory.base import Memory, Query, System, words
from remind.states.pyramid import one_line, turn_lines
from remind.text.thoughts import without_thoughts
from sae.ranges import PositiveInt


@dataclass(frozen=True)
class TrainedSystem(System):
    """Base of both.

    Attributes:
        needs: what the prompt that a checkpoint was trained on holds.
    """

    needs: ClassVar[tuple[str, ...]]
    prompts: str | None = None
    """Python file of the authors' repository with the prompt that their checkpoint was trained on; it is read, not run.
    None: our own words, for any chat model."""
    room: PositiveInt = 1024
    """Tokens of a reply, which is all that goes on."""

    @property
    def not_as_published(self) -> tuple[str, ...]:
        return () if self.prompts else ("the prompt is in our own words, for a model that is not trained for this",)

    @cached_property
    def trained(self) -> str:
        """The first string of the file with all that is needed; fields of f-strings stand in braces.

        Raises:
            DataError: a file that is no Python, or has no such string.
        """
        path = Path(str(self.prompts))
        try:
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"cannot be read as Python: {error}", path) from None
        for node in nodes:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(_text(part) for part in parts)
            if all(part in text for part in self.needs):
                return text
        raise DataError(f"holds no prompt with {', '.join(self.needs)}", path)

    def filled(self, **values: object) -> str:
        """The trained prompt with its fields filled; braces that are none of these stay."""
        return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), self.trained)

    def about(self) -> dict[str, Any]:
        """As `System.about`. Raises DataError as `trained`."""
        about = super().about()
        if self.prompts:
            about |= {
                "prompts": None,
                "prompt_hashes": {"trained": hashlib.sha256(self.trained.encode()).hexdigest()[:12]},
            }
        return about


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@dataclass(frozen=True)
class MemAgentSystem(TrainedSystem):
    """A memory that is written while the dialogue is read for one question. It tells no sources: after each chunk it is
    written anew as a whole. The trace has it after each chunk."""

    needs = ("{prompt}", "{memory}", "{chunk}")
    templates = ("memagent_read",)
    rules = "the paper, Table 1"
    provenance = None
    name: str = "memagent"
    chunk: PositiveInt = 5000
    """Tokens that are read at a time, in the run's encoder; a turn is not cut."""


class MemAgentBank(Bank, of=MemAgentSystem):
    system: MemAgentSystem

    def remember(self, session: Session) -> None:
        """Nothing but the session."""

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[Memory]:
        memory, system = "", self.system
        trace["memories"] = []
        for section in self._sections():
            if system.prompts:
                # as the authors' code says that there is none
                data = {"prompt": query.asked, "memory": memory or "No previous memory", "chunk": section}
                said = (Message("user", system.filled(**data)),)
                (reply,) = self.send(Request(said, "read", self.dialogue_id, "memagent", system.room))
            else:
                data = {"problem": query.asked, "memory": memory, "section": section}
                reply = self.ask("read", "memagent_read", data, system.room)
            # without a reply the memory stays as it was
            told = "" if reply.failure is not None else words(reply)
            memory = told or memory
            trace["memories"].append(memory)
        if memory:
            yield self.written("notes", memory, ())

    def _sections(self) -> Iterator[str]:
        """The dialogue in chunks."""
        lines, spent = list[str](), 0
        for session in self.store.sessions():
            texts = list(map(turn_lines, session.turns))
            if session.time:
                texts[0] = f"[{one_line(session.time)}]\n{texts[0]}"
            for text, count in zip(texts, self.encoder.count_many(texts), strict=True):
                if lines and spent + count > self.system.chunk:
                    yield "\n".join(lines)
                    lines, spent = [], 0
                lines.append(text)
                spent += count
        if lines:
            yield "\n".join(lines)


@dataclass(frozen=True)
class Mem1System(TrainedSystem):
    """The last internal state with the model's own answer; its sources are the turns that were found on the way.

    With a trained prompt, what the model wrote last and what its search found are the beginning of its own turn, as in
    the authors' code.
    """

    needs = ("{question}", "<search>", "</think>")
    templates = ("mem1_step",)
    rules = "MIT-MI/MEM1, prompts"
    name: str = "mem1"
    rounds: PositiveInt = 6
    """Calls for a question, at most."""
    top: PositiveInt = 3
    """Turns that a search brings, by cosine."""


class Mem1Bank(Bank, of=Mem1System):
    system: Mem1System

    def remember(self, session: Session) -> None:
        self.put_turns(session.turns)

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[Memory]:
        state = found = answer = last = ""
        seen, system = set[int](), self.system
        trace["searches"] = []
        for left in reversed(range(system.rounds)):
            if system.prompts:
                turns = (
                    f"{left + 1} turns left." if left else "1 turn left. You must answer the question in the next turn."
                )
                hint = f"[HINT]You have {turns}[/HINT]"
                before = f"{last}<information>\n{hint}\n{found}\n</information>" if last else ""
                said = (Message("user", system.filled(question=query.asked)), Message("assistant", before))
                ask = Request(said if before else said[:1], "read", self.dialogue_id, "mem1", system.room)
                (reply,) = self.send(ask)
            else:
                data = {"question": query.asked, "state": state, "found": found}
                reply = self.ask("read", "mem1_step", data, system.room, left=left)
            if reply.failure is not None:
                break
            state = _part("think", reply.text) or state
            told = without_thoughts(reply.text)
            search = _part("search", told)
            # a reply with both is taken for a search, as by the authors
            if not search:
                answer = _part("answer", told)
                break
            trace["searches"].append(search)
            if left:
                # shown in the order of the dialogue
                numbers = sorted(number for number, _ in islice(self.store.rank(search, "dense"), system.top))
                seen.update(numbers)
                found = "\n".join(self.store.memory(number).dated for number in numbers)
                last = f"<think>{state}</think><search>{search}</search>"
        trace["answer"] = answer
        text = "\n".join(part for part in (state, answer and f"Answer: {answer}") if part)
        if text:
            sources = (turn for number in sorted(seen) for turn in self.store.memory(number).sources or ())
            yield self.written("state", text, sources)


def _part(tag: str, text: str) -> str:
    """What stands between the tags; "": there are none."""
    match = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return match[1].strip() if match else ""
