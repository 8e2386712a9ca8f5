"""The folder of a run: its config, what it was trained on, its metrics and checkpoints. One process writes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remind.alignment import checkpoint
from remind.alignment.config import CONFIG, TrainConfig, as_dict, differences, flatten, read_config, write_config
from remind.alignment.failures import saving
from remind.alignment.metrics import MetricsLog
from remind.alignment.tokens import KIND as TOKENS
from remind.alignment.trackers import Trackers, check_names
from remind.core.errors import ConfigError, RemindError
from remind.core.files import missing_folders, remove_empty, write_json

DATA = "data.json"
FAILURE = "failure.json"
BEST = "best.json"
CACHE = "cache"


class RunFolder:
    """config.yaml, data.json, metrics.jsonl, checkpoints/; best.json where a best checkpoint is chosen, failure.json
    where the run ended with an error."""

    def __init__(self, cfg: TrainConfig, main: bool) -> None:
        check_names(cfg.trainer.trackers)
        self.cfg, self.path, self.main = cfg, Path(cfg.out), main
        self._missing: list[Path] = []
        self.log = MetricsLog(self.path)
        self.trackers: Trackers | None = None

    def claim(self) -> Path | None:
        """The checkpoint to go on from, if any. Every process looks before any of them writes.

        Raises:
            ConfigError: the folder is in use, was run with other settings, or holds what is not of a run.
            ModelError: there are checkpoints and all are damaged.
        """
        if not (self.path / CONFIG).exists():
            self._check_foreign()
            self._missing = missing_folders(self.path / CACHE)
            return None
        if not self.cfg.resume:
            raise ConfigError(f"{self.path} holds a run already; choose another out, or set resume to go on with it")
        if odd := differences(read_config(self.path), self.cfg):
            raise ConfigError(f"{self.path} was run with other settings ({', '.join(odd)}); a resume must keep them")
        return checkpoint.newest(self.path, say=self.main)

    def _check_foreign(self) -> None:
        """A run that was killed before its first step has left its cache, and hidden files it was writing."""
        if not self.path.is_dir():
            if self.path.exists():
                raise ConfigError(f"{self.path} is a file; choose another out")
            return
        foreign = sorted(f.name for f in self.path.iterdir() if not f.name.startswith(".") and f.name != CACHE)
        if foreign:
            what = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
            raise ConfigError(f"{self.path} holds what is not of a run ({what}); choose another out")

    @contextmanager
    def refusing(self, *errors: type[RemindError]) -> Iterator[None]:
        """Where one of these errors ends the block, a new run leaves no folder behind.

        Its tokens are made again in no time; answers and targets of the model, which take long, stay if there are any.
        """
        try:
            yield
        except errors:
            if self.main and self._missing:
                shutil.rmtree(self.path / CACHE / TOKENS, ignore_errors=True)
                remove_empty(self._missing)
            raise

    def begin(self, about: Mapping[str, Any], step: int, evaluated: int) -> None:
        """Write what is known before the first step, and forget metrics of steps that are run again.

        Args:
            evaluated: the last step after which the held-out loss was measured; -1: none.
        """
        scalars = {key: str(value) for key, value in flatten(as_dict(self.cfg)).items()}
        if self.main:
            with saving(self.path):
                # first of all: by it the folder is known as a run's
                write_config(self.path, self.cfg)
                write_json(self.path / DATA, about)
            self.log.cut(step, evaluated)
        self.trackers = Trackers(self.cfg.trainer.trackers, self.path, scalars, self.main)

    def record(self, metrics: dict[str, Any]) -> None:
        if not self.main:
            return
        self.log.append(metrics)
        if self.trackers is not None:
            kept = {k: v for k, v in metrics.items() if isinstance(v, int | float) and k != "step"}
            self.trackers.log({f"{metrics['kind']}/{k}": v for k, v in kept.items()}, metrics["step"])

    def write(self, name: str, value: Mapping[str, Any]) -> Path:
        """A JSON file beside the checkpoints."""
        path = self.path / name
        if self.main:
            with saving(path):
                write_json(path, value)
        return path

    def close(self) -> None:
        if self.trackers is not None:
            self.trackers.close()
