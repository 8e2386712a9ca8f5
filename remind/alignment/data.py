"""Training examples: states as tokens, those that can be used, and where their answers come from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from remind.alignment.cache import Cache, Crew
from remind.alignment.example import Example, Pictured
from remind.alignment.pictures import Pictures
from remind.alignment.tokens import Row, answer_ids, read_rows, row_of
from remind.core.errors import ConfigError, DataError
from remind.core.files import sha256_file
from remind.core.progress import track
from remind.data.split import check_overlap
from remind.states.parquet import MANIFEST, StateRecord, read_manifest, read_part, state_parts

#: Answers for questions that have none, by question id; None where none could be decoded.
Answers = Callable[[Sequence[StateRecord]], Mapping[str, str | None]]
#: Why questions are left out, in words.
_REASONS = {
    "without_target": "without a gold answer",
    "empty_answer": "with an empty gold answer",
    "long_context": "too long with their answer",
    "long_answer": "with too long an answer",
}


@dataclass(frozen=True)
class DataConfig:
    """Which states become training examples."""

    max_length: int | None = None
    """Most tokens of a prompt with its answer, in any level; None: as many as the model takes."""
    max_answer: int = 1024
    """Most tokens of an answer, its end token included."""
    on_long: Literal["error", "skip", "cut"] = "error"
    """What to do with a question that is longer: stop, leave it out and count it, or cut: leave out its oldest turns,
    the same ones in every state, and count it. An answer is never cut."""
    unlabelled: Literal["x2", "x1", "skip"] = "x2"
    """Questions without a gold answer: the state under which the model, as it is before training, answers them once,
    greedily. Such an answer carries no hard loss. skip: leave them out."""
    max_decoded: int = 256
    """Most tokens of such an answer."""
    group_by_length: bool = False
    """Form batches of examples of similar length. The order is still a function of seed and epoch."""
    limit: int | None = None
    """At most this many training questions, the first ones; for a quick look."""
    images: Literal["captions", "pixels"] = "captions"
    """How prompts show the images of the dialogue: by their captions, or as pixels in place of the caption wherever the
    states know the image's file."""
    image_tokens: int = 256
    """At most about so many tokens for an image shown as pixels; larger ones are made smaller."""
    image_root: str | None = None
    """Folder that the image files must lie in, links followed; None: they are read wherever the states say they lie,
    which is anywhere on disk if the states are another's."""
    cache: str | None = None
    """Folder for tokenised states, decoded answers and fixed targets, which runs may share; None: cache/ in the run
    folder."""

    def __post_init__(self) -> None:
        if self.max_answer < 1 or (self.max_length is not None and self.max_length < 2):
            raise ConfigError("max_answer must be 1 or more and max_length 2 or more")
        if self.images == "pixels" and self.on_long == "cut":
            raise ConfigError(
                "data.images pixels: turns with images cannot be left out; set data.on_long error or skip"
            )
        for name in ("limit", "max_decoded", "image_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")


@dataclass
class Examples:
    """Examples of one split, and the ids of questions that were left out, by reason, or cut to fit."""

    items: list[Example] = field(default_factory=list)
    without_target: list[str] = field(default_factory=list)
    empty_answer: list[str] = field(default_factory=list)
    long_context: list[str] = field(default_factory=list)
    long_answer: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    def left_out(self) -> dict[str, list[str]]:
        """Ids by reason, reasons that occur alone."""
        return {name: ids for name, ids in vars(self).items() if name not in ("items", "cut") and ids}

    def counts(self) -> dict[str, int]:
        return {
            "examples": len(self.items),
            "labelled": sum(item.labelled for item in self.items),
            **{name: len(ids) for name, ids in vars(self).items() if name != "items"},
            "longest_prompt": max((len(p) for item in self.items for p in item.prompts), default=0),
            "longest_answer": max((len(item.answer) for item in self.items), default=0),
        }

    def fingerprint(self) -> str:
        """Hash of every id and token in order."""
        digest = hashlib.sha256()
        for item in self.items:
            digest.update(repr(item.id if item.labelled else (item.id, "decoded")).encode() + item.seen.encode())
            for ids in (*item.prompts, item.answer):
                digest.update(len(ids).to_bytes(8, "little") + ids.numpy().tobytes())
        return digest.hexdigest()


def example_of(tokenizer: Any, record: StateRecord) -> Example:
    """Tokens of one question that has a target. Strings in the text that look like special tokens stay text."""
    row = row_of(tokenizer, record)
    assert row.answer is not None
    return Example(row.id, row.prompts, row.answer)


def build_examples(tokenizer: Any, records: Sequence[StateRecord], config: DataConfig, model_length: int) -> Examples:
    """Examples in the order of the records, those without a target left out. Arguments and errors: `select`."""
    fit = fit_of(config, model_length)
    return select([row_of(tokenizer, r, fit) for r in track(records, "tokenise", len(records))], config, model_length)


def fit_of(config: DataConfig, model_length: int) -> tuple[int, int] | None:
    """What `row_of` is to cut to; None: nothing is cut."""
    most = min(model_length, config.max_length or model_length)
    return (most, config.max_decoded + 1) if config.on_long == "cut" else None


