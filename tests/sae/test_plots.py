"""Pictures of coders show the figures of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sae import FormatError
from sae.plots import held_out, plot_density, plot_training


def _summary(fvu: float, counts: list[int], never: int) -> dict[str, Any]:
    return {"fvu": fvu, "density_histogram": {"edges": [1e-3, 1e-2, 1e-1, 1.0], "counts": counts, "never": never}}


def test_pictures(tmp_path: Path) -> None:
    parts = {"text": _summary(0.2, [0, 4, 2], 2), "visual": _summary(0.4, [0, 1, 1], 6)}
    for layer, scores in ((2, {**_summary(0.25, [0, 5, 2], 1), **parts}), (10, _summary(0.3, [1, 0, 0], 7))):
        place = tmp_path / f"layer_{layer:02d}"
        place.mkdir()
        (place / "training.json").write_text(json.dumps({"held_out": scores}))
    rows = [{"step": step, "layer": layer, "fvu": layer / step} for step in (1, 2, 4) for layer in (2, 10)]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    left, right = plot_training(tmp_path).figure.axes
    lines = {line.get_label(): line.get_ydata() for line in left.get_lines()}
    assert np.allclose(lines["layer 10"], [10, 5, 2.5])
    # text and visual tokens apart where both were there
    assert np.allclose([bar.get_height() for bar in right.patches], [0.25, 0.2, 0.4, 0.3])
    picture = plot_density(held_out(tmp_path))
    first, second = picture.figure.axes
    assert [patch.get_label() for patch in first.patches] == ["all", "text", "visual"]
    assert "all 1, text 2, visual 6" in first.get_title(loc="left")
    assert "all 7" in second.get_title(loc="left")
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert picture.save(tmp_path / "new" / "density.svg").read_text().lstrip().startswith("<?xml")
    with pytest.raises(FormatError, match="no layer_"):
        held_out(tmp_path / "nothing")
    metrics.write_text("{")
    with pytest.raises(FormatError, match="not JSON"):
        plot_training(tmp_path)
    metrics.unlink()
    with pytest.raises(FormatError, match="no such file"):
        plot_training(tmp_path)
