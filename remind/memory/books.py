"""The costs of memory systems: those of their requests and of the sentence encoder, in a file that outlives a kill."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remind.core.errors import DataError
from remind.llm.ledger import Ledger

_EMBEDDINGS = ("calls", "texts", "tokens", "seconds")


class Books(Ledger):
    """A `Ledger` with rows for calls of the encoder, too.

    Args:
        path: JSON lines, one for each row as it is counted. What an earlier process wrote there is counted as paid
            before, also where it is never asked for again. One process at a time. None: nothing is written.

    Raises:
        DataError: the file cannot be read or written, or holds something else.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self.path = None if path is None else Path(path).expanduser()
        if self.path is not None:
            self._rows = _earlier(self.path)

    def add_embeddings(
        self, system: str, dialogue: str, stage: str, encoder: str, texts: int, tokens: int, seconds: float
    ) -> None:
        """Count a call of the sentence encoder."""
        spent = dict(zip(_EMBEDDINGS, (1, texts, tokens, seconds), strict=True))
        place = {"stage": stage, "endpoint": encoder, "system": system, "dialogue": dialogue}
        self._add({**place, "embeddings": spent})

    @staticmethod
    def sums(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As in `Ledger`; further `embeddings`."""
        texts = [row["embeddings"] for row in rows if "embeddings" in row]
        spent = {name: sum(one[name] for one in texts) for name in _EMBEDDINGS}
        return {**Ledger.sums([row for row in rows if "embeddings" not in row]), "embeddings": spent}

    def _add(self, row: dict[str, Any]) -> None:
        super()._add(row)
        if self.path is not None:
            # one line at a time, also from several threads
            with self._lock:
                try:
                    with self.path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                except OSError as error:
                    raise DataError(f"cannot be written: {error.strerror}", self.path) from None


def _earlier(path: Path) -> list[dict[str, Any]]:
    """Rows of earlier processes, paid before. A last line that a killed process left unfinished is removed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
    except OSError as error:
        raise DataError(f"cannot be used: {error.strerror}", path) from None
    rows = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            Books.sums([row])
            rows.append({**row, "cached": True})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise DataError("is not a record of costs; choose another file", path, f"line {number}") from None
    return rows
