"""The stages of an evaluation under one condition: answer, judge, score."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from remind.core.errors import ConfigError, ModelError
from remind.core.files import write_rows
from remind.core.progress import ProgressBar
from remind.data.dialogue import FORMATS
from remind.evaluation.conditions import Prompt
from remind.evaluation.judge import judge_run
from remind.evaluation.predictions import PASSING, Prediction, RunFolder, appending, part_name, prompt_hash
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


class Task(NamedTuple):
    """What the processes of a run answer together.

    Attributes:
        folder: of the condition.
        hashes: of the prompts.
        done: which questions were answered before.
    """

    folder: Path
    ids: list[str]
    prompts: list[Prompt]
    hashes: list[str]
    done: list[bool]

    def part(self, places: Sequence[int]) -> Task:
        """Some of it."""
        ids, prompts = [self.ids[n] for n in places], [self.prompts[n] for n in places]
        return Task(self.folder, ids, prompts, [self.hashes[n] for n in places], [self.done[n] for n in places])

    def answer(self, answerer: Answerer, on_output: Callable[[int, Generation], None]) -> None:
        answerer.answer([prompt.content for prompt in self.prompts], self.ids, self.done, on_output)

    def row(self, place: int, output: Generation) -> dict[str, Any]:
        """The row of predictions.jsonl."""
        prompt = self.prompts[place]
        made = (output, self.hashes[place], prompt.evidence, prompt.images, prompt.cut_turns, prompt.left_out)
        return Prediction(*made).row(self.ids[place])


class Scored(NamedTuple):
    """A condition's entry in the report, and what is behind it: scores, and final prediction rows by question id."""

    section: dict[str, Any]
    scores: list[Score]
    rows: dict[str, dict[str, Any]]


class Outputs:
    """The outputs of one condition in predictions.jsonl.

    Attributes:
        resumed: how many of them were there before.
        model_seconds, seconds: spent in the model, and in all, in this sitting.
    """

    def __init__(self, run: RunFolder) -> None:
        run.adopt_parts()
        self.run = run
        self.resumed, self.model_seconds, self.seconds = 0, 0.0, 0.0
        #: Of outputs that stand: their prompts' hashes.
        self._known = {name: one.prompt for name, one in run.read().items() if one.output.failure not in PASSING}
        self._any = bool(self._known)

    def add(
        self, ids: Sequence[str], prompts: Sequence[Prompt], answerer: Answerer, team: Team, bar: ProgressBar
    ) -> None:
        """Put those of the questions to the model that have no output yet; one row for each.

        Args:
            team: the processes that answer; this is the first of them.
            bar: counts the questions.

        Raises:
            ModelError: the model gave an output for none of the first questions it was tried on, or cannot be used at
                all; or another process has failed.
            ImagePathError: an image that cannot be used. ConfigError: images for a model that takes text alone.
        """
        started, begun = time.perf_counter(), bar.n
        shown = [(name, [place.path for place in one.pictures]) for name, one in zip(ids, prompts, strict=True)]
        files: Sequence[Sequence[str]] = [()] * len(ids)
        if any(paths for _, paths in shown):
            if answerer.pictures is None:
                raise ConfigError(f"images pixels: {answerer.about['name']} takes text only; set images captions")
            files = answerer.pictures.check(shown)
        hashes = list(map(prompt_hash, prompts, files))
        done = [self._known.get(name) == own for name, own in zip(ids, hashes, strict=True)]
        self.resumed += sum(done)
        bar.skip(sum(done))
        every = Task(self.run.folder, list(ids), list(prompts), hashes, done)
        task = every.part([n for n, prompt in enumerate(prompts) if prompt.asks])
        outputs: dict[int, Generation] = {}
        with appending(self.run.path) as put:
            for n, prompt in enumerate(prompts):
                if not prompt.asks and not done[n]:
                    put(every.row(n, prompt.output or Generation("", 0, finished=True)))

            def answered(place: int, output: Generation) -> None:
                outputs[place] = output
                put(task.row(place, output))
                # the other processes are about as far as this one
                bar.advance_to(min(begun + len(ids), bar.n + team.shard.count))
                team.check()

            def own() -> dict[int, Generation]:
                task.answer(answerer, answered)
                return {}

            before = time.perf_counter()
            if not all(task.done):
                team.share(task)
                for part in team.gather(own):
                    outputs |= part
            self.model_seconds += time.perf_counter() - before
        self.run.adopt_parts()
        bar.advance_to(begun + len(ids))
        tried = [output for output in outputs.values() if output.failure not in ("too_long", "unasked")]
        if tried and all(output.failure in PASSING for output in tried) and not self._any:
            name = answerer.about["name"]
            raise ModelError(f"{name} could be run on none of {len(tried)} questions: {tried[0].message}")
        self._any |= bool(tried)
        self.seconds += time.perf_counter() - started


