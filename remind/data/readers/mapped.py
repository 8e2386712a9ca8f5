"""JSON of any shape, read by a mapping file, which says where it keeps what dialogues and questions are made of."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from remind.core.errors import ConfigError, DataError, FormatError, brief, shown
from remind.core.files import read_bytes
from remind.data.dialogue import DIMENSIONS, FORMATS, SPLITS
from remind.data.readers import refmem
from remind.data.readers.builder import Draft, Place, records

#: What each kind of record has; named as in `remind.data.dialogue`, besides `file` and `records`.
_RECORDS = {
    "dialogue": ("file", "records", "id", "sessions", "turns", "questions"),
    "session": ("id", "time", "turns"),
    "turn": ("id", "speaker", "text", "time", "images"),
    "image": ("path", "caption", "source"),
    "question": (
        *("file", "records", "id", "dialogue", "text", "format", "options", "answers", "evidence", "images"),
        *("dimension", "category", "time", "split"),
    ),
    "option": ("letter", "text"),
    "answer": ("letter", "index", "text"),
    "evidence": ("id", "session", "turn", "line"),
}
_VALUES: dict[str, Collection[str]] = {"format": FORMATS, "dimension": DIMENSIONS, "split": SPLITS}
_KEYS = {f"{kind}.{name}" for kind, names in _RECORDS.items() for name in names}
_KEYS |= {"count_from", *(f"values.{name}" for name in _VALUES)}


class _Entry(NamedTuple):
    """An entry of a list, or of an object by its key."""

    key: str | None
    place: Place
    value: Any


def _entries(place: Place, value: object, what: str, one: bool = False) -> list[_Entry]:
    """The entries of a list or an object; with `one` anything but a list is an entry itself.

    Raises:
        DataError: neither a list nor an object.
    """
    if value is None:
        return []
    if isinstance(value, dict) and not one:
        return [_Entry(key, place.at(key), item) for key, item in value.items()]
    listed = [value] if one and not isinstance(value, list) else place.sequence(value, what)
    return [_Entry(None, place.at(f"{what} {number}"), item) for number, item in enumerate(listed, start=1)]


class MappedReader:
    """What reads by one mapping file. Records become those of RefMem-Bench, whose reader checks them.

    A path is dotted keys; numbers count from 0 in lists, `.` is the record itself, and what ends in `?` may be missing.

    Attributes:
        path: of the file.
        patterns: for "dialogue" and "question" the pattern of their files' names.
        count_from: of whole numbers in the data that count answers, turns, sessions and images: 0 or 1.
        values: for format, dimension and split the value in the data, and its meaning here.

    Raises:
        ConfigError: no sound YAML, an unknown key, a path or value that is none, a key that is missing or that does not
            go with another.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            # every scalar as it is written: `no` is a word. This loader makes strings, lists and mappings, nothing else
            content = yaml.load(read_bytes(path), yaml.BaseLoader)
        except DataError as error:
            raise ConfigError(str(error)) from None
        except (yaml.YAMLError, RecursionError) as error:
            raise self._error(f"not YAML: {brief(error)}") from None
        given = dict(_flat(content)) if isinstance(content, dict) else {"": content}
        for key in given:
            if key not in _KEYS:
                known = ", ".join(_RECORDS.get(key.partition(".")[0], (*_RECORDS, "values")))
                raise self._error(f"unknown key {shown(key)}; there are {known}")
        count = given.pop("count_from", "0")
        self.count_from = int(self._one_of("count_from", count, ("0", "1")))
        self.values: dict[str, Mapping[str, str]] = {name: given.pop(f"values.{name}", {}) for name in _VALUES}
        for name, words in self.values.items():
            if not isinstance(words, dict):
                raise self._error(f"values.{name} should map values of the data to {', '.join(_VALUES[name])}")
            for meaning in words.values():
                self._one_of(f"values.{name}", meaning, _VALUES[name])
        for key, value in given.items():
            if not isinstance(value, str) or (not all(value.removesuffix("?").split(".")) and value not in (".", ".?")):
                raise self._error(f"{key}: {shown(value)} is not a path, such as items.0.text or . for the record")
        self.patterns = {kind: str(given.get(f"{kind}.file", "*")) for kind in ("dialogue", "question")}
        self._paths: dict[str, str] = given
        self._check()

    def has(self, name: str) -> bool:
        """Whether `turn.id`, for example, is mapped."""
        return name in self._paths

    def find(self, name: str, place: Place, record: object) -> Any:
        """What a record has for `turn.text`, for example; None where it is not mapped, or optional and missing.

        Raises:
            DataError: it is not there and not optional.
        """
        if name not in self._paths:
            return None
        path = self._paths[name].removesuffix("?")
        optional = path != self._paths[name]
        value: Any = record
        for key in path.split(".") if path != "." else ():
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and len(key) < 10 and int(key) < len(value):
                value = value[int(key)]
            elif optional:
                return None
            else:
                there = ", ".join(shown(one) for one in list(value)[:5]) if isinstance(value, dict) else "no keys"
                hint = f"among {there or 'no keys'}; where it may be missing write {shown(path + '?')}"
                raise place.error(f"no {shown(path)} {hint} ({name} of {self.path.name})")
        return value

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {what}")

    def _one_of(self, key: str, value: object, known: Collection[str]) -> str:
        if value not in known:
            raise self._error(f"{key} should be {' or '.join(known)}, not {shown(value)}")
        return str(value)

    def _check(self) -> None:
        """Raise ConfigError for keys that do not go together; what is missing is missed where it is read."""
        has, apart = self.has, self.has("question.dialogue")
        problems = {
            "dialogue needs either sessions or turns": has("dialogue.sessions") == has("dialogue.turns"),
            "evidence needs both session and turn": has("evidence.session") != has("evidence.turn"),
            "either dialogue.questions or question.dialogue says which dialogue a question is about": (
                has("question.text") and has("dialogue.questions") == apart
            ),
            "dialogue and question both need file, or both records, to be distinguished": apart
            and not any(has(f"dialogue.{key}") and has(f"question.{key}") for key in ("file", "records")),
        }
        for message, holds in problems.items():
            if holds:
                raise self._error(message)

    def files(self, paths: Sequence[Path]) -> list[Path]:
        """Those of the files that hold what is mapped. Raises FormatError for none."""
        patterns = self.patterns.values()
        found = [p for p in paths if p.suffix.lower() != ".csv" and any(fnmatchcase(p.name, name) for name in patterns)]
        if not found:
            raise FormatError(f"no file of format {self.path}", paths[0].parent if paths else None)
        return found

    def drafts(self, paths: Sequence[Path]) -> Iterator[Draft]:
        """A dialogue with its questions at a time; questions in records of their own are all held.

        Without ids in the file: dialogues `<file>-<n>`, sessions `S<n>`, turns `<session>:T<n>`, questions
        `<dialogue>-q<n>`.

        Raises:
            DataError: what the mapping names is not there, what is there cannot be used, an id twice, a question whose
                dialogue is missing.
            ImagePathError: a local image that is missing or leaves the folder of its file.
        """
        asked: dict[str, list[_Entry]] = {}
        if self.has("question.dialogue"):
            for entry in self._records(paths, "question"):
                name = entry.place.name(self.find("question.dialogue", *entry[1:]), "question.dialogue")
                asked.setdefault(name, []).append(entry)
        for number, (key, place, value) in enumerate(self._records(paths, "dialogue"), start=1):
            name = self._name("dialogue.id", place, value) or key or f"{place.path.stem}-{number:05d}"
            draft = Draft(place.at(name), name)
            ids = self._add_sessions(draft, draft.place, value)
            nested = self.find("dialogue.questions", place, value)
            questions = _entries(draft.place, nested, "question", one=nested is value) + asked.pop(name, [])
            for count, entry in enumerate(questions):
                self._add_question(draft, entry, entry.key or f"{name}-q{count:03d}", ids)
            yield draft
        for name, questions in asked.items():
            raise questions[0].place.error(f"its dialogue {shown(name)} is missing")

    def _name(self, field: str, place: Place, record: object) -> str | None:
        return place.optional_name(self.find(field, place, record), field)

    def _records(self, paths: Sequence[Path], kind: str) -> Iterator[_Entry]:
        """The dialogues, or the questions in records of their own, of the files that hold them."""
        for path in paths:
            for place, value in records(path) if fnmatchcase(path.name, self.patterns[kind]) else ():
                if self.has(f"{kind}.records"):
                    yield from _entries(place, self.find(f"{kind}.records", place, value), kind)
                else:
                    yield _Entry(None, place, value)

    def _add_sessions(self, draft: Draft, place: Place, record: object) -> dict[object, str]:
        """Turn ids by what evidence names them by: id, session and turn, or line.

        Args:
            place: of the record.
        """
        first = self.count_from
        ids: dict[object, str] = {}
        repeated: set[object] = set()
        if self.has("dialogue.turns"):
            sessions = [(_Entry(None, place, None), self.find("dialogue.turns", place, record))]
        else:
            entries = _entries(place, self.find("dialogue.sessions", place, record), "session")
            own = self.has("session.turns")
            sessions = [(e, self.find("session.turns", e.place, e.value) if own else e.value) for e in entries]
        rows = []
        for count, (entry, listed) in enumerate(sessions):
            named = self._name("session.id", entry.place, entry.value) or entry.key
            session = named or f"S{count + 1}"
            turns = []
            for number, (key, where, value) in enumerate(_entries(entry.place, listed, "turn")):
                given = self._name("turn.id", where, value) or key
                turn_id = given or f"{session}:T{number + 1}"
                if given and self.has("evidence.session"):
                    turn_id = f"{session}:{given}"
                turn = {name: self.find(f"turn.{name}", where, value) for name in ("speaker", "text", "time")}
                images = _entries(where, self.find("turn.images", where, value), "image", one=True)
                turns.append({"id": turn_id, **turn, "images": [self._image(image) for image in images if image.value]})
                names: set[object] = {turn_id}
                if self.has("evidence.session"):
                    names = {(named or str(count + first), given or str(number + first))}
                elif self.has("evidence.line"):
                    lines = (str(turn["text"]), f"{turn['speaker']}: {turn['text']}")
                    names = {words for line in lines if (words := " ".join(line.split()))}
                    # a line that several turns have names none of them
                    repeated |= names & ids.keys()
                ids |= dict.fromkeys(names, turn_id)
            time = self.find("session.time", entry.place, entry.value)
            rows.append({"id": session, "time": time, "turns": turns})
        refmem.add_sessions(draft, rows)
        return {name: turn_id for name, turn_id in ids.items() if name not in repeated}

    def _image(self, entry: _Entry) -> dict[str, Any]:
        names = ("path", "caption", "source")
        if not any(self.has(f"image.{name}") for name in names):
            return {"path": entry.value}
        return {name: self.find(f"image.{name}", entry.place, entry.value) for name in names}

    def _add_question(self, draft: Draft, entry: _Entry, name: str, ids: dict[object, str]) -> None:
        """Add a question.

        Args:
            name: its id where it has none of its own.
            ids: turn ids by what names them in the file.
        """
        place, record = entry.place, entry.value
        name = self._name("question.id", place, record) or name
        place = place.at(name)
        taken = ("text", "category", "time", *self.values)
        fields = {name: self.find(f"question.{name}", place, record) for name in taken}
        for field, words in self.values.items():
            if isinstance(fields[field], str | int):
                fields[field] = words.get(str(fields[field]), fields[field])
        options = []
        listed = _entries(place, self.find("question.options", place, record), "option")
        for number, (key, where, item) in enumerate(listed):
            letter = self._name("option.letter", where, item) or key or _letter(number)
            text = self.find("option.text", where, item) if self.has("option.text") else item
            options.append((letter, _words(where, text, "an option")))
        kind = fields["format"]
        direct = not options if kind is None else kind == "direct"
        answers = self._answers(place, self.find("question.answers", place, record), options, direct)
        evidence = _entries(place, self.find("question.evidence", place, record), "evidence", one=True)
        images = self.find("question.images", place, record)
        listed_images = images if isinstance(images, list) else [images]
        row = {
            **fields,
            "id": name,
            "question": fields["text"],
            "format": kind or ("direct" if direct else "multi" if len(answers) > 1 else "single"),
            "options": [text for _, text in options],
            "answers": answers,
            "evidence": [self._reference(piece, ids) for piece in evidence],
            "images": [self._counted(index) for index in listed_images if index is not None],
        }
        refmem.add_question(draft, entry.place, row)

    def _answers(self, place: Place, value: object, options: list[tuple[str, str]], direct: bool) -> list[str]:
        """Answers as texts, or as the letters that options have here."""
        named = {
            "letter": [letter for letter, _ in options],
            "number": [str(number + self.count_from) for number in range(len(options))],
            "text": [" ".join(text.split()) for _, text in options],
        }
        keys = {"text": "text"} if direct else {"letter": "letter", "index": "number", "text": "text"}
        key = next((key for key in keys if self.has(f"answer.{key}")), None)
        kind = "letter" if key is None else keys[key]
        answers = []
        for _, where, item in _entries(place, value, "answer", one=True):
            given = item if key is None else self.find(f"answer.{key}", where, item)
            if given is None:
                continue
            text = _words(where, given, "an answer")
            if direct:
                answers.append(text)
                continue
            text = " ".join(text.split())
            for name in re.findall(r"\w+", text) if kind == "letter" and text not in named[kind] else [text]:
                if name not in named[kind]:
                    raise where.error(f"answer {shown(given)} is not the {kind} of an option; there are {len(options)}")
                answers.append(_letter(named[kind].index(name)))
        return answers

    def _reference(self, entry: _Entry, ids: dict[object, str]) -> str:
        """The turn that a piece of evidence names; where there is none, what it says."""
        place, value = entry.place, entry.value
        if self.has("evidence.session"):
            parts = (self.find(f"evidence.{part}", place, value) for part in ("session", "turn"))
            session, turn = (_words(place, part, "evidence") for part in parts)
            return ids.get((session, turn), f"{session}:{turn}")
        if self.has("evidence.line"):
            line = _words(place, self.find("evidence.line", place, value), "evidence")
            return ids.get(" ".join(line.split()), line)
        text = _words(place, self.find("evidence.id", place, value) if self.has("evidence.id") else value, "evidence")
        return ids.get(text, text)

    def _counted(self, index: object) -> object:
        """A whole number counted from 0; anything else as it is."""
        return index - self.count_from if type(index) is int else index


def _flat(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Keys as `turn.text`, also where they are written so."""
    rows: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        inner = isinstance(value, dict) and value and name not in _KEYS
        rows += _flat(value, f"{name}.") if inner else [(name, value)]
    return rows


def _letter(number: int) -> str:
    """Of an option; what is none for the 27th, which is refused later."""
    return string.ascii_uppercase[number : number + 1] or str(number)


def _words(place: Place, value: object, what: str) -> str:
    """Text, or a number as it is written."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    return place.text(value, what)
