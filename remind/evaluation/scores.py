"""From outputs to scores per question (Eq. 9-14), and their averages by group (Eq. 8)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from remind.core.files import write_rows
from remind.data.dialogue import FORMATS
from remind.evaluation import metrics
from remind.evaluation.judge import judge_run
from remind.evaluation.parse import ParsedAnswer, parse_answer
from remind.evaluation.predictions import NO_VERDICT, PREDICTIONS
from remind.evaluation.statistics import bootstrap, several, share
from remind.evaluation.tables import HEADS
from remind.models.generate import Generation
from remind.states.records import StateRecord, evidence_share
from remind.text.words import Verdict

if TYPE_CHECKING:
    from remind.evaluation.config import EvaluateConfig
    from remind.evaluation.run import Outputs
    from remind.models.encoder import SentenceEncoder
    from remind.perception.auxiliary import AuxiliaryLLM

#: Answers without gold that a report quotes.
_SHOWN = 50
#: The averaged scores; those of `SHARES` are shares of ones, the others are means.
MEASURES = tuple(HEADS)
SHARES = ("accuracy", "parse_rate")


@dataclass(frozen=True)
class Score:
    """The scores of one question. None: the question takes no part in that score.

    Attributes:
        failure: there is no answer to judge, or no verdict on it: as in `Generation`, "unparsable" (the output gives no
            answer, or chooses from no options, not even none of them), or "judge" (the judge gave no verdict). Those of
            the answering model are scored as an empty output; those in `NO_VERDICT` take no part in accuracy.
        why: the kind of a judge's failure; "" otherwise.
        accuracy: s_i of Eq. 9, 0 where the answering model failed; None without a verdict, and where no gold answer is
            known.
        memory_recall_text, memory_recall_visual: Eq. 10, 11. bleu1, f1: Eq. 13, 14, direct questions only.
        locomo_f1: direct questions of LoCoMo's categories 1 to 5.
        evidence_recall: share of the gold evidence that x0 holds; known even where the answer failed.
    """

    record: StateRecord
    generation: Generation
    parsed: ParsedAnswer
    failure: str | None = None
    why: str = ""
    accuracy: float | None = None
    memory_recall_text: float | None = None
    memory_recall_visual: float | None = None
    bleu1: float | None = None
    f1: float | None = None
    locomo_f1: float | None = None
    evidence_recall: float | None = None

    @property
    def memory_recall(self) -> float | None:
        """The recall of the question's own modality (Section 3, Evaluation Protocols)."""
        return self.memory_recall_visual if self.record.visual else self.memory_recall_text

    @property
    def parse_rate(self) -> float | None:
        """1 if an answer could be read from the output, 0 if not; None where no output came."""
        return None if self.generation.failure in NO_VERDICT else float(self.failure in (None, *NO_VERDICT))

    @property
    def outcome(self) -> str:
        """failed, unscored, wrong or right."""
        return "failed" if self.failure is not None else {None: "unscored", 0.0: "wrong"}.get(self.accuracy, "right")

    @property
    def gold_evidence(self) -> list[tuple[str, bool]]:
        """The gold lines or images, and whether the prompt showed each."""
        record = self.record
        if record.visual:
            return [(f"image {index}", index in (record.images_found or ())) for index in record.images]
        lines = zip(record.evidence, record.evidence_lines, strict=True)
        return [(line, turn in (record.evidence_found or ())) for turn, line in lines]

    def row(self) -> dict[str, Any]:
        """What predictions.jsonl holds of it besides the output."""
        return {
            **about(self.record),
            "answer": self.parsed.answer,
            "letters": sorted(self.parsed.letters),
            "evidence": list(self.parsed.evidence),
            "images": sorted(self.parsed.images),
            "problems": list(self.parsed.problems),
            "score_failure": self.failure,
            **{name: getattr(self, name) for name in MEASURES},
        }


def about(record: StateRecord) -> dict[str, Any]:
    """What predictions.jsonl holds of a question besides its id."""
    named = {name: getattr(record, name) for name in ("dialogue_id", "format", "dimension", "category")}
    return {**named, "gold": list(record.answers)}


def parse_all(records: Sequence[StateRecord], outputs: Sequence[Generation]) -> list[ParsedAnswer]:
    """What each output says."""
    return [
        parse_answer(output.text, record.format, record.options, record.visual)
        for record, output in zip(records, outputs, strict=True)
    ]


def score(
    records: Sequence[StateRecord],
    generations: Sequence[Generation],
    parsed: Sequence[ParsedAnswer],
    verdicts: Sequence[Verdict | None],
    encode: Callable[[list[str]], Tensor],
) -> list[Score]:
    """Score outputs that have been parsed and judged.

    Args:
        verdicts: None where there was nothing to judge.
        encode: φ of Eq. 10, lines to unit rows; called once, on all lines.
    """
    pairs = [(r.evidence_lines, p.evidence) for r, p in zip(records, parsed, strict=True) if not r.visual]
    lines = (line for gold, found in pairs if gold and found for line in (*gold, *found))
    every = list(dict.fromkeys(lines))
    vectors = dict(zip(every, encode(every), strict=True)) if every else {}
    return [
        _score(*parts, lambda wanted: torch.stack([vectors[line] for line in wanted]))
        for parts in zip(records, generations, parsed, verdicts, strict=True)
    ]


