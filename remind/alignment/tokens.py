"""States as tokens: computed once per part of a states folder, then read from disk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remind.alignment.cache import Cache, Crew, ragged, unragged
from remind.alignment.pictures import Pictures
from remind.alignment.shorten import shortened
from remind.core.files import sha256_file, sha256_json
from remind.core.progress import track
from remind.models.chat import end_token_id, prompt_ids, tokenize
from remind.states.parquet import StateRecord, read_part
from remind.states.pyramid import LEVELS

KIND = "tokens"
#: Raise it when the same text becomes other tokens.
_VERSION = 1


@dataclass(frozen=True)
class Row:
    """One question as tokens.

    Attributes:
        evidence: what train and test must not share: gold turns and images.
        prompts: under x0, x1 and x2, int32.
        answer: y* with its end token, int32; None where no gold answer is known, or it is empty (`empty`).
        cut: turns left out to make it fit.
        labelled: whether the answer is gold.
        images: path and hash of each image that the prompts show as pixels, the same ones under each level.
    """

    id: str
    dialogue_id: str
    split: str
    evidence: tuple[str | int, ...]
    prompts: tuple[Tensor, ...]
    answer: Tensor | None
    empty: bool = False
    cut: int = 0
    labelled: bool = True
    images: tuple[tuple[str, str], ...] = ()


def answer_ids(tokenizer: Any, text: str) -> Tensor:
    """An answer as tokens, end token last. Strings in the text that look like special tokens stay text."""
    return _int32([*tokenize(tokenizer, text).ids, end_token_id(tokenizer)])


def row_of(
    tokenizer: Any, record: StateRecord, fit: tuple[int, int] | None = None, shown: Pictures | None = None
) -> Row:
    """Tokens of one question.

    Args:
        fit: most tokens of a prompt with its answer, and the tokens to keep free for an answer that is not known yet;
            the oldest turns are left out until it fits. None: nothing is left out.
        shown: show images that have a file as pixels; then nothing can be left out. None: all as captions.
    """
    cut = 0
    if shown is not None and record.pictures:
        assert fit is None
    elif fit is not None:
        limit, reserve = fit
        record, cut = shortened(tokenizer, record, limit, reserve)
    empty = record.target is not None and _is_empty(record.target)
    # one answer for all levels: Eq. 6 compares the three distributions at the same tokens
    answer = None if record.target is None or empty else answer_ids(tokenizer, record.target)
    evidence: tuple[str | int, ...] = (*record.evidence, *record.images)
    images: tuple[tuple[str, str], ...] = ()
    if shown is not None and record.pictures:
        prompts = tuple(_int32(shown.prompt(tokenizer, record, level)) for level in LEVELS)
        images = shown.files(record)
    else:
        prompts = tuple(_int32(prompt_ids(tokenizer, record.level(level).text)) for level in LEVELS)
    names = (record.question_id, record.dialogue_id, record.split)
    return Row(*names, evidence, prompts, answer, empty, cut, images=images)


def _is_empty(target: str) -> bool:
    return not target.strip() or re.match(r"\s*<answer>\s*</answer>", target) is not None


def _int32(ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def read_rows(
    parts: Sequence[Path],
    tokenizer: Any,
    fit: tuple[int, int] | None = None,
    cache: Cache | None = None,
    crew: Crew | None = None,
    shown: Pictures | None = None,
) -> list[Row]:
    """All questions of a states folder, in order. With a cache each part is tokenised once, by one of the processes.

    Args:
        parts: its files. fit, shown: as for `row_of`.

    Raises:
        DataError, FormatError: files that are not of states.
        ImagePathError: images that are to be shown and cannot be.
        ModelError: the cache cannot be written.
    """
    pictures = None if shown is None else shown.survey(parts)
    if cache is None:
        return [
            row_of(tokenizer, record, fit, shown)
            for path in track(parts, "tokenise", len(parts))
            for record in read_part(path)
        ]
    crew = crew or Crew()
    name = tokenizer_fingerprint(tokenizer)
    keys: list[dict[str, Any]] = [
        {"version": _VERSION, "part": sha256_file(path), "tokenizer": name, "fit": fit} for path in parts
    ]
    if shown is not None and pictures is not None:
        for key, hashes in zip(keys, pictures, strict=True):
            key["images"] = [shown.name, hashes]
    own = crew.own(len(parts))
    for number in track(own, "tokenise", len(own)):
        if not cache.has(KIND, keys[number]):
            _write(cache, keys[number], [row_of(tokenizer, record, fit, shown) for record in read_part(parts[number])])
    crew.wait()
    rows: list[Row] = []
    for path, key in zip(parts, keys, strict=True):
        found = cache.read(KIND, key)
        if found is None:
            _write(cache, key, [row_of(tokenizer, record, fit, shown) for record in read_part(path)])
            found = cache.read(KIND, key)
            assert found is not None
        rows += _rows(*found)
    return rows


def _write(cache: Cache, key: Any, rows: list[Row]) -> None:
    nothing = torch.empty(0, dtype=torch.int32)
    ids = [tensor for row in rows for tensor in (*row.prompts, nothing if row.answer is None else row.answer)]
    about = [
        {k: v for k, v in vars(row).items() if k not in ("prompts", "answer")} | {"known": row.answer is not None}
        for row in rows
    ]
    cache.write(KIND, key, ragged(ids, nothing), about)


def _rows(tensors: dict[str, Tensor], about: list[dict[str, Any]]) -> list[Row]:
    ids = unragged(tensors["values"], tensors["lengths"])
    step = len(LEVELS) + 1
    rows = []
    for number, values in enumerate(about):
        *prompts, answer = ids[number * step : (number + 1) * step]
        known = values.pop("known")
        values["evidence"] = tuple(values["evidence"])
        values["images"] = tuple((path, content) for path, content in values.get("images", ()))
        rows.append(Row(**values, prompts=tuple(prompts), answer=answer if known else None))
    return rows


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of all that decides which tokens a text becomes: vocabulary, rules, chat template, library version."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else backend.to_str()
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return sha256_json([rules, tokenizer.chat_template, special, version("tokenizers")])
