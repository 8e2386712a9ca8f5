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

from remind.core.cache import Cache
from remind.core.files import sha256_json
from remind.data.dialogue import Dialogue
from remind.grounding.encode import SparseEncoder
from remind.models.backbone import Backbone
from sae import SparseCodes

KIND = "codes"
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


def backbone_fingerprint(backbone: Backbone) -> str:
    """Hash of a model's weights and configuration, wherever it was loaded from."""
    config = {key: value for key, value in backbone.model.config.to_dict().items() if key not in _ORIGIN}
    settings = json.loads(json.dumps(config, default=str))
    return sha256_json([settings, backbone.kind, backbone.frame, tensors_hash(backbone.model.state_dict())])


def tensors_hash(tensors: Mapping[str, Any]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes; other values are hashed as text."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {value}\n".encode())
    return digest.hexdigest()


class CodeStore:
    """Sparse codes of dialogues in a `Cache`: `<layer>.values` [T, k], `<layer>.indices` int32 [T, k].

    An entry's key is all that its codes depend on; batch_size, which changes rounding alone, is not among it. One that
    cannot be written is skipped with a warning.

    Args:
        encoder: its weights must not change while the store is in use; they are hashed once.
    """

    def __init__(self, folder: str | Path, encoder: SparseEncoder) -> None:
        self.cache, self.encoder = Cache(folder), encoder

    @cached_property
    def _encoder_hash(self) -> str:
        backbone = self.encoder.backbone
        coders = {
            str(layer): [type(coder).__name__, coder.d_in, coder.d_sae, coder.k, tensors_hash(coder.state_dict())]
            for layer, coder in self.encoder.saes.items()
        }
        place = [str(backbone.dtype), backbone.device.type, torch.__version__]
        return sha256_json([backbone_fingerprint(backbone), coders, self.encoder.sink_ratio, place])

    def key(self, windows: Sequence[Sequence[int]]) -> list[Any]:
        """The key of these windows' codes."""
        return [self._encoder_hash, [list(window) for window in windows]]

    def encode(self, windows: Sequence[Sequence[int]]) -> dict[int, SparseCodes]:
        """`SparseEncoder.encode(windows)`, from disk where it is there, bit for bit what was computed then."""
        key = self.key(windows)
        if (entry := self.cache.read(KIND, key)) is not None:
            tensors, _ = entry
            return {
                layer: SparseCodes(tensors[f"{layer}.values"], tensors[f"{layer}.indices"].long())
                for layer in self.encoder.saes
            }
        codes = self.encoder.encode(windows)
        tensors = {f"{layer}.values": one.values for layer, one in codes.items()}
        tensors |= {f"{layer}.indices": one.indices.int() for layer, one in codes.items()}
        try:
            self.cache.write(KIND, key, tensors)
        except OSError as error:
            _log.warning("%s cannot be written (%s); it is skipped", self.cache.path(KIND, key), error.strerror)
        return codes
