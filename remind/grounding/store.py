"""Sparse codes on disk, so that another process need not encode the same dialogue again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from remind.core.errors import DataError
from remind.core.files import atomic_path, sha256_json
from remind.grounding.encode import SparseEncoder
from remind.models.backbone import Backbone
from sae import SAEError, SparseCodes

FORMAT, FORMAT_VERSION = "remind-codes", "1"
#: Entries of a model's configuration that say where it comes from rather than what it computes.
_ORIGIN = ("_name_or_path", "transformers_version", "architectures")
_log = logging.getLogger(__name__)


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

    A file is named by the hash of all that its codes depend on: the windows' token ids (and so the dialogue's lines,
    the tokenizer and window_tokens), weights and configuration of the backbone, weights of the coders, sink ratio,
    dtype, kind of device and version of torch. Not batch_size, which changes no more than rounding. A file that cannot
    be used is encoded anew and replaced, and one that cannot be written is done without; a warning is logged for
    either. The folder is safe to delete.

    Args:
        encoder: its weights must stay as they are while the store is in use; they are hashed once.
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
        """Where the codes of these windows stand, or would."""
        key = sha256_json([FORMAT, FORMAT_VERSION, self._encoder_hash, [list(window) for window in windows]])
        return self.folder / f"{key}.safetensors"

    def encode(self, windows: Sequence[Sequence[int]]) -> dict[int, SparseCodes]:
        """`SparseEncoder.encode(windows)`, from disk where it is there, bit for bit what was computed then."""
        path = self.path(windows)
        found = self._read(path, sum(map(len, windows)))
        if found is None:
            found = self.encoder.encode(windows)
            self._write(path, found)
        return found

    def _read(self, path: Path, tokens: int) -> dict[int, SparseCodes] | None:
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            # safetensors checks its header alone
            if metadata.get("sha256") != hash_tensors(tensors):
                raise DataError("its content has changed since it was written")
            codes = {
                layer: SparseCodes(tensors[f"{layer}.values"], tensors[f"{layer}.indices"].long())
                for layer in self.encoder.saes
            }
            if any(found.values.shape != (tokens, self.encoder.saes[layer].k) for layer, found in codes.items()):
                raise DataError(f"it does not hold {tokens} tokens")
        except (DataError, SAEError, SafetensorError, OSError, KeyError, ValueError) as error:
            _log.warning("%s cannot be used (%s); its dialogue is encoded anew", path, " ".join(str(error).split()))
            return None
        return codes

    def _write(self, path: Path, codes: Mapping[int, SparseCodes]) -> None:
        tensors = {}
        for layer, found in codes.items():
            tensors[f"{layer}.values"] = found.values.contiguous()
            tensors[f"{layer}.indices"] = found.indices.int().contiguous()
        metadata = {"format": FORMAT, "format_version": FORMAT_VERSION, "sha256": hash_tensors(tensors)}
        try:
            with atomic_path(path) as temporary:
                save_file(tensors, temporary, metadata=metadata)
        except (OSError, SafetensorError) as error:
            _log.warning("%s cannot be written (%s); go on without it", path, " ".join(str(error).split()))