def _score(
    record: StateRecord,
    generation: Generation,
    parsed: ParsedAnswer,
    verdict: Verdict | None,
    encode: Callable[[list[str]], Tensor],
) -> Score:
    share = evidence_share(record)
    if generation.failure in NO_VERDICT:
        return Score(record, generation, parsed, generation.failure, evidence_recall=share)
    direct = record.format == "direct"
    failure: str | None = generation.failure or (None if parsed.readable else "unparsable")
    correct = None
    if failure is not None:
        correct = 0.0 if record.answers else None
    elif direct and verdict is not None:
        failure = "judge" if verdict.value is None else None
        correct = None if verdict.value is None else float(verdict.value)
    elif not direct and record.answers:
        correct = metrics.accuracy(set(parsed.letters), set(record.answers))
    text = visual = bleu1 = f1 = locomo = None
    # what cannot be read is like an empty output
    told = parsed if parsed.readable else ParsedAnswer("")
    if record.visual:
        visual = metrics.memory_recall_visual(set(record.images), set(told.images))
    else:
        text = metrics.memory_recall_text(record.evidence_lines, told.evidence, encode)
    if direct and record.answers:
        bleu1, f1 = (metric(parsed.answer, record.answers) for metric in (metrics.bleu1, metrics.token_f1))
        if record.dimension is None and record.category in {"1", "2", "3", "4", "5"}:
            locomo = max(metrics.locomo_f1(parsed.answer, gold, int(record.category)) for gold in record.answers)
    why = "" if verdict is None else verdict.failure or ""
    return Score(record, generation, parsed, failure, why, correct, text, visual, bleu1, f1, locomo, share)


def summarise(scored: Iterable[Mapping[str, Any]], resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Counts, and for each of `MEASURES` an `Estimate` over the questions that take part, or None.

    Accuracy is Eq. 8 over all questions with a gold answer: an output that cannot be read, or none at all from a model
    that refuses or has no room, is wrong (`failed` counts them), so that leaving questions out cannot raise it. Only
    questions without a verdict (`no_verdict`: no reply from a server, a forward that failed, a judge that failed) take
    no part. Intervals are of resampled dialogues where there are several.

    Args:
        scored: rows of `Score.row`, as predictions.jsonl holds them.
    """
    rows = list(scored)
    failures = [failure for row in rows if (failure := row.get("score_failure")) is not None]
    without = sum(failure in NO_VERDICT for failure in failures)
    summary: dict[str, Any] = {"n": len(rows), "failed": len(failures) - without, "no_verdict": without}
    for name in MEASURES:
        part = [(float(row[name]), row["dialogue_id"]) for row in rows if row[name] is not None]
        values, dialogues = [value for value, _ in part], [dialogue for _, dialogue in part]
        if name in SHARES:
            summary[name] = share(values, dialogues, resamples, seed)
        else:
            summary[name] = bootstrap(values, resamples, seed, several(dialogues))
    return summary


def macro(by_dimension: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over dimensions of each of `MEASURES`, with the number of dimensions that have it as n; no interval.

    It is what the paper's Table 1 prints: the mean of a row of Tables 4 to 7, however many questions a dimension has.

    Args:
        by_dimension: what `summarise` gives of each.
    """
    means: dict[str, Any] = {
        key: sum(row[key] for row in by_dimension.values()) for key in ("n", "failed", "no_verdict")
    }
    for name in MEASURES:
        values = [row[name]["value"] for row in by_dimension.values() if row[name] is not None]
        mean = {"value": sum(values) / len(values), "low": None, "high": None, "n": len(values)} if values else None
        means[name] = mean
    return means


def summaries(scored: Sequence[Mapping[str, Any]], resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """What `summarise` gives over all, by format, by dimension, by both (Tables 4 to 7), and by category.

    `macro` has the means over dimensions: of each format and, of all formats together, "all".
    """

    def by(key: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
        names = FORMATS if key == "format" else sorted({row[key] for row in rows if row[key] is not None})
        groups = {name: [row for row in rows if row[key] == name] for name in names}
        return {name: group for name, group in groups.items() if group}

    def each(groups: Mapping[str, list[Mapping[str, Any]]]) -> dict[str, Any]:
        return {name: summarise(group, resamples, seed) for name, group in groups.items()}

    both = {name: each(by("format", own)) for name, own in by("dimension", scored).items()}
    parts = {f"by_{key}": each(by(key, scored)) for key in ("format", "dimension", "category")}
    columns: dict[str, dict[str, Any]] = {
        format: {name: cells[format] for name, cells in both.items() if format in cells} for format in FORMATS
    }
    columns["all"] = parts["by_dimension"]
    return {
        "overall": summarise(scored, resamples, seed),
        **parts,
        "by_dimension_and_format": both,
        "macro": {format: macro(rows) for format, rows in columns.items() if rows},
    }


def counts(scores: Sequence[Score]) -> dict[str, Any]:
    """What was left out of which score and why, departures from the output form, and tokens."""
    answered = [s for s in scores if s.generation.failure is None]
    return {
        "questions": len(scores),
        "dialogues": len({s.record.dialogue_id for s in scores}),
        "answered": len(answered),
        "empty": sum(not s.generation.text.strip() for s in answered),
        "failures": dict(sorted(Counter(s.failure for s in scores if s.failure is not None).items())),
        "judge_failures": dict(sorted(Counter(s.why for s in scores if s.failure == "judge").items())),
        "without_gold_answer": sum(not s.record.answers for s in scores),
        "without_gold_evidence": sum(s.evidence_recall is None for s in scores),
        "cut_off": sum(not s.generation.finished for s in answered),
        "problems": dict(Counter(p for s in answered for p in s.parsed.problems).most_common()),
        "prompt_tokens": sum(s.generation.prompt_tokens for s in scores),
        "new_tokens": sum(s.generation.new_tokens for s in scores),
    }


class Scored(NamedTuple):
    """A condition's entry in the report, and what is behind it: scores, and final prediction rows by question id."""

    section: dict[str, Any]
    scores: list[Score]
    rows: dict[str, dict[str, Any]]


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
