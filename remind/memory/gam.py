"""GAM, general agentic memory (Yan et al., 2025): each session becomes a page with an abstract; for a question a
researcher plans searches, gathers what the pages tell that were found, and goes on until that suffices.

Stages: summaries (memorizer), read (researcher).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from remind.data.dialogue import Session
from remind.llm.structured import object_schema
from remind.memory.bank import Bank, Method, mapping
from remind.memory.base import TEXT, TEXTS, Draft, Memory, Query, System, texts, words
from remind.states.pyramid import one_line, turn_lines
from sae.ranges import PositiveInt

_NUMBERS = {"type": "array", "items": {"type": "integer"}}
PLAN_SCHEMA = object_schema(
    info_needs=TEXTS, tools=TEXTS, keyword_collection=TEXTS, vector_queries=TEXTS, page_index=_NUMBERS
)
INTEGRATE_SCHEMA = object_schema(content=TEXT, sources=_NUMBERS)
CHECK_SCHEMA = object_schema(enough={"type": "boolean"})
ASK_SCHEMA = object_schema(new_requests=TEXTS)


@dataclass(frozen=True)
class GAMSystem(System):
    """Pages with abstracts, and notes on the question that a researcher gathers from them. The notes' sources are the
    turns of the pages they rest on, as the model names them."""

    templates = ("gam_page", "gam_plan", "gam_integrate", "gam_check", "gam_ask")
    rules = "VectorSpaceLab/general-agentic-memory, prompts"
    provenance = "session"
    name: str = "gam"
    rounds: PositiveInt = 3
    """Rounds of research, at most; each has two to four calls."""
    top: PositiveInt = 5
    """Pages that each keyword or sentence brings."""
    abstract_room: PositiveInt = 256
    """Tokens of an abstract."""
    room: PositiveInt = 2048
    """Tokens of a researcher's reply."""


class GAMBank(Bank, of=GAMSystem):
    """The researcher knows pages by their numbers from 0, in the order of the dialogue."""

    system: GAMSystem

    def remember(self, session: Session) -> None:
        lines = [f"[{one_line(session.time)}]"] if session.time else []
        page = "\n".join([*lines, *map(turn_lines, session.turns)])
        data = {"abstracts": self._abstracts(), "page": page}
        reply = self.ask("summaries", "gam_page", data, self.system.abstract_room)
        abstract = one_line(words(reply) if reply.failure is None else "") or one_line(page[:200])
        sources, key = tuple(turn.id for turn in session.turns), f"{abstract}\n{page}"
        self.put(Draft("page", sources, page, (key,), session.time, abstract))

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[Memory]:
        question = request = query.asked
        notes, cited = "", set[int]()

        def research(template: str, schema: Mapping[str, Any], **data: str) -> Mapping[str, Any]:
            return mapping(self.ask("read", template, data, self.system.room, schema))

        numbers = self.store.numbers()
        trace["rounds"] = []
        for _ in range(self.system.rounds):
            plan = research("gam_plan", PLAN_SCHEMA, question=request, abstracts=self._abstracts())
            found = self._search(plan, numbers)
            trace["rounds"].append({"request": request, "plan": dict(plan), "pages": found})
            pages = "\n\n".join(f"Page {page}:\n{self.store.memory(numbers[page]).text}" for page in found)
            gathered = research("gam_integrate", INTEGRATE_SCHEMA, question=question, notes=notes, pages=pages)
            notes = gathered.get("content") or notes
            cited.update(page for page in gathered.get("sources", ()) if 0 <= page < len(numbers))
            if not notes:
                continue
            if research("gam_check", CHECK_SCHEMA, question=question, notes=notes).get("enough") is True:
                break
            more = research("gam_ask", ASK_SCHEMA, question=question, notes=notes)
            request = "\n".join(texts(more.get("new_requests"))) or question
        if notes:
            turns = [turn for page in sorted(cited) for turn in self.store.memory(numbers[page]).sources or ()]
            yield self.written("notes", notes, turns)

    def _search(self, plan: Mapping[str, Any], numbers: Sequence[int]) -> list[int]:
        """The pages that the plan's tools bring, in the order of the dialogue."""
        tools, found = plan.get("tools", ()), set[int]()
        if "keyword" in tools:
            found.update(self._ranked(texts(plan["keyword_collection"]), "bm25"))
        if "vector" in tools:
            found.update(self._ranked(texts(plan["vector_queries"]), "dense"))
        if "page_index" in tools:
            found.update(numbers[page] for page in plan["page_index"] if 0 <= page < len(numbers))
        return [page for page, number in enumerate(numbers) if number in found]

    def _ranked(self, queries: Iterable[str], method: Method) -> Iterator[int]:
        for query in queries:
            for number, score in islice(self.store.rank(query, method), self.system.top):
                # BM25 ranks pages without any of the words, too
                if method == "dense" or score > 0:
                    yield number

    def _abstracts(self) -> str:
        return "\n".join(f"Page {page}: {self.store.note(number)}" for page, number in enumerate(self.store.numbers()))
