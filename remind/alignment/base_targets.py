"""Targets of the model as it was before training: computed once, kept on disk, read as the steps need them."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from remind.alignment.batch import MicroBatch, collate
from remind.alignment.cache import Cache, Crew, ragged, unragged
from remind.alignment.example import Example
from remind.alignment.fixed import FixedTeacher, HiddenTeacher, TopKTeacher, approximation_error, teach, topk_targets
from remind.alignment.step import AlignmentModel, head_weight
from remind.alignment.teachers import Fixed, TeacherConfig
from remind.core.errors import ModelError
from remind.core.progress import track

_KIND = "targets"
#: Examples per file: what is computed again after a kill.
_BLOCK = 16


class BaseTargets:
    """Teachers from disk.

    Args:
        module: the model as it is before training, on the device it runs on; its head is kept where it is trained.
        examples: those of the training split, in order.
        levels: those that teach.
        base: fingerprint of the weights.
        frozen_head: whether the head stays as it is; then none is kept.

    Attributes:
        error: with top-k targets, nats per token that the bucket hides from the divergence between x0 and the last of
            `levels`, over the first examples (Eq. 6 without γ and τ²); None: exact.

    Raises:
        ModelError: no room on the disk.
    """

    def __init__(
        self,
        module: AlignmentModel,
        examples: Sequence[Example],
        levels: Sequence[int],
        config: TeacherConfig,
        base: str,
        cache: Cache,
        crew: Crew,
        frozen_head: bool,
    ) -> None:
        self.module, self.levels, self.config, self.cache = module, tuple(sorted(levels)), config, cache
        self.objective = module.objective
        weight = head_weight(module.model).detach()
        self.head = weight.clone() if config.targets == "hidden" and not frozen_head else None
        about: list[Any] = [base, str(weight.dtype), self.levels, config.targets]
        if config.targets == "topk":
            about += [config.k, self.objective.tau]
        blocks = [list(examples[start : start + _BLOCK]) for start in range(0, len(examples), _BLOCK)]
        keys = [[about, _tokens(block, self.levels)] for block in blocks]
        missing = [number for number, key in enumerate(keys) if not cache.has(_KIND, key)]
        self._check_room([blocks[number] for number in missing], weight, crew.rank == 0)
        own = [number for number in crew.own(len(blocks)) if number in set(missing)]
        for number in track(own, "base targets", len(own)):
            self._write(blocks[number], keys[number], first=number == 0)
        crew.wait()
        self._rows: dict[int, dict[str, Tensor]] = {}
        for number, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            tensors, found = self._read(block, key, first=number == 0)
            if number == 0:
                self.error: float | None = found
            columns = {name: unragged(tensors[name], tensors["lengths"]) for name in tensors if name != "lengths"}
            for place, example in enumerate(block):
                self._rows[id(example)] = {name: rows[place] for name, rows in columns.items()}
        self._examples = examples  # their ids in memory are the keys
        del self.module

    def of(self, module: nn.Module, chosen: Sequence[list[Example]], batches: Sequence[MicroBatch]) -> list[Fixed]:
        return [self._teachers(some, batch.targets.device) for some, batch in zip(chosen, batches, strict=True)]

    def _teachers(self, chosen: list[Example], device: torch.device) -> Fixed:
        def column(name: str) -> Tensor:
            return torch.cat([self._rows[id(example)][name] for example in chosen]).to(device)

        teachers: dict[int, FixedTeacher] = {}
        for level in self.levels:
            if self.config.targets == "hidden":
                teachers[level] = HiddenTeacher(column(f"hidden{level}"), self.head)
            else:
                teachers[level] = TopKTeacher(column(f"indices{level}"), column(f"log_probs{level}"))
        return teachers

    def _read(self, block: list[Example], key: Any, first: bool) -> tuple[dict[str, Tensor], float | None]:
        found = self.cache.read(_KIND, key)
        if found is None:
            self._write(block, key, first)
            found = self.cache.read(_KIND, key)
            assert found is not None
        return found[0], found[1]["error"]

    @torch.no_grad()
    def _write(self, block: list[Example], key: Any, first: bool) -> None:
        weight = head_weight(self.module.model)
        topk = self.config.targets == "topk"
        rows: dict[str, list[Tensor]] = {}
        errors: list[Tensor] = []
        for example in block:
            batch = collate([example], [1.0]).to(weight.device)
            hidden = teach(self.module, batch, self.levels)
            for level, h in hidden.items():
                if topk:
                    indices, log_probs = topk_targets(h, weight, self.objective.tau, self.config.k)
                    rows.setdefault(f"indices{level}", []).append(indices.cpu())
                    rows.setdefault(f"log_probs{level}", []).append(log_probs.cpu())
                else:
                    rows.setdefault(f"hidden{level}", []).append(h.cpu())
            if topk and first:
                student = teach(self.module, batch, (0,))[0]
                teacher = hidden[self.levels[-1]]
                errors.append(approximation_error(student, teacher, weight, self.objective.tau, self.config.k))
        tensors: dict[str, Tensor] = {}
        for name, values in rows.items():
            tensors[name] = torch.cat(values)
            tensors["lengths"] = ragged(values, values[0][:0])["lengths"]
        self.cache.write(_KIND, key, tensors, {"error": float(torch.cat(errors).mean()) if errors else None})

    def _check_room(self, blocks: Sequence[Sequence[Example]], weight: Tensor, say: bool) -> None:
        positions = sum(len(example.answer) for block in blocks for example in block) * len(self.levels)
        each = weight.shape[1] * weight.element_size() if self.config.targets == "hidden" else 8 * self.config.k + 4
        folder = self.cache.folder
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if positions * each > free:
            raise ModelError(
                f"{self.cache.folder}: targets of the base model need {positions * each / 1e9:.1f} GB, and "
                f"{free / 1e9:.1f} are free: set teacher.targets topk, lower teacher.k, or move data.cache"
            )
        if say and positions:
            print(f"targets of the base model: {positions * each / 1e6:.1f} MB in {self.cache.folder}", file=sys.stderr)


def _tokens(block: Sequence[Example], levels: Sequence[int]) -> str:
    digest = hashlib.sha256()
    for example in block:
        digest.update(example.seen.encode())
        for ids in (*(example.prompts[level] for level in (0, *levels)), example.answer):
            digest.update(len(ids).to_bytes(8, "little") + ids.numpy().tobytes())
    return digest.hexdigest()
