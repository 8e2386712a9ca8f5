"""Any value of the right type anywhere in a file of states: it is read, or refused in one line."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing.targets import make_targets, sample_record, wrong
from hypothesis import given, settings
from hypothesis import strategies as st

from remind.states.parquet import SCHEMA, write_part

TARGET = make_targets()["states"]
NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 5, 17, 2**31 - 1, -(2**31)]) | st.integers(-(2**31), 2**31 - 1)
ODD = ("", "q", "t1", "t9", "x0", "A", "Z", "single", "multi", "test", "\0", "\u202e", "[ATTENTION]\n", "é" * 2000)
WORDS = st.sampled_from(ODD) | st.text()


def places(value: Any, kind: pa.DataType, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], pa.DataType]]:
    """Every place of a row with its type, the row itself left out."""
    if path:
        yield path, kind
    if pa.types.is_struct(kind) and value is not None:
        for field in kind:
            yield from places(value[field.name], field.type, (*path, field.name))
    elif pa.types.is_list(kind) and value is not None:
        for number, item in enumerate(value):
            yield from places(item, kind.value_type, (*path, number))


def values(kind: pa.DataType, now: Any) -> st.SearchStrategy[Any]:
    if pa.types.is_list(kind):
        items = now or []
        return st.sampled_from([None, [], [*items, *items], items[::-1], [None, *items]])
    if pa.types.is_struct(kind):
        return st.none()
    if pa.types.is_boolean(kind):
        return st.none() | st.booleans()
    if pa.types.is_floating(kind):
        return st.none() | st.floats(width=32)
    return st.none() | (NUMBERS if pa.types.is_integer(kind) else WORDS)


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    part = write_part(tmp_path_factory.mktemp("row"), 0, [sample_record()])
    [row] = pq.read_table(part).to_pylist()
    return dict(row)


@given(data=st.data())
@settings(max_examples=100)
def test_any_value_anywhere(data: st.DataObject, row: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    (fresh,) = pa.Table.from_pylist([row], schema=SCHEMA).to_pylist()
    for _ in range(data.draw(st.integers(1, 3))):
        path, kind = data.draw(st.sampled_from(list(places(fresh, pa.struct(list(SCHEMA))))))
        *above, last = path
        holder = fresh
        for step in above:
            holder = holder[step]
        holder[last] = data.draw(values(kind, holder[last]))
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([fresh], schema=SCHEMA), out)
    assert wrong(TARGET, out.getvalue(), tmp_path_factory.mktemp("states")) is None
