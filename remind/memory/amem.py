"""A-Mem (Xu et al., 2025, Section 3): each turn becomes a note with keywords, context and tags, is linked to its
nearest notes, and may change theirs.

Two calls a turn (construction, evolution), and one a question, as in the authors' evaluation on LoCoMo.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from remind.data.dialogue import Session
from remind.llm.structured import object_schema
from remind.memory.bank import Bank, mapping
from remind.memory.base import TEXT, TEXTS, Draft, Query, System, texts
from remind.states.pyramid import one_line, turn_lines
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


@dataclass(frozen=True)
class AMemSystem(System):
    """Linked notes, found by the cosine of turn, context, keywords and tags together with keywords that the model makes
    of the question. After each note come those that it links to."""

    templates = ("amem_note", "amem_evolve", "amem_query")
    rules = "the paper, Appendix B"
    name: str = "amem"
    neighbours: PositiveInt = 5
    """Nearest notes that a new one is shown with."""


class AMemBank(Bank, of=AMemSystem):
    system: AMemSystem

    def remember(self, session: Session) -> None:
        for turn in session.turns:
            said = turn_lines(turn)
            note = self._construct(said)
            # nearest to the turn's words (Eq. 4-5)
            found = self.store.nearest(self.encoder.encode_apart([said])[0])
            nearest = [number for number, _ in islice(found, self.system.neighbours)]
            changes = self._evolve(turn.time or session.time, note, nearest)
            if "strengthen" in changes.get("actions", ()):
                note["links"] = [number for number in nearest if number in changes["suggested_connections"]]
                note["tags"] = texts(changes["tags_to_update"])
            self.put(Draft("note", (turn.id,), shown(note), note=note))
            if changes:
                self._update(changes, nearest)
                self.store.log({"turn": turn.id, **changes})

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float]]:
        reply = self.ask("read", "amem_query", {"question": query.text}, ROOM, QUERY_SCHEMA)
        trace["keywords"] = texts(mapping(reply).get("keywords"))
        seen: set[int] = set()
        for number, score in self.store.rank(", ".join(trace["keywords"]) or query.text, "dense"):
            for found in (number, *self.store.note(number)["links"]):
                if found not in seen:
                    seen.add(found)
                    yield found, score

    def _construct(self, said: str) -> dict[str, Any]:
        """A turn's note with K, X and G (Eq. 1-2)."""
        value = mapping(self.ask("summaries", "amem_note", {"remark": said}, ROOM, NOTE_SCHEMA))
        return {
            "said": said,
            "keywords": texts(value.get("keywords")),
            "context": one_line(value.get("context") or "General"),
            "tags": texts(value.get("tags")),
            "links": [],
        }

    def _evolve(self, when: str | None, note: Mapping[str, Any], nearest: Sequence[int]) -> Mapping[str, Any]:
        """What the model would change (Eq. 6-7); nothing where it would not."""
        notes = [
            {"id": number, **_listed(self.store.note(number), self.store.memory(number).time)} for number in nearest
        ]
        data = {
            "note": json.dumps(_listed(note, when), ensure_ascii=False),
            "nearest": "\n".join(json.dumps(row, ensure_ascii=False) for row in notes),
        }
        value = mapping(self.ask("update", "amem_evolve", data, ROOM, EVOLVE_SCHEMA, count=len(notes)))
        return value if value.get("should_evolve") is True else {}

    def _update(self, changes: Mapping[str, Any], nearest: Sequence[int]) -> None:
        """Contexts and tags of the nearest notes; of those the model left out at the end, nothing."""
        if "update_neighbor" not in changes["actions"]:
            return
        contexts = changes["new_context_neighborhood"]
        for place, (number, tags) in enumerate(zip(nearest, changes["new_tags_neighborhood"], strict=False)):
            note, memory = self.store.note(number), self.store.memory(number)
            context = one_line(contexts[place]) if place < len(contexts) else note["context"]
            note |= {"tags": texts(tags), "context": context}
            self.put(Draft("note", memory.sources, shown(note), time=memory.time, note=note), number)


def shown(note: Mapping[str, Any]) -> str:
    """A note as it is encoded (Eq. 3) and as a reader sees it."""
    keywords, tags = (", ".join(note[name]) for name in ("keywords", "tags"))
    return f"{note['said']}\nContext: {note['context']}\nKeywords: {keywords}\nTags: {tags}"


def _listed(note: Mapping[str, Any], when: str | None) -> dict[str, Any]:
    """A note as the model sees it."""
    return {"time": when, "content": note["said"], **{name: note[name] for name in ("context", "keywords", "tags")}}
