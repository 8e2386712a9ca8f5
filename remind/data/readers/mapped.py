"""JSON and JSON Lines of any shape, read by a mapping file."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from remind.core.errors import FormatError, shown
from remind.data.readers import refmem
from remind.data.readers.builder import Draft, Place, records
from remind.data.readers.mapping import FieldMapping


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
    """What reads by one mapping file. Records become those of RefMem-Bench, whose reader checks them."""

    def __init__(self, mapping: FieldMapping) -> None:
        self.mapping = mapping
        self._find, self._has = mapping.find, mapping.has

    def files(self, paths: Sequence[Path]) -> list[Path]:
        """Those of the files that hold what is mapped. Raises FormatError for none."""
        patterns = self.mapping.files.values()
        found = [p for p in paths if p.suffix.lower() != ".csv" and any(fnmatchcase(p.name, name) for name in patterns)]
        if not found:
            raise FormatError(f"no file of format {self.mapping.path}", paths[0].parent if paths else None)
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
        if self._has("question.dialogue"):
            for entry in self._records(paths, "question"):
                name = entry.place.name(self._find("question.dialogue", *entry[1:]), "question.dialogue")
                asked.setdefault(name, []).append(entry)
        for number, (key, place, value) in enumerate(self._records(paths, "dialogue"), start=1):
            name = self._name("dialogue.id", place, value) or key or f"{place.path.stem}-{number:05d}"
            draft = Draft(place.at(name), name)
            ids = self._add_sessions(draft, draft.place, value)
            nested = self._find("dialogue.questions", place, value)
            questions = _entries(draft.place, nested, "question", one=nested is value) + asked.pop(name, [])
            for count, entry in enumerate(questions):
                self._add_question(draft, entry, entry.key or f"{name}-q{count:03d}", ids)
            yield draft
        for name, questions in asked.items():
            raise questions[0].place.error(f"its dialogue {shown(name)} is missing")

    def _name(self, field: str, place: Place, record: object) -> str | None:
        value = self._find(field, place, record)
        return None if value is None else place.name(value, field)

    def _records(self, paths: Sequence[Path], kind: str) -> Iterator[_Entry]:
        """The dialogues, or the questions in records of their own, of the files that hold them."""
        for path in paths:
            for place, value in records(path) if fnmatchcase(path.name, self.mapping.files[kind]) else ():
                if self._has(f"{kind}.records"):
                    yield from _entries(place, self._find(f"{kind}.records", place, value), kind)
                else:
                    yield _Entry(None, place, value)

    def _add_sessions(self, draft: Draft, place: Place, record: object) -> dict[str, str]:
        """Turn ids by what evidence names them by: id, session and turn as `_pair` joins them, or line.

        Args:
            place: of the record.
        """
        first = self.mapping.count_from
        ids: dict[str, str] = {}
        repeated: set[str] = set()
        if self._has("dialogue.turns"):
            sessions = [(_Entry(None, place, None), self._find("dialogue.turns", place, record))]
        else:
            entries = _entries(place, self._find("dialogue.sessions", place, record), "session")
            own = self._has("session.turns")
            sessions = [(e, self._find("session.turns", e.place, e.value) if own else e.value) for e in entries]
        rows = []
        for count, (entry, listed) in enumerate(sessions):
            named = self._name("session.id", entry.place, entry.value) or entry.key
            session = named or f"S{count + 1}"
            turns = []
            for number, (key, where, value) in enumerate(_entries(entry.place, listed, "turn")):
                given = self._name("turn.id", where, value) or key
                turn_id = given or f"{session}:T{number + 1}"
                if given and self._has("evidence.session"):
                    turn_id = f"{session}:{given}"
                turn = {name: self._find(f"turn.{name}", where, value) for name in ("speaker", "text", "time")}
                images = _entries(where, self._find("turn.images", where, value), "image", one=True)
                turns.append({"id": turn_id, **turn, "images": [self._image(image) for image in images if image.value]})
                names = {turn_id}
                if self._has("evidence.session"):
                    names = {_pair(named or str(count + first), given or str(number + first))}
                elif self._has("evidence.line"):
                    lines = (str(turn["text"]), f"{turn['speaker']}: {turn['text']}")
                    names = {" ".join(line.split()) for line in lines} - {""}
                    # a line that several turns have names none of them
                    repeated |= names & ids.keys()
                ids |= dict.fromkeys(names, turn_id)
            time = self._find("session.time", entry.place, entry.value)
            rows.append({"id": session, "time": time, "turns": turns})
        refmem.add_sessions(draft, rows)
        return {name: turn_id for name, turn_id in ids.items() if name not in repeated}

    def _image(self, entry: _Entry) -> dict[str, Any]:
        names = ("path", "caption", "source")
        if not any(self._has(f"image.{name}") for name in names):
            return {"path": entry.value}
        return {name: self._find(f"image.{name}", entry.place, entry.value) for name in names}

    def _add_question(self, draft: Draft, entry: _Entry, name: str, ids: dict[str, str]) -> None:
        """Add a question.

        Args:
            name: its id where it has none of its own.
            ids: turn ids by what names them in the file.
        """
        place, record = entry.place, entry.value
        name = self._name("question.id", place, record) or name
        place = place.at(name)
        taken = ("text", "category", "time", *self.mapping.values)
        fields = {name: self._find(f"question.{name}", place, record) for name in taken}
        for field, words in self.mapping.values.items():
            if isinstance(fields[field], str | int):
                fields[field] = words.get(str(fields[field]), fields[field])
        options = []
        listed = _entries(place, self._find("question.options", place, record), "option")
        for number, (key, where, item) in enumerate(listed):
            letter = self._name("option.letter", where, item) or key or _letter(number)
            text = self._find("option.text", where, item) if self._has("option.text") else item
            options.append((letter, _words(where, text, "an option")))
        kind = fields["format"]
        direct = not options if kind is None else kind == "direct"
        answers = self._answers(place, self._find("question.answers", place, record), options, direct)
        evidence = _entries(place, self._find("question.evidence", place, record), "evidence", one=True)
        images = self._find("question.images", place, record)
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
        letters = [letter for letter, _ in options]
        texts = [" ".join(text.split()) for _, text in options]
        kinds = ("text",) if direct else ("letter", "index", "text")
        kind = next((kind for kind in kinds if self._has(f"answer.{kind}")), None)
        answers = []
        for _, where, item in _entries(place, value, "answer", one=True):
            given = item if kind is None else self._find(f"answer.{kind}", where, item)
            if given is None:
                continue
            text = _words(where, given, "an answer")
            if direct:
                answers.append(text)
                continue
            places: list[object]
            if kind == "index":
                places = [self._counted(int(text) if text.isdecimal() and len(text) < 10 else given)]
            else:
                names, found = (texts, [" ".join(text.split())]) if kind == "text" else (letters, [text])
                if kind != "text" and text not in letters:
                    found = re.findall(r"\w+", text)
                places = [names.index(name) if name in names else None for name in found]
            for at in places:
                if not isinstance(at, int) or not 0 <= at < len(options):
                    what = {"index": "number", "text": "text"}.get(str(kind), "letter")
                    raise where.error(f"answer {shown(given)} is not the {what} of an option; there are {len(options)}")
                answers.append(_letter(at))
        return answers

    def _reference(self, entry: _Entry, ids: dict[str, str]) -> str:
        """The turn that a piece of evidence names; where there is none, what it says."""
        place, value = entry.place, entry.value
        if self._has("evidence.session"):
            parts = (self._find(f"evidence.{part}", place, value) for part in ("session", "turn"))
            session, turn = (_words(place, part, "evidence") for part in parts)
            return ids.get(_pair(session, turn), f"{session}:{turn}")
        if self._has("evidence.line"):
            line = _words(place, self._find("evidence.line", place, value), "evidence")
            return ids.get(" ".join(line.split()), line)
        text = _words(place, self._find("evidence.id", place, value) if self._has("evidence.id") else value, "evidence")
        return ids.get(text, text)

    def _counted(self, index: object) -> object:
        """A whole number counted from 0; anything else as it is."""
        return index - self.mapping.count_from if type(index) is int else index


def _letter(number: int) -> str:
    """Of an option; what is none for the 27th, which is refused later."""
    return string.ascii_uppercase[number : number + 1] or str(number)


def _pair(session: str, turn: str) -> str:
    return f"{len(session)}:{session}:{turn}"


def _words(place: Place, value: object, what: str) -> str:
    """Text, or a number as it is written."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    return place.text(value, what)
