"""Banks whose journal is a log of operations, and whose memories are its fold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar

from torch import Tensor

from remind.core.files import sha256_json
from remind.llm.request import Reply, Request
from remind.memory.bank import Bank
from remind.memory.base import Draft
from remind.memory.operations import Entry, Occasion, Operation, Role, State, fold, made, propose, undated
from remind.states.pyramid import one_line
from remind.text.days import day_of

#: How systems whose memories a policy writes differ from their publications.
NOT_AS_PUBLISHED = ("the prompts are in our own words, and the policy is the endpoint's model as it is",)


class LoggedBank(Bank):
    """What `membuilder` and `salimory` have in common. An entry has the number of its operation in the log.

    Attributes:
        keeps_versions: whether superseded entries are still retrieved.
    """

    keeps_versions: ClassVar[bool]

    def operations(self) -> Iterator[Operation]:
        """The log."""
        return map(Operation.of, self.store.journal())

    def state(self) -> State:
        """The fold of the log, read anew."""
        return fold(self.operations())

    def report(self) -> dict[str, Any]:
        """As of every bank, with the number of rejected operations."""
        return {**super().report(), "rejected": sum(one.status == "rejected" for one in self.operations())}

    def first(self) -> int:
        """Place of the next operation in the log."""
        return self.store.count("journal") + 1

    def entries(self, numbers: Iterable[int]) -> list[Entry]:
        """Memories as the entries they are."""
        found = []
        for number in numbers:
            memory, coarse = self.store.memory(number), bool(self.store.note(number)["coarse"])
            rest = (memory.time, "", memory.sources or (), coarse)
            found.append(Entry(memory.id, memory.kind, memory.text, *rest))
        return found

    def nearest(self, vectors: Iterable[Tensor], count: int, *kinds: str) -> list[int]:
        """The memories of these kinds that are nearest to any of the vectors [d], at most so many, best first."""
        own, best = set(self.store.numbers(*kinds)), dict[int, float]()
        for vector in vectors if own else ():
            found = ((number, cosine) for number, cosine in self.store.nearest(vector) if number in own)
            for number, cosine in islice(found, min(count, len(own))):
                best[number] = max(cosine, best.get(number, cosine))
        return sorted(best, key=lambda number: (-best[number], number))[:count]

    def replies(self, requests: Sequence[Request]) -> list[tuple[Reply, dict[str, str]]]:
        """Replies, each with its `Operation.by`."""
        replies, model = self.send(*requests, salvaged=True), self.chat(requests[0].stage)
        keys = [sha256_json([one.chat, one.schema])[:16] for one in requests]
        return [
            (reply, {"model": model.name if model else "", "prompt": one.prompt_id, "key": key})
            for reply, one, key in zip(replies, requests, keys, strict=True)
        ]

    def proposed(
        self, role: Role, reply: Reply, occasion: Occasion, entries: Sequence[Entry], first: int
    ) -> list[Operation]:
        """The operations of a reply, as `propose`; one in the wrong form that nothing comes of is lost."""
        if reply.failure not in (None, "invalid"):
            return []
        made = propose(role, reply.text, occasion, entries, first)
        if reply.failure is not None and all(one.status == "rejected" for one in made):
            self.lost.append(f"memory: {reply.failure}: {reply.message} ({role})")
        return made

    def commit(self, operations: Sequence[Operation]) -> None:
        """Append operations to the log, and do to the memories what they say.

        Args:
            operations: which refer to entries from before all of them.
        """
        applied = [one for one in operations if one.status == "applied"]
        # what they refer to, before the first of them removes it
        before = {name: self.entries([int(name[1:])])[0] for one in applied for name in one.refs}
        new = {one.seq: made(one, [before[name] for name in one.refs]) for one in applied}
        for one in operations:
            self.store.log(one.value())
            entry = new.get(one.seq)
            if one.status == "applied" and (entry is None or entry.store == "core" or not self.keeps_versions):
                for name in one.refs:
                    self.store.remove(int(name[1:]))
            if entry is None:
                continue
            note = {"session": self.store.count("sessions"), "coarse": entry.coarse}
            # it is shown with every question: were all that went into it its sources, it would be evidence of all
            block, keys = Draft("core", None, entry.text, (), entry.time, note), (undated(entry.text),)
            # an update is as old as itself, not as what it replaces
            other = Draft(entry.store, entry.sources, entry.text, keys, entry.time, note)
            self.put(block if entry.store == "core" else other, one.seq)


def numbered(texts: Iterable[str]) -> str:
    """Texts as a prompt shows them, a line each, from 1."""
    return "\n".join(f"{number}. {one_line(text)}" for number, text in enumerate(texts, 1))


def dated(time: str | None) -> str | None:
    """A time as operations take it; None where it is unknown or in words that name no day."""
    return time if day_of(time) else None
