"""REMIND: reflective memory for vision-language models.

The names below are imported on first use, so that `import remind` and the command line start fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remind.models.kernels import keep_out

if TYPE_CHECKING:
    from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
    from remind.data.readers import read

# bitsandbytes, which peft imports, would ask the model hub for a kernel; this only registers an import hook
keep_out()

__version__ = "0.1.0"
__all__ = ["Corpus", "Dialogue", "Image", "Question", "Session", "Turn", "__version__", "read"]
_DIALOGUE = "remind.data.dialogue"
_MODULES = dict.fromkeys(("Corpus", "Dialogue", "Image", "Question", "Session", "Turn"), _DIALOGUE)
_MODULES["read"] = "remind.data.readers"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
