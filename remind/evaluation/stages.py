"""The stages of an evaluation under one condition: answer, judge, score."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter

from remind.core.errors import ConfigError, ModelError
from remind.core.files import write_rows
from remind.core.progress import ProgressBar
from remind.evaluation.conditions import Prompt
from remind.evaluation.judge import judge_run
from remind.evaluation.predictions import PASSING, PREDICTIONS, appending, part_name, read_rows
from remind.evaluation.scores import Score, about, counts, parse_all, score, summaries
from remind.evaluation.team import Team
from remind.models.chat import Content, prompt_text
from remind.models.generate import Generation
from remind.models.images import content_of
from remind.states.records import StateRecord

if TYPE_CHECKING:
    from remind.evaluation.answerers import Answerer
    from remind.evaluation.config import EvaluateConfig
    from remind.models.encoder import SentenceEncoder
    from remind.perception.auxiliary import AuxiliaryLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Generation):
    """A row on disk: an output, what its prompt showed, and sixteen hex digits of its SHA-256 as the model read it.

    Attributes:
        evidence_shown, images_shown, cut_turns, left_out: as in `Prompt`.
    """

    question_id: str
    prompt: str
    evidence_shown: tuple[str, ...] | None
    images_shown: tuple[int, ...] | None
    cut_turns: int = 0
    left_out: str | None = None

    def row(self) -> dict[str, Any]:
        """The row of predictions.jsonl."""
        return {"question_id": self.question_id, **asdict(self)}


#: Answers without gold that a report quotes.
_SHOWN = 50
_ROW = TypeAdapter(Prediction)


def predictions(path: Path) -> Iterator[Prediction]:
    """The outputs in a file; of a question that was answered twice the later counts.

    Raises:
        DataError: a line that is no output.
    """
    return (row for _, row in read_rows(path, "an output", lambda line: _ROW.validate_json(line, strict=True)))


def adopt_parts(folder: Path) -> None:
    """Move what other processes have answered, for this run or for one that was killed, to predictions.jsonl.

    Raises:
        DataError: a line that is no output.
    """
    for part in sorted(folder.glob(part_name("*"))):
        rows = list(predictions(part))
        with appending(folder / PREDICTIONS) as put:
            for row in rows:
                put(row.row())
        # a process of a killed run that still writes does so to a file that is gone
        part.unlink()


class Task(NamedTuple):
    """What the processes of a run answer together.

    Attributes:
        folder: of the condition.
        blank: the rows, still without outputs.
        done: which questions were answered before.
    """

    folder: Path
    blank: list[Prediction]
    prompts: list[Content]
    done: list[bool]

    def row(self, place: int, output: Generation) -> dict[str, Any]:
        return replace(self.blank[place], **asdict(output)).row()


class Scored(NamedTuple):
    """A condition's entry in the report, and what is behind it: scores, and final prediction rows by question id."""

    section: dict[str, Any]
    scores: list[Score]
    rows: dict[str, dict[str, Any]]


