"""Code from elsewhere that libraries would fetch from the hub and import: kernels, named by a model's configuration or
asked for by bitsandbytes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from remind.core.errors import ModelError

#: What each field may name, which is what transformers brings along; any other name is a repository of the hub, or
#: stands for one.
_KNOWN = {
    "attn_implementation": ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}


def check_kernels(name: str) -> None:
    """Refuse a model whose configuration names kernels from elsewhere, at any depth. Nothing of it is loaded.

    Args:
        name: a Hugging Face folder or hub id. One without a usable configuration passes: that is for its loader to say.

    Raises:
        ModelError: it names such a kernel, or flash attention where the package `kernels` might fetch that.
    """
    from transformers import PretrainedConfig
    from transformers.utils import is_kernels_available

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
    """Fields that name an implementation, with each name they hold: one, or one for each part of the model."""
    found = []
    open_ = [("", config)]
    while open_:
        field, value = open_.pop()
        if field and isinstance(value, str):
            found.append((field, value))
        elif isinstance(value, list | tuple):
            open_ += [(field, one) for one in value]
        elif isinstance(value, dict):
            for key, inner in value.items():
                own = str(key).strip("_").removesuffix("_internal") in _KNOWN
                open_.append((str(key) if own else field, inner))
    return found


def keep_out() -> None:
    """Let bitsandbytes, wherever it is imported from, fetch nothing while it is imported.

    On processors with AVX512-BF16 it asks the hub for a kernel as soon as it is imported, which peft and with it
    sentence-transformers and transformers do; without the package `kernels` it complains and goes on without.
    """
    if not any(isinstance(finder, _Alone) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alone())


class _Alone(MetaPathFinder):
    """Finds bitsandbytes where it is, to be imported as if there were no package `kernels`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "bitsandbytes" else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def alone(module: ModuleType) -> None:
            with _without_kernels():
                run(module)

        spec.loader.exec_module = alone  # type: ignore[method-assign]
        return spec


@contextmanager
def _without_kernels() -> Iterator[None]:
    there = "kernels" in sys.modules
    before = sys.modules.get("kernels")
    # what tells the user to install kernels
    advice = logging.getLogger("bitsandbytes.backends.cpu.ops")
    silent = advice.disabled
    advice.disabled = True
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        advice.disabled = silent
        sys.modules.pop("kernels", None)
        if there:
            sys.modules["kernels"] = before  # type: ignore[assignment]
