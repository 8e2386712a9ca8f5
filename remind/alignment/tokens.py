"""Questions as tokens: prompts and answers, and answers decoded where there is no gold one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remind.alignment.cache import Cache, Entry, Ranks
from remind.core.files import sha256_file, sha256_json
from remind.core.progress import ProgressBar, track
from remind.models.backbone import Backbone
from remind.models.chat import end_token_id, prompt_ids, tokenize
from remind.models.generate import generate
from remind.models.pictures import Pictures, level_content
from remind.states.pyramid import LEVELS
from remind.states.records import StateRecord

TOKENS, _DECODED = "tokens", "decoded"
#: Raise it when the same text becomes other tokens, or entries get another form.
_VERSION = 2
#: Decoded questions per file: what is computed again after a kill.
_BLOCK = 32


@dataclass(frozen=True)
class Example:
    """One question as tokens: the prompt under x0, x1 and x2, and the one answer that follows each.

    Attributes:
        prompts: under x0, x1 and x2, int32.
        answer: y* with its end token, int32; without any token where none is known.
        labelled: whether the answer is gold; one that was decoded carries no hard loss.
        gold: the gold answer, where `answer` is another (`data.targets`).
        images: path and hash of each image shown as pixels, in the order of its tokens, the same under each level.
        evidence: what train and test must not share: gold turns and images.
        empty: whether there is a gold answer and it is empty.
        shown: reads the images.
    """

    id: str
    prompts: tuple[Tensor, ...]
    answer: Tensor
    labelled: bool = True
    gold: Tensor | None = None
    images: tuple[tuple[str, str], ...] = ()
    dialogue_id: str = ""
    split: str = ""
    evidence: tuple[str | int, ...] = ()
    empty: bool = False
    shown: Pictures | None = field(default=None, repr=False, compare=False)

    def tokens_under(self, levels: Iterable[int]) -> int:
        """Tokens the model reads if it runs these levels."""
        return sum(len(self.prompts[level]) + len(self.answer) - 1 for level in levels)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest answer."""
        return max(len(prompt) for prompt in self.prompts) + max(len(answer) for answer in self.answers)

    @property
    def answers(self) -> tuple[Tensor, ...]:
        """The answer and, where it is another, the gold one."""
        return (self.answer,) if self.gold is None else (self.answer, self.gold)

    def answering(self, answer: Tensor) -> Example:
        """The same question with an answer of the model, gold kept apart."""
        return replace(
            self, answer=answer, labelled=False, gold=self.answer if self.labelled and len(self.answer) else None
        )

    @property
    def with_gold(self) -> Example | None:
        """The same question with the gold answer that is kept apart, if there is one."""
        return None if self.gold is None else replace(self, answer=self.gold, labelled=True, gold=None)

    @property
    def largest_id(self) -> int:
        """The highest token id of prompts and answers."""
        return max(int(ids.max()) for ids in (*self.prompts, *self.answers) if len(ids))

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
        ids = (*(self.prompts[level] for level in levels), self.answer)
        return images + b"".join(len(row).to_bytes(8, "little") + row.numpy().tobytes() for row in ids)


def pixels_of(examples: Iterable[Example]) -> dict[str, Tensor]:
    """`Example.pixels` of all examples in order; nothing where none has an image. Raises ImagePathError."""
    shown = [pixels for example in examples if (pixels := example.pixels())]
    return {name: torch.cat([pixels[name] for pixels in shown]) for name in (shown[0] if shown else ())}


def answer_ids(tokenizer: Any, text: str) -> Tensor:
    """An answer as tokens, end token last. Strings in the text that look like special tokens stay text."""
    return _int32([*tokenize(tokenizer, text).ids, end_token_id(tokenizer)])


def example_of(tokenizer: Any, record: StateRecord, shown: Pictures | None = None) -> Example:
    """Tokens of one question.

    Args:
        shown: show images that have a file as pixels. None: all as captions.
    """
    empty = record.target is not None and _is_empty(record.target)
    images: tuple[tuple[str, str], ...] = ()
    if shown is not None and record.pictures:
        prompts = tuple(_int32(shown.prompt(tokenizer, record, level)) for level in LEVELS)
        images = shown.files(record)
    else:
        prompts = tuple(_int32(prompt_ids(tokenizer, record.level(level).text)) for level in LEVELS)
    return Example(
        record.question_id,
        prompts,
        # one answer for all levels: Eq. 6 compares the three distributions at the same tokens
        _int32([]) if record.target is None or empty else answer_ids(tokenizer, record.target),
        images=images,
        dialogue_id=record.dialogue_id,
        split=record.split,
        evidence=(*record.evidence, *record.images),
        empty=empty,
        shown=shown,
    )


