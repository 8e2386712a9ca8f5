"""What a page tells, against grounding and against sorting in Python."""

from __future__ import annotations

from typing import Any

import pytest

from remind.states.pyramid import render
from remind.viewing.inspector.page import Inspection, write_page
from tests.viewing.conftest import D_SAE, Table, data_of, inspect_state, long_state, table_grounder

TURNS, LAYER = 90, 3


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    return inspect_state(table_grounder((LAYER,), beta_unit=None, beta=0.5), long_state(TURNS))


@pytest.fixture(scope="module")
def data(inspection: Inspection, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = write_page(inspection, tmp_path_factory.mktemp("page") / "page.html", features=None, per_feature=3)
    return data_of(path)


def tokens_of(inspection: Inspection) -> list[tuple[int, int, int]]:
    """(start, end, turn) of every dialogue token, from the text alone."""
    rendered, found = render(inspection.state), []
    for turn, span in enumerate(rendered.turns):
        known = Table().tokenize(rendered.text[span.start : span.end])
        found += [(span.start + a, span.start + b, turn) for a, b in known.offsets]
    return found


def test_features_of_tokens_are_those_of_codes(inspection: Inspection, data: dict[str, Any]) -> None:
    codes, layer = inspection.trace.codes.layers[LAYER].dialogue, data["layers"][0]
    for indices, values, *given in zip(codes.indices, codes.values, layer["features"], layer["values"], strict=True):
        pairs = zip(indices.tolist(), values.tolist(), strict=True)
        shown = {layer["ids"][local]: value for local, value in zip(*given, strict=True)}
        assert shown == pytest.approx({feature: value for feature, value in pairs if value > 0}, abs=1e-5)


def test_top_examples_are_those_of_a_full_sort(data: dict[str, Any], inspection: Inspection) -> None:
    codes = inspection.trace.codes
    layer, context, turn = data["layers"][0], data["context"], codes.turn.tolist()
    columns = codes.layers[LAYER].dialogue.dense(D_SAE)
    for place, feature in enumerate(layer["ids"]):
        column = [round(value, 4) for value in columns[:, feature].tolist()]
        best: dict[int, int] = {}
        for t, value in enumerate(column):
            if value > 0 and (turn[t] not in best or value > column[best[turn[t]]]):
                best[turn[t]] = t
        wanted = sorted((column[t] for t in best.values()), reverse=True)[:3]
        shown = layer["examples"][place]
        assert [column[peak] for peak, _ in shown] == pytest.approx(wanted, abs=2e-4)
        assert len({turn[peak] for peak, _ in shown}) == len(shown)
        for peak, digits in shown:
            around = range(max(peak - context, 0), min(peak + context + 1, len(turn)))
            near = [t for t in around if turn[t] == turn[peak]]
            for t, digit in zip(near, digits, strict=True):
                assert abs(int(digit) - 9 * column[t] / max(wanted)) < 1.01
                assert (digit == "0") == (column[t] == 0)


def test_numbers_are_those_of_text_and_equations(data: dict[str, Any], inspection: Inspection) -> None:
    trace, layer, tokens = inspection.trace, data["layers"][0], data["tokens"]
    read = [tokens[name] for name in ("start", "end", "turn")]
    assert list(zip(*read, strict=True)) == tokens_of(inspection)
    codes, v = trace.codes.layers[LAYER].dialogue.dense(D_SAE).double(), trace.guidance[LAYER].double()
    numbers = ((tokens["r"], trace.combined), (tokens["s"], trace.smoothed), (layer["r"], trace.combined))
    for field, values in (*numbers, (layer["local"], codes @ v), (layer["v"], v[layer["ids"]])):
        assert field == pytest.approx(values.tolist(), rel=1e-4, abs=1e-4)
    assert layer["fired"] == (codes[:, layer["ids"]] > 0).sum(0).tolist()
    assert layer["active"] == (codes > 0).sum(1).tolist()
