"""What every other package needs: errors, files, the command line, progress, processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from remind.core.errors import ModelError

#: Packages that not everyone has, and the extra of remind-toolkit that brings each.
EXTRAS = {
    "bitsandbytes": "gpu",
    "gguf": "smollm2",
    "langchain_openai": "langmem",
    "langmem": "langmem",
    "statsmodels": "refmem",
    "torchao": "torchao",
    "trl": "rl",
    "vllm": "vllm",
}


def optional(module: str, purpose: str) -> Any:
    """Import a module of a package in `EXTRAS`.

    Args:
        module: its name.
        purpose: what needs it, as the subject of the message: "train-memory".

    Raises:
        ModelError: the package is not installed, or does not load.
    """
    try:
        return import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        package = module.partition(".")[0]
        line = f"{purpose} needs the package {package}: pip install 'remind-toolkit[{EXTRAS[package]}]'"
        raise ModelError(f"{line} ({error})") from None


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports names on first use, so that its configs are read without torch.

    Args:
        package: its name.
        modules: for each name the module of the package that has it.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get
