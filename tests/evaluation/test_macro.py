"""Means over dimensions against the paper's own cells: the rows of Tables 4 and Table 1 for its system."""

from __future__ import annotations

import pytest

from remind.data.dialogue import DIMENSIONS
from remind.evaluation.scores import MEASURES, macro, summaries
from remind.evaluation.tables import dimensions_and_formats

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


def test_a_report_has_both_means_and_names_them() -> None:
    """Three right of four in one dimension, none of one in the other: 60 % of the questions, 37.5 % by dimension."""

    def row(number: int, dimension: str, right: float) -> dict[str, object]:
        named = {"dialogue_id": f"d{number}", "format": "single", "dimension": dimension, "category": None}
        return {**named, "score_failure": None, **dict.fromkeys(MEASURES), "accuracy": right}

    rows = [row(n, "belief_modeling", float(n > 0)) for n in range(4)] + [row(4, "temporal_dynamics", 0.0)]
    report = summaries(rows, resamples=20)
    assert report["overall"]["accuracy"]["value"] == pytest.approx(0.6)
    assert report["macro"]["all"]["accuracy"] == report["macro"]["single"]["accuracy"]
    assert report["macro"]["all"]["accuracy"]["value"] == pytest.approx(0.375)
    [table] = dimensions_and_formats(report)
    assert table.heads[:3] == ["dimension", "single n", "single Acc"]
    assert (table.rows[-1].name, table.rows[-1].cells[:2]) == ("mean over dimensions", ["5", "37.5"])
