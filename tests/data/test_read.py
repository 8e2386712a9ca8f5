"""Formats, folders and streams; files and records that cannot be read, each refused with one line."""

import json
import tracemalloc

import pytest
from fuzzing import seeds
from fuzzing.seeds import changed

from remind import Corpus, read
from remind.data.readers import FORMATS, builder, sniff, stream

GOOD = json.dumps({"speaker": "Ana", "text": "hi"})


def make(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_the_content_tells_the_format(tmp_path, remind_data):
    for format, contents in seeds.FILES.items():
        for content in contents:
            assert sniff(make(tmp_path, "x", content)) == format.removesuffix("_seasons")
    assert sniff(make(tmp_path, "x", json.dumps({"question_id": "q", "hypothesis": "h"}))) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": the file is empty"),
        (b"[]", ": not "),
        (GOOD.encode() + b"\n" + b'{"speaker": "\xff"}', "[line 2]: not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b'[{"speaker": "Ana", "text": "hi", "text": "ho"}]', ": not JSON: the key 'text' occurs twice"),
        (b"[" * 100_000, ": not JSON: maximum recursion"),
    ],
)
def test_files_that_are_no_records(tmp_path, refused, content, message):
    path = make(tmp_path, "x.jsonl", content)
    for format in (None, "chat"):
        assert refused(path, format).startswith(message)


def test_a_folder_of_one_format(tmp_path, caplog, refused):
    (tmp_path / "sub").mkdir()
    make(tmp_path / "sub", "chat_3.jsonl", GOOD)
    assert "not in a known format" in refused(tmp_path)
    for name in ("chat_10.jsonl", "chat_2.jsonl", "notes.txt"):
        make(tmp_path, name, GOOD)
    make(tmp_path, "other.json", '{"a": 1}')
    make(tmp_path, ".hidden.jsonl", "broken")
    assert [dialogue.id for dialogue in read(tmp_path).dialogues] == ["chat_2", "chat_10"]
    assert caplog.messages == [f"{tmp_path / 'other.json'}: left out, not a chat file"]
    assert "not of format locomo" in refused(tmp_path, "locomo")
    make(tmp_path, "b.json", json.dumps({"dialog": [{"text": "x"}]}))
    assert refused(tmp_path).endswith("several formats (msc, chat); name one")


@pytest.mark.parametrize(
    ("format", "path", "value", "message"),
    [
        ("locomo", "1.sample_id", "s1", "[s1]: dialogue id 's1' occurs twice, first in "),
        ("locomo", "0.conversation.session_1_date_time", "1:00 am on 31 June, 2023", "[s1]: the time of session 'S1'"),
        ("locomo", "0.qa.0.category", "4", "[s1-q000]: category should be a whole number, not '4'"),
        ("dialogcc", "0.dialogue.0.shared_image", "../x", "[item 1, d1, S1:T1]: image '../x' is outside the data"),
        ("refmem", "2", {"type": "answer"}, "[item 3]: unknown record type 'answer'; known: context, question"),
        ("refmem", "1.images", [10**4000], f"[item 2, q1]: image index 1{'0' * 37}...{'0' * 39} is out of range"),
        ("shaped", "data.0.parts", ..., "[dialogue 1, c1]: no 'parts' among 'conv', 'qa'; where it may be missing"),
        ("shaped", "data.0.qa.0.gold", 2, "[dialogue 1, c1, question 1, c1-q000, answer 1]: answer 2 is not the"),
    ],
)
def test_a_bad_record_is_one_line(tmp_path, refused, format, path, value, message):
    file, mapping = tmp_path / "x.json", tmp_path / "mapping.yaml"
    file.write_text(json.dumps(changed(getattr(seeds, format.upper()), path, value)), encoding="utf-8")
    mapping.write_text(seeds.MAPPING, encoding="utf-8")
    assert refused(file, str(mapping) if format == "shaped" else format).startswith(message)


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
