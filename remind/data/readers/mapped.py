"""JSON and JSON Lines of any shape, read by a mapping file."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, NamedTuple

from remind.data.dialogue import Corpus, Dialogue, joined
from remind.data.readers import refmem
from remind.data.readers.builder import CorpusBuilder
from remind.data.readers.mapping import FieldMapping
from remind.data.readers.source import Place, Source, shown

#: Fields of a question that are taken as they are.
_KEPT = ("text", "category", "time")


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
    """`matches` and `stream` for one mapping file. Records become those of RefMem-Bench, whose reader checks them."""

    def __init__(self, mapping: FieldMapping) -> None:
        self.mapping = mapping
        self._find, self._has = mapping.find, mapping.has

    def matches(self, source: Source) -> bool:
        return source.is_json and any(fnmatchcase(source.path.name, name) for name in self.mapping.files.values())

    def stream(self, sources: Sequence[Source]) -> Iterator[Corpus]:
        """A dialogue with its questions at a time; questions in records of their own are all held.

        Without ids in the file: dialogues `<file>-<n>`, sessions `S<n>`, turns `<session>:T<n>`, questions
        `<dialogue>-q<n>`. Records of one `dialogue.join` are made one dialogue by `joined`.

        Raises:
            DataError: what the mapping names is not there, what is there cannot be used, a question id twice, a
                question whose dialogue is missing, records to be joined that do not follow each other.
            ImagePathError: a local image that is missing or leaves the folder of its file.
        """
        seen: set[str] = set()
        for name, parts in groupby(self._pieces(sources), key=lambda part: part[0]):
            if name is None:
                yield from (piece for _, _, piece in parts)
                continue
            pieces = []
            for _, place, piece in parts:
                if name in seen:
                    raise place.error(f"{shown(name)} appears again after other dialogues; keep its records together")
                pieces.append(piece)
            seen.add(name)
            yield joined(pieces, name)
        self.mapping.warn()

    def _pieces(self, sources: Sequence[Source]) -> Iterator[tuple[str | None, Place, Corpus]]:
        """What a dialogue is joined to, its place, and the dialogue with its questions."""
        out = CorpusBuilder()
        self._places: dict[str, Place] = {}
        held = self._apart(sources)
        for number, (key, place, value) in enumerate(self._records(sources, "dialogue"), start=1):
            name = self._name("dialogue.id", place, value) or key or f"{place.path.stem}-{number:05d}"
            record, ids = self._context(place, name, value)
            dialogue = out.add_dialogue(refmem.context(place, record))
            if self._has("evidence.line"):
                ids = _by_line(dialogue)
            place = place.at(name)
            nested = self._find("dialogue.questions", place, value)
            questions = _entries(place, nested, "question", one=nested is value) + held.pop(name, [])
            for count, entry in enumerate(questions):
                self._question(out, entry, count, dialogue, ids)
            yield self._name("dialogue.join", place, value), place, out.piece()
        out.end(sources)
        for name, questions in held.items():
            raise questions[0].place.error(f"its dialogue {shown(name)} is missing")

    def _name(self, field: str, place: Place, record: object) -> str | None:
        value = self._find(field, place, record)
        return None if value is None else place.name(value, field)

    def _records(self, sources: Sequence[Source], kind: str) -> Iterator[_Entry]:
        """The dialogues, or the questions in records of their own, of the files that hold them."""
        for source in sources:
            if not fnmatchcase(source.path.name, self.mapping.files[kind]):
                continue
            for place, value in source.records:
                if self._has(f"{kind}.records"):
                    yield from _entries(place, self._find(f"{kind}.records", place, value), kind)
                else:
                    yield _Entry(None, place, value)

    def _apart(self, sources: Sequence[Source]) -> dict[str, list[_Entry]]:
        """The questions in records of their own, by dialogue."""
        held: dict[str, list[_Entry]] = {}
        if self._has("question.dialogue"):
            for entry in self._records(sources, "question"):
                name = entry.place.name(self._find("question.dialogue", *entry[1:]), "question.dialogue")
                held.setdefault(name, []).append(entry)
        return held

    def _context(self, place: Place, name: str, record: object) -> tuple[dict[str, Any], dict[str, str]]:
        """A context record, and the turn ids by session and turn as `_pair` joins them."""
        first = self.mapping.count_from
        sessions: list[dict[str, Any]] = []
        ids: dict[str, str] = {}
        for count, (entry, listed) in enumerate(self._sessions(place.at(name), record)):
            named = self._name("session.id", entry.place, entry.value) or entry.key
            session = named or f"S{count + 1}"
            turns = []
            for number, (key, where, value) in enumerate(_entries(entry.place, listed, "turn")):
                given = self._name("turn.id", where, value) or key
                turn_id = given or f"{session}:T{number + 1}"
                if given and self._has("evidence.session"):
                    turn_id = f"{session}:{given}"
                ids.setdefault(_pair(named or str(count + first), given or str(number + first)), turn_id)
                turns.append({"id": turn_id, **self._turn(where, value)})
            time = self._find("session.time", entry.place, entry.value)
            sessions.append({"id": session, "time": time, "turns": turns})
        return {"id": name, "sessions": sessions}, ids

    def _sessions(self, place: Place, record: object) -> Iterator[tuple[_Entry, Any]]:
        """Each session with its turns."""
        if self._has("dialogue.turns"):
            yield _Entry(None, place, None), self._find("dialogue.turns", place, record)
            return
        for entry in _entries(place, self._find("dialogue.sessions", place, record), "session"):
            own = self._has("session.turns")
            yield entry, self._find("session.turns", entry.place, entry.value) if own else entry.value

    def _turn(self, place: Place, turn: object) -> dict[str, Any]:
        fields = {name: self._find(f"turn.{name}", place, turn) for name in ("speaker", "text", "time")}
        images = _entries(place, self._find("turn.images", place, turn), "image", one=True)
        return {**fields, "images": [self._image(entry) for entry in images]}

    def _image(self, entry: _Entry) -> dict[str, Any]:
        names = ("path", "caption", "source")
        if not any(self._has(f"image.{name}") for name in names):
            return {"path": entry.value}
        return {name: self._find(f"image.{name}", entry.place, entry.value) for name in names}

    def _question(
        self, out: CorpusBuilder, entry: _Entry, count: int, dialogue: Dialogue, ids: Mapping[str, str]
    ) -> None:
        """Add a question, by number the `count`-th from 0 of its dialogue.

        Args:
            ids: turn ids by what names them in the file.
        """
        place, record = entry.place, entry.value
        name = self._name("question.id", place, record) or entry.key or f"{dialogue.id}-q{count:03d}"
        if name in self._places:
            raise place.error(f"question id {shown(name)} occurs twice, first in {self._places[name]}")
        self._places[name] = place = place.at(name)
        fields = {key: self._find(f"question.{key}", place, record) for key in (*_KEPT, *self.mapping.values)}
        for key, words in self.mapping.values.items():
            if isinstance(fields[key], str | int):
                fields[key] = words.get(str(fields[key]), fields[key])
        options = self._options(place, self._find("question.options", place, record))
        kind = fields["format"]
        direct = not options if kind is None else kind == "direct"
        answers = self._answers(place, self._find("question.answers", place, record), options, direct)
        if kind is None:
            kind = "direct" if direct else "multi" if len(answers) > 1 else "single"
        evidence = _entries(place, self._find("question.evidence", place, record), "evidence", one=True)
        images = self._find("question.images", place, record)
        listed = images if isinstance(images, list) else [] if images is None else [images]
        row = {
            **fields,
            "id": name,
            "question": fields["text"],
            "format": kind,
            "options": [text for _, text in options],
            "answers": answers,
            "evidence": [self._reference(entry, ids) for entry in evidence],
            "images": [self._counted(index) for index in listed],
        }
        refmem.add_question(out, entry.place, row, dialogue)

    def _options(self, place: Place, value: object) -> list[tuple[str, str]]:
        """The letter by which the file names each option, and its text."""
        options = []
        for number, (key, where, item) in enumerate(_entries(place, value, "option")):
            letter = self._name("option.letter", where, item) or key or _letter(number)
            text = self._find("option.text", where, item) if self._has("option.text") else item
            options.append((letter, _words(where, text, "an option")))
        return options

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
            elif kind == "index":
                at = self._counted(int(text) if text.isdecimal() and len(text) < 10 else given)
                if not isinstance(at, int) or not 0 <= at < len(options):
                    raise where.error(f"answer {shown(given)} is not the number of an option; there are {len(options)}")
                answers.append(_letter(at))
            elif kind == "text":
                if (words := " ".join(text.split())) not in texts:
                    raise where.error(f"answer {shown(text)} is not the text of an option")
                answers.append(_letter(texts.index(words)))
            else:
                for name in [text] if text in letters else re.findall(r"\w+", text):
                    if name not in letters:
                        raise where.error(
                            f"answer {shown(text)} is not an option (there are {', '.join(letters[:26])})"
                        )
                    answers.append(_letter(letters.index(name)))
        return answers

    def _reference(self, entry: _Entry, ids: Mapping[str, str]) -> str:
        """The turn that a piece of evidence names; where there is none, what it says."""
        place, value = entry.place, entry.value
        if self._has("evidence.session"):
            parts = (self._find(f"evidence.{part}", place, value) for part in ("session", "turn"))
            session, turn = (_words(place, part, "evidence") for part in parts)
            return ids.get(_pair(session, turn), f"{session}:{turn}")
        if self._has("evidence.line"):
            line = _words(place, self._find("evidence.line", place, value), "evidence")
            return ids.get(" ".join(line.split()), line)
        return _words(place, self._find("evidence.id", place, value) if self._has("evidence.id") else value, "evidence")

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


def _by_line(dialogue: Dialogue) -> dict[str, str]:
    """Turn ids by what is said, with and without the speaker; without lines that several turns have."""
    ids: dict[str, str] = {}
    repeated: set[str] = set()
    for turn in dialogue.turns:
        for line in {" ".join(text.split()) for text in (turn.text, f"{turn.speaker}: {turn.text}")} - {""}:
            if ids.setdefault(line, turn.id) != turn.id:
                repeated.add(line)
    return {line: turn_id for line, turn_id in ids.items() if line not in repeated}
