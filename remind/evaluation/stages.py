"""The stages of an evaluation under one condition: answer, judge, report. Each reads what the one before left."""

from __future__ import annotations

import time
from collections import Counter as Count
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from remind.core.errors import DataError, ModelError
from remind.core.progress import Counter
from remind.data.dialogue import FORMATS
from remind.evaluation.conditions import Prompt
from remind.evaluation.predictions import PASSING, Prediction, RunFolder, predicted, prediction_row, prompt_hash, put
from remind.evaluation.scores import MEASURES, Score, counts, group, score_judged, summarise
from remind.evaluation.verdicts import Verdicts, judge_run, parse_all, read_verdicts
from remind.models.generate import Generation
from remind.states.parquet import StateRecord

if TYPE_CHECKING:
    from torch import Tensor

    from remind.evaluation.answerers import Answerer
    from remind.evaluation.config import EvaluateConfig
    from remind.models.encoder import SentenceEncoder
    from remind.states.auxiliary import AuxiliaryLLM


class Answers(NamedTuple):
    """Predictions for every question, left-out ones included.

    Attributes:
        resumed: how many were there before.
        model_seconds, seconds: spent in the model, and in all, in this sitting.
    """

    predictions: list[Prediction]
    resumed: int = 0
    model_seconds: float = 0.0
    seconds: float = 0.0


class Part(NamedTuple):
    """A condition's entry in the report, with the scores behind it."""

    section: dict[str, Any]
    scores: list[Score]


