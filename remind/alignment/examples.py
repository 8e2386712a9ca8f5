"""Questions as tokens: which rows become training examples, and in which order they form batches."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from remind.alignment.config import ExampleConfig
from remind.core.errors import DataError, ModelError
from remind.core.files import sha256_json
from remind.core.progress import track
from remind.models.chat import end_token_id, prompt_ids, tokenize
from remind.models.images import Pictures, level_content
from remind.states.pyramid import LEVELS
from remind.states.records import StateRecord, record_of_row


@dataclass(frozen=True)
class Example:
    """One question as tokens: the prompt under x0, x1 and x2, and the one answer that follows each.

    Attributes:
        prompts: under x0, x1 and x2, int32; without any token under a level that the data lack.
        answer: y* with its end token, int32; without any token where none is known.
        labelled: whether the answer is gold; one that was decoded carries no hard loss.
        gold: the gold answer, where `answer` is another (`targets`).
        images: path and hash of each image shown as pixels, in the order of its tokens, the same under each level.
        shown: reads the images.
    """

    id: str
    prompts: tuple[Tensor, ...]
    answer: Tensor
    labelled: bool = True
    gold: Tensor | None = None
    images: tuple[tuple[str, str], ...] = ()
    shown: Pictures | None = field(default=None, repr=False, compare=False)

    def tokens_under(self, levels: Iterable[int]) -> int:
        """Tokens the model reads if it runs these levels."""
        return sum(len(self.prompts[level]) + len(self.answer) - 1 for level in levels)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest answer."""
        return max(map(len, self.prompts)) + max(map(len, self.answers))

    @property
    def answers(self) -> tuple[Tensor, ...]:
        """The answer and, where it is another, the gold one."""
        return (self.answer,) if self.gold is None else (self.answer, self.gold)

    def answering(self, answer: Sequence[int]) -> Example:
        """The same question with an answer of the model, gold kept apart."""
        gold = self.answer if self.labelled and len(self.answer) else None
        return replace(self, answer=_int32(answer), labelled=False, gold=gold)

    @property
    def unanswered(self) -> Example:
        """The same question without any answer."""
        return replace(self, answer=_int32([]), labelled=False, gold=None)

    @property
    def with_gold(self) -> Example | None:
        """The same question with the gold answer that is kept apart, if there is one."""
        return None if self.gold is None else replace(self, answer=self.gold, labelled=True, gold=None)

    def pixels(self) -> dict[str, Tensor]:
        """pixel_values [patches, values] and image_grid_thw [images, 3], read from the files each time.

        Raises:
            ImagePathError: a file that can no longer be read.
        """
        if not self.images or self.shown is None:
            return {}
        return self.shown.tensors([path for path, _ in self.images], self.id)

    def content(self, levels: Iterable[int]) -> bytes:
        """What the model sees under these levels and is to answer, as bytes for a hash."""
        images = b""
        if self.images and self.shown is not None:
            images = sha256_json([self.shown.name, [content for _, content in self.images]]).encode()
        ids = (*(self.prompts[level] for level in levels), *self.answers)
        return images + b"".join(len(row).to_bytes(8, "little") + row.numpy().tobytes() for row in ids)


def pixels_of(examples: Iterable[Example]) -> dict[str, Tensor]:
    """`Example.pixels` of all examples in order; nothing where none has an image. Raises ImagePathError."""
    shown = [pixels for example in examples if (pixels := example.pixels())]
    return {name: torch.cat([pixels[name] for pixels in shown]) for name in (shown[0] if shown else ())}


def answer_ids(tokenizer: Any, text: str) -> list[int]:
    """An answer as tokens, end token last. Strings in the text that look like special tokens stay text."""
    return [*tokenize(tokenizer, text).ids, end_token_id(tokenizer)]


def example_of(tokenizer: Any, row: Any, shown: Pictures | None = None, number: int = 0) -> Example:
    """Tokens of one question.

    Args:
        row: a `StateRecord` (where images are shown), or a mapping with `x0`, `x1`, `x2` (texts, or mappings with
            `text`; those there are), `target` (None: no gold answer) and, if known, `question_id`.
        shown: show images that have a file as pixels. None: all as captions.
        number: names a question without an id.

    Raises:
        DataError: no text, or no target. ModelError: a tokenizer without a chat template.
    """
    values = row if isinstance(row, Mapping) else getattr(row, "__dict__", {})
    name = str(values.get("question_id") or f"row {number}")
    if missing := [column for column in ("x0", "target") if column not in values]:
        raise DataError(f"the data have no column {missing[0]}; there are {', '.join(values)}", record=name)
    texts = [_text(values.get(level)) for level in LEVELS]
    target = values["target"]
    if texts[0] is None or not isinstance(target, str | None):
        raise DataError("x0 is not a text, or target is neither a text nor None", record=name)
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError("the tokenizer has no chat template: set processing_class.chat_template")
    images: tuple[tuple[str, str], ...] = ()
    if shown is not None and values.get("pictures"):
        contents = [level_content(row, level) if level in row.levels else None for level in LEVELS]
        prompts = tuple(_int32([] if one is None else shown.ids(tokenizer, one)) for one in contents)
        images = shown.files(row)
    else:
        prompts = tuple(_int32([] if text is None else prompt_ids(tokenizer, text)) for text in texts)
    # one answer for all levels: Eq. 6 compares the three distributions at the same tokens
    # an empty one is no answer
    empty = target is None or not target.strip() or re.match(r"\s*<answer>\s*</answer>", target)
    answer = _int32([] if target is None or empty else answer_ids(tokenizer, target))
    return Example(name, prompts, answer, images=images, shown=shown)


