"""Training examples: states rendered to tokens, their order, and each process's share of a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from remind.chat import end_token_id, prompt_ids, tokenize
from remind.errors import ConfigError, DataError
from remind.io import sha256_file
from remind.progress import track
from remind.pyramid import LEVELS
from remind.states import MANIFEST, StateRecord, check_split, iterate_states, read_manifest


@dataclass(frozen=True)
class DataConfig:
    """Which states become training examples."""

    max_length: int | None = None
    """Most tokens of a prompt with its answer, in any level; None: as many as the model takes."""
    max_answer: int = 1024
    """Most tokens of an answer, its end token included."""
    on_long: Literal["error", "skip"] = "error"
    """What to do with a question that is longer: stop, or leave it out and count it. Nothing is ever cut."""
    limit: int | None = None
    """At most this many training questions, the first ones; for a quick look."""

    def __post_init__(self) -> None:
        if self.max_answer < 1 or (self.max_length is not None and self.max_length < 2):
            raise ConfigError("max_answer must be 1 or more and max_length 2 or more")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit is {self.limit}; it must be 1 or more")


@dataclass(frozen=True)
class Example:
    """One question: the prompt under x0, x1 and x2, and the one answer y* that follows each (end token included)."""

    id: str
    prompts: tuple[Tensor, ...]
    answer: Tensor

    @property
    def tokens(self) -> int:
        """Tokens the model reads over the three levels."""
        return sum(len(prompt) + len(self.answer) - 1 for prompt in self.prompts)


@dataclass
class Examples:
    """Examples of one split, and the ids of the questions that were left out, by reason."""

    items: list[Example] = field(default_factory=list)
    without_target: list[str] = field(default_factory=list)
    long_context: list[str] = field(default_factory=list)
    long_answer: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    def left_out(self) -> dict[str, list[str]]:
        """Ids by reason, reasons that occur alone."""
        return {name: ids for name, ids in vars(self).items() if name != "items" and ids}

    def counts(self) -> dict[str, int]:
        return {
            "examples": len(self.items),
            **{name: len(ids) for name, ids in vars(self).items() if name != "items"},
            "longest_prompt": max((len(p) for item in self.items for p in item.prompts), default=0),
            "longest_answer": max((len(item.answer) for item in self.items), default=0),
        }

    def fingerprint(self) -> str:
        """Hash of every id and token in order."""
        digest = hashlib.sha256()
        for item in self.items:
            digest.update(repr(item.id).encode())
            for ids in (*item.prompts, item.answer):
                digest.update(len(ids).to_bytes(8, "little") + ids.numpy().tobytes())
        return digest.hexdigest()


def example_of(tokenizer: Any, record: StateRecord) -> Example:
    """Tokens of one question that has a target. Strings in the text that look like special tokens stay text."""
    assert record.target is not None
    # one answer for all levels: Eq. 6 compares the three distributions at the same tokens
    answer = [*tokenize(tokenizer, record.target).ids, end_token_id(tokenizer)]
    prompts = tuple(_int32(prompt_ids(tokenizer, record.level(level).text)) for level in LEVELS)
    return Example(record.question_id, prompts, _int32(answer))


def _int32(ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def build_examples(
    tokenizer: Any, records: Sequence[StateRecord], config: DataConfig, model_length: int, what: str = "tokenise"
) -> Examples:
    """Examples in the order of the records.

    Args:
        model_length: most tokens the model takes.

    Raises:
        DataError: a question is too long and `on_long` is "error".
    """
    limit = min(model_length, config.max_length or model_length)
    examples = Examples()
    for record in track(records, what, len(records)):
        if record.target is None:
            examples.without_target.append(record.question_id)
            continue
        example = example_of(tokenizer, record)
        length = max(len(prompt) for prompt in example.prompts) + len(example.answer)
        if len(example.answer) > config.max_answer:
            _too_long(examples.long_answer, record, "answer", len(example.answer), config.max_answer, config)
        elif length > limit:
            _too_long(examples.long_context, record, "prompt and answer", length, limit, config)
        else:
            examples.items.append(example)
    return examples


def _too_long(skipped: list[str], record: StateRecord, what: str, length: int, most: int, config: DataConfig) -> None:
    if config.on_long == "error":
        raise DataError(
            f"{what} of {length} tokens, at most {most} fit; build shorter states or set data.on_long skip",
            record=record.question_id,
        )
    skipped.append(record.question_id)


@dataclass(frozen=True)
class Order:
    """Which examples form the batch of a step: a function of seed and step alone, so that a resume needs no more."""

    n_examples: int
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The last batch of an epoch may be smaller; it is not dropped."""
        return ceil(self.n_examples / self.batch_size)

    def batch(self, step: int) -> list[int]:
        """Indices of the examples of optimiser step `step` (0-based)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._permutation(epoch)[place * self.batch_size : (place + 1) * self.batch_size]

    def _permutation(self, epoch: int) -> list[int]:
        digest = hashlib.sha256(f"{self.seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        order: list[int] = torch.randperm(self.n_examples, generator=generator).tolist()
        return order


def share(n: int, rank: int, processes: int, size: int) -> list[list[int]]:
    """Places in a batch of `n` that process `rank` computes, cut into microbatches of at most `size`.

    Every process gets as many microbatches, because their collective operations must match; one that runs out of
    places gets an empty microbatch.
    """
    own = list(range(rank, n, processes))
    pieces = ceil(ceil(n / processes) / size)
    return [own[start * size : (start + 1) * size] for start in range(pieces)]


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
) -> Data:
    """Read a states folder and tokenise what is needed of it.

    Held-out questions that are too long are left out and counted whatever `config` says.

    Raises:
        DataError: states that cannot be used, splits that share evidence, or no example to train on.
    """
    records = list(iterate_states(states))
    check_split(records)
    splits = {record.split for record in records}
    train = [record for record in records if record.split == "train"][: config.limit]
    examples = build_examples(tokenizer, train, config, model_length, "tokenise train")
    if not examples.items:
        there = ", ".join(sorted(splits)) or "none"
        raise DataError(f"nothing to train on: {examples.counts()}; splits there are: {there}", states)
    watched = next((split for split in (eval_split, "test") if split in splits), None)
    held_out = build_examples(
        tokenizer,
        [record for record in records if record.split == watched][:eval_limit],
        replace(config, on_long="skip"),
        model_length,
        "tokenise held out",
    )
    manifest = Path(states) / MANIFEST
    about = {
        "states": str(states),
        "manifest_sha256": sha256_file(manifest),
        "inputs": read_manifest(states).get("inputs", {}),
        "tokens_sha256": examples.fingerprint(),
        "train": examples.counts(),
        "left_out": examples.left_out(),
        "held_out": {"split": watched, **held_out.counts()},
    }
    return Data(examples, held_out, watched, about)
