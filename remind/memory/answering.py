"""The answers of a run: what was read, the letters it chooses, and the judge's verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from remind.core.files import read_json, write_rows
from remind.data.dialogue import Question
from remind.evaluation.judge import Case, judge_answers, load_judge
from remind.evaluation.parse import parse_answer
from remind.memory.config import RunMemoryConfig
from remind.memory.readers import Reading
from remind.states import prompts
from remind.states.auxiliary import AuxiliaryLLM


def who(cfg: RunMemoryConfig) -> Iterator[str]:
    """Who answers and who judges, with the hashes of the prompts, a line each."""
    if (reads := cfg.llm.endpoint("answer")) is not None:
        yield f"Answers: {reads.identity}, reader {cfg.reader}, {prompts.prompt_id('memory_read')}."
    if cfg.judge == "llm" and (rules := cfg.llm.endpoint("judge")) is not None:
        yield f"Verdicts: {rules.identity}, {prompts.prompt_id('ask_judge')}."
    elif cfg.judge != "none":
        yield f"Verdicts: {load_judge(cfg.judge).name}."


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


def write_answers(out: Path, units: Sequence[str]) -> None:
    """Every system's answers as `answers/NAME.jsonl`: question_id and answer, the letters where there are options."""
    rows: dict[str, list[dict[str, str]]] = {}
    for name in units:
        unit = read_json(out / name)
        for row in unit["rows"]:
            if (answer := row["answer"]) is not None and answer["failed"] is None:
                text = answer["text"] if row["format"] == "direct" else ",".join(answer["letters"])
                rows.setdefault(unit["system"], []).append({"question_id": row["question"], "answer": text})
    for system, lines in rows.items():
        write_rows(out / "answers" / f"{system}.jsonl", lines)
