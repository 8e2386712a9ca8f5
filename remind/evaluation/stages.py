"""The stages of an evaluation under one condition: answer, judge, score."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from remind.core.errors import ModelError
from remind.core.files import write_rows
from remind.core.progress import ProgressBar
from remind.data.dialogue import FORMATS
from remind.evaluation.conditions import Prompt
from remind.evaluation.judge import judge_run
from remind.evaluation.predictions import PASSING, RunFolder, appending, output_row, part_name, prompt_hash
from remind.evaluation.scores import Score, counts, group, parse_all, score, summarise
from remind.evaluation.team import Team
from remind.models.generate import Generation
from remind.states.records import StateRecord

if TYPE_CHECKING:
    from torch import Tensor

    from remind.evaluation.answerers import Answerer
    from remind.evaluation.config import EvaluateConfig
    from remind.llm.auxiliary import AuxiliaryLLM
    from remind.models.encoder import SentenceEncoder


class Answers(NamedTuple):
    """Prompt and output of every question, left-out ones included.

    Attributes:
        resumed: how many outputs were there before.
        model_seconds, seconds: spent in the model, and in all, in this sitting.
    """

    prompts: Sequence[Prompt]
    outputs: list[Generation]
    resumed: int
    model_seconds: float
    seconds: float


class Asked(NamedTuple):
    """What the processes of a run answer together under one condition.

    Attributes:
        folder: of the condition.
        done: which questions were answered before.
    """

    folder: Path
    ids: list[str]
    prompts: list[Prompt]
    done: list[bool]

    def put_to(self, answerer: Answerer, on_output: Callable[[int, Generation], None]) -> None:
        answerer.answer([prompt.content for prompt in self.prompts], self.ids, self.done, on_output)


class Scored(NamedTuple):
    """A condition's entry in the report, and what is behind it: scores, and final prediction rows by question id."""

    section: dict[str, Any]
    scores: list[Score]
    rows: dict[str, dict[str, Any]]