class Outputs:
    """The outputs of one condition in predictions.jsonl.

    Attributes:
        folder: of the condition.
        identity: what decides the outputs.
        resumed: how many of them were there before.
        seconds: spent in the model in this sitting.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        adopt_parts(folder)
        self.folder, self.identity = folder, identity
        self.resumed, self.seconds = 0, 0.0
        #: Of outputs that stand: their prompts' hashes.
        self._known = {one.question_id: one.prompt for one in self.read().values() if one.failure not in PASSING}
        self._any = bool(self._known)

    def read(self) -> dict[str, Prediction]:
        """The outputs so far by question id. Raises DataError."""
        return {one.question_id: one for one in predictions(self.folder / PREDICTIONS)}

    def add(
        self, ids: Sequence[str], prompts: Sequence[Prompt], answerer: Answerer, team: Team, bar: ProgressBar
    ) -> None:
        """Put those of the questions to the model that have no output yet; one row for each.

        Args:
            team: the processes that answer; this is the first of them.
            bar: counts the questions.

        Raises:
            ModelError: the model gave an output for none of the first questions it was tried on, or cannot be used at
                all; or another process has ended.
            ImagePathError: an image that cannot be used. ConfigError: images for a model that takes text alone.
        """
        begun = bar.n
        shown = [(name, [place.path for place in one.pictures]) for name, one in zip(ids, prompts, strict=True)]
        files: Sequence[Sequence[str]] = [()] * len(ids)
        if any(paths for _, paths in shown):
            if answerer.pictures is None:
                raise ConfigError(f"images pixels: {answerer.about['name']} takes text only; set images captions")
            files = answerer.pictures.check(shown)
        blank = [_blank(answerer.tokenizer, *one) for one in zip(ids, prompts, files, strict=True)]
        done = [self._known.get(one.question_id) == one.prompt for one in blank]
        self.resumed += sum(done)
        bar.skip(sum(done))
        with appending(self.folder / PREDICTIONS) as put:
            for row, prompt, known in zip(blank, prompts, done, strict=True):
                if not prompt.asks and not known:
                    put(replace(row, **asdict(prompt.output or Generation("", 0, finished=True))).row())
        asks = [n for n, prompt in enumerate(prompts) if prompt.asks]
        contents = [content_of(prompts[n].text, prompts[n].pictures) for n in asks]
        task = Task(self.folder, [blank[n] for n in asks], contents, [done[n] for n in asks])

        def told() -> None:
            # the other processes are about as far as this one
            bar.advance_to(min(begun + len(ids), bar.n + team.shard.count))

        before = time.perf_counter()
        if not all(task.done):
            team.share(task)
            outputs = [one for part in team.gather(answer_part(task, answerer, team, told)) for one in part]
            adopt_parts(self.folder)
            tried = [output for output in outputs if output.failure not in ("too_long", "unasked")]
            if tried and all(output.failure in PASSING for output in tried) and not self._any:
                name = answerer.about["name"]
                raise ModelError(f"{name} could be run on none of {len(tried)} questions: {tried[0].message}")
            self._any |= bool(tried)
        self.seconds += time.perf_counter() - before
        bar.advance_to(begun + len(ids))


def _blank(tokenizer: Any, question_id: str, prompt: Prompt, files: Sequence[str]) -> Prediction:
    """A row without its output.

    Args:
        tokenizer: as of an `Answerer`.
        files: hashes of the prompt's image files.
    """
    fixed, text = prompt.output, prompt.text
    if fixed is None and tokenizer is not None:
        text = prompt_text(tokenizer, content_of(prompt.text, prompt.pictures))
    shown = [text, *files] if fixed is None else ["", fixed.text, fixed.message]
    # escaped: a lone surrogate in a dialogue has no bytes of its own
    digest = hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]
    return Prediction(
        "",
        0,
        question_id=question_id,
        prompt=digest,
        evidence_shown=prompt.evidence,
        images_shown=prompt.images,
        cut_turns=prompt.cut_turns,
        left_out=prompt.left_out,
    )


def answer_part(task: Task, answerer: Answerer, team: Team, told: Callable[[], None] | None = None) -> list[Generation]:
    """What this process has to answer. Rows of the first go to predictions.jsonl, those of each other to a file of its
    own, which the first adds to it.

    Args:
        told: called for every output.
    """
    outputs: list[Generation] = []
    with appending(task.folder / part_name(team.shard.index)) as put:

        def keep(place: int, output: Generation) -> None:
            outputs.append(output)
            put(task.row(place, output))
            if told is not None:
                told()

        answerer.answer(task.prompts, [one.question_id for one in task.blank], task.done, keep)
    return outputs


def score_stage(
    records: Sequence[StateRecord], outputs: Outputs, judge: AuxiliaryLLM, encoder: SentenceEncoder, cfg: EvaluateConfig
) -> Scored:
    """Judge the direct answers, score every question, write the scores beside the outputs, and sum them up.

    The section holds counts, tables, and seconds of this sitting: in the model, and scoring.

    Raises:
        ModelError: a judge that cannot be used at all.
    """
    found = outputs.read()
    made = [found[record.question_id] for record in records]
    # the evidence found is what the prompt showed
    pairs = [
        (replace(record, evidence_found=one.evidence_shown, images_found=one.images_shown), one)
        for record, one in zip(records, made, strict=True)
        if one.left_out is None
    ]
    included, generations = [record for record, _ in pairs], [one for _, one in pairs]
    parsed = parse_all(included, generations)
    verdicts = judge_run(judge, included, generations, parsed)

    started = time.perf_counter()
    scores = score(included, generations, parsed, verdicts, encoder.encode)
    scored = {item.record.question_id: item.row() for item in scores}
    rows = {
        record.question_id: {**one.row(), **scored.get(record.question_id, about(record))}
        for record, one in zip(records, made, strict=True)
    }
    write_rows(outputs.folder / PREDICTIONS, rows.values())
    left_out = Counter(one.left_out for one in made if one.left_out is not None)
    section = {
        "counts": {
            **counts(scores),
            "left_out": dict(sorted(left_out.items())),
            "cut_prompts": sum(one.cut_turns > 0 for one in made),
            "cut_turns": sum(one.cut_turns for one in made),
        },
        **summaries(list(scored.values()), cfg.bootstrap, cfg.seed),
        # nothing else in a report says what became of questions that nobody has answered
        "unlabelled": [
            {
                "id": item.record.question_id,
                "question": item.record.question,
                "answer": item.parsed.answer or item.failure,
            }
            for item in scores
            if not item.record.answers
        ][:_SHOWN],
        "seconds": {"model": outputs.seconds, "scoring": time.perf_counter() - started},
        "resumed": outputs.resumed,
    }
    return Scored(section, scores, rows)
