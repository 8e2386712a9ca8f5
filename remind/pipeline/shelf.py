"""What stages have made, by the hash of what they made it from. Every file is whole or absent, and safe to delete."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remind.core.errors import DataError
from remind.core.files import atomic_path, read_json, sha256_file, sha256_json, write_text
from remind.states.parquet import StateRecord, write_records

_log = logging.getLogger(__name__)


class Parts:
    """The states of dialogues: `<key>.parquet` and, written after it, `<key>.json` with its hash and account."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, key: str, records: Sequence[StateRecord], account: dict[str, Any]) -> None:
        """Keep a dialogue's states.

        Args:
            account: JSON that belongs to them.
        """
        path = self._path(key, ".parquet")
        write_records(path, records)
        found = {"sha256": sha256_file(path), "account": account}
        write_text(self._path(key, ".json"), json.dumps(found) + "\n")

    def account(self, key: str) -> dict[str, Any] | None:
        """The account of states that are here and whole, else None."""
        note = self._path(key, ".json")
        if not note.is_file():
            return None
        try:
            found = read_json(note)
            if not isinstance(found, dict) or sha256_file(self._path(key, ".parquet")) != found.get("sha256"):
                raise DataError("its content has changed since it was written", note)
            account: dict[str, Any] = found["account"]
        except (DataError, OSError, KeyError) as error:
            _log.warning("%s; it is built again", " ".join(str(error).split()))
            return None
        return account

    def copy(self, key: str, target: Path) -> None:
        """The states as a file. Raises DataError where they are not what was put here."""
        path = self._path(key, ".parquet")
        wanted = read_json(self._path(key, ".json"))["sha256"]
        with atomic_path(target) as temporary:
            shutil.copyfile(path, temporary)
            if sha256_file(temporary) != wanted:
                raise DataError("has changed since it was built; start again", path)

    def _path(self, key: str, suffix: str) -> Path:
        return self.folder / key[:2] / f"{key}{suffix}"


class Kept:
    """JSON values by stage and key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, stage: str, key: str) -> Any | None:
        """The value, or None where there is none that is whole."""
        path = self._path(stage, key)
        if not path.is_file():
            return None
        try:
            found = read_json(path)
            if not isinstance(found, dict) or sha256_json(found.get("value")) != found.get("sha256"):
                raise DataError("its content has changed since it was written", path)
        except (DataError, OSError) as error:
            _log.warning("%s; it is made again", " ".join(str(error).split()))
            return None
        return found["value"]

    def put(self, stage: str, key: str, value: Any) -> None:
        content = {"sha256": sha256_json(value), "value": value}
        write_text(self._path(stage, key), json.dumps(content, ensure_ascii=False) + "\n")

    def _path(self, stage: str, key: str) -> Path:
        return self.folder / stage / key[:2] / f"{key}.json"