def answer_stage(
    records: Sequence[StateRecord], prompts: Sequence[Prompt], answerer: Answerer, run: RunFolder, team: Team
) -> Answers:
    """Put every question to the model that has no output yet; one row per question in predictions.jsonl.

    Args:
        team: the processes that answer; this is the first of them.

    Raises:
        ModelError: the model gave an output for none of the questions it was tried on, or cannot be used at all; or
            another process has failed.
    """
    started = time.perf_counter()
    run.adopt_parts()
    stored = run.read()
    ids = [record.question_id for record in records]
    outputs: dict[int, Generation] = {}
    for n, (question_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        item = stored.get(question_id)
        # a row without a hash was written before there were any
        if item is not None and item.prompt in ("", prompt_hash(prompt)):
            outputs[n] = item.output
    resumed = len(outputs)
    progress = ProgressBar(f"answer {run.identity['level']}", len(ids), resumed)
    with appending(run.path) as put, progress as bar:

        def keep(index: int, output: Generation) -> None:
            outputs[index] = output
            put(output_row(ids[index], prompts[index], output))

        for n, prompt in enumerate(prompts):
            if n not in outputs and (prompt.left_out is not None or prompt.reply is not None):
                keep(n, Generation(prompt.reply or "", 0, finished=True))
        asked = [n for n, prompt in enumerate(prompts) if prompt.left_out is None and prompt.reply is None]
        done = [n in outputs for n in asked]
        known = len(outputs)
        bar.advance_to(known)
        task = Asked(run.folder, [ids[n] for n in asked], [prompts[n] for n in asked], done)

        def answered(place: int, output: Generation) -> None:
            keep(asked[place], output)
            # the other processes are about as far as this one
            bar.advance_to(min(len(ids), known + team.shard.count * (len(outputs) - known)))
            team.check()

        def own() -> dict[int, Generation]:
            task.put_to(answerer, answered)
            return {}

        before = time.perf_counter()
        team.share(task)
        for part in team.gather(own):
            outputs |= {asked[place]: output for place, output in part.items()}
        bar.advance_to(len(outputs))
        model_seconds = time.perf_counter() - before
    run.adopt_parts()
    tried = [outputs[n] for n, skip in zip(asked, done, strict=True) if not skip and outputs[n].failure != "too_long"]
    if tried and all(output.failure in PASSING for output in tried) and not any(done):
        name = answerer.about["name"]
        raise ModelError(f"{name} could be run on none of {len(tried)} questions: {tried[0].message}")
    ordered = [outputs[n] for n in range(len(ids))]
    return Answers(prompts, ordered, resumed, model_seconds, time.perf_counter() - started)


def answer_part(task: Asked, answerer: Answerer, team: Team) -> dict[int, Generation]:
    """What this process, which is not the first, has to answer, by place. Its rows are in a file of their own until the
    first process adds them to predictions.jsonl.
    """
    outputs: dict[int, Generation] = {}
    with appending(task.folder / part_name(team.shard.index)) as put:

        def keep(place: int, output: Generation) -> None:
            outputs[place] = output
            put(output_row(task.ids[place], task.prompts[place], output))
            team.check()

        task.put_to(answerer, keep)
    return outputs


def score_stage(
    records: Sequence[StateRecord],
    answers: Answers,
    run: RunFolder,
    judge: AuxiliaryLLM,
    encoder: SentenceEncoder,
    cfg: EvaluateConfig,
) -> Scored:
    """Judge the direct answers, score every question, write the scores beside the outputs, and sum them up.

    Verdicts are in verdicts.jsonl. The section holds counts, tables, and seconds of this sitting: answering and the
    part of it spent in the model, scoring and the part of it spent in the sentence encoder.

    Raises:
        DataError: verdicts that are damaged.
        ModelError: a judge that cannot be used at all.
    """
    kept = [n for n, prompt in enumerate(answers.prompts) if prompt.left_out is None]
    prompts, outputs = [answers.prompts[n] for n in kept], [answers.outputs[n] for n in kept]
    # the evidence found is what the prompt showed
    included = [
        replace(records[n], evidence_found=prompt.evidence, images_found=prompt.images)
        for n, prompt in zip(kept, prompts, strict=True)
    ]
    parsed = parse_all(included, outputs)
    rulings, verdicts_resumed = judge_run(judge, included, outputs, parsed, run.verdicts)

    started, encoding = time.perf_counter(), 0.0

    def encode(lines: list[str]) -> Tensor:
        nonlocal encoding
        before = time.perf_counter()
        try:
            return encoder.encode(lines)
        finally:
            encoding += time.perf_counter() - before

    scores = score(included, outputs, parsed, rulings, encode)
    by_id = {item.record.question_id: item for item in scores}
    rows = {
        record.question_id: _row(record, prompt, output, by_id.get(record.question_id))
        for record, prompt, output in zip(records, answers.prompts, answers.outputs, strict=True)
    }
    write_rows(run.path, rows.values())
    left_out = Counter(prompt.left_out for prompt in answers.prompts if prompt.left_out is not None)
    section = {
        "counts": {
            **counts(scores),
            "left_out": dict(sorted(left_out.items())),
            "cut_prompts": sum(prompt.cut_turns > 0 for prompt in prompts),
            "cut_turns": sum(prompt.cut_turns for prompt in prompts),
        },
        **summaries(scores, cfg.bootstrap, cfg.seed),
        "seconds": {
            "answering": answers.seconds,
            "model": answers.model_seconds,
            "scoring": time.perf_counter() - started,
            "encoding": encoding,
        },
        "resumed": answers.resumed,
        "verdicts_resumed": verdicts_resumed,
    }
    return Scored(section, scores, rows)


def summaries(scores: list[Score], resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Rows of `summarise`: over all, by format, by dimension, by dimension and format (Tables 4 to 7), by category."""

    def rows(members: list[Score], key: Callable[[StateRecord], str | None]) -> Mapping[str, Any]:
        return {name: summarise(own, resamples, seed) for name, own in group(members, key).items()}

    def by_format(members: list[Score]) -> Mapping[str, Any]:
        found = rows(members, lambda record: record.format)
        return {name: found[name] for name in FORMATS if name in found}

    dimensions = group(scores, lambda record: record.dimension)
    return {
        "overall": summarise(scores, resamples, seed),
        "by_format": by_format(scores),
        "by_dimension": rows(scores, lambda record: record.dimension),
        "by_dimension_and_format": {name: by_format(own) for name, own in dimensions.items()},
        "by_category": rows(scores, lambda record: record.category),
    }


def _row(record: StateRecord, prompt: Prompt, output: Generation, score: Score | None) -> dict[str, Any]:
    return {
        **output_row(record.question_id, prompt, output),
        "dialogue_id": record.dialogue_id,
        "format": record.format,
        "dimension": record.dimension,
        "category": record.category,
        "gold": list(record.answers),
        **({} if score is None else score.row()),
    }
