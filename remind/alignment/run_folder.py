"""The folder of a run: its config, what it was trained on, its metrics and checkpoints. One process writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from remind.alignment import checkpoint
from remind.alignment.config import (
    DataConfig,
    Edge,
    GuardConfig,
    LoraConfig,
    Objective,
    TeacherConfig,
    TrainConfig,
    TrainerConfig,
)
from remind.alignment.metrics import METRICS, read_metrics
from remind.alignment.tokens import TOKENS
from remind.core.errors import ConfigError, RemindError
from remind.core.files import missing_folders, remove_empty, write_json, write_text
from remind.core.processes import sole_writer

CONFIG = "config.yaml"
DATA = "data.json"
FAILURE = "failure.json"
BEST = "best.json"
CACHE = "cache"
#: Settings that may differ between a run and its resumption: they do not touch the weights' trajectory.
FREE = frozenset(
    {"out", "resume", "objective.chunk", "data.cache", "data.image_root"}
    | {f"trainer.{name}" for name in ("gradient_accumulation", "gradient_checkpointing", "prefix_sharing", "trackers")}
    | {f"trainer.{name}" for name in ("eval_every", "eval_limit", "eval_split", "save_every", "keep_last")}
    | {f"trainer.guard.{name}" for name in ("mode", "ce_rise", "entropy_share")}
)


def as_dict(cfg: Any) -> dict[str, Any]:
    """A config as plain dicts, lists and scalars."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(cfg)))
    return values


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts with dotted keys; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Settings, dotted, in which a resumed run differs from its first part and must not."""
    before, after = flatten(as_dict(old)), flatten(as_dict(new))
    return sorted(k for k in before.keys() | after.keys() if k not in FREE and before.get(k) != after.get(k))


def read_config(folder: str | Path) -> TrainConfig:
    """The config of a run folder. Raises ConfigError if there is none or it cannot be used."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder}: no {CONFIG}: not a run folder")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        objective, data, trainer = values["objective"], values["data"], values["trainer"]
        edges = tuple(Edge(**edge) for edge in objective["edges"])
        for group, name in ((data, "group_by_length"), (objective, "clip_kl")):  # options of older runs
            if group.pop(name, None):
                raise ConfigError(f"{path}: {name} is no longer supported")
        if data.get("on_long") == "cut":
            raise ConfigError(f"{path}: data.on_long cut is no longer supported")
        values |= {
            "objective": Objective(**{**objective, "edges": edges}),
            "data": DataConfig(**data),
            "trainer": TrainerConfig(**{**trainer, "guard": GuardConfig(**trainer.get("guard", {}))}),
            "teacher": TeacherConfig(**values.get("teacher", {})),
            "lora": None if values["lora"] is None else LoraConfig(**values["lora"]),
        }
        return TrainConfig(**values)
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not the config of a training run: {error}") from None


class RunFolder:
    """config.yaml, data.json, metrics.jsonl, checkpoints/; best.json where a best checkpoint is chosen, failure.json
    where the run ended with an error."""

    def __init__(self, cfg: TrainConfig, accelerator: Any) -> None:
        self.cfg, self.path, self.accelerator = cfg, Path(cfg.out), accelerator
        self.main: bool = accelerator.is_main_process
        self._missing: list[Path] = []

    def claim(self) -> Path | None:
        """The checkpoint to go on from, if any. Every process calls it before any of them writes.

        Raises:
            ConfigError: the folder was run with other settings, or holds files that are not of a run.
            ModelError: there are checkpoints and all are damaged.
        """
        if not (self.path / CONFIG).exists():
            self._check_foreign()
            self._missing = missing_folders(self.path / CACHE)
            return None
        if not self.cfg.resume:
            raise ConfigError(f"{self.path} already holds a run; choose another out, or set resume to continue it")
        if changed := differences(read_config(self.path), self.cfg):
            raise ConfigError(
                f"{self.path} was run with other settings ({', '.join(changed)}); a resumed run must keep them"
            )
        return checkpoint.newest(self.path, report=self.main)

    def _check_foreign(self) -> None:
        """A run that was killed before its first step has left its cache, and hidden files it was writing."""
        if not self.path.is_dir():
            if self.path.exists():
                raise ConfigError(f"{self.path} is a file; choose another out")
            return
        foreign = sorted(f.name for f in self.path.iterdir() if not f.name.startswith(".") and f.name != CACHE)
        if foreign:
            what = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
            raise ConfigError(f"{self.path} holds files that are not of a run ({what}); choose another out")

    @contextmanager
    def refusing(self, *errors: type[RemindError]) -> Iterator[None]:
        """Where one of these errors ends the block, a new run leaves no folder behind.

        Its tokens are quickly computed again; answers and targets of the model, which take long, stay if there are any.
        """
        try:
            yield
        except errors:
            if self.main and self._missing:
                shutil.rmtree(self.path / CACHE / TOKENS, ignore_errors=True)
                remove_empty(self._missing)
            raise

    def held(self) -> AbstractContextManager[None]:
        """Keep other processes out. Raises ConfigError where one, which the message names, is training here."""
        return sole_writer(self.path) if self.main else nullcontext()

    def begin(self, about: Mapping[str, Any], step: int, evaluated: int) -> None:
        """Write what is known before the first step, and forget metrics of steps that are run again.

        Args:
            evaluated: the last step after which the held-out loss was measured; -1: none.

        Raises:
            ConfigError: another process is training in the folder.
        """
        if self.main:
            with checkpoint.saving(self.path), self.held():
                # first of all: it marks the folder as a run's
                content = yaml.safe_dump(as_dict(self.cfg), sort_keys=False, allow_unicode=True)
                write_text(self.path / CONFIG, content)
                write_json(self.path / DATA, about)
                if (log := self.path / METRICS).exists():
                    rows = read_metrics(self.path)
                    rows = [row for row in rows if row["step"] <= (step if row["kind"] == "train" else evaluated)]
                    write_text(log, "".join(f"{json.dumps(row)}\n" for row in rows))
        if self.cfg.trainer.trackers:
            settings = {key: str(value) for key, value in flatten(as_dict(self.cfg)).items()}
            self.accelerator.init_trackers("remind", config=settings)

    def record(self, metrics: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl, and give its numbers to the trackers.

        Raises:
            ModelError: it cannot be written; a resumed run takes back what was written of the line.
        """
        if self.main:
            path = self.path / METRICS
            with checkpoint.saving(path, "set resume to continue from the newest checkpoint"), path.open("a") as file:
                file.write(f"{json.dumps(metrics)}\n")
            numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float) and k != "step"}
            self.accelerator.log({f"{metrics['kind']}/{k}": v for k, v in numbers.items()}, metrics["step"])

    def write(self, name: str, value: Mapping[str, Any]) -> Path:
        """A JSON file beside the checkpoints."""
        path = self.path / name
        if self.main:
            with checkpoint.saving(path):
                write_json(path, value)
        return path

    def close(self) -> None:
        for tracker in self.accelerator.trackers:
            tracker.finish()
