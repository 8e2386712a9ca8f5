"""J(ŷ, y) of Eq. 9: whether a direct answer is equivalent to an acceptable one (Figure 10), also as LongMemEval
asks; and how an answer uses what is remembered of a person, and where a wrong one went wrong (SaliMory, arXiv
2606.04120, Appendices B.3 and B.4), which a chat model decides: no rule could replace it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from remind.core.errors import DataError
from remind.evaluation.parse import ParsedAnswer
from remind.evaluation.statistics import bootstrap, several
from remind.llm.request import ChatModel, Reply, Request, Stage, from_template
from remind.llm.structured import object_schema
from remind.perception.auxiliary import ROOM, VERDICT_SCHEMA, ChatLLM, verdict_in
from remind.states import prompts
from remind.states.pyramid import one_line
from remind.text.words import Verdict

if TYPE_CHECKING:
    from remind.models.generate import Generation
    from remind.perception.auxiliary import AuxiliaryLLM
    from remind.states.records import StateRecord


#: LongMemEval's six question types, in the benchmark's order, and the role in which a judge is asked about each. The
#: fifth role, abstention, is that of questions whose id has `_abs`, whatever their type.
LONGMEMEVAL = {
    "single-session-user": "default",
    "single-session-preference": "preference",
    "single-session-assistant": "default",
    "multi-session": "default",
    "temporal-reasoning": "temporal",
    "knowledge-update": "update",
}


class Case(NamedTuple):
    """What the judge sees."""

    question: str
    references: tuple[str, ...]
    prediction: str


class LongMemEvalJudge(ChatLLM):
    """LongMemEval's judge: a chat model that is asked in one of five roles by the type of the question.

    Attributes:
        types: of the questions, by their ids.
    """

    def __init__(self, models: Mapping[Stage, ChatModel], types: Mapping[str, str | None] | None = None) -> None:
        super().__init__(models)
        self.types = dict(types or {})

    @property
    def name(self) -> str:
        return f"longmemeval {' '.join(role_prompts().values())} {self.models['judge'].name}"

    def verdicts(
        self, cases: Sequence[tuple[str, Sequence[str], str]], samples: Sequence[str] | None = None
    ) -> list[Verdict]:
        """Whether each prediction is right, in the role of its question's type.

        Args:
            samples: question ids, which tell abstention.

        Raises:
            DataError: a question of no type of LongMemEval's.
        """
        requests = [self._request(*case, sample) for case, sample in zip(cases, samples or (), strict=True)]
        return [verdict_in(reply) for reply in self._replies("judge", requests)]

    def _request(self, question: str, references: Sequence[str], prediction: str, sample: str) -> Request:
        """What is asked about a prediction, beside the gold: an answer, a rubric, or why there is no answer."""
        role = "abstention" if "_abs" in sample else LONGMEMEVAL.get(str(self.types.get(sample)))
        if role is None:
            what = f"judge longmemeval knows no question type {self.types.get(sample)!r}"
            raise DataError(what, record=sample)
        data = {"question": question, "reference": "\n".join(references), "response": prediction}
        lines = {name: one_line(text) for name, text in data.items()}
        return from_template("judge", f"judge_longmemeval_{role}", sample, VERDICT_SCHEMA, ROOM["judge"], lines)


def role_prompts() -> dict[str, str]:
    """Name and hash of the template of each role."""
    return {role: prompts.prompt_id(f"judge_longmemeval_{role}") for role in (*LONGMEMEVAL.values(), "abstention")}


def judge_answers(judge: AuxiliaryLLM, cases: Sequence[Case], samples: Sequence[str] | None = None) -> list[Verdict]:
    """What the judge says of each case.

    An empty prediction is rejected without asking (rule 5 of Figure 10).

    Args:
        samples: question ids to which a judge's costs are booked, one for each case.

    Raises:
        ModelError: a judge that cannot be used at all.
    """
    asked = [n for n, case in enumerate(cases) if case.prediction.strip()]
    names = None if samples is None else [samples[n] for n in asked]
    found = dict(zip(asked, judge.verdicts([cases[n] for n in asked], names) if asked else (), strict=True))
    return [found.get(n, Verdict(False)) for n in range(len(cases))]


def judge_run(
    judge: AuxiliaryLLM, records: Sequence[StateRecord], outputs: Sequence[Generation], parsed: Sequence[ParsedAnswer]
) -> list[Verdict | None]:
    """One verdict per question; None: there was nothing to judge (options, no gold answer, no output).

    Raises:
        ModelError: a judge that cannot be used at all.
    """
    asked = [
        n
        for n, (record, output) in enumerate(zip(records, outputs, strict=True))
        if record.format == "direct" and record.answers and output.failure is None
    ]
    if isinstance(judge, LongMemEvalJudge):
        judge.types |= {record.question_id: record.category for record in records}
    cases = [Case(records[n].question, records[n].answers, parsed[n].answer) for n in asked]
    verdicts = dict(zip(asked, judge_answers(judge, cases, [records[n].question_id for n in asked]), strict=True))
    return [verdicts.get(n) for n in range(len(records))]


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