def select(rows: Iterable[Row], config: DataConfig, model_length: int, shown: Pictures | None = None) -> Examples:
    """The questions that can be used, in order.

    Args:
        model_length: most tokens the model takes.
        shown: what the rows were made with.

    Raises:
        DataError: a question is too long and `on_long` is "error".
    """
    limit = min(model_length, config.max_length or model_length)
    examples = Examples()
    for row in rows:
        if row.answer is None:
            (examples.empty_answer if row.empty else examples.without_target).append(row.id)
            continue
        example = Example(row.id, row.prompts, row.answer, row.labelled)
        if row.images:
            example = Pictured(**vars(example), images=row.images, shown=shown)
        if len(example.answer) > config.max_answer:
            _too_long(examples.long_answer, row.id, "answer", len(example.answer), config.max_answer, config)
        elif example.longest > limit:
            _too_long(examples.long_context, row.id, "prompt and answer", example.longest, limit, config)
        else:
            examples.items.append(example)
            if row.cut:
                examples.cut.append(row.id)
    return examples


def _too_long(skipped: list[str], name: str, what: str, length: int, most: int, config: DataConfig) -> None:
    if config.on_long == "error":
        raise DataError(
            f"{what} of {length} tokens, at most {most} fit; build shorter states, or set data.on_long skip or cut",
            record=name,
        )
    skipped.append(name)


@dataclass
class Data:
    """What a run learns from and what it is watched on.

    Attributes:
        eval_split: split of `held_out`; None where there is neither the one asked for nor test.
        about: provenance and counts, for data.json.
    """

    train: Examples
    held_out: Examples
    eval_split: str | None
    about: dict[str, Any]


def load_data(
    states: str | Path,
    tokenizer: Any,
    config: DataConfig,
    model_length: int,
    eval_split: str = "dev",
    eval_limit: int | None = None,
    cache: Cache | None = None,
    crew: Crew | None = None,
    answers: Answers | None = None,
    shown: Pictures | None = None,
) -> Data:
    """Read a states folder and tokenise what is needed of it.

    Held-out questions that are too long are left out and counted whatever `config` says. Of them those with a gold
    answer are watched; only where there are none, decoded answers.

    Args:
        cache: where tokenised states are kept; None: nowhere.
        answers: decodes answers for questions without one; None: they are left out.
        shown: show images as pixels; None: as captions.

    Raises:
        DataError: states that cannot be used, splits that share evidence, or no example to train on.
        ImagePathError: images that are to be shown and cannot be.
        ConfigError: a question that is to be shown images has no gold answer.
    """
    parts = state_parts(states)
    rows = read_rows(parts, tokenizer, fit_of(config, model_length), cache, crew, shown)
    check_overlap(((row.id, row.dialogue_id, row.split, row.evidence) for row in rows), lambda _: states)
    splits = {row.split for row in rows}
    watched = next((split for split in (eval_split, "test") if split in splits), None)
    train = [row for row in rows if row.split == "train"][: config.limit]
    held_out = [row for row in rows if row.split == watched]
    labelled = [row for row in held_out if row.answer is not None]
    held_out = (labelled or held_out)[:eval_limit]
    if config.unlabelled != "skip" and answers is not None:
        train, held_out = _answered(parts, tokenizer, [train, held_out], answers)
    examples = select(train, config, model_length, shown)
    if not examples.items:
        raise _nothing(states, splits, examples)
    watch = select(held_out, replace(config, on_long="skip"), model_length, shown)
    about = {
        "states": str(states),
        "manifest_sha256": sha256_file(Path(states) / MANIFEST),
        "inputs": read_manifest(states).get("inputs", {}),
        "tokens_sha256": examples.fingerprint(),
        "train": examples.counts(),
        "left_out": examples.left_out(),
        "cut": examples.cut,
        "held_out": {"split": watched, **watch.counts()},
    }
    if shown is not None:
        files = [one for item in (*examples.items, *watch.items) if isinstance(item, Pictured) for one in item.images]
        about["images"] = {"shown": len(files), "files": len(set(files)), "most_tokens": shown.most}
    return Data(examples, watch, watched, about)


def check_trainable(states: str | Path) -> None:
    """See that there is a question to train on, before anything is loaded or written.

    Raises:
        DataError, FormatError: there is none, or files that are not of states.
    """
    splits: set[str] = set()
    for path in state_parts(states):
        splits |= {record.split for record in read_part(path, levels=(), spans=False)}
        if "train" in splits:
            return
    raise _nothing(states, splits, Examples())


def _nothing(states: str | Path, splits: set[str], examples: Examples) -> DataError:
    if "train" not in splits:
        there = f"all are of split {' or '.join(sorted(splits))}" if splits else "there are no questions"
        return DataError(f"nothing to train on: {there}; build states with questions of split train", states)
    why = ", ".join(f"{len(ids)} {_REASONS[reason]}" for reason, ids in examples.left_out().items())
    return DataError(f"nothing to train on: every question of split train is left out: {why}", states)


def _answered(parts: Sequence[Path], tokenizer: Any, groups: Sequence[list[Row]], answers: Answers) -> list[list[Row]]:
    """The rows, those without a gold answer with one that is decoded."""
    wanted = {row.id for rows in groups for row in rows if row.answer is None and not row.empty}
    if not wanted:
        return list(groups)
    if pictured := sum(row.id in wanted and bool(row.images) for rows in groups for row in rows):
        raise ConfigError(
            f"data.images pixels: {pictured} questions with images have no gold answer, and answers are decoded from "
            "text alone; set data.unlabelled skip"
        )
    decoded = answers([record for path in parts for record in read_part(path) if record.question_id in wanted])

    def fill(row: Row) -> Row:
        text = decoded.get(row.id)
        return row if text is None else replace(row, answer=answer_ids(tokenizer, text), labelled=False)

    return [[fill(row) if row.id in wanted else row for row in rows] for rows in groups]
