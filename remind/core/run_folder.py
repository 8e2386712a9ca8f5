"""The folder of a run: one writer, the settings that it was begun with, and what came out."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from remind.core.errors import ConfigError
from remind.core.files import none_empty, sweep, write_text
from remind.core.processes import locked

CONFIG, REPORT, _LOCK = "config.yaml", "report.json", ".lock"


class RunFolder:
    """A folder that a command writes.

    Attributes:
        path: of the folder; made when it is held.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @contextmanager
    def held(self) -> Iterator[RunFolder]:
        """Keep others out, and remove what a killed process left half-written.

        If the block writes nothing, for example because it raises an error first, no new folder is left behind.

        Raises:
            ConfigError: another process is at work there; or it is a file.
        """
        self.check(resume=True)
        lock = self.path / _LOCK
        with none_empty(self.path), locked(lock, wait=False):
            sweep(self.path)
            try:
                yield self
            finally:
                if [*self.path.glob("*")] == [lock]:
                    lock.unlink()

    def check(self, resume: bool) -> None:
        """Raise ConfigError if it is a file, or holds a run that is not to be gone on with."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; choose another out")
        if (self.path / CONFIG).is_file() and not resume:
            raise ConfigError(f"{self.path} already holds a run; choose another out, or set resume to continue it")

    def claim(self, config: Any, resume: bool = False, free: Collection[str] = ()) -> None:
        """Begin a run, whose settings go into config.yaml, or go on with it.

        Args:
            config: dataclass or mapping.
            free: dotted names of settings in which a resumed run may differ.

        Raises:
            ConfigError: as `check`; or the run there has other settings, or what is there is no run.
        """
        self.check(resume)
        file = self.path / CONFIG
        if not file.is_file():
            if any(not path.name.startswith(".") for path in self.path.glob("*")):
                raise ConfigError(f"{self.path} holds files that are not of a run; choose another out")
            self.write(config)
        before, after = flatten(yaml.safe_load(file.read_text(encoding="utf-8"))), flatten(as_dict(config))
        changed = sorted(k for k in before.keys() | after.keys() if k not in free and before.get(k) != after.get(k))
        if changed:
            raise ConfigError(
                f"{self.path} was run with other settings ({', '.join(changed)}), which a resumed run must keep"
            )

    def write(self, config: Any) -> None:
        """Write config.yaml."""
        write_text(self.path / CONFIG, yaml.safe_dump(as_dict(config), sort_keys=False, allow_unicode=True))


def as_dict(cfg: Any) -> dict[str, Any]:
    """A config, dataclass or mapping, as plain dicts, lists and scalars."""
    return dict(json.loads(json.dumps(cfg if isinstance(cfg, Mapping) else asdict(cfg))))


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts with dotted keys; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
