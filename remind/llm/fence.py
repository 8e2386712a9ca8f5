"""Data set apart from instructions: fences that a text cannot close, because their code follows from all the texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable


def code_for(texts: Iterable[str]) -> str:
    """Eight hex digits that stand in none of the texts; the same for the same texts, so that a prompt repeats."""
    held = list(texts)
    round_ = 0
    while True:
        # as ASCII: a lone surrogate, which JSON input may hold, has no UTF-8
        code = hashlib.sha256(json.dumps([round_, held]).encode()).hexdigest()[:8]
        if not any(code in text for text in held):
            return code
        round_ += 1


def fenced(name: str, text: str, code: str) -> str:
    """The text between an opening and a closing line that carry the code."""
    return f"<<<{name} {code}\n{text.strip()}\n{name} {code}>>>"
