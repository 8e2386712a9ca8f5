"""The questions of a split with their prompts under each condition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from remind.core.errors import DataError
from remind.evaluation.conditions import Prompt, Prompter, control, most_frequent
from remind.evaluation.names import CONDITIONS
from remind.states.parquet import StateRecord, check_split, read_part, state_parts
from remind.states.pyramid import LEVELS, Rendered

_NOTHING = Rendered("", (0, 0), (), (), ())


class Item(NamedTuple):
    """A question to answer: its prompt, and its record without the rendered levels (they are large)."""

    prompt: str
    record: StateRecord


@dataclass(frozen=True)
class Asked:
    """The questions of a split.

    Attributes:
        records: without the rendered levels.
        prompts: by condition, one for each record.
    """

    records: list[StateRecord]
    prompts: Mapping[str, list[Prompt]]


def load_asked(
    states: str | Path, split: str, names: Sequence[str], prompter: Prompter | None = None, limit: int | None = None
) -> Asked:
    """The questions of a split, and what each condition shows of them.

    Args:
        names: conditions; none: no prompts are made.
        prompter: makes the prompts; None: one that knows the states alone.
        limit: at most this many questions, spread evenly over the split.

    Raises:
        FormatError: not a states folder.
        DataError: no questions in the split, a question whose options and answers do not fit its format, a question
            id twice, gold evidence that train and test share, or dialogue files that are not those of the states.
        ConfigError: a condition that needs more than the states, and no prompter.
    """
    prompter = prompter or Prompter(names)
    chosen = None if limit is None else _spread(states, split, limit)
    asking = [name for name in names if CONDITIONS[name].asks]
    spans = any(name not in LEVELS for name in asking)
    levels = LEVELS if spans else tuple(name for name in LEVELS if name in asking)
    records: list[StateRecord] = []
    prompts: dict[str, list[Prompt]] = {name: [] for name in names}
    splits: set[str] = set()
    training: list[StateRecord] = []
    seen: set[str] = set()
    met = 0

    def lean() -> Iterator[StateRecord]:
        nonlocal met
        for path in state_parts(states):
            part: list[StateRecord] = []
            for record in read_part(path, levels, spans):
                splits.add(record.split)
                bare = replace(record, x0=_NOTHING, x1=_NOTHING, x2=_NOTHING)
                if record.split == "train":
                    training.append(bare)
                if record.split == split:
                    if record.question_id in seen:
                        raise DataError("this question id occurs twice in the split", states, record.question_id)
                    seen.add(record.question_id)
                    if chosen is None or met in chosen:
                        records.append(bare)
                        part.append(record)
                    met += 1
                yield bare
            for name in asking:
                prompts[name] += prompter.prompts(name, part) if part else []

    check_split(lean(), states)
    if not records:
        raise DataError(f"no states of split {split!r} (there are: {', '.join(sorted(splits)) or 'none'})", states)
    frequent = most_frequent(training)
    for name in names:
        if name not in asking:
            prompts[name] = [control(name, record, frequent) for record in records]
    return Asked(records, prompts)


def load_items(states: str | Path, split: str, level: str, limit: int | None = None) -> list[Item]:
    """The questions of a split with their prompts under a condition that needs the states alone.

    Raises:
        FormatError, DataError, ConfigError: as `load_asked`.
    """
    asked = load_asked(states, split, [level], limit=limit)
    return [Item(prompt.text, record) for prompt, record in zip(asked.prompts[level], asked.records, strict=True)]


def _spread(states: str | Path, split: str, limit: int) -> set[int] | None:
    total = sum(record.split == split for path in state_parts(states) for record in read_part(path, levels=()))
    return {number * total // limit for number in range(limit)} if limit < total else None
