"""The folder of a run: its config, what it was trained on, its metrics and checkpoints. One process writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remind.alignment import checkpoint
from remind.alignment.config import CONFIG, TrainConfig, as_dict, differences, flatten, read_config, write_config
from remind.alignment.failures import saving
from remind.alignment.metrics import MetricsLog
from remind.alignment.trackers import Trackers
from remind.errors import ConfigError
from remind.io import write_json

DATA = "data.json"
FAILURE = "failure.json"
BEST = "best.json"


class RunFolder:
    """config.yaml, data.json, metrics.jsonl, checkpoints/; best.json where a best checkpoint is chosen, failure.json
    where the run ended with an error."""

    def __init__(self, cfg: TrainConfig, main: bool) -> None:
        self.cfg, self.path, self.main = cfg, Path(cfg.out), main
        self.log = MetricsLog(self.path)
        self.trackers: Trackers | None = None

    def claim(self) -> Path | None:
        """The checkpoint to go on from, if any. Every process looks before any of them writes.

        Raises:
            ConfigError: the folder is in use, or was run with other settings.
            ModelError: there are checkpoints and all are damaged.
        """
        if not (self.path / CONFIG).exists():
            return None
        if not self.cfg.resume:
            raise ConfigError(f"{self.path} holds a run already; choose another out, or set resume to go on with it")
        if odd := differences(read_config(self.path), self.cfg):
            raise ConfigError(f"{self.path} was run with other settings ({', '.join(odd)}); a resume must keep them")
        return checkpoint.newest(self.path, say=self.main)

    def begin(self, about: Mapping[str, Any], step: int, evaluated: int) -> None:
        """Write what is known before the first step, and forget metrics of steps that are run again.

        Args:
            evaluated: the last step after which the held-out loss was measured; -1: none.
        """
        scalars = {key: str(value) for key, value in flatten(as_dict(self.cfg)).items()}
        self.trackers = Trackers(self.cfg.trainer.trackers, self.path, scalars, self.main)
        if self.main:
            with saving(self.path):
                write_config(self.path, self.cfg)
                write_json(self.path / DATA, about)
            self.log.cut(step, evaluated)

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
