"""Training data: which questions of a states folder become examples, and in which order they form batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from remind.alignment.cache import Cache, Ranks
from remind.alignment.config import DataConfig
from remind.alignment.tokens import Example, answer_ids, read_examples
from remind.core.errors import ConfigError, DataError
from remind.core.files import sha256_file
from remind.models.pictures import Pictures
from remind.states.parquet import MANIFEST, StateRecord, check_shared_evidence, read_manifest, read_part, state_parts

#: Answers for questions that have none, by question id; None where none could be decoded.
Answers = Callable[[Sequence[StateRecord]], Mapping[str, str | None]]
#: Why questions are left out, in words.
_REASONS = {
    "without_target": "without a gold answer",
    "empty_answer": "with an empty gold answer",
    "long_context": "too long with their answer",
    "long_answer": "with too long an answer",
}


@dataclass
class Examples:
    """Examples of one split, and the ids of questions that were left out, by reason."""

    items: list[Example] = field(default_factory=list)
    without_target: list[str] = field(default_factory=list)
    empty_answer: list[str] = field(default_factory=list)
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
            "labelled": sum(item.labelled or item.gold is not None for item in self.items),
            **{name: len(ids) for name, ids in vars(self).items() if name != "items"},
            "longest_prompt": max((len(p) for item in self.items for p in item.prompts), default=0),
            "longest_answer": max((len(item.answer) for item in self.items), default=0),
        }

    def fingerprint(self) -> str:
        """Hash of every id and token in order."""
        digest = hashlib.sha256()
        for item in self.items:
            digest.update(repr(item.id if item.labelled else (item.id, "decoded")).encode())
            digest.update(item.content(range(len(item.prompts))))
            if item.gold is not None:
                digest.update(b"gold" + item.gold.numpy().tobytes())
        return digest.hexdigest()


def select(examples: Iterable[Example], config: DataConfig, model_length: int) -> Examples:
    """The questions that can be used, in order.

    Args:
        model_length: most tokens the model takes.

    Raises:
        DataError: a question is too long and `on_long` is "error".
    """
    limit = min(model_length, config.max_length or model_length)
    on_policy = config.targets == "on_policy"
    selected = Examples()

    def leave_out(ids: list[str], question: str, what: str, length: int, most: int) -> None:
        if config.on_long == "error":
            raise DataError(
                f"{what} of {length} tokens, at most {most} fit; build shorter states, or set data.on_long skip",
                record=question,
            )
        ids.append(question)

    for example in examples:
        answer = max(len(answer) for answer in example.answers)
        # what the student will answer may be as long as it is allowed to be, end token included
        own = max(0, config.max_decoded + 1 - answer) if on_policy else 0
        if not answer and (example.empty or not on_policy or config.unlabelled == "skip"):
            (selected.empty_answer if example.empty else selected.without_target).append(example.id)
        elif answer > config.max_answer:
            leave_out(selected.long_answer, example.id, "answer", answer, config.max_answer)
        elif example.longest + own > limit:
            what = "prompt and data.max_decoded" if own else "prompt and answer"
            leave_out(selected.long_context, example.id, what, example.longest + own, limit)
        else:
            selected.items.append(example if answer else replace(example, labelled=False))
    return selected


@dataclass
class Data:
    """What a run is trained and evaluated on.

    Attributes:
        eval_split: split of `held_out`; None where the states lack the one asked for.
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
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    answers: Answers | None = None,
    shown: Pictures | None = None,
) -> Data:
    """Read a states folder and tokenise what is needed of it.

    Held-out questions that are too long are left out and counted whatever `config` says. Of them those with a gold
    answer are used; only where there are none, decoded answers.

    Args:
        cache: where tokenised states are kept; None: nowhere.
        answers: decodes answers for questions without one; None: they are left out.
        shown: show images as pixels; None: as captions.

    Raises:
        DataError: states that cannot be used, splits that share evidence, or no example to train on.
        ImagePathError: images that are to be shown and cannot be.
    """
    parts = state_parts(states)
    everything = read_examples(parts, tokenizer, cache, ranks, shown)
    check_shared_evidence(((e.id, e.dialogue_id, e.split, e.evidence) for e in everything), states)
    splits = {example.split for example in everything}
    monitored = eval_split if eval_split in splits else None
    train = [example for example in everything if example.split == "train"][: config.limit]
    held_out = [example for example in everything if example.split == monitored]
    labelled = [example for example in held_out if len(example.answer)]
    held_out = (labelled or held_out)[:eval_limit]
    if config.unlabelled != "skip" and answers is not None:
        wanted = {e.id for e in held_out if not len(e.answer)}
        if config.targets != "on_policy":
            wanted |= {e.id for e in train if config.targets == "decoded" or not len(e.answer)}
        train, held_out = _answered(parts, tokenizer, [train, held_out], wanted, answers)
    examples = select(train, config, model_length)
    if not examples.items:
        raise _nothing(states, splits, examples)
    evaluated = select(held_out, replace(config, on_long="skip", targets="gold"), model_length)
    about = {
        "states": str(states),
        "manifest_sha256": sha256_file(Path(states) / MANIFEST),
        "inputs": read_manifest(states).get("inputs", {}),
        "tokens_sha256": examples.fingerprint(),
        "train": examples.counts(),
        "left_out": examples.left_out(),
        "held_out": {"split": monitored, **evaluated.counts()},
    }
    if shown is not None:
        files = [image for item in (*examples.items, *evaluated.items) for image in item.images]
        about["images"] = {"shown": len(files), "files": len(set(files)), "most_tokens": shown.most}
    return Data(examples, evaluated, monitored, about)


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