def _is_empty(target: str) -> bool:
    return not target.strip() or re.match(r"\s*<answer>\s*</answer>", target) is not None


def _int32(ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def read_examples(
    parts: Sequence[Path],
    tokenizer: Any,
    cache: Cache | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    shown: Pictures | None = None,
) -> list[Example]:
    """All questions of a states folder, in order. With a cache each part is tokenised once, by one of the processes.

    Args:
        parts: its files. shown: as for `example_of`.

    Raises:
        DataError, FormatError: files that are not of states.
        ImagePathError: images that are to be shown and cannot be.
        ModelError: the cache cannot be written.
    """
    # here, so that steps run where pyarrow is not
    from remind.states.parquet import read_part

    pictures = None if shown is None else shown.survey(parts)

    def tokenised(number: int) -> list[Example]:
        return [example_of(tokenizer, record, shown) for record in read_part(parts[number])]

    if cache is None:
        return [example for number in track(range(len(parts)), "tokenise", len(parts)) for example in tokenised(number)]
    name = tokenizer_fingerprint(tokenizer)
    keys: list[dict[str, Any]] = [{"version": _VERSION, "part": sha256_file(p), "tokenizer": name} for p in parts]
    if shown is not None and pictures is not None:
        for key, hashes in zip(keys, pictures, strict=True):
            key["images"] = [shown.name, hashes]
    entries = cache.entries(TOKENS, keys, lambda number: _pack(tokenised(number)), ranks, "tokenise")
    return [example for entry in entries for example in _unpack(entry, shown)]


def _pack(examples: list[Example]) -> Entry:
    ids = [tensor for example in examples for tensor in (*example.prompts, example.answer)]
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    about = [{k: v for k, v in vars(e).items() if k not in ("prompts", "answer", "gold", "shown")} for e in examples]
    return {"values": torch.cat([_int32([]), *ids]), "lengths": lengths}, about


def _unpack(entry: Entry, shown: Pictures | None) -> list[Example]:
    tensors, about = entry
    ids = list(tensors["values"].split(tensors["lengths"].tolist()))
    step = len(LEVELS) + 1
    examples = []
    for number, values in enumerate(about):
        *prompts, answer = ids[number * step : (number + 1) * step]
        lists = {
            "evidence": tuple(values["evidence"]),
            "images": tuple((path, content) for path, content in values["images"]),
        }
        examples.append(Example(**{**values, **lists}, prompts=tuple(prompts), answer=answer, shown=shown))
    return examples


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of all that decides which tokens a text becomes: vocabulary, rules, chat template, library version."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else backend.to_str()
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return sha256_json([rules, tokenizer.chat_template, special, version("tokenizers")])


def decode(
    backbone: Backbone,
    records: Sequence[StateRecord],
    level: str,
    max_tokens: int,
    cache: Cache,
    base: str,
    batch_size: int = 8,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    shown: Pictures | None = None,
) -> Mapping[str, str | None]:
    """Greedy answers under a state, each decoded once and kept on disk; the processes divide the work.

    Args:
        level: x1 or x2.
        max_tokens: an answer that has not ended by then ends there.
        base: fingerprint of the model's weights.
        shown: as for `example_of`.

    Returns:
        By question id; None where the model could not be run on the question.

    Raises:
        ModelError: a model that does not generate; or the cache cannot be written.
    """
    about = [base, str(backbone.dtype), tokenizer_fingerprint(backbone.tokenizer), level, max_tokens, batch_size]
    blocks = [records[start : start + _BLOCK] for start in range(0, len(records), _BLOCK)]
    keys: list[list[Any]] = [[about, [(r.question_id, r.level(level).text) for r in block]] for block in blocks]
    if shown is not None:
        for key, block in zip(keys, blocks, strict=True):
            key.append([shown.name, [[content for _, content in shown.files(r)] for r in block]])

    own = range(ranks.rank, len(keys), ranks.processes)
    missing = sum(len(blocks[number]) for number in own if not cache.has(_DECODED, keys[number]))
    # by question: a block of a large model takes minutes
    with ProgressBar(f"answer from {level}", missing) as bar:

        def answers(number: int) -> Entry:
            block = blocks[number]
            prompts = [r.level(level).text if shown is None else level_content(r, level) for r in block]
            outputs = generate(
                backbone, prompts, max_tokens, batch_size, on_output=lambda *_: bar.step(), pictures=shown
            )
            pairs = zip(block, outputs, strict=True)
            return {}, {r.question_id: None if o is None or o.failure else o.text for r, o in pairs}

        entries = cache.entries(_DECODED, keys, answers, ranks, None)
    return {question: text for _, texts in entries for question, text in texts.items()}
