"""What memories are worth by the judges of SaliMory (arXiv 2606.04120, Appendices B.4 and E): for rewards of its
training, and as scores of a bank of any system.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from remind.data.dialogue import Question
from remind.llm.request import ChatModel, Reply, Request, code_for, fenced, from_template
from remind.llm.structured import NotValid, object_schema, read_value
from remind.memory.bank import Bank
from remind.memory.base import Query
from remind.memory.logged import numbered

TEMPLATE = "reward_salimory"
#: Tokens of a judge's reply; models that think first need some of it.
ROOM = 2048
#: Entries that are judged at once, and those of a bank, nearest to a question, that a judge of its profile sees.
BATCH, HELD = 20, 200
_GRADE, _TRUTH = {"type": "number", "minimum": 0, "maximum": 1}, {"type": "boolean"}
#: Of the judge's replies, by what is graded.
GRADES: Mapping[str, Mapping[str, Any]] = {
    "response": object_schema(accuracy=_GRADE, personalisation={"anyOf": [_GRADE, {"type": "null"}]}),
    "memory": object_schema(entries={"type": "array", "items": object_schema(factual=_TRUTH, vague=_TRUTH)}),
    "profile": object_schema(score=_GRADE),
}
_FORMS = {
    "response": {"accuracy": 0.7, "personalisation": None},
    "memory": {"entries": [{"factual": True, "vague": False}]},
    "profile": {"score": 0.7},
}


def grade_request(step: str, sample: str, given: Mapping[str, str]) -> Request:
    """The request to grade a response (E.1), the entries of a memory (E.2) or a profile (E.3); `given` by name."""
    code, form = code_for(given.values()), json.dumps(_FORMS[step])
    parts = [fenced(name, text, code) for name, text in given.items()]
    return from_template("judge", TEMPLATE, sample, GRADES[step], ROOM, step=step, form=form, code=code, parts=parts)


def grades(step: str, reply: Reply) -> Any:
    """What a judge's reply says; of a response also where personalisation is left out or told in words, not applicable.
    Nothing where it cannot be read."""
    if reply.failure == "invalid" and step == "response":
        with suppress(NotValid):
            return read_value(reply.text, object_schema(accuracy=_GRADE), reply.finished)
    return {} if reply.failure else reply.value


def bank_quality(bank: Bank, questions: Sequence[Question], judge: ChatModel, k: int = 10) -> dict[str, float | None]:
    """SaliMory's measures of memory (Table 5) for the bank of any system.

    An entry is judged beside the turns that it is from, or beside all turns where the system does not know them. The
    profile of a question are the `k` memories that the bank retrieves for it.

    Args:
        questions: with answers, on the dialogue of the bank.

    Returns:
        Shares `vague` and `factual` of the entries; `utilisation`, the mean score in [0, 1] of the profiles, of an
        empty one 0; None where nothing was judged. `entries` and `questions` are how many were: replies that cannot be
        read are left out.

    Raises:
        ModelError: the endpoint as a whole cannot be used.
    """
    store, every = bank.store, [turn.id for session in bank.store.sessions() for turn in session.turns]
    entries = [store.memory(number) for number in store.numbers()]
    batches = [entries[start : start + BATCH] for start in range(0, len(entries), BATCH)]
    asked, scores = list[tuple[str, str, dict[str, str]]](), list[float]()
    for batch in batches:
        known = [one.sources for one in batch]
        turns = every if None in known else [turn for sources in known for turn in sources or ()]
        given = {"conversation": store.words(turns), "memory": numbered(one.text for one in batch)}
        asked.append(("memory", bank.dialogue_id, given))
    for query, question in zip(map(Query.of, questions), questions, strict=True):
        near = (store.memory(number).text for number, _ in islice(store.rank(query.text, "bm25"), HELD))
        given = {"question": query.asked, "right": numbered(question.answers), "memory": numbered(near)}
        if profile := "\n".join(one.dated for one in bank.retrieve(query, k=k).memories):
            asked.append(("profile", query.id, {**given, "profile": profile}))
        else:
            scores.append(0.0)
    replies = judge.complete([grade_request(*one) for one in asked])
    told = [grades(step, reply) for (step, *_), reply in zip(asked, replies, strict=True)]
    checked = [value.get("entries", ()) for value in told[: len(batches)]]
    points = [point for own, batch in zip(checked, batches, strict=True) if len(own) == len(batch) for point in own]
    scores += [value["score"] for value in told[len(batches) :] if value]
    return {
        "vague": _mean([point["vague"] for point in points]),
        "factual": _mean([point["factual"] for point in points]),
        "utilisation": _mean(scores),
        "entries": len(points),
        "questions": len(scores),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