def answer_part(task: Task, answerer: Answerer, team: Team) -> dict[int, Generation]:
    """What this process, which is not the first, has to answer, by place. Its rows are in a file of their own until the
    first process adds them to predictions.jsonl.
    """
    outputs: dict[int, Generation] = {}
    with appending(task.folder / part_name(team.shard.index)) as put:

        def keep(place: int, output: Generation) -> None:
            outputs[place] = output
            put(task.row(place, output))
            team.check()

        task.answer(answerer, keep)
    return outputs


def score_stage(
    records: Sequence[StateRecord],
    outputs: Outputs,
    judge: AuxiliaryLLM,
    encoder: SentenceEncoder,
    cfg: EvaluateConfig,
) -> Scored:
    """Judge the direct answers, score every question, write the scores beside the outputs, and sum them up.

    The section holds counts, tables, and seconds of this sitting: answering and the part of it spent in the model,
    scoring and the part of it spent in the sentence encoder.

    Raises:
        ModelError: a judge that cannot be used at all.
    """
    run, found = outputs.run, outputs.run.read()
    made = {record.question_id: found[record.question_id] for record in records}
    # the evidence found is what the prompt showed
    included = [
        replace(record, evidence_found=one.evidence, images_found=one.images)
        for record, one in zip(records, made.values(), strict=True)
        if one.left_out is None
    ]
    generations = [made[record.question_id].output for record in included]
    parsed = parse_all(included, generations)
    rulings = judge_run(judge, included, generations, parsed)

    started, encoding = time.perf_counter(), 0.0

    def encode(lines: list[str]) -> Tensor:
        nonlocal encoding
        before = time.perf_counter()
        try:
            return encoder.encode(lines)
        finally:
            encoding += time.perf_counter() - before

    scores = score(included, generations, parsed, rulings, encode)
    by_id = {item.record.question_id: item for item in scores}
    rows = {
        record.question_id: _row(record, made[record.question_id], by_id.get(record.question_id)) for record in records
    }
    write_rows(run.path, rows.values())
    left_out = Counter(one.left_out for one in made.values() if one.left_out is not None)
    section = {
        "counts": {
            **counts(scores),
            "left_out": dict(sorted(left_out.items())),
            "cut_prompts": sum(one.cut_turns > 0 for one in made.values()),
            "cut_turns": sum(one.cut_turns for one in made.values()),
        },
        **summaries(scores, cfg.bootstrap, cfg.seed),
        "seconds": {
            "answering": outputs.seconds,
            "model": outputs.model_seconds,
            "scoring": time.perf_counter() - started,
            "encoding": encoding,
        },
        "resumed": outputs.resumed,
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


def _row(record: StateRecord, prediction: Prediction, score: Score | None) -> dict[str, Any]:
    return {
        **prediction.row(record.question_id),
        "dialogue_id": record.dialogue_id,
        "format": record.format,
        "dimension": record.dimension,
        "category": record.category,
        "gold": list(record.answers),
        **({} if score is None else score.row()),
    }