def _text(level: Any) -> str | None:
    text = level.get("text") if isinstance(level, Mapping) else getattr(level, "text", level)
    # a level that was not built is empty
    return text if isinstance(text, str) and text else None


def _int32(ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def examples_of(tokenizer: Any, rows: Iterable[Any] | None, shown: Pictures | None = None) -> list[Example]:
    """`example_of` of all rows in order.

    Raises:
        DataError: a question that occurs twice; and as `example_of`. ImagePathError: images that cannot be shown.
    """
    if shown is not None and rows is not None:
        rows = [row if isinstance(row, StateRecord) else record_of_row(row) for row in rows]
        shown.check((row.question_id, [picture.path for picture in row.pictures]) for row in rows)
    rows = track(rows, "tokenise", len(rows)) if isinstance(rows, Sized) and len(rows) else rows or ()
    examples = [example_of(tokenizer, row, shown, number) for number, row in enumerate(rows)]
    if twice := [name for name, count in Counter(example.id for example in examples).items() if count > 1]:
        raise DataError("the question occurs twice", record=twice[0])
    return examples


@dataclass
class Examples(Dataset[tuple[Example, float]]):
    """Examples of one split, and how many questions were left out, by reason.

    As a dataset its keys are those of `Batches`: a place with the sample's weight in the loss.
    """

    items: list[Example] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: tuple[int, float]) -> tuple[Example, float]:
        return self.items[key[0]], key[1]

    def labelled(self) -> int:
        """How many have a gold answer."""
        return sum(item.labelled or item.gold is not None for item in self.items)

    def levels(self) -> frozenset[int]:
        """Levels that all examples have."""
        return frozenset(n for n in range(len(LEVELS)) if all(len(item.prompts[n]) for item in self.items))

    def fingerprint(self) -> str:
        """Hash of every id and token in order."""
        contents = (hashlib.sha256(item.content(range(len(item.prompts)))).hexdigest() for item in self.items)
        return sha256_json([[item.id, item.labelled, own] for item, own in zip(self.items, contents, strict=True)])


def select(examples: Iterable[Example], config: ExampleConfig, model_length: int, held_out: bool = False) -> Examples:
    """The questions that can be used, in order.

    Args:
        model_length: most tokens the model takes.
        held_out: too long ones are left out in any case, and the student answers none.

    Raises:
        DataError: a question is too long and `on_long` is "error".
    """
    limit = min(model_length, config.max_length or model_length)
    on_policy = config.targets == "on_policy" and not held_out
    selected = Examples()
    for example in examples:
        answer = max(map(len, example.answers))
        # what the student will answer may be as long as it is allowed to be, end token included
        own = max(0, config.max_decoded + 1 - answer) if on_policy else 0
        if not answer and (not on_policy or config.unlabelled == "skip"):
            selected.left_out["without an answer"] += 1
        elif answer > config.max_answer or example.longest + own > limit:
            if config.on_long == "error" and not held_out:
                what = f"prompt and answer of {example.longest + own} tokens, of which the answer {answer + own}"
                why = f"at most {limit} and {config.max_answer} fit: build shorter states, or set on_long skip"
                raise DataError(f"{what}; {why}", record=example.id)
            selected.left_out["too long"] += 1
        else:
            selected.items.append(example if answer else replace(example, labelled=False))
    return selected


@dataclass
class Batches:
    """The microbatches of one process: lists of (place of the example, its weight in the mean over the batch).

    The batch of a step is a function of seed and step alone, whatever the number of processes; each takes its share,
    cut into equally many microbatches, because their collective operations must match. Where the last batch of an
    epoch has too few samples, a process repeats one with weight 0.

    Attributes:
        batch_size: of all processes together.
        pieces: microbatches of a process in one batch.
        shuffle: a new order each epoch; otherwise in the order of the examples.
    """

    n_examples: int
    batch_size: int
    pieces: int = 1
    rank: int = 0
    processes: int = 1
    seed: int = 0
    shuffle: bool = True
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def steps_per_epoch(self) -> int:
        """The last batch of an epoch may be smaller; it is not dropped."""
        return ceil(self.n_examples / self.batch_size)

    def __len__(self) -> int:
        return self.steps_per_epoch * self.pieces

    def batch(self, step: int) -> list[int]:
        """Places of the examples of optimiser step `step` (0-based), of all processes."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = list(range(self.n_examples))
        if self.shuffle:
            digest = hashlib.sha256(f"{self.seed}:{epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            order = torch.randperm(self.n_examples, generator=generator).tolist()
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def __iter__(self) -> Iterator[list[tuple[int, float]]]:
        steps = self.steps_per_epoch
        for step in range(self.epoch * steps, (self.epoch + 1) * steps):
            places = self.batch(step)
            own = places[self.rank :: self.processes]
            for piece in range(self.pieces):
                yield [(place, 1 / len(places)) for place in own[piece :: self.pieces]] or [(places[0], 0.0)]
