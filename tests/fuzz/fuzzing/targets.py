"""What is fuzzed: every reader must refuse its input with one typed line, or read it rightly."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzzing import seeds
from fuzzing.strategies import changed_bytes, changed_json
from remind.core.errors import RemindError
from remind.data.dialogue import Corpus
from remind.data.readers import FORMATS, read, stream, write_refmem

#: Seconds that no input may take.
SLOW = 20.0


@dataclass(frozen=True)
class Target:
    """Something that reads: valid inputs, what reads one in a scratch folder, and strategies that change a seed.

    `run` raises AssertionError where the input was read wrongly.
    """

    seeds: tuple[bytes, ...]
    run: Callable[[bytes, Path], None]
    changed: tuple[Callable[[bytes], st.SearchStrategy[bytes]], ...] = (changed_json, changed_bytes)

    @property
    def inputs(self) -> st.SearchStrategy[bytes]:
        return st.one_of([strategy(seed) for seed in self.seeds for strategy in self.changed])


def wrong(target: Target, data: bytes, folder: Path) -> str | None:
    """What is wrong with how an input is taken, or None: a typed error of one line, or a sound result, in time."""
    start = time.process_time()
    try:
        target.run(data, folder)
    except RemindError as error:
        if "\n" in str(error) or not str(error).strip():
            return f"{type(error).__name__} is not one line"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    taken = time.process_time() - start
    return f"took {taken:.0f} s" if taken > SLOW else None


def make_check(name: str, cases: int) -> Callable[[], None]:
    """A hypothesis test of one target: any input is read rightly, or refused with one typed line."""
    target = make_targets()[name]
    memory = Path("/dev/shm")

    @settings(max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=target.inputs)
    def check(data: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="remind-fuzz-", dir=memory if memory.is_dir() else None) as folder:
            problem = wrong(target, data, Path(folder))
        assert problem is None, problem

    return check


def _reader(format: str | None) -> Callable[[bytes, Path], None]:
    def run(data: bytes, folder: Path) -> None:
        path = folder / ("input.csv" if format in seeds.CSV else "input.json")
        path.write_bytes(data)
        check_corpus(list(stream(path, format)), folder)

    return run


def _shaped(data: bytes, folder: Path, mapping: bytes = seeds.MAPPING.encode()) -> None:
    (folder / "mapping.yaml").write_bytes(mapping)
    _reader(str(folder / "mapping.yaml"))(data, folder)


def _mapping(data: bytes, folder: Path) -> None:
    _shaped(seeds.as_list(seeds.SHAPED), folder, data)


def check_corpus(pieces: list[Corpus], folder: Path) -> None:
    """Raise AssertionError unless a corpus survives being written as RefMem-Bench and read again."""
    corpus = Corpus.merge(pieces)
    copy = folder / "copy.jsonl"
    try:
        write_refmem(corpus, copy)
        again = read(copy)
    except RemindError as error:
        raise AssertionError(f"what was read cannot be written: {error}") from None
    assert again.dialogues == corpus.dialogues, "dialogues changed on the way through a file"
    assert again.questions == corpus.questions, "questions changed on the way through a file"
    assert sorted(map(repr, again.dangling)) == sorted(map(repr, corpus.dangling)), "references got lost"


def make_targets() -> dict[str, Target]:
    """All targets by name."""
    every = tuple(data for format in FORMATS for data in seeds.FILES[format] if format not in seeds.CSV)
    return {
        **{format: Target(seeds.FILES[format], _reader(format)) for format in FORMATS if format not in seeds.CSV},
        **{format: Target(seeds.FILES[format], _reader(format), (changed_bytes,)) for format in seeds.CSV},
        "mapped": Target((seeds.as_list(seeds.SHAPED), seeds.as_lines([seeds.SHAPED])), _shaped),
        "mapping": Target((seeds.MAPPING.encode(),), _mapping, (changed_bytes,)),
        "sniffed": Target(every, _reader(None)),
    }