def answer_stage(
    records: Sequence[StateRecord], prompts: Sequence[Prompt], answerer: Answerer, run: RunFolder
) -> Answers:
    """Put every question to the model that has no output yet; one row per question in predictions.jsonl.

    Raises:
        ModelError: the model gave an output for none of the questions it was tried on, or cannot be used at all.
    """
    started, before = time.perf_counter(), answerer.seconds
    known = run.read()
    ids = [record.question_id for record in records]
    found: dict[int, Prediction] = {}
    for n, (question_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        item = known.get(question_id)
        # a row without a hash was written before there were any
        if item is not None and item.prompt in ("", prompt_hash(prompt)):
            found[n] = predicted(prompt, item.output)
    resumed = len(found)
    with run.append() as file, Counter(f"answer {run.identity['level']}", len(ids), resumed) as bar:

        def keep(index: int, output: Generation) -> None:
            found[index] = predicted(prompts[index], output)
            put(file, ids[index], found[index])
            bar.step()

        for n, prompt in enumerate(prompts):
            if n not in found and (prompt.left_out is not None or prompt.reply is not None):
                keep(n, Generation(prompt.reply or "", 0, finished=True))
        asked = [n for n, prompt in enumerate(prompts) if prompt.left_out is None and prompt.reply is None]
        done = [n in found for n in asked]
        fresh = answerer.answer(
            [prompts[n].text for n in asked], [ids[n] for n in asked], done, lambda place, o: keep(asked[place], o)
        )
    tried = [output for output in fresh if output is not None and output.failure != "too_long"]
    if tried and all(output.failure in PASSING for output in tried) and not any(done):
        name = answerer.about()["name"]
        raise ModelError(f"{name} could be run on none of {len(tried)} questions: {tried[0].message}")
    model_seconds = answerer.seconds - before
    seconds = time.perf_counter() - started
    return Answers([found[n] for n in range(len(ids))], resumed, model_seconds, seconds)


def read_answers(records: Sequence[StateRecord], run: RunFolder) -> Answers:
    """What stage answer left.

    Raises:
        DataError: a question without a row.
    """
    known = run.read(again=())
    missing = [record.question_id for record in records if record.question_id not in known]
    if missing:
        raise DataError(f"{len(missing)} questions have no answer yet; run stage answer", run.path, missing[0])
    return Answers([known[record.question_id] for record in records], len(records))


def taking_part(records: Sequence[StateRecord], answers: Answers) -> tuple[list[StateRecord], list[Prediction]]:
    """The questions that are not left out; their records hold as found the evidence that the prompt showed."""
    pairs = [
        (_shown(record, item), item)
        for record, item in zip(records, answers.predictions, strict=True)
        if item.left_out is None
    ]
    return [record for record, _ in pairs], [item for _, item in pairs]


def _shown(record: StateRecord, item: Prediction) -> StateRecord:
    if item.prompt == "":
        return record
    return replace(record, evidence_found=item.evidence, images_found=item.images)


def judge_stage(
    records: Sequence[StateRecord], answers: Answers, run: RunFolder, judge: AuxiliaryLLM | None
) -> Verdicts:
    """Judge the direct answers; one row per question in verdicts.jsonl.

    Args:
        judge: None: read what an earlier stage wrote.

    Raises:
        DataError: verdicts that are missing or damaged.
        ModelError: a judge that cannot be used at all.
    """
    asked, items = taking_part(records, answers)
    outputs = [item.output for item in items]
    parsed = parse_all(asked, outputs)
    if judge is None:
        return read_verdicts(asked, outputs, parsed, run.verdicts)
    return judge_run(judge, asked, outputs, parsed, run.verdicts)


def score_stage(
    records: Sequence[StateRecord],
    answers: Answers,
    verdicts: Verdicts,
    run: RunFolder,
    encoder: SentenceEncoder,
    cfg: EvaluateConfig,
) -> Part:
    """Score every question, write the scores beside the outputs, and sum them up.

    Returns:
        counts, tables, and seconds of this sitting: answering and the part of it spent in the model, scoring and the
        part of it spent in the sentence encoder.
    """
    started = time.perf_counter()
    asked, items = taking_part(records, answers)
    outputs = [item.output for item in items]
    encoding = 0.0

    def encode(lines: list[str]) -> Tensor:
        nonlocal encoding
        before = time.perf_counter()
        try:
            return encoder.encode(lines)
        finally:
            encoding += time.perf_counter() - before

    scores = score_judged(asked, outputs, parse_all(asked, outputs), verdicts.rulings, encode)
    by_id = {item.record.question_id: item for item in scores}
    run.rewrite(
        [
            _row(record, item, by_id.get(record.question_id))
            for record, item in zip(records, answers.predictions, strict=True)
        ]
    )
    left_out = Count(item.left_out for item in answers.predictions if item.left_out is not None)
    section = {
        "counts": {
            **counts(scores),
            "left_out": dict(sorted(left_out.items())),
            "cut_prompts": sum(item.cut_turns > 0 for item in items),
            "cut_turns": sum(item.cut_turns for item in items),
        },
        **_tables(scores, cfg),
        "seconds": {
            "answering": answers.seconds,
            "model": answers.model_seconds,
            "scoring": time.perf_counter() - started,
            "encoding": encoding,
        },
        "resumed": answers.resumed,
        "verdicts_resumed": verdicts.resumed,
    }
    return Part(section, scores)


def _tables(scores: list[Score], cfg: EvaluateConfig) -> dict[str, Any]:
    def rows(groups: Mapping[str, list[Score]]) -> dict[str, Any]:
        return {name: summarise(members, cfg.bootstrap, cfg.seed) for name, members in groups.items()}

    by_format = group(scores, lambda record: record.format)
    return {
        "overall": summarise(scores, cfg.bootstrap, cfg.seed),
        "by_format": rows({name: by_format[name] for name in FORMATS if name in by_format}),
        "by_dimension": rows(group(scores, lambda record: record.dimension)),
        "by_category": rows(group(scores, lambda record: record.category)),
    }


def _row(record: StateRecord, item: Prediction, score: Score | None) -> dict[str, Any]:
    row = {
        **prediction_row(record.question_id, item),
        "dialogue_id": record.dialogue_id,
        "format": record.format,
        "dimension": record.dimension,
        "category": record.category,
        "gold": list(record.answers),
    }
    if score is None:
        return row
    parsed = score.parsed
    return {
        **row,
        "answer": parsed.answer,
        "letters": sorted(parsed.letters),
        "evidence": list(parsed.evidence),
        "images": sorted(parsed.images),
        "problems": list(parsed.problems),
        "score_failure": score.failure,
        **{name: getattr(score, name) for name in MEASURES},
    }
