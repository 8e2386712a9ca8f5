"""The answers of a run: what was read, the letters it chooses, and the judge's verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from remind.core.files import read_json, write_rows
from remind.data.dialogue import Question
from remind.evaluation.judge import Case, judge_answers, load_judge
from remind.evaluation.parse import parse_answer
from remind.evaluation.personalisation import TEMPLATE, Used, assess
from remind.llm.auxiliary import AuxiliaryLLM
from remind.llm.request import ChatModel
from remind.memory.asking import dated
from remind.memory.base import Bank, Memory
from remind.memory.config import RunMemoryConfig
from remind.memory.readers import Reading
from remind.states import prompts


def who(cfg: RunMemoryConfig) -> Iterator[str]:
    """Who answers and who judges, with the hashes of the prompts, a line each."""
    if (reads := cfg.llm.endpoint("answer")) is not None:
        template = "answer" if cfg.reader == "x0" else "memory_read"
        yield f"Answers: {reads.identity}, reader {cfg.reader}, {prompts.prompt_id(template)}."
    if cfg.judge in ("llm", "p13n") and (rules := cfg.llm.endpoint("judge")) is not None:
        yield f"Verdicts: {rules.identity}, {prompts.prompt_id('ask_judge')}."
        if cfg.judge == "p13n":
            yield f"Personalisation and errors: {rules.identity}, {prompts.prompt_id(TEMPLATE)}."
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


def put_personalisation(
    rows: Sequence[dict[str, Any]],
    questions: Sequence[Question],
    shown: Sequence[Sequence[Memory]],
    bank: Bank | None,
    budget: int,
    model: ChatModel,
) -> None:
    """Put how direct answers use what is remembered beside them, as `assess` says.

    Args:
        shown: the memories each was read from.
        bank: what it holds is the memory, the nearest to the question up to `budget` tokens; None: what was shown.
    """
    cases, answers, samples = [], [], []
    for row, question, memories in zip(rows, questions, shown, strict=True):
        answer = row["answer"]
        if question.format != "direct" or not question.answers or answer["failed"] is not None:
            continue
        profile = "\n".join(map(dated, memories))
        memory = profile if bank is None else "\n".join(map(dated, _nearest(bank, question.text, budget)))
        wrong = answer["verdict"] is False
        cases.append(Used(question.text, question.answers, answer["text"], profile, memory, wrong))
        answers.append(answer)
        samples.append(question.id)
    for answer, found in zip(answers, assess(model, cases, samples), strict=True):
        answer |= {"p13n": found.label, "bucket": found.bucket, "p13n_failed": found.why}


def _nearest(bank: Bank, text: str, budget: int) -> Iterator[Memory]:
    """The memories of a bank, nearest first; before them those without vectors: a block that is always shown."""
    places = {number: place for place, (number, _) in enumerate(bank.ranker.rank(text, "dense"))}
    for number in sorted(bank.store.numbers(), key=lambda number: places.get(number, -1)):
        memory = bank.store.memory(number)
        budget -= memory.tokens
        if budget < 0:
            return
        yield memory


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
