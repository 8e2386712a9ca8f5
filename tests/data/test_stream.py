"""Corpora in pieces: the same content as in one, in bounded memory."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from fuzzing import seeds
from hypothesis import given
from hypothesis import strategies as st

from remind import Corpus, read
from remind.data.readers import FORMATS, builder, stream
from remind.data.readers.builder import records


@pytest.mark.parametrize("format", FORMATS)
def test_pieces_make_up_the_whole(tmp_path, format):
    for number, data in enumerate(seeds.FILES[format]):
        path = tmp_path / f"{number}.{'csv' if format in seeds.CSV else 'json'}"
        path.write_bytes(data)
        # the files of seasons are recognised as episodes
        pieces = list(stream(path, format if format == "friends_seasons" else None))
        assert Corpus.merge(pieces) == read(path, format)
        assert all(len(piece.dialogues) == 1 for piece in pieces)


BOM = "\ufeff"
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars | st.text('aé😀\\"\n{[', max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abé", max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(values, min_size=1, max_size=6), st.booleans(), st.sampled_from([None, 1]), st.sampled_from(["", BOM]))
def test_a_list_is_read_item_by_item(tmp_path_factory, items, ascii_only, indent, mark):
    path = tmp_path_factory.getbasetemp() / "list.json"
    path.write_text(mark + json.dumps(items, ensure_ascii=ascii_only, indent=indent), encoding="utf-8")
    for held in (0, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(builder, "HELD", held)
            assert [record.value for record in records(path)] == items
    rows = [{"row": item} for item in items]
    path.write_text(mark + "\n\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows), encoding="utf-8")
    assert [record.value for record in records(path)] == rows


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "HELD", 1 << 16)
    turns = [{"speaker": "Ana", "dia_id": f"D1:{n}", "text": "so it goes " * 120} for n in range(30)]
    peaks, sizes = [], []
    for count in (20, 60):
        path = tmp_path / f"{count}.json"
        samples = [{"sample_id": f"s{number}", "conversation": {"session_1": turns}} for number in range(count)]
        path.write_bytes(seeds.as_list(samples))
        tracemalloc.start()
        assert sum(len(piece.dialogues) for piece in stream(path)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(path.stat().st_size)
    # ids and questions stay
    assert peaks[1] - peaks[0] < 0.2 * sizes[1]
