"""The answers of a run: what was read, the letters it chooses, and the judge's verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remind.data.dialogue import Question
from remind.evaluation.judge import Case, judge_answers
from remind.evaluation.parse import parse_answer
from remind.memory.readers import Reading
from remind.states.auxiliary import AuxiliaryLLM


def put_answers(
    rows: Sequence[dict[str, Any]],
    questions: Sequence[Question],
    readings: Sequence[Reading],
    tokens: Sequence[int],
    judge: AuxiliaryLLM | None,
) -> None:
    """Put what was answered into the rows of the questions, under `answer`.

    Args:
        tokens: of the memories each was read from.
        judge: gives verdicts on direct answers; None: there are none.
    """
    for row, question, reading, spent in zip(rows, questions, readings, tokens, strict=True):
        parsed = parse_answer(f"<answer>{reading.text}</answer>", question.format, question.options, False)
        row["answer"] = {
            "text": reading.text,
            "letters": sorted(parsed.letters),
            "cited": None if reading.cited is None else sorted(reading.cited),
            "tokens": spent,
            "failed": reading.failure,
            "verdict": None,
            "verdict_failed": "",
        }
    if judge is None:
        return
    judged = [
        (question, row["answer"])
        for question, row in zip(questions, rows, strict=True)
        if question.format == "direct" and question.answers and row["answer"]["failed"] is None
    ]
    cases = [Case(question.text, question.answers, answer["text"]) for question, answer in judged]
    rulings = judge_answers(judge, cases, samples=[question.id for question, _ in judged])
    for (_, answer), ruling in zip(judged, rulings, strict=True):
        answer |= {"verdict": ruling.value, "verdict_failed": ruling.why}
