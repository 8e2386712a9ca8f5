"""Means over dimensions against the paper's own cells: the rows of Table 4 and Table 1 for its system."""

from __future__ import annotations

import pytest

from remind.data.dialogue import DIMENSIONS
from remind.evaluation.scores import MEASURES, macro

#: Table 4's accuracies of the eight dimensions, and what Table 1 prints.
PRINTED = {
    "multi": ((60.92, 65.04, 64.20, 52.78, 51.73, 59.60, 60.09, 60.41), 59.4),
    "single": ((60.97, 68.26, 58.76, 69.39, 68.64, 65.40, 64.32, 73.73), 66.2),
    "direct": ((27.21, 31.49, 35.68, 26.82, 28.59, 59.05, 43.50, 10.59), 32.9),
}


@pytest.mark.parametrize(("cells", "printed"), PRINTED.values(), ids=PRINTED)
def test_the_mean_over_dimensions_is_what_table_1_prints(cells: tuple[float, ...], printed: float) -> None:
    nothing = dict.fromkeys(MEASURES)
    rows = {
        name: {"n": n, "failed": 0, "no_verdict": 0, **nothing, "accuracy": {"value": value}}
        for n, (name, value) in enumerate(zip(DIMENSIONS, cells, strict=True), start=1)
    }
    found = macro(rows)
    assert found["accuracy"]["value"] == pytest.approx(printed, abs=0.1)
    assert (found["accuracy"]["n"], found["n"], found["f1"]) == (8, 36, None)
