"""What is fuzzed: every reader must refuse its input with one typed line, or read it rightly."""

from __future__ import annotations

import json
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
from remind.core.files import read_json
from remind.data.dialogue import Corpus, Dialogue, Question, Session, Turn
from remind.data.readers import FORMATS, read, stream, write_refmem
from remind.evaluation.parse import parse_answer
from remind.states.pyramid import LETTERS, AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import StateRecord, record_of, record_of_row, row_of

#: Seconds that no input may take.
SLOW = 20.0
_OPTIONS = ("red", "green", "blue")


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


def _answer(data: bytes, folder: Path) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for format in ("single", "multi", "direct"):
        for visual in (False, True):
            options = () if format == "direct" else _OPTIONS
            parsed = parse_answer(text, format, options, visual)
            assert parsed.letters <= set(LETTERS[: len(options)]), "a letter that is no option"
            assert not (parsed.images if not visual else parsed.evidence), "evidence of the other kind"
            assert "\n" not in parsed.answer, "an answer of several lines"
            assert all(line and line.strip() == line for line in parsed.evidence), "evidence that is blank or padded"
            assert all(type(index) is int and index >= 0 for index in parsed.images), "an image that has no index"
            assert len(set(parsed.problems)) == len(parsed.problems), "a problem named twice"
            assert parsed == parse_answer(text, format, options, visual), "read differently the second time"


def _json(data: bytes, folder: Path) -> None:
    path = folder / "input.json"
    path.write_bytes(data)
    read_json(path)


def _states(data: bytes, folder: Path) -> None:
    (folder / "row.json").write_bytes(data)
    row = read_json(folder / "row.json")
    if isinstance(row, dict):
        record = record_of_row(row)
        _check_record(record)
        assert record_of_row(row_of(record)) == record, "a state changed on the way through a row"


def _check_record(record: StateRecord) -> None:
    for name in record.levels:
        level = record.level(name)
        for turn in level.turns:
            assert 0 <= turn.start <= turn.end <= len(level.text)
        assert len(level.markers) % 2 == 0


def sample_record() -> StateRecord:
    """The states of a small question."""
    turns = tuple(Turn(f"t{number}", "Ana", f"line {number} é") for number in range(4))
    dialogue = Dialogue("d", (Session("s", None, turns),))
    question = Question("q", "d", "why?", answers=("so",), evidence=("t1",), category=4)
    factual = FactualState(dialogue, question, (Segment(0, 2),), Strategy(("think",), entities=("line",)))
    attentional = AttentionalState(factual, ((1, 1),), (0.5, 1.5, -1.0))
    return record_of(ReflectiveState(attentional, "because"), "train")


def _state_seeds() -> tuple[bytes, ...]:
    return (json.dumps(row_of(sample_record())).encode(),)


def make_targets() -> dict[str, Target]:
    """All targets by name."""
    every = tuple(data for format in FORMATS for data in seeds.FILES[format] if format not in seeds.CSV)
    return {
        **{format: Target(seeds.FILES[format], _reader(format)) for format in FORMATS if format not in seeds.CSV},
        **{format: Target(seeds.FILES[format], _reader(format), (changed_bytes,)) for format in seeds.CSV},
        "mapped": Target((seeds.as_list(seeds.SHAPED), seeds.as_lines([seeds.SHAPED])), _shaped),
        "mapping": Target((seeds.MAPPING.encode(),), _mapping, (changed_bytes,)),
        "sniffed": Target(every, _reader(None)),
        "answer": Target(tuple(text.encode() for text in seeds.ANSWERS), _answer, (changed_bytes,)),
        "json": Target((seeds.as_list(seeds.REALTALK),), _json),
        "states": Target(_state_seeds(), _states),
    }
