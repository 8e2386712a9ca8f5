"""J(ŷ, y) of Eq. 9: whether a direct answer is equivalent to an acceptable one (Figure 10); and LongMemEval's judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remind.core.errors import DataError
from remind.evaluation.parse import ParsedAnswer
from remind.llm.request import ChatModel, Request, Stage, from_template
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
