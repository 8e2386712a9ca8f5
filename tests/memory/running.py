"""`remind run-memory` with an encoder of a few lines and short waits: `python running.py --input ... --out ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import openai._base_client
from words import WordEncoder

from remind.commands import main
from remind.memory.provider import CachedEncoder


def use_words(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make `WordEncoder` what every run encodes with."""
    stub = WordEncoder()
    put(CachedEncoder, "_forward", lambda self, texts: stub.encode(texts))
    put(CachedEncoder, "count_many", lambda self, texts: stub.count_many(texts))
    put(CachedEncoder, "dimension", stub.dimension)


if __name__ == "__main__":
    use_words()
    openai._base_client.MAX_RETRY_DELAY = 0.02
    main(["run-memory", *sys.argv[1:]])
