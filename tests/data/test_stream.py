"""Corpora in pieces: the same content as in one, in bounded memory."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from fuzzing import seeds
from hypothesis import given
from hypothesis import strategies as st

from remind import Corpus, read
from remind.core.errors import DataError
from remind.data.readers import FORMATS, refmem, stream, window, write_refmem
from remind.data.readers.source import Source


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("format", FORMATS)
def test_pieces_make_up_the_whole(tmp_path, monkeypatch, format, chunk):
    monkeypatch.setattr(window, "CHUNK", chunk)
    for number, data in enumerate(seeds.FILES[format]):
        path = tmp_path / f"{number}.{'csv' if format in seeds.CSV else 'json'}"
        path.write_bytes(data)
        # the files of seasons are recognised as episodes
        pieces = list(stream(path, format if format == "friends_seasons" else None))
        assert Corpus.merge(pieces) == read(path, format)
        assert all(len(piece.dialogues) == 1 for piece in pieces)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('aé😀\\"\n{[', max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abé", max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(values, min_size=1, max_size=6), st.integers(1, 40), st.booleans(), st.sampled_from([None, 1]))
def test_a_list_is_read_item_by_item(tmp_path_factory, items, chunk, ascii_only, indent):
    path = tmp_path_factory.getbasetemp() / "list.json"
    path.write_text(json.dumps(items, ensure_ascii=ascii_only, indent=indent), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "CHUNK", chunk)
        assert [record.value for record in Source(path).records] == items


@given(
    st.binary(max_size=60) | st.sampled_from([b'[{"a": 1}, {"a": 2}]', b'{"a": 1}\n{"b": [2]}\n']),
    st.sampled_from([b"", b"\xff", b"]", b"1.5e", b'"', b"tru", b"\xc3"]),
    st.data(),
)
def test_chunks_do_not_change_the_result(tmp_path_factory, content, inserted, data):
    at = data.draw(st.integers(0, len(content)))
    content = content[:at] + inserted + content[at:]
    path = tmp_path_factory.getbasetemp() / "chunks.json"
    path.write_bytes(content)
    results = set()
    for chunk in (1, 3, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(window, "CHUNK", chunk)
            try:
                results.add(repr([record.value for record in Source(path).records]))
            except DataError as error:
                results.add(str(error))
    [result] = results
    try:
        expected = json.loads(content.decode("utf-8-sig"))
        assert result == repr(expected if isinstance(expected, list) and expected else [expected]) or expected == []
    except ValueError:
        pass


def test_places_far_into_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(window, "CHUNK", 16)
    path = tmp_path / "x.jsonl"
    line = json.dumps({"speaker": "Ané", "text": "hi"}, ensure_ascii=False).encode() + b"\n"
    path.write_bytes(b"\xef\xbb\xbf" + line * 50 + b'{"speaker": "\xff"}\n')
    with pytest.raises(DataError, match=rf"line 51\]: not UTF-8 \(byte {3 + 50 * len(line) + 13}\)"):
        read(path)
    path.write_bytes(b"[\n" + line.replace(b"\n", b",\n") * 50 + b"{oops}]")
    with pytest.raises(DataError, match=r"line 52\]: not JSON: Expecting property name"):
        read(path)


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 20])
def test_a_byte_order_mark_is_no_content(tmp_path, refused, monkeypatch, chunk):
    monkeypatch.setattr(window, "CHUNK", chunk)
    path = tmp_path / "x.json"
    path.write_bytes(b"\xef\xbb\xbf")
    assert refused(path) == ": the file is empty"
    path.write_bytes(b'\xef\xbb\xbf{"text": "hi"}')
    assert [record.value for record in Source(path).records] == [{"text": "hi"}]


def test_refmem_gives_each_context_with_its_questions(tmp_path, monkeypatch):
    contexts = [{**seeds.REFMEM[0], "id": f"c{number}"} for number in range(3)]
    questions = [{**seeds.REFMEM[1], "id": f"q{n}", "context_id": f"c{c}"} for n, c in enumerate([1, 0, 2, 0])]
    path = tmp_path / "x.jsonl"
    path.write_bytes(seeds.as_lines([*questions, *contexts]))
    pieces = [([d.id for d in piece.dialogues], [q.id for q in piece.questions]) for piece in stream(path)]
    assert pieces == [(["c0"], ["q1", "q3"]), (["c1"], ["q0"]), (["c2"], ["q2"])]
    monkeypatch.setattr(refmem, "_count", lambda _: Counter(c0=9))
    with pytest.raises(DataError, match="changed while it was read"):
        read(path)


def peak(path: Path) -> int:
    tracemalloc.start()
    for _ in stream(path):
        pass
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def long_file(path: Path, format: str, count: int) -> None:
    """A file of `count` dialogues of 30 turns."""
    words = "so it goes " * 120
    if format == "chat":
        turns = [{"role": "user", "content": words}] * 30
        path.write_bytes(seeds.as_lines([{"messages": turns} for _ in range(count)]))
        return
    turns = [{"speaker": "Ana", "dia_id": f"D1:{number}", "text": words} for number in range(30)]
    sample = {**seeds.LOCOMO[0], "conversation": {"session_1": turns}}
    path.write_bytes(seeds.as_list([{**sample, "sample_id": f"s{number}"} for number in range(count)]))
    if format == "refmem":
        write_refmem(read(path), path)


@pytest.mark.parametrize("format", ["locomo", "chat", "refmem"])
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, format):
    monkeypatch.setattr(window, "CHUNK", 1 << 15)
    small, large = tmp_path / "20.json", tmp_path / "60.json"
    long_file(small, format, 20)
    long_file(large, format, 60)
    # ids and questions stay
    assert peak(large) - peak(small) < 0.2 * large.stat().st_size


def test_a_file_of_one_long_object_is_decoded_few_times(tmp_path, monkeypatch):
    monkeypatch.setattr(window, "CHUNK", 1 << 10)
    held: list[int] = []
    real = window._DECODER.raw_decode

    def counting(text: str, position: int) -> object:
        held.append(len(text))
        return real(text, position)

    monkeypatch.setattr(window._DECODER, "raw_decode", counting)
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"id": "a", "messages": [{"role": "user", "content": "so it goes"}] * 2_000}))
    [record] = Source(path).records
    assert len(record.value["messages"]) == 2_000
    # all of it is decoded once, and little is decoded in vain before
    assert held.count(path.stat().st_size) == 1
    assert len(held) <= 5
