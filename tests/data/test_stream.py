"""Corpora in pieces: the same content as in one, in bounded memory."""

from __future__ import annotations

import tracemalloc

import pytest
from fuzzing import seeds

from remind import Corpus, read
from remind.data.readers import FORMATS, builder, stream


@pytest.mark.parametrize("format", FORMATS)
def test_pieces_make_up_the_whole(tmp_path, format):
    for number, data in enumerate(seeds.FILES[format]):
        path = tmp_path / f"{number}.{'csv' if format in seeds.CSV else 'json'}"
        path.write_bytes(data)
        # the files of seasons are recognised as episodes
        pieces = list(stream(path, format if format == "friends_seasons" else None))
        assert Corpus.merge(pieces) == read(path, format)
        assert all(len(piece.dialogues) == 1 for piece in pieces)


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
