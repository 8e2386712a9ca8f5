"""What grounding keeps of dialogues between questions: recent ones in memory, sparse codes on disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from remind.core.errors import DataError
from remind.core.files import atomic_path, sha256_json
from remind.data.dialogue import Dialogue
from remind.grounding.encode import SparseEncoder
from remind.models.backbone import Backbone
from sae import SAEError, SparseCodes

FORMAT, FORMAT_VERSION = "remind-codes", "1"
#: Entries of a model's configuration that say where it comes from rather than what it computes.
_ORIGIN = ("_name_or_path", "transformers_version", "architectures")
T = TypeVar("T")
_log = logging.getLogger(__name__)


class RecentDialogues(Generic[T]):
    """One value per dialogue, computed when first asked for; the least recently used dialogue is dropped first.

    Args:
        build: computes the value of a dialogue.
        limit: how many dialogues stay in memory.
    """

    def __init__(self, build: Callable[[Dialogue], T], limit: int) -> None:
        self.build, self.limit = build, limit
        # a short list, searched: a dict would hash every turn of a dialogue at every question
        self._entries: list[tuple[Dialogue, T]] = []

    def get(self, dialogue: Dialogue) -> T:
        """The dialogue's value."""
        entries = enumerate(self._entries)
        place = next((n for n, (known, _) in entries if known is dialogue or known == dialogue), None)
        entry = (dialogue, self.build(dialogue)) if place is None else self._entries.pop(place)
        self._entries.append(entry)
        del self._entries[: max(0, len(self._entries) - self.limit)]
        return entry[1]


def hash_tensors(tensors: Mapping[str, Any]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes; entries that are no tensors count by their text."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {value}\n".encode())
    return digest.hexdigest()


def backbone_fingerprint(backbone: Backbone) -> str:
    """Hash of a model's weights and configuration, wherever it was loaded from."""
    config = {key: value for key, value in backbone.model.config.to_dict().items() if key not in _ORIGIN}
    settings = json.loads(json.dumps(config, default=str))
    return sha256_json([settings, backbone.kind, backbone.frame, hash_tensors(backbone.model.state_dict())])


class CodeStore:
    """One safetensors file per dialogue: `<layer>.values` [T, k], `<layer>.indices` int32 [T, k].

    A file is named by the hash of all that its codes depend on; batch_size, which changes rounding alone, is not among
    it. A file that cannot be used is encoded again and replaced, and one that cannot be written is skipped; a warning
    is logged for either. The folder is safe to delete.

    Args:
        encoder: its weights must not change while the store is in use; they are hashed once.
    """

    def __init__(self, folder: str | Path, encoder: SparseEncoder) -> None:
        self.folder, self.encoder = Path(folder).expanduser(), encoder

    @cached_property
    def _encoder_hash(self) -> str:
        backbone = self.encoder.backbone
        coders = {
            str(layer): [type(coder).__name__, coder.d_in, coder.d_sae, coder.k, hash_tensors(coder.state_dict())]
            for layer, coder in self.encoder.saes.items()
        }
        place = [str(backbone.dtype), backbone.device.type, torch.__version__]
        return sha256_json([backbone_fingerprint(backbone), coders, self.encoder.sink_ratio, place])

    def path(self, windows: Sequence[Sequence[int]]) -> Path:
        """The file of these windows' codes, written or not."""
        key = sha256_json([FORMAT, FORMAT_VERSION, self._encoder_hash, [list(window) for window in windows]])
        return self.folder / f"{key}.safetensors"

    def encode(self, windows: Sequence[Sequence[int]]) -> dict[int, SparseCodes]:
        """`SparseEncoder.encode(windows)`, from disk where it is there, bit for bit what was computed then."""
        path = self.path(windows)
        if path.exists():
            try:
                return self._read(path, sum(map(len, windows)))
            except (DataError, SAEError, SafetensorError, OSError, KeyError, ValueError) as error:
                reason = " ".join(str(error).split())
                _log.warning("%s cannot be used (%s); its dialogue is encoded again", path, reason)
        codes = self.encoder.encode(windows)
        try:
            self._write(path, codes)
        except (OSError, SafetensorError) as error:
            _log.warning("%s cannot be written (%s); it is skipped", path, " ".join(str(error).split()))
        return codes

    def _read(self, path: Path, tokens: int) -> dict[int, SparseCodes]:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        # safetensors checks its header alone
        if metadata.get("sha256") != hash_tensors(tensors):
            raise DataError("its content has changed since it was written")
        codes = {}
        for layer, coder in self.encoder.saes.items():
            codes[layer] = SparseCodes(tensors[f"{layer}.values"], tensors[f"{layer}.indices"].long())
            if codes[layer].values.shape != (tokens, coder.k):
                raise DataError(f"it does not hold {tokens} tokens")
        return codes

    def _write(self, path: Path, codes: Mapping[int, SparseCodes]) -> None:
        tensors = {}
        for layer, layer_codes in codes.items():
            tensors[f"{layer}.values"] = layer_codes.values.contiguous()
            tensors[f"{layer}.indices"] = layer_codes.indices.int().contiguous()
        metadata = {"format": FORMAT, "format_version": FORMAT_VERSION, "sha256": hash_tensors(tensors)}
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)
