"""GAM, general agentic memory (Yan et al., 2025): each session becomes a page with an abstract; for a question a
researcher plans searches, gathers what the pages tell that were found, and goes on until that suffices.

Stages: summaries (memorizer), read (researcher).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from remind.data.dialogue import Session
from remind.llm.structured import object_schema
from remind.memory.asking import TEXT, TEXTS, Fault, Written, ask, asked, failed, mapping, texts, words
from remind.memory.base import Bank, Memory, Query
from remind.memory.store import Draft, Method
from remind.states.pyramid import one_line, turn_text
from sae.ranges import PositiveInt

_NUMBERS = {"type": "array", "items": {"type": "integer"}}
PLAN_SCHEMA = object_schema(
    info_needs=TEXTS, tools=TEXTS, keyword_collection=TEXTS, vector_queries=TEXTS, page_index=_NUMBERS
)
INTEGRATE_SCHEMA = object_schema(content=TEXT, sources=_NUMBERS)
CHECK_SCHEMA = object_schema(enough={"type": "boolean"})
ASK_SCHEMA = object_schema(new_requests=TEXTS)
#: Characters of a page that stand in for an abstract that did not come.
_STAND_IN = 200


@dataclass(frozen=True)
class GAMSystem(Written):
    """Pages with abstracts, and notes on the question that a researcher gathers from them. The notes' sources are the
    turns of the pages they rest on, as the model names them."""

    templates = ("gam_page", "gam_plan", "gam_integrate", "gam_check", "gam_ask")
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
    pages: Fault = "fixed"
    """How pages are numbered for the researcher. upstream: by their place among the abstracts that differ, so that
    after one that was there before all numbers name a wrong page. fixed: by their place among the pages."""


class GAMBank(Bank, of=GAMSystem):
    system: GAMSystem

    def remember(self, session: Session) -> Iterable[str]:
        lines = [f"[{one_line(session.time)}]"] if session.time else []
        page = "\n".join([*lines, *map(turn_text, session.turns)])
        data = {"abstracts": self._abstracts(), "page": page}
        reply = ask(self, "summaries", "gam_page", data, self.system.abstract_room)
        if reply.failure is not None:
            yield failed("summaries", reply)
        abstract = one_line(words(reply)) if reply.failure is None else ""
        abstract = abstract or one_line(page[:_STAND_IN])
        key = f"{abstract}\n{page}"
        draft = Draft("page", tuple(turn.id for turn in session.turns), page, (key,), session.time, abstract)
        self.store.add(draft, self.encoder.count_tokens(page), self.encoder.encode_apart([key]))

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[Memory]:
        question = asked(query)
        request, notes = question, ""
        cited: set[int] = set()
        trace["rounds"] = []
        for _ in range(self.system.rounds):
            plan = self._ask("gam_plan", PLAN_SCHEMA, trace, question=request, abstracts=self._abstracts())
            found = self._search(plan)
            trace["rounds"].append({"request": request, "plan": dict(plan), "pages": found})
            gathered = self._ask(
                "gam_integrate", INTEGRATE_SCHEMA, trace, question=question, notes=notes, pages=self._shown(found)
            )
            notes = str(gathered.get("content") or notes)
            cited.update(self._pages().keys() & gathered.get("sources", ()))
            if not notes:
                continue
            if self._ask("gam_check", CHECK_SCHEMA, trace, question=question, notes=notes).get("enough") is True:
                break
            more = self._ask("gam_ask", ASK_SCHEMA, trace, question=question, notes=notes)
            request = "\n".join(texts(more.get("new_requests"))) or question
        if notes:
            pages = self._pages()
            turns = [turn for page in sorted(cited) for turn in self.store.memory(pages[page]).sources or ()]
            yield Memory("notes", notes, "notes", tuple(turns) or None, None, 1.0, self.encoder.count_tokens(notes))

    def _ask(self, template: str, schema: Mapping[str, Any], trace: dict[str, Any], **data: str) -> Mapping[str, Any]:
        reply = ask(self, "read", template, data, self.system.room, schema)
        if reply.failure is not None:
            trace.setdefault("failed", []).append(failed(template, reply))
        return mapping(reply)

    def _search(self, plan: Mapping[str, Any]) -> list[int]:
        """Numbers of the pages that the plan's tools bring, each once, in the order they come."""
        tools: dict[str, Callable[[], Iterable[int]]] = {
            "keyword": lambda: self._ranked(texts(plan["keyword_collection"]), "bm25"),
            "vector": lambda: self._ranked(texts(plan["vector_queries"]), "dense"),
            "page_index": lambda: plan["page_index"],
        }
        known = self._pages()
        found = (number for tool in plan.get("tools", ()) if tool in tools for number in tools[tool]())
        # to JSON, 1.0 is an integer
        return [number for number in dict.fromkeys(map(int, found)) if number in known]

    def _ranked(self, queries: Sequence[str], method: Method) -> Iterator[int]:
        number_of = {memory: page for page, memory in self._pages().items()}
        for query in queries:
            for memory, score in islice(self.ranker.rank(query, method), self.system.top):
                # BM25 ranks pages without any of the words, too
                if memory in number_of and (method == "dense" or score > 0):
                    yield number_of[memory]

    def _pages(self) -> dict[int, int]:
        """Memories of the pages by their numbers for the researcher."""
        return dict(enumerate(self.store.numbers()))

    def _abstracts(self) -> str:
        abstracts = [self.store.note(number) for number in self.store.numbers()]
        if self.system.pages == "upstream":
            abstracts = list(dict.fromkeys(abstracts))
        return "\n".join(f"Page {number}: {abstract}" for number, abstract in enumerate(abstracts))

    def _shown(self, found: Sequence[int]) -> str:
        pages = self._pages()
        return "\n\n".join(f"Page {number}:\n{self.store.memory(pages[number]).text}" for number in found)
