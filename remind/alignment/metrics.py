"""metrics.jsonl: one line per step and per measurement of the held-out loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from remind.alignment.losses import Objective
from remind.errors import DataError
from remind.io import write_text

METRICS = "metrics.jsonl"


def summary(objective: Objective, values: dict[str, Tensor]) -> dict[str, float]:
    """Means over samples of per-sample values by name, each [n].

    Returns:
        `total`; `hard` (sum over the hard levels) and `dist01`, …, as they are before λ, τ² and γ; `jsd01`, … (Eq. 21);
        `ce0`, … and `entropy0`, …; and `share_hard`, `share_dist01`, …: what each adds to the total, as a share of it
        (Figure 14).
    """
    means = {name: float(value.mean()) for name, value in values.items()}
    parts = objective.parts(means)
    total = sum(parts.values())
    shares = {f"share_{name}": part / total if total else 0.0 for name, part in parts.items()}
    hard = sum(means.pop(f"hard{level}") for level in objective.hard_levels if f"hard{level}" in means)
    return {"total": total, "hard": hard, **means, **shares}


class MetricsLog:
    """Appends to metrics.jsonl; only the first process may write."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS

    def append(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def cut(self, step: int) -> None:
        """Forget what was measured after `step`: those steps are run again."""
        if self.path.exists():
            kept = [json.dumps(row) for row in read_metrics(self.path.parent) if row["step"] <= step]
            write_text(self.path, "".join(f"{line}\n" for line in kept))


def read_metrics(run_folder: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that was cut off is left out. Raises DataError if there is no file."""
    path = Path(run_folder) / METRICS
    if not path.is_file():
        raise DataError("no such file: not a run folder, or it has not begun", path)
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise DataError("not JSON", path, f"line {number}") from None
    return rows
