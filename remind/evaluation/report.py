"""The report of an evaluation: report.json and one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from remind.core.files import write_json, write_text
from remind.data.dialogue import FORMATS
from remind.evaluation import tables
from remind.evaluation.tables import judge_label, percent
from remind.states.pyramid import LETTERS

if TYPE_CHECKING:
    from remind.evaluation.scores import Score

_LONGEST_QUOTE = 1200


def write_report(
    folder: str | Path,
    report: dict[str, Any],
    scores: Sequence[Score],
    failed: Mapping[str, Sequence[Score]],
    more: str = "",
) -> None:
    """Write report.html and, last, report.json.

    Args:
        scores: of the reference condition; its wrong answers are shown.
        failed: scores by condition, whose failures are shown.
        more: HTML that the page shows behind its tables.
    """
    folder = Path(folder)
    limit = report["config"]["examples"]
    wrong, broken = examples(scores, limit), failed_examples(failed, limit)
    write_text(folder / "report.html", html(report, wrong, broken, more))
    write_json(folder / "report.json", report)


def examples(scores: Sequence[Score], limit: int) -> list[dict[str, Any]]:
    """Wrong answers in file order, the formats by turns, with the evidence found and missed. Failures are apart."""
    wrong = [
        [s for s in scores if s.accuracy == 0.0 and s.failure is None and s.record.format == name] for name in FORMATS
    ]
    return [_example(item) for item in _by_turns(wrong)[:limit]]


def failed_examples(scores: Mapping[str, Sequence[Score]], limit: int) -> list[dict[str, Any]]:
    """Failures in file order, the kinds by turns: condition, kind, message, what was asked and what came.

    Args:
        scores: by condition.
    """
    failed = [(name, item) for name, items in scores.items() for item in items if item.failure is not None]
    kinds = list(dict.fromkeys(item.failure for _, item in failed))
    mixed = _by_turns([[pair for pair in failed if pair[1].failure == kind] for kind in kinds])
    return [
        {
            **_example(item),
            "condition": name,
            "failure": str(item.failure) + (f": {item.why}" if item.failure == "judge" and item.why else ""),
            "message": _cut(item.generation.message),
        }
        for name, item in mixed[:limit]
    ]


def _by_turns(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [item for item in chain.from_iterable(zip_longest(*groups)) if item is not None]


def _example(item: Score) -> dict[str, Any]:
    record, parsed = item.record, item.parsed
    if record.visual:
        gold = [(index, f"image {index}") for index in record.images]
        shown: Sequence[object] = record.images_found or ()
        cited = [f"image {index}" for index in sorted(parsed.images)]
    else:
        gold = [(turn, _cut(line)) for turn, line in zip(record.evidence, record.evidence_lines, strict=True)]  # type: ignore[misc]
        shown = record.evidence_found or ()
        cited = [_cut(line) for line in parsed.evidence]
    return {
        "id": record.question_id,
        "dialogue": record.dialogue_id,
        "kind": " · ".join(part for part in (record.format, record.dimension, record.category) if part),
        "question": record.question,
        "options": [
            {"letter": letter, "text": option, "gold": letter in record.answers, "chosen": letter in parsed.letters}
            for letter, option in zip(LETTERS, record.options, strict=False)
        ],
        "gold": [] if record.options else list(record.answers),
        "answer": _cut(parsed.answer),
        "output": _cut(item.generation.text),
        "problems": list(parsed.problems) + ([] if item.generation.finished else ["cut off"]),
        "found": [line for place, line in gold if place in shown],
        "missed": [line for place, line in gold if place not in shown],
        "cited": cited,
    }


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + " […]"


def _facts(report: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What was run: configuration, identity, inputs, prompts, versions."""
    model, identity = report["model"], report["identity"]
    length = f", {model['max_length']} tokens" if model["max_length"] else ""
    kind = f" ({model['kind']}{length})" if model["kind"] else ""
    rest = {key: value for key, value in identity.items() if key not in {"states", "model", *report["config"]}}
    return [
        *report["config"].items(),
        ("answering model", f"{model['name']}{kind}"),
        *rest.items(),
        ("states hash", identity["states"]),
        ("model hash", identity["model"]),
        *((f"input {name}", value) for name, value in (report["states"]["inputs"] or {}).items()),
        *(
            (f"states: {name}", value)
            for name in ("kind", "abstention")
            if (value := report["states"].get(name)) is not None
        ),
        *((f"prompt {name}", value) for name, value in report["prompts"].items()),
        ("machine", report["machine"]),
        *((f"version of {name}", value) for name, value in report["versions"].items()),
    ]


def html(
    report: Mapping[str, Any],
    wrong: Sequence[Mapping[str, Any]] = (),
    broken: Sequence[Mapping[str, Any]] = (),
    more: str = "",
) -> str:
    """The page. Everything from data or model is escaped, and isolated so that no text turns the page's direction.

    Args:
        wrong: what `examples` gives. broken: what `failed_examples` gives. more: HTML, escaped.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = percent
    template = (files("remind.evaluation") / "report.html.j2").read_text(encoding="utf-8")
    parts = report["conditions"]
    return environment.from_string(template).render(
        report=report,
        judge=judge_label(report),
        base=report["reference"],
        parts=parts,
        first=[*tables.comparisons(report), *tables.failures(report)],
        measures={name: tables.measures(part) for name, part in parts.items()},
        costs=tables.costs(report),
        facts=_facts(report),
        wrong=wrong,
        broken=broken,
        more=Markup(more),
    )
