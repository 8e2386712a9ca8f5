"""LongMemEval, native files: a question with its haystack of sessions (Wu et al., 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from remind.data.dialogue import Question
from remind.data.readers.builder import Draft, Place, Resolved, iso_time, objects, time_form
from remind.data.readers.locomo import answers_of

#: "2023/05/20 (Sat) 02:21".
_TIME = time_form(r"{year}/{month}/{day}(?:\s*\([a-z]+\))?(?:\s+{hour}:{minute})?")


def drafts(paths: Sequence[Path]) -> Iterator[Draft]:
    """One dialogue per instance, in the order of the dates; sessions `S<n>` and turns `S<n>:T<m>`, counted from 1.

    Where a date is in words, the order is that of the file. Session ids of the file are not kept, since they name the
    gold sessions. Evidence: the turns with `has_answer`; if there are none, all turns of the gold sessions. A gold
    session that is missing or empty is a dangling reference. Questions whose id ends in `_abs` cannot be answered from
    the haystack; their gold answer says why.

    Raises:
        DataError: a record that lacks what it needs, or lists of sessions, ids and dates of unequal length.
    """
    for _, place, instance in objects(paths, "an instance"):
        question_id = place.name(instance.get("question_id"), "question_id")
        place = place.at(question_id)
        haystack = place.sequence(instance.get("haystack_sessions"), "haystack_sessions")
        names = _names(place, instance.get("haystack_session_ids"), "haystack_session_ids")
        gold = _names(place, instance.get("answer_session_ids") or [], "answer_session_ids")
        dates = place.sequence(instance.get("haystack_dates"), "haystack_dates")
        if not len(haystack) == len(names) == len(dates):
            raise place.error(
                f"{len(haystack)} sessions, {len(names)} session ids and {len(dates)} dates: must be equal"
            )
        times = [iso_time(place.text(date, "a date"), _TIME) for date in dates]
        order = list(range(len(haystack)))
        if all(_TIME.fullmatch(date.strip()) for date in dates):
            # the oracle files are not in time order
            order.sort(key=lambda position: str(times[position]))

        draft = Draft(place, question_id)
        flagged: list[str] = []
        in_gold: list[str] = []
        for number, position in enumerate(order, start=1):
            draft.session(f"S{number}", times[position])
            for turn_id, where, turn in place.turns(haystack[position] or [], "a session", f"S{number}:T{{}}"):
                flag = turn.get("has_answer")
                if flag is not None and not isinstance(flag, bool):
                    raise where.error("has_answer should be true or false")
                if draft.turn(where, turn_id, turn.get("role"), turn.get("content")):
                    flagged += [turn_id] * bool(flag)
                    in_gold += [turn_id] * (names[position] in gold)

        present = {name for name, session in zip(names, haystack, strict=True) if session}
        dangling = tuple(name for name in gold if name not in present)
        evidence = flagged or in_gold
        date = place.optional_text(instance.get("question_date"), "question_date")
        question = Question(
            id=question_id,
            dialogue_id=question_id,
            text=place.name(instance.get("question"), "question"),
            answers=answers_of(place, instance),
            category=place.optional_text(instance.get("question_type"), "question_type"),
            time=place.time(iso_time(date, _TIME), "question_date"),
        )
        draft.question(place, question, Resolved(tuple(evidence), dangling, len(evidence) + len(dangling)))
        yield draft


def _names(place: Place, value: object, what: str) -> list[str]:
    return [place.name(name, f"an entry of {what}") for name in place.sequence(value, what)]
