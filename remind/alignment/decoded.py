"""Answers of the model as it is before training, for questions that have no gold answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remind.alignment.cache import Cache, Crew
from remind.alignment.shorten import shortened
from remind.alignment.tokens import tokenizer_fingerprint
from remind.models.backbone import Backbone
from remind.models.generate import generate
from remind.states.parquet import StateRecord

_KIND = "decoded"
#: Questions per file: what is computed again after a kill.
_BLOCK = 32


def decode(
    backbone: Backbone,
    records: Sequence[StateRecord],
    level: str,
    most: int,
    cache: Cache,
    crew: Crew,
    base: str,
    fit: tuple[int, int] | None = None,
    batch_size: int = 8,
) -> Mapping[str, str | None]:
    """Greedy answers under a state, each decoded once and kept on disk; the processes divide the work.

    Args:
        level: x1 or x2.
        most: most tokens of an answer; one that has not ended by then ends there.
        base: fingerprint of the model's weights.
        fit: what the states are cut to, as for training.

    Returns:
        By question id; None where the model could not be run on the question.

    Raises:
        ModelError: a model that does not generate; or the cache cannot be written.
    """
    if fit is not None:
        records = [shortened(backbone.tokenizer, record, *fit)[0] for record in records]
    about = [base, str(backbone.dtype), tokenizer_fingerprint(backbone.tokenizer), level, most, batch_size]
    blocks = [records[start : start + _BLOCK] for start in range(0, len(records), _BLOCK)]
    keys = [[about, [(r.question_id, r.level(level).text) for r in block]] for block in blocks]
    for number in crew.own(len(blocks)):
        if not cache.has(_KIND, keys[number]):
            _write(backbone, blocks[number], keys[number], level, most, cache, batch_size)
    crew.wait()
    answers: dict[str, str | None] = {}
    for block, key in zip(blocks, keys, strict=True):
        found = cache.read(_KIND, key)
        if found is None:
            _write(backbone, block, key, level, most, cache, batch_size)
            found = cache.read(_KIND, key)
            assert found is not None
        answers |= found[1]
    return answers


def _write(
    backbone: Backbone, block: Sequence[StateRecord], key: Any, level: str, most: int, cache: Cache, batch_size: int
) -> None:
    outputs = generate(backbone, [record.level(level).text for record in block], most, batch_size)
    answers = {
        record.question_id: None if output is None or output.failure else output.text
        for record, output in zip(block, outputs, strict=True)
    }
    cache.write(_KIND, key, {}, answers)
