"""The memory that tensors take, counted storage by storage."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Held(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def note(self, tensor: Tensor) -> None:
        if tensor.layout == torch.sparse_csr:
            for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
                self.note(part)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key)
            self.most = max(self.most, sum(self.alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self.note(value)
        return out
