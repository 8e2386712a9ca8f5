"""Right or wrong, question by question: greedy answers of a backbone under the levels of its states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from remind.core.errors import DataError
from remind.evaluation import metrics
from remind.evaluation.parse import parse_answer
from remind.states.parquet import StateRecord

if TYPE_CHECKING:
    from remind.models.backbone import Backbone
    from remind.models.generate import Generation

#: Answers of the world end well before; the nano backbone quotes nothing after them.
MAX_NEW_TOKENS = 12


def answered(
    backbone: Backbone,
    records: Sequence[StateRecord],
    level: str,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 64,
) -> list[bool]:
    """Whether each question is answered rightly from a level.

    Raises:
        DataError: a question without a gold answer.
        ModelError: a model that does not generate.
    """
    from remind.models.generate import generate

    outputs = generate(backbone, [record.level(level).text for record in records], max_new_tokens, batch_size)
    return [is_right(record, output) for record, output in zip(records, outputs, strict=True)]


def is_right(record: StateRecord, output: Generation | None) -> bool:
    """Whether an output gives an acceptable answer, word for word but for case, or exactly the right letters.

    Raises:
        DataError: nobody knows the right answer.
    """
    if not record.answers:
        raise DataError("has no gold answer to be measured by", record=record.question_id)
    if output is None or output.failure is not None:
        return False
    parsed = parse_answer(output.text, record.format, record.options, record.visual)
    if record.format == "direct":
        return parsed.answer.strip().casefold() in {answer.casefold() for answer in record.answers}
    return metrics.accuracy(set(parsed.letters), set(record.answers)) == 1
