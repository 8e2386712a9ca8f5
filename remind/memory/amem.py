"""A-Mem (Xu et al., 2025, Section 3): each turn becomes a note with keywords, context and tags, is linked to its
nearest notes, and may change theirs.

Two calls a turn (construction, evolution), and one a question, as in the authors' evaluation on LoCoMo.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from remind.data.dialogue import Session, Turn
from remind.llm.structured import object_schema
from remind.memory.asking import TEXT, TEXTS, Fault, Written, ask, failed, mapping, texts
from remind.memory.base import Bank, Query
from remind.memory.store import Draft
from remind.states.pyramid import one_line, turn_text
from sae.ranges import PositiveInt

#: Tokens of a reply, as the authors' code asks for.
ROOM = 1000
NOTE_SCHEMA = object_schema(keywords=TEXTS, context=TEXT, tags=TEXTS)
EVOLVE_SCHEMA = object_schema(
    should_evolve={"type": "boolean"},
    actions=TEXTS,
    suggested_connections={"type": "array", "items": {"type": "integer"}},
    tags_to_update=TEXTS,
    new_context_neighborhood=TEXTS,
    new_tags_neighborhood={"type": "array", "items": TEXTS},
)
QUERY_SCHEMA = object_schema(keywords=TEXTS)
#: A note whose construction came to nothing.
_EMPTY: dict[str, Any] = {"keywords": [], "context": "General", "tags": []}


@dataclass(frozen=True)
class AMemSystem(Written):
    """Linked notes, found by the cosine of turn, context, keywords and tags together. After each note come those that
    it links to."""

    templates = ("amem_note", "amem_evolve", "amem_query")
    name: str = "amem"
    neighbours: PositiveInt = 5
    """Nearest notes that a new one is shown with."""
    query: Literal["keywords", "question"] = "keywords"
    """What is searched with: keywords that the model makes of the question, or its text."""
    analysis: Fault = "fixed"
    """upstream: notes have no keywords, context and tags of their own, since the authors' code drops what the model
    says of a turn; the call is not made."""
    evolution: Fault = "fixed"
    """Which notes new contexts and tags go to. upstream: the first of the store, as in the library A-mem-sys. fixed:
    the nearest ones, which they were made for."""
    index: Fault = "fixed"
    """When changed notes are encoded again. upstream: all of them at each 100th evolution. fixed: at once."""
    consolidate: PositiveInt = 100
    """Evolutions after which `index: upstream` encodes all notes."""


class AMemBank(Bank, of=AMemSystem):
    system: AMemSystem

    def remember(self, session: Session) -> Iterable[str]:
        for turn in session.turns:
            note, problems = self._construct(turn)
            nearest = self._nearest(turn)
            changes, problem = self._evolve(turn, note, nearest)
            yield from problems + problem
            self._connect(changes, note, nearest)
            text = shown(turn_text(turn), note)
            draft = Draft("note", (turn.id,), text, note={**note, "said": turn_text(turn)})
            self.store.add(draft, self.encoder.count_tokens(text), self.encoder.encode_apart([text]))
            if changes:
                self._update(changes, nearest)
                self.store.log({"turn": turn.id, **changes})
                evolutions = self.store.counts()["journal"]
                if self.system.index == "upstream" and evolutions % self.system.consolidate == 0:
                    for number in self.store.numbers():
                        self._rewrite(number, self.store.note(number), encode=True)

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float]]:
        seen: set[int] = set()
        for number, score in self.ranker.rank(self._search_text(query, trace), "dense"):
            for found in (number, *self.store.note(number)["links"]):
                if found not in seen:
                    seen.add(found)
                    yield found, score

    def _search_text(self, query: Query, trace: dict[str, Any]) -> str:
        if self.system.query == "question":
            return query.text
        reply = ask(self, "read", "amem_query", {"question": query.text}, ROOM, QUERY_SCHEMA)
        if reply.failure is not None:
            trace["failed"] = [failed("read", reply)]
        trace["keywords"] = texts(mapping(reply).get("keywords"))
        return ", ".join(trace["keywords"]) or query.text

    def _construct(self, turn: Turn) -> tuple[dict[str, Any], list[str]]:
        """K, X and G of the turn's note (Eq. 1-2), and why there are none."""
        if self.system.analysis == "upstream":
            return {**_EMPTY, "links": []}, []
        reply = ask(self, "summaries", "amem_note", {"remark": turn_text(turn)}, ROOM, NOTE_SCHEMA)
        value = mapping(reply)
        note = {
            "keywords": texts(value.get("keywords")),
            "context": one_line(str(value.get("context") or _EMPTY["context"])),
            "tags": texts(value.get("tags")),
            "links": [],
        }
        return note, [failed("summaries", reply)] if reply.failure is not None else []

    def _nearest(self, turn: Turn) -> list[int]:
        """The notes nearest to the turn's words (Eq. 4-5)."""
        vector = self.encoder.encode_apart([turn_text(turn)])[0]
        found = self.store.nearest(vector)
        return [number for number, _ in islice(found, self.system.neighbours)]

    def _evolve(
        self, turn: Turn, note: Mapping[str, Any], nearest: Sequence[int]
    ) -> tuple[Mapping[str, Any], list[str]]:
        """What the model would change (Eq. 6-7), nothing where it would not, and why it did not say."""
        notes = [{"id": number, **self._seen(number)} for number in nearest]
        data = {
            "note": json.dumps(_listed(turn_text(turn), note, turn.time), ensure_ascii=False),
            "nearest": "\n".join(json.dumps(row, ensure_ascii=False) for row in notes),
        }
        reply = ask(self, "update", "amem_evolve", data, ROOM, EVOLVE_SCHEMA, count=len(notes))
        value = mapping(reply)
        problems = [failed("update", reply)] if reply.failure is not None else []
        return value if value.get("should_evolve") is True else {}, problems

    def _connect(self, changes: Mapping[str, Any], note: dict[str, Any], nearest: Sequence[int]) -> None:
        """Links and tags of the new note."""
        if "strengthen" in changes.get("actions", ()):
            note["links"] = [number for number in nearest if number in changes["suggested_connections"]]
            note["tags"] = texts(changes["tags_to_update"])

    def _update(self, changes: Mapping[str, Any], nearest: Sequence[int]) -> None:
        """Contexts and tags of the nearest notes; of those the model left out at the end, nothing."""
        if "update_neighbor" not in changes["actions"]:
            return
        targets = nearest if self.system.evolution == "fixed" else self.store.numbers()[: len(nearest)]
        contexts = changes["new_context_neighborhood"]
        for place, (number, tags) in enumerate(zip(targets, changes["new_tags_neighborhood"], strict=False)):
            note = self.store.note(number)
            context = one_line(contexts[place]) if place < len(contexts) else note["context"]
            self._rewrite(number, {**note, "tags": texts(tags), "context": context}, self.system.index == "fixed")

    def _rewrite(self, number: int, note: Mapping[str, Any], encode: bool) -> None:
        memory, text = self.store.memory(number), shown(note["said"], note)
        draft = Draft("note", memory.sources, text, time=memory.time, note=note)
        vectors = self.encoder.encode_apart([text]) if encode else None
        self.store.rewrite(number, draft, self.encoder.count_tokens(text), vectors)

    def _seen(self, number: int) -> dict[str, Any]:
        note = self.store.note(number)
        return _listed(note["said"], note, self.store.memory(number).time)


def shown(said: str, note: Mapping[str, Any]) -> str:
    """A note as it is encoded (Eq. 3) and as a reader sees it."""
    keywords, tags = (", ".join(note[name]) for name in ("keywords", "tags"))
    return f"{said}\nContext: {note['context']}\nKeywords: {keywords}\nTags: {tags}"


def _listed(said: str, note: Mapping[str, Any], when: str | None) -> dict[str, Any]:
    """A note as the model sees it."""
    return {"time": when, "content": said, **{name: note[name] for name in ("context", "keywords", "tags")}}
