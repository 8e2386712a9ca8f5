"""Stages that run once: a folder each, whole or absent, under a key of everything that went into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remind.core.files import atomic_folder, read_json, sha256_json, write_json

#: Part of every key; raise it when a stage writes something else than before.
VERSION = 2


@dataclass(frozen=True)
class Stage:
    """A finished stage: its folder, its key, and whether an earlier run had finished it."""

    folder: Path
    key: str
    reused: bool

    @property
    def result(self) -> dict[str, Any]:
        """What its writer returned."""
        result: dict[str, Any] = read_json(self.folder / "manifest.json")["result"]
        return result


def run_stage(folder: Path, settings: Any, write: Callable[[Path], Any]) -> Stage:
    """Run a stage unless its folder holds the result for these settings.

    Args:
        settings: JSON value of everything the result depends on, including the keys of earlier stages.
        write: fills an empty folder; its return value goes into manifest.json. Must not depend on the clock.
    """
    key = sha256_json([VERSION, folder.name, settings])
    manifest = folder / "manifest.json"
    reused = manifest.is_file() and read_json(manifest).get("key") == key
    if not reused:
        with atomic_folder(folder) as temporary:
            result = write(temporary)
            write_json(temporary / "manifest.json", {"key": key, "settings": settings, "result": result})
    return Stage(folder, key, reused)
