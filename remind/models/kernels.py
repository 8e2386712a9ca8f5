"""Keeps libraries from fetching kernels, which are code, from the hub."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from remind.core.errors import ModelError
from sae.regular import check_regular

#: Implementations that are part of transformers; any other name is or maps to a repository of the hub.
_KNOWN = {
    "attn_implementation": ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}


def check_kernels(name: str) -> None:
    """Refuse a model before anything of it is loaded: external kernels in its configuration, files that would hang.

    Args:
        name: a Hugging Face folder or hub id; one without a usable configuration is left to its loader.

    Raises:
        ModelError: a file of its folder is a pipe, a device or a socket; it names such a kernel, at any depth, or flash
            attention if the installed package `kernels` might fetch it.
    """
    from transformers import PretrainedConfig
    from transformers.utils import is_kernels_available

    for file in (one for pattern in ("*", "*/*") for one in Path(name).glob(pattern)):
        if file.exists() and not file.is_dir():
            check_regular(file, lambda message, path: ModelError(f"{path}: {message}"))
    try:
        config: Any = PretrainedConfig.get_config_dict(name)[0]
    except Exception:  # the library raises OSError, ValueError, KeyError and errors of its own
        return
    for field, value in _named(config):
        why = ""
        if value not in _KNOWN[field.strip("_").removesuffix("_internal")]:
            why = "which may be code from elsewhere and is not fetched"
        elif value.startswith("flash") and is_kernels_available():
            why = "which the installed package kernels might fetch from the hub"
        if why:
            raise ModelError(
                f"{name}: its config.json names {value[:80]!r} as {field[:40]}, {why}; take the field out of it"
            )


def _named(config: Any) -> list[tuple[str, str]]:
    """(field, name) of every implementation named: one per field, or one for each part of the model."""
    names = []
    stack = [("", config)]
    while stack:
        field, value = stack.pop()
        if field and isinstance(value, str):
            names.append((field, value))
        elif isinstance(value, list | tuple):
            stack += [(field, item) for item in value]
        elif isinstance(value, dict):
            for key, inner in value.items():
                names_one = str(key).strip("_").removesuffix("_internal") in _KNOWN
                stack.append((str(key) if names_one else field, inner))
    return names


def keep_out() -> None:
    """Keep bitsandbytes, which peft imports, from fetching a kernel when it is imported.

    On processors with AVX512-BF16 it asks the hub for a kernel at import, unless the package `kernels` is missing.
    """
    if not any(isinstance(finder, _BitsandbytesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BitsandbytesFinder())


class _BitsandbytesFinder(MetaPathFinder):
    """Imports bitsandbytes as if there were no package `kernels`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "bitsandbytes" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def without_kernels(module: ModuleType) -> None:
            with _hidden_kernels():
                execute(module)

        spec.loader.exec_module = without_kernels  # type: ignore[method-assign]
        return spec


@contextmanager
def _hidden_kernels() -> Iterator[None]:
    imported = sys.modules.pop("kernels", None)
    # this logger advises to install kernels
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    disabled, logger.disabled = logger.disabled, True
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        logger.disabled = disabled
        del sys.modules["kernels"]
        if imported is not None:
            sys.modules["kernels"] = imported
