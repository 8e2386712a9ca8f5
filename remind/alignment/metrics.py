"""What a run leaves in its folder: metrics.jsonl, one line per step and per measurement, and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remind.alignment.config import Objective
from remind.core.errors import DataError
from remind.core.files import read_json

METRICS = "metrics.jsonl"


def summary(objective: Objective, means: Mapping[str, float]) -> dict[str, float]:
    """What a row of metrics holds, from means over samples by name (`hard0`, `dist01`, `ce0`, …).

    Returns:
        `total`; `hard` (sum over the hard levels) and `dist01`, …, as they are before λ, τ² and γ; `jsd01`, … (Eq. 21);
        `ce0`, … and `entropy0`, …; and `share_hard`, `share_dist01`, …: what each adds to the total, as a share of it
        (Figure 14).
    """
    levels = [f"hard{level}" for level in objective.hard_levels if f"hard{level}" in means]
    hard, others = sum(means[name] for name in levels), {k: value for k, value in means.items() if k not in levels}
    parts = {"hard": objective.lambda_hard * hard} if levels and objective.lambda_hard > 0 else {}
    share = (1 - objective.lambda_hard) * objective.tau**2
    # held-out questions may lack a level
    edges = [edge for edge in objective.active if f"dist{edge.name}" in means]
    parts |= {f"dist{edge.name}": share * edge.gamma * means[f"dist{edge.name}"] for edge in edges}
    total = sum(parts.values())
    shares = {f"share_{name}": part / total if total else 0.0 for name, part in parts.items()}
    return {"total": total, "hard": hard, **others, **shares}


def record(folder: str | Path, row: Mapping[str, Any]) -> None:
    """Add a line to the metrics.jsonl of a run."""
    path = Path(folder) / METRICS
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
    except OSError as error:  # a full disk is noticed when the file is closed, where nothing knows its name
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_metrics(run_folder: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that was cut off is left out. Raises DataError if there is no file."""
    path = Path(run_folder) / METRICS
    if not path.is_file():
        raise DataError("no such file: not a run folder, or it has not begun", path)
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        try:
            rows += [json.loads(line)] if line.endswith("\n") else []
        except ValueError:
            raise DataError("not JSON", path, f"line {number}") from None
    return rows


def checkpoints(run: str | Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first."""
    found = [path for path in Path(run).glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def kept(folder: Path) -> dict[str, Any] | None:
    """What `PRATrainer` keeps in a checkpoint (`RunState`); None: not written to its end, or of another trainer."""
    try:
        state: dict[str, Any] = read_json(folder / "trainer_state.json")["stateful_callbacks"]["RunState"]["attributes"]
    except (OSError, DataError, KeyError, TypeError):
        return None
    return state


def newest(run: str | Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    return next((path for path in reversed(checkpoints(run)) if kept(path)), None)
