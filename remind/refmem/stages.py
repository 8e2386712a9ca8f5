"""Stages that are done once: a folder each, whole or absent, under a key of all that went into it."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError
from remind.core.files import atomic_folder, read_json, sha256_json, write_json

#: Part of every key; a change to what a stage writes raises it.
VERSION = 1


class Stages:
    """The stages of one build folder.

    Args:
        out: the folder of the build.

    Attributes:
        done: name of each stage asked for so far, and whether it was found finished.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.done: dict[str, bool] = {}

    def run(self, name: str, settings: Any, write: Callable[[Path], Any]) -> tuple[Path, str]:
        """The folder of a stage and its key; done only if it is not there under that key.

        Args:
            settings: JSON value of everything the result depends on, the keys of earlier stages among it.
            write: fills an empty folder; what it returns goes into the stage's manifest. Must not depend on the clock.
        """
        key = sha256_json([VERSION, name, settings])
        folder = self.out / name
        manifest = folder / "manifest.json"
        found = manifest.is_file() and read_json(manifest).get("key") == key
        self.done[name] = found
        if not found:
            with atomic_folder(folder) as temporary:
                told = write(temporary)
                write_json(temporary / "manifest.json", {"key": key, "settings": settings, "result": told})
        return folder, key


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other builds off the folder, and clear what a killed one left half-written.

    Raises:
        ConfigError: another build is at work there.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another build is at work in {out}; wait for it or choose another out") from None
        for pattern in (".*.tmp", ".*.old"):
            for left in out.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)
        yield
