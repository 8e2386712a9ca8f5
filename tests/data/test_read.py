"""Formats, folders and files that cannot be read at all."""

import json
import subprocess
import sys

import pytest
from fuzzing import seeds

from remind import read
from remind.data.readers import sniff

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


def test_reading_needs_no_torch():
    code = "import sys, remind; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'pyarrow')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
