"""The bundled data: a RefMem-Bench in miniature, and small talk to train SAEs on. Both are synthetic.

Speakers of the benchmark have latent states (a changing stance, a habit, a value, an experience, an avoided subject, a
visual style, a motif) that show only in scattered turns and captions; every question asks for one of them.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def sample_path() -> Path:
    """The folder of the bundled benchmark: train.jsonl, dev.jsonl and test.jsonl."""
    return Path(str(files("remind.data") / "sample"))


def corpus_path() -> Path:
    """Bundled small talk without questions (a folder of JSONL); shares no line and no speaker with the benchmark."""
    return Path(str(files("remind.data") / "corpus"))
