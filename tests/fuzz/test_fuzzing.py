"""Every reader takes any change of a valid file: it is read rightly, or refused with one typed line, in time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from fuzzing import seeds
from fuzzing.strategies import changed_bytes, changed_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remind.core.errors import RemindError
from remind.data.dialogue import Corpus
from remind.data.readers import FORMATS, read, stream, write_refmem

#: Seconds that no input may take.
SLOW = 20.0
SHAPED = (seeds.as_list(seeds.SHAPED), seeds.as_lines([seeds.SHAPED]))
EVERY = tuple(data for format in FORMATS for data in seeds.FILES[format] if format not in seeds.CSV)
TARGETS = {**{format: seeds.FILES[format] for format in FORMATS}, "mapped": SHAPED, "sniffed": EVERY}
TARGETS["mapping"] = (seeds.MAPPING.encode(),)


def reads(name: str, data: bytes, folder: Path) -> None:
    """Read a file as a format, by a mapping, or as what it looks like; of "mapping", the file is the mapping."""
    path = folder / ("input.csv" if name in seeds.CSV else "input.json")
    path.write_bytes(SHAPED[0] if name == "mapping" else data)
    mapping = folder / "mapping.yaml"
    mapping.write_bytes(data if name == "mapping" else seeds.MAPPING.encode())
    format = str(mapping) if name in ("mapped", "mapping") else None if name == "sniffed" else name
    corpus, copy = Corpus.merge(list(stream(path, format))), folder / "copy.jsonl"
    try:
        write_refmem(corpus, copy)
        again = read(copy)
    except RemindError as error:
        raise AssertionError(f"what was read cannot be written: {error}") from None
    assert (again.dialogues, again.questions) == (corpus.dialogues, corpus.questions), "changed on the way"


@pytest.mark.parametrize("name", list(TARGETS))
def test_changed_files_are_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    kinds = [changed_bytes] if name in (*seeds.CSV, "mapping") else [changed_bytes, changed_json]
    for seed in TARGETS[name]:
        reads(name, seed, tmp_path)

    @settings(max_examples=int(os.environ.get("REMIND_FUZZ", "25")), suppress_health_check=list(HealthCheck))
    @given(st.one_of([kind(seed) for seed in TARGETS[name] for kind in kinds]))
    def check(data: bytes) -> None:
        start = time.process_time()
        said = "nothing"
        try:
            reads(name, data, tmp_path)
        except RemindError as error:
            said = str(error)
        assert said.strip()
        assert "\n" not in said
        assert time.process_time() - start < SLOW

    check()
