"""J(ŷ, y) of Eq. 9: whether a direct answer is equivalent to an acceptable one (Figure 10), and verdicts.jsonl.

The file has one line per direct answer, with the judge that gave the verdict and the hash of what it saw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from remind.core.errors import ConfigError
from remind.core.files import write_rows
from remind.core.progress import ProgressBar
from remind.evaluation.parse import ParsedAnswer
from remind.evaluation.predictions import appending, bad_row, read_rows

if TYPE_CHECKING:
    from remind.llm.auxiliary import AuxiliaryLLM
    from remind.models.generate import Generation
    from remind.states.records import StateRecord

#: Cases put to a judge at once; their verdicts are kept before the next ones are asked for.
_AT_ONCE = 64


class Case(NamedTuple):
    """What the judge sees."""

    question: str
    references: tuple[str, ...]
    prediction: str

    @property
    def hash(self) -> str:
        """Sixteen hex digits of a SHA-256."""
        return hashlib.sha256(json.dumps(list(self)).encode()).hexdigest()[:16]


class Ruling(NamedTuple):
    """What became of a case.

    Attributes:
        value: whether the answer is accepted; None: the judge itself failed, which is no verdict on the answer.
        why: the kind of that failure, such as "neither" for a reply that is neither verdict; "" otherwise.
        message: the same in a line.
    """

    value: bool | None
    why: str = ""
    message: str = ""


def load_judge(name: str) -> AuxiliaryLLM:
    """The judge of that name. "offline" is a rule, not a model: its verdicts compare with one another only.

    Raises:
        ConfigError: no such judge.
    """
    if name != "offline":
        raise ConfigError(f"no judge {name!r}; there is: offline (any other AuxiliaryLLM can be passed to evaluate())")
    from remind.llm.auxiliary import OfflineLLM

    return OfflineLLM()


def judge_answers(
    judge: AuxiliaryLLM,
    cases: Sequence[Case],
    known: Mapping[Case, Ruling] | None = None,
    on_ruling: Callable[[int, Ruling], None] | None = None,
    samples: Sequence[str] | None = None,
) -> list[Ruling]:
    """What the judge says of each case.

    An empty prediction is rejected without asking (rule 5 of Figure 10). Equal cases are asked once.

    Args:
        known: rulings from before.
        on_ruling: called with index and ruling of each case that was not known, as they come.
        samples: question ids to which a judge's costs are booked, one for each case.

    Raises:
        ModelError: a judge that cannot be used at all.
    """
    rulings: dict[Case, Ruling] = dict(known or {})
    places: dict[Case, list[int]] = {}
    for index, case in enumerate(cases):
        if case not in rulings:
            places.setdefault(case, []).append(index)
    new = list(places)
    with ProgressBar("judge", len(cases), len(cases) - sum(map(len, places.values()))) as bar:
        for start in range(0, len(new), _AT_ONCE):
            group = new[start : start + _AT_ONCE]
            names = [samples[places[case][0]] if samples else "" for case in group]
            for case, ruling in zip(group, _judge_group(judge, group, names), strict=True):
                rulings[case] = ruling
                for index in places[case]:
                    if on_ruling is not None:
                        on_ruling(index, ruling)
                    bar.step()
    return [rulings[case] for case in cases]


def _judge_group(judge: AuxiliaryLLM, cases: Sequence[Case], samples: Sequence[str]) -> list[Ruling]:
    rulings = [Ruling(False)] * len(cases)
    filled = [n for n, case in enumerate(cases) if case.prediction.strip()]
    if filled:
        verdicts = judge.verdicts([cases[n] for n in filled], [samples[n] for n in filled])
        for n, verdict in zip(filled, verdicts, strict=True):
            rulings[n] = Ruling(verdict.value, verdict.failure or "", verdict.message)
    return rulings


def case_of(record: StateRecord, output: Generation, parsed: ParsedAnswer) -> Case | None:
    """What a judge has to decide; None where there is nothing to: options, no gold answer, no output."""
    if record.format != "direct" or not record.answers or output.failure is not None:
        return None
    return Case(record.question, record.answers, parsed.answer)


def judge_run(
    judge: AuxiliaryLLM,
    records: Sequence[StateRecord],
    outputs: Sequence[Generation],
    parsed: Sequence[ParsedAnswer],
    path: Path,
) -> tuple[list[Ruling | None], int]:
    """Judge the direct answers, and write a row for each. Verdicts that are in the file already are not asked again.

    Returns:
        One ruling per question (None: there was nothing to judge), and how many were known from before.

    Raises:
        DataError: rows at `path` that are no verdicts.
        ModelError: a judge that cannot be used at all.
    """
    all_cases = map(case_of, records, outputs, parsed)
    direct = {n: case for n, case in enumerate(all_cases) if case is not None}
    cases, ids = list(direct.values()), [records[n].question_id for n in direct]
    stored = _stored(path)
    known = {case: Ruling(stored[judge.name, case.hash]) for case in cases if (judge.name, case.hash) in stored}

    def row(n: int, ruling: Ruling) -> dict[str, Any]:
        about = {"verdict": ruling.value, "why": ruling.why, "message": ruling.message}
        return {"question_id": ids[n], "judge": judge.name, "case": cases[n].hash, **about}

    with appending(path) as put:
        rulings = judge_answers(judge, cases, known, lambda n, ruling: put(row(n, ruling)), ids)
    write_rows(path, [row(n, ruling) for n, ruling in enumerate(rulings)])
    by_place = dict(zip(direct, rulings, strict=True))
    return [by_place.get(n) for n in range(len(records))], sum(case in known for case in cases)


def _stored(path: Path) -> dict[tuple[str, str], bool]:
    """Verdicts by judge and case; failures are left out, so that they are asked again."""
    verdicts: dict[tuple[str, str], bool] = {}
    for number, row in read_rows(path, "a verdict"):
        verdict, judge, case = row.get("verdict"), row.get("judge"), row.get("case")
        if not isinstance(verdict, bool | None) or not isinstance(judge, str) or not isinstance(case, str):
            raise bad_row(path, number, "a verdict")
        if verdict is not None:
            verdicts[judge, case] = verdict
    return verdicts
