"""The stages of an evaluation under one condition: answer, judge, report. Each reads what the one before left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from remind.core.errors import DataError, ModelError
from remind.core.progress import ProgressBar
from remind.data.dialogue import FORMATS
from remind.evaluation.conditions import Prompt
from remind.evaluation.judge import Verdicts, judge_run, read_verdicts
from remind.evaluation.predictions import PASSING, Prediction, RunFolder, prompt_hash, put_row
from remind.evaluation.scores import Score, counts, group, parse_all, score_judged, summarise
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

    def summary(self) -> dict[str, int]:
        left_out = sum(item.left_out is not None for item in self.predictions)
        failed = sum(item.output.failure is not None for item in self.predictions)
        return {"questions": len(self.predictions), "left out": left_out, "failed": failed, "resumed": self.resumed}


class Scored(NamedTuple):
    """A condition's entry in the report, and what is behind it: scores, and final prediction rows by question id."""

    section: dict[str, Any]
    scores: list[Score]
    rows: dict[str, dict[str, Any]]


def answer_stage(
    records: Sequence[StateRecord], prompts: Sequence[Prompt], answerer: Answerer, run: RunFolder
) -> Answers:
    """Put every question to the model that has no output yet; one row per question in predictions.jsonl.

    Raises:
        ModelError: the model gave an output for none of the questions it was tried on, or cannot be used at all.
    """
    started, before = time.perf_counter(), answerer.seconds
    stored = run.read()
    ids = [record.question_id for record in records]
    predictions: dict[int, Prediction] = {}
    for n, (question_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        item = stored.get(question_id)
        # a row without a hash was written before there were any
        if item is not None and item.prompt in ("", prompt_hash(prompt)):
            predictions[n] = Prediction.of(prompt, item.output)
    resumed = len(predictions)
    with run.append() as file, ProgressBar(f"answer {run.identity['level']}", len(ids), resumed) as bar:

        def keep(index: int, output: Generation) -> None:
            predictions[index] = Prediction.of(prompts[index], output)
            put_row(file, predictions[index].row(ids[index]))
            bar.step()

        for n, prompt in enumerate(prompts):
            if n not in predictions and (prompt.left_out is not None or prompt.reply is not None):
                keep(n, Generation(prompt.reply or "", 0, finished=True))
        open_ = [n for n, prompt in enumerate(prompts) if prompt.left_out is None and prompt.reply is None]
        done = [n in predictions for n in open_]
        outputs = answerer.answer(
            [prompts[n].text for n in open_], [ids[n] for n in open_], done, lambda place, o: keep(open_[place], o)
        )
    tried = [output for output in outputs if output is not None and output.failure != "too_long"]
    if tried and all(output.failure in PASSING for output in tried) and not any(done):
        name = answerer.about["name"]
        raise ModelError(f"{name} could be run on none of {len(tried)} questions: {tried[0].message}")
    model_seconds = answerer.seconds - before
    return Answers([predictions[n] for n in range(len(ids))], resumed, model_seconds, time.perf_counter() - started)


def read_answers(records: Sequence[StateRecord], run: RunFolder) -> Answers:
    """What stage answer left.

    Raises:
        DataError: a question without a row.
    """
    stored = run.read(again=())
    missing = [record.question_id for record in records if record.question_id not in stored]
    if missing:
        raise DataError(f"{len(missing)} questions have no answer yet; run stage answer", run.path, missing[0])
    return Answers([stored[record.question_id] for record in records], len(records))


def _taking_part(records: Sequence[StateRecord], answers: Answers) -> tuple[list[StateRecord], list[Prediction]]:
    """The questions that are not left out; their records hold as found the evidence that the prompt showed."""
    pairs = [(r, item) for r, item in zip(records, answers.predictions, strict=True) if item.left_out is None]
    shown = [
        record if item.prompt == "" else replace(record, evidence_found=item.evidence, images_found=item.images)
        for record, item in pairs
    ]
    return shown, [item for _, item in pairs]


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
    included, items = _taking_part(records, answers)
    outputs = [item.output for item in items]
    parsed = parse_all(included, outputs)
    if judge is None:
        return read_verdicts(included, outputs, parsed, run.verdicts)
    return judge_run(judge, included, outputs, parsed, run.verdicts)


def score_stage(
    records: Sequence[StateRecord],
    answers: Answers,
    verdicts: Verdicts,
    run: RunFolder,
    encoder: SentenceEncoder,
    cfg: EvaluateConfig,
) -> Scored:
    """Score every question, write the scores beside the outputs, and sum them up.

    Returns:
        counts, tables, and seconds of this sitting: answering and the part of it spent in the model, scoring and the
        part of it spent in the sentence encoder.
    """
    started = time.perf_counter()
    included, items = _taking_part(records, answers)
    outputs = [item.output for item in items]
    encoding = 0.0

    def encode(lines: list[str]) -> Tensor:
        nonlocal encoding
        before = time.perf_counter()
        try:
            return encoder.encode(lines)
        finally:
            encoding += time.perf_counter() - before

    scores = score_judged(included, outputs, parse_all(included, outputs), verdicts.rulings, encode)
    by_id = {item.record.question_id: item for item in scores}
    rows = {
        record.question_id: _row(record, item, by_id.get(record.question_id))
        for record, item in zip(records, answers.predictions, strict=True)
    }
    run.rewrite(list(rows.values()))
    left_out = Counter(item.left_out for item in answers.predictions if item.left_out is not None)
    section = {
        "counts": {
            **counts(scores),
            "left_out": dict(sorted(left_out.items())),
            "cut_prompts": sum(item.cut_turns > 0 for item in items),
            "cut_turns": sum(item.cut_turns for item in items),
        },
        **_summaries(scores, cfg),
        "seconds": {
            "answering": answers.seconds,
            "model": answers.model_seconds,
            "scoring": time.perf_counter() - started,
            "encoding": encoding,
        },
        "resumed": answers.resumed,
        "verdicts_resumed": verdicts.resumed,
    }
    return Scored(section, scores, rows)


def _summaries(scores: list[Score], cfg: EvaluateConfig) -> dict[str, Any]:
    def rows(key: Callable[[StateRecord], str | None], names: Sequence[str] | None = None) -> Mapping[str, Any]:
        groups = group(scores, key)
        chosen = [name for name in names or groups if name in groups]
        return {name: summarise(groups[name], cfg.bootstrap, cfg.seed) for name in chosen}

    return {
        "overall": summarise(scores, cfg.bootstrap, cfg.seed),
        "by_format": rows(lambda record: record.format, FORMATS),
        "by_dimension": rows(lambda record: record.dimension),
        "by_category": rows(lambda record: record.category),
    }


def _row(record: StateRecord, item: Prediction, score: Score | None) -> dict[str, Any]:
    return {
        **item.row(record.question_id),
        "dialogue_id": record.dialogue_id,
        "format": record.format,
        "dimension": record.dimension,
        "category": record.category,
        "gold": list(record.answers),
        **({} if score is None else score.row()),
    }
