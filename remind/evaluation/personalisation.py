"""How an answer uses what is remembered of a person, and where a wrong one went wrong (SaliMory, arXiv 2606.04120,
Appendices B.3 and B.4). A chat model decides; no rule could replace it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from remind.evaluation.statistics import bootstrap, several
from remind.llm.request import ChatModel, Reply, Request, from_template
from remind.llm.structured import object_schema
from remind.states.pyramid import one_line

TEMPLATE = "judge_p13n"
#: Labels of an answer; the first three are personalised (Figure 5).
LABELS = ("good", "basic", "bad", "underuse", "na")
#: The stage that a wrong answer is due to, the earliest first.
BUCKETS = ("memory", "profile", "generation")
QUALITY = ("richness", "value_add", "style", "relevance", "quality", "misapplied")
_KEYS = {"detection": ("personalised",), "quality": QUALITY, "signals": ("signals",), "suffices": ("suffices",)}
#: Tokens of a reply; models that think first need some of it.
_ROOM = 1024


class Used(NamedTuple):
    """An answer as the judges see it.

    Attributes:
        profile: what it was read from.
        memory: what the system holds; "": nothing.
        wrong: whether another judge rejected it.
    """

    question: str
    references: tuple[str, ...]
    prediction: str
    profile: str
    memory: str
    wrong: bool


class Assessment(NamedTuple):
    """What the judges say.

    Attributes:
        label: one of `LABELS`; None: a reply of theirs could not be read, which is no verdict on the answer.
        bucket: one of `BUCKETS`; None: the answer is not wrong, or as above.
    """

    label: str | None
    bucket: str | None


def assess(model: ChatModel, cases: Sequence[Used], samples: Sequence[str]) -> list[Assessment]:
    """Label every answer, and find the stage that each wrong one is due to. Requests of a step go out together.

    Without any memory an answer can use none, and an empty text answers nothing: neither is asked.

    Args:
        samples: question ids to which the costs are booked, one for each case.

    Raises:
        ModelError: the endpoint as a whole cannot be used.
    """
    labels: dict[int, str] = {n: "na" for n, case in enumerate(cases) if not case.memory}
    buckets: dict[int, str] = {}

    def ask(step: str, numbers: Iterable[int], text: Callable[[Used], str]) -> dict[int, Mapping[str, bool]]:
        chosen, found = list(numbers), {}
        requests = [_request(step, cases[n], text(cases[n]), samples[n]) for n in chosen]
        for n, reply in zip(chosen, model.complete(requests) if requests else (), strict=True):
            if (value := _read(step, reply)) is not None:
                found[n] = value
        return found

    uses = ask("detection", (n for n in range(len(cases)) if n not in labels), lambda one: one.memory)
    for n, value in ask("quality", (n for n in uses if uses[n]["personalised"]), lambda one: one.memory).items():
        labels[n] = quality_label(value)
    for n, value in ask("signals", (n for n in uses if not uses[n]["personalised"]), lambda one: one.memory).items():
        labels[n] = "underuse" if value["signals"] else "na"

    def sufficient(numbers: Sequence[int], text: Callable[[Used], str]) -> dict[int, bool]:
        said = ask("suffices", (n for n in numbers if text(cases[n])), text)
        return {n: said[n]["suffices"] if n in said else False for n in numbers if n in said or not text(cases[n])}

    profiles = sufficient([n for n, case in enumerate(cases) if case.wrong], lambda one: one.profile)
    memories = sufficient([n for n, enough in profiles.items() if not enough], lambda one: one.memory)
    for n, enough in profiles.items():
        if enough or n in memories:
            buckets[n] = "generation" if enough else "profile" if memories[n] else "memory"
    return [Assessment(labels.get(n), buckets.get(n)) for n in range(len(cases))]


def quality_label(points: Mapping[str, bool]) -> str:
    """Good, basic or bad by the points of the second step (Appendix B.3)."""
    if points["misapplied"] or not (points["style"] and points["relevance"] and points["quality"]):
        return "bad"
    return "good" if points["richness"] and points["value_add"] else "basic"


def tally(
    answers: Sequence[tuple[str, Mapping[str, Any]]], resamples: int = 1000, seed: int = 0
) -> dict[str, Any] | None:
    """Shares of the labels, with 95 % intervals over dialogues, and counts of the stages that errors are due to.

    Args:
        answers: each with its dialogue; with `p13n`, `bucket` and `verdict` where they were assessed.

    Returns:
        n labelled answers, `unread` others, the shares `p13n` (personalised at all) and of `LABELS`, and `errors`, of
        which `unread` have no bucket; None: no answer was assessed.
    """
    assessed = [(dialogue, one) for dialogue, one in answers if "p13n" in one]
    if not assessed:
        return None
    read = [(dialogue, one["p13n"]) for dialogue, one in assessed if one["p13n"] is not None]
    clusters = several([dialogue for dialogue, _ in read])
    shares = {
        name: bootstrap([float(label in labels) for _, label in read], resamples, seed, clusters)
        for name, labels in {"p13n": LABELS[:3], **{label: (label,) for label in LABELS}}.items()
    }
    stages = Counter(one["bucket"] or "unread" for _, one in assessed if one["verdict"] is False)
    errors = {name: stages[name] for name in (*BUCKETS, "unread")}
    return {"n": len(read), "unread": len(assessed) - len(read), **shares, "errors": errors}


def _request(step: str, case: Used, text: str, sample: str) -> Request:
    suffices = step == "suffices"
    answer = "\n".join(map(one_line, case.references if suffices else (case.prediction,)))
    data = {"question": one_line(case.question), "answers" if suffices else "reply": answer}
    data["text" if suffices else "memory"] = text
    schema = object_schema(**{key: {"type": "boolean"} for key in _KEYS[step]})
    form = json.dumps(dict.fromkeys(_KEYS[step], True))
    return from_template("judge", TEMPLATE, sample, schema, _ROOM, data, step=step, form=form)


def _read(step: str, reply: Reply) -> Mapping[str, bool] | None:
    """The points of a reply; None where one is missing or neither true nor false."""
    value = reply.value
    if reply.failure is not None or not isinstance(value, Mapping):
        return None
    return value if all(isinstance(value.get(key), bool) for key in _KEYS[step]) else None
