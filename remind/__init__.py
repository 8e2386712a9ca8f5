"""REMIND: reflective memory for vision-language models.

The names below are imported on first use, so that `import remind` and the command line start fast.
"""

import logging
from typing import TYPE_CHECKING

from remind.core import lazy_names

if TYPE_CHECKING:
    from remind.alignment import PRAConfig, PRATrainer
    from remind.ask import Answer, answer
    from remind.build import build_states
    from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
    from remind.data.readers import read
    from remind.memory.run import evaluate
    from remind.states.dataset import load_states

# bitsandbytes, which peft imports, advises on some CPUs to install the package kernels
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Corpus",
    "Dialogue",
    "Image",
    "PRAConfig",
    "PRATrainer",
    "Question",
    "Session",
    "Turn",
    "__version__",
    "answer",
    "build_states",
    "evaluate",
    "load_states",
    "read",
]

__getattr__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(("Corpus", "Dialogue", "Image", "Question", "Session", "Turn"), "data.dialogue"),
        "Answer": "ask",
        "PRAConfig": "alignment.arguments",
        "PRATrainer": "alignment.trainer",
        "answer": "ask",
        "build_states": "build.states",
        "evaluate": "memory.run",
        "load_states": "states.dataset",
        "read": "data.readers",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