def _answered(
    parts: Sequence[Path], tokenizer: Any, groups: Sequence[list[Example]], wanted: set[str], answers: Answers
) -> list[list[Example]]:
    """The examples, those `wanted` (ids) with an answer that is decoded; a gold answer that is empty stays."""
    wanted = wanted - {e.id for examples in groups for e in examples if e.empty}
    if not wanted:
        return list(groups)
    decoded = answers([record for path in parts for record in read_part(path) if record.question_id in wanted])

    def fill(example: Example) -> Example:
        text = decoded.get(example.id)
        return example if text is None else example.answering(answer_ids(tokenizer, text))

    return [[fill(e) if e.id in wanted else e for e in examples] for examples in groups]


def check_mixture(
    with_images: Sequence[bool], processes: int, train_vision: bool, sharded: bool, sharing: bool
) -> None:
    """Refuse what would leave one process waiting for another that has no image to show.

    Args:
        with_images: for each example, of training and held out.
        sharing: whether x1 and x2 are run together where they can.

    Raises:
        ConfigError: some examples have images and some not, and each process has to run the tower.
    """
    if processes == 1 or not any(with_images):
        return
    if (train_vision or sharded) and not all(with_images):
        raise ConfigError(
            f"data.images pixels: {with_images.count(False)} of {len(with_images)} examples have no image, and several "
            "processes under FSDP, or with train_vision, all have to run the vision tower: "
            "use DDP with a frozen tower, one process, or data.images captions"
        )
    if sharded and sharing:
        raise ConfigError("data.images pixels: under FSDP set trainer.prefix_sharing false")


@dataclass(frozen=True)
class Order:
    """The batch of a step is a function of seed and step alone, so that a resume needs no more."""

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
        digest = hashlib.sha256(f"{self.seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        order: list[int] = torch.randperm(self.n_examples, generator=generator).tolist()
        return order[place * self.batch_size : (place + 1) * self.batch_size]


def share(n: int, rank: int, processes: int, size: int) -> list[list[int]]:
    """Places in a batch of `n` that process `rank` computes, cut into microbatches of at most `size`.

    Every process gets as many microbatches, because their collective operations must match; one that runs out of
    places gets an empty microbatch.
    """
    own = list(range(rank, n, processes))
    pieces = ceil(ceil(n / processes) / size)
    return [own[start * size : (start + 1) * size] for start in range(pieces)]
