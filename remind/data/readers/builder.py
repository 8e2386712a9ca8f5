"""What all readers share: the records of a file, each with its place for errors, and a dialogue while it is read."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
import string
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import ijson

from remind.core.errors import DataError, ImagePathError, shown
from remind.core.files import opened, read_json, unique_keys
from remind.data.dialogue import DIMENSIONS, FORMATS, SPLITS, Corpus, Dangling, Dialogue, Image, Question, Session, Turn

#: Bytes of a list that is read whole; of a longer one an element is held at a time.
HELD = 1 << 22
#: The beginning of a time in ISO 8601.
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2})?)?", re.ASCII)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_TIME_PARTS = {name: rf"(?P<{name}>\d{{1,2}})" for name in ("day", "hour")}
_TIME_PARTS |= {name: rf"(?P<{name}>\d\d)" for name in ("minute", "second")}
_TIME_PARTS |= {"year": r"(?P<year>\d{4})", "half": "(?P<half>[ap]m)"}
_TIME_PARTS["month"] = rf"(?P<month>\d{{1,2}}|(?:{'|'.join(_MONTHS)})[a-z]*)"
#: Where an object may name an image, and where it may describe it.
_IMAGE = (
    ("path", "url", "image_url", "image_path", "image", "img_url", "img_path"),
    ("caption", "image_caption", "description", "alt"),
)
#: The first character of a pickle.
PICKLED = "\x80"
#: Bytes of a header that are looked at.
_HEADER = 10_000
_REMOTE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://|data:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Place:
    """A file and a record in it ("line 12", "conv-26, D1:3"), with the checks of values that every reader shares."""

    path: Path
    record: str | None = None

    def at(self, record: str) -> Place:
        return Place(self.path, record if self.record is None else f"{self.record}, {record}")

    def error(self, message: str) -> DataError:
        return DataError(message, self.path, self.record)

    def mapping(self, value: object, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(f"{what} should be an object, not {_kind(value)}")
        return value

    def sequence(self, value: object, what: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.error(f"{what} should be a list, not {_kind(value)}")
        return value

    def turns(self, value: object, what: str, name: str) -> Iterator[tuple[str, Place, dict[str, Any]]]:
        """The objects of a list of turns, each with an id that `name` makes of its number from 1, and its place."""
        for number, turn in enumerate(self.sequence(value, what), start=1):
            turn_id = name.format(number)
            where = self.at(turn_id)
            yield turn_id, where, where.mapping(turn, "a turn")

    def text(self, value: object, what: str) -> str:
        """A string, possibly empty."""
        if not isinstance(value, str):
            raise self.error(f"{what} should be text, not {_kind(value)}")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise self.error(f"{what} holds half a character (a lone surrogate at {error.start})") from None
        return value

    def optional_text(self, value: object, what: str) -> str | None:
        return None if value is None else self.text(value, what)

    def time(self, value: object, what: str) -> str | None:
        """A time as `Turn` has it: ISO 8601 or words. NaN and NaT, which tables hold where there is none, are None."""
        text = self.optional_text(value, what)
        if text is None or text.strip().lower() in ("nan", "nat"):
            return None
        if match := _DATE.match(text.strip()):
            try:
                datetime.fromisoformat(match[0])
            except ValueError:
                raise self.error(f"{what} {shown(text)} is not a valid date or time of day") from None
        return text

    def name(self, value: object, what: str) -> str:
        """A string that is not blank; whole numbers are taken as their digits."""
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if value is None or not (text := self.text(value, what)).strip():
            raise self.error(f"{what} is missing or blank")
        return text

    def optional_name(self, value: object, what: str) -> str | None:
        return None if value is None else self.name(value, what)


def _kind(value: object) -> str:
    kinds = {"an object": dict, "a list": list, "text": str, "true or false": bool, "missing or null": type(None)}
    return next((name for name, kind in kinds.items() if isinstance(value, kind)), "a number")


def time_form(form: str) -> re.Pattern[str]:
    """A way to write times: a pattern with {year}, {month}, {day}, {hour}, {minute}, {second} and {half} of the day."""
    return re.compile(form.format(**_TIME_PARTS), re.ASCII | re.IGNORECASE)


def iso_time(text: str | None, form: re.Pattern[str]) -> str | None:
    """A time as ISO 8601, whether there is such a day or not; words of another form as they are."""
    match = None if text is None else form.fullmatch(text.strip())
    if match is None:
        return text
    part = {"hour": "", "half": "", "second": "", **match.groupdict("")}
    month = part["month"] if part["month"].isdigit() else str(_MONTHS.index(part["month"][:3].lower()) + 1)
    date = f"{part['year']}-{month:0>2}-{part['day']:0>2}"
    if not part["hour"]:
        return date
    hour = int(part["hour"]) % 12 + 12 * (part["half"].lower() == "pm") if part["half"] else int(part["hour"])
    return f"{date}T{hour:02}:{':'.join(filter(None, (part['minute'], part['second'])))}"


class Record(NamedTuple):
    place: Place
    value: Any


def records(path: str | Path) -> Iterator[Record]:
    """The records of a JSON file: lines of JSON Lines, elements of a list, or the one object; none of an empty file.

    One record is held at a time, and of a list no more than `HELD` bytes. A single object in a `.jsonl` file is a line.

    Raises:
        DataError: not a regular file, not readable, not UTF-8 or not JSON (with the line), an object with a key twice.
    """
    path = Path(path)
    with opened(path) as file:
        if file.peek().startswith(codecs.BOM_UTF8):
            file.seek(len(codecs.BOM_UTF8))
        place, count = Place(path), 0
        if file.peek().lstrip().startswith(b"["):
            if path.stat().st_size > HELD:
                # a key twice goes unnoticed here
                with suppress(ijson.JSONError, ValueError):
                    for value in ijson.items(file, "item", use_float=True):
                        count += 1
                        yield Record(place.at(f"item {count}"), value)
                    return
            # where ijson fails, too: it knows no lines, no NaN, and no whole numbers of more than 64 bits
            for number, value in enumerate(read_json(path)[count:], start=count + 1):
                yield Record(place.at(f"item {number}"), value)
            return
        lines = ((place.at(f"line {number}"), line) for number, line in enumerate(file, start=1) if line.strip())
        first = list(filter(None, (next(lines, None), next(lines, None))))
        if first and not _is_line(path, *first):
            yield Record(place, read_json(path))
            return
        for where, line in chain(first, lines):
            try:
                yield Record(where, json.loads(line.decode(), object_pairs_hook=unique_keys))
            except (ValueError, RecursionError) as error:
                raise where.error(f"not JSON: {getattr(error, 'msg', error)}") from None


def _is_line(path: Path, first: tuple[Place, bytes], *others: object) -> bool:
    """Whether the first line of a file is a record of its own."""
    if not others and path.suffix.lower() != ".jsonl":
        return False
    try:
        json.loads(first[1])
    except (ValueError, RecursionError):
        return False
    return True


def objects(paths: Sequence[Path], what: str) -> Iterator[tuple[int, Place, dict[str, Any]]]:
    """The records of files: number in its file from 1, place and fields.

    Args:
        what: a record in words, for errors ("a sample").

    Raises:
        DataError: as `records`, and a record that is no object.
    """
    for path in paths:
        for number, (place, value) in enumerate(records(path), start=1):
            yield number, place, place.mapping(value, what)


def rows(path: Path) -> Iterator[Record]:
    """The rows of a CSV file as objects by column.

    Raises:
        DataError: not a regular file, not readable, not UTF-8, not CSV, a row with too few or too many columns.
    """
    with io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                place = Place(path, f"line {reader.line_num}")
                if None in row or None in row.values():
                    raise place.error(f"the row should have {len(reader.fieldnames or ())} columns")
                yield Record(place, row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"not CSV: {error}", path, f"line {reader.line_num}") from None


def head(path: Path) -> dict[str, Any]:
    """By what a format is told: the first record of a JSON file if it is an object; `PICKLED` of a pickle; of another
    file the columns of its header, if it has some; each with True.

    Raises:
        DataError: as `records`, and an empty file.
    """
    with opened(path) as file:
        start = file.peek().removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        if not start:
            raise DataError("the file is empty", path)
        if start == PICKLED.encode("latin-1"):
            return {PICKLED: True}
        if start not in b"[{":
            header = file.readline(_HEADER).decode("utf-8-sig", errors="replace")
            return dict.fromkeys(next(csv.reader(header.splitlines()[:1]), []), True)
    first = next(records(path), Record(Place(path), None)).value
    return first if isinstance(first, dict) else {}


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which numbers in names count as numbers."""
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", name)
    return [(0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts]


class Resolved(NamedTuple):
    """Evidence references of one question.

    Attributes:
        turn_ids: the turns they name, each once, in the order written.
        dangling: references that name no turn, as written.
        references: number of references: every turn named (repetitions count) and every dangling one.
    """

    turn_ids: tuple[str, ...] = ()
    dangling: tuple[str, ...] = ()
    references: int = 0


class Draft:
    """A dialogue with its questions while it is read. Sessions without turns are left out.

    Attributes:
        turn_ids: of the turns so far, in order.
        images: number of images so far.
        blank: number of turns that were left out, since they have neither words nor images.
    """

    def __init__(self, place: Place, dialogue_id: str) -> None:
        self.place = place
        self.id = dialogue_id
        self.turn_ids: dict[str, None] = {}
        self.images = self.blank = 0
        self._sessions: dict[str, tuple[str | None, list[Turn]]] = {}
        self._turns: list[Turn] = []
        self._questions: dict[str, Question] = {}
        self._dangling: list[Dangling] = []
        self._referenced: dict[str, int] = {}

    def session(self, session_id: str, time: str | None = None) -> None:
        """Open the session that the next turns belong to. Raises DataError for an id that is taken, or no such time."""
        if session_id in self._sessions:
            raise self.place.error(f"session id {shown(session_id)} occurs twice; keep the turns of a session together")
        self._turns = []
        self._sessions[session_id] = (self.place.time(time, f"the time of session {session_id!r}"), self._turns)

    def image(
        self, place: Place, reference: str | None = None, caption: str | None = None, source: str | None = None
    ) -> Image:
        """The next image of the dialogue.

        Args:
            reference: a path inside the data folder, or a URL, which becomes `source` and is never fetched.

        Raises:
            ImagePathError: a path that leaves the folder of the data file, or names no file.
        """
        path = None
        if reference and _REMOTE.match(reference):
            source = source or reference
        elif reference and (path := image_file(place, reference)) is None:
            what = f"image {shown(reference)}: no such file in {place.path.parent}"
            raise ImagePathError(what, place.path, place.record)
        self.images += 1
        return Image(self.images - 1, path, caption, source)

    def shown(self, place: Place, fields: dict[str, Any]) -> Image | None:
        """The next image from an object that names it, as chat protocols do; None where it names none.

        Raises:
            DataError: a path, URL or caption that is no text. ImagePathError: as `image`.
        """
        reference, caption = (next((fields[key] for key in keys if fields.get(key)), None) for keys in _IMAGE)
        source = fields.get("source")
        if isinstance(source, dict):  # inline, or a URL
            reference, source = source.get("url") or f"data:{source.get('media_type')}", None
        if isinstance(reference, dict):
            reference = reference.get("url")
        given = [place.optional_text(value, "the image") for value in (reference, caption, source)]
        return self.image(place, *given) if any(given) else None

    def turn(
        self,
        place: Place,
        turn_id: str,
        speaker: object,
        text: object,
        time: str | None = None,
        images: Sequence[Image] = (),
    ) -> bool:
        """Add a turn to the open session. False for one without words and images, which is counted instead.

        Args:
            text: words; none where it is null or NaN; or a list of the parts that chat protocols have, of which texts
                and images count, and calls of tools, their results and thoughts do not. Their images come last.

        Raises:
            DataError: no speaker, words that are no text, no such time, or an id that is taken.
            ImagePathError: as `image`.
        """
        said = text if isinstance(text, list) else [{"text": text}]
        parts = [place.mapping({"text": part} if isinstance(part, str) else part or {}, "a part") for part in said]
        parts = [part for part in parts if not str(part.get("type")).startswith(("reasoning", "thinking", "thought"))]
        words = "\n".join(place.text(part["text"], "text") for part in parts if _is_there(part.get("text")))
        images = [*images, *filter(None, (self.shown(place, part) for part in parts))]
        if not words.strip() and not images:
            self.blank += 1
            return False
        if turn_id in self.turn_ids:
            raise place.error(f"turn id {shown(turn_id)} occurs twice; ids must be unique in a dialogue")
        self.turn_ids[turn_id] = None
        speaker = place.name(speaker, "speaker")
        self._turns.append(Turn(turn_id, speaker, words, place.time(time, "time"), tuple(images)))
        return True

    def exact(self, references: Sequence[str]) -> Resolved:
        """References that are ids of the turns so far, letter for letter."""
        named_turns = tuple(dict.fromkeys(text for text in references if text in self.turn_ids))
        return Resolved(named_turns, tuple(t for t in references if t not in self.turn_ids), len(references))

    def question(self, place: Place, question: Question, evidence: Resolved) -> None:
        """Add a question, once the turns it is about are there.

        Raises:
            DataError: an id that is taken, and where `check_question` does.
        """
        check_question(place, question, self.images)
        if question.id in self._questions:
            raise place.error(f"question id {shown(question.id)} occurs twice")
        self._questions[question.id] = replace(question, evidence=evidence.turn_ids)
        self._dangling += [Dangling(question.id, reference) for reference in evidence.dangling]
        if evidence.references:
            self._referenced[question.id] = evidence.references

    def corpus(self) -> Corpus:
        """The dialogue with its questions; without turns and questions none. Raises DataError for questions alone."""
        sessions = tuple(Session(name, time, tuple(turns)) for name, (time, turns) in self._sessions.items() if turns)
        if not sessions and self._questions:
            raise self.place.error("the dialogue has no turns")
        return Corpus(
            (Dialogue(self.id, sessions),) if sessions else (),
            tuple(self._questions.values()),
            tuple(self._dangling),
            self._referenced,
            self.blank,
        )


def _is_there(text: object) -> bool:
    """Whether it is neither null nor NaN, which tables hold where there is nothing."""
    return text is not None and text == text


def image_file(place: Place, name: str) -> str | None:
    """The absolute path of an image file, links resolved; None if there is none.

    Raises:
        ImagePathError: no usable path, or one that leaves the folder of the data file.
    """
    folder = os.path.realpath(place.path.parent)
    try:
        target = os.path.realpath(os.path.join(folder, name))
    except ValueError:  # a NUL, half a character
        raise ImagePathError(f"image {shown(name)} is not a usable path", place.path, place.record) from None
    if not Path(target).is_relative_to(folder):
        raise ImagePathError(f"image {shown(name)} is outside the data folder {folder}", place.path, place.record)
    return target if os.path.isfile(target) else None


def check_question(place: Place, question: Question, images: int) -> None:
    """Raises DataError for a blank question or gold answer, an unknown format, dimension or split, an image index out
    of range, and options or answers that do not fit the format.

    Args:
        images: number of images of the dialogue.
    """
    if not question.text.strip():
        raise place.error("the question is blank")
    for what, value, known in (
        ("question format", question.format, FORMATS),
        ("dimension", question.dimension or DIMENSIONS[0], DIMENSIONS),
        ("split", question.split or SPLITS[0], SPLITS),
    ):
        if value not in known:
            raise place.error(f"unknown {what} {shown(value)}; known: {', '.join(known)}")
    count, answers = len(question.options), question.answers
    letters = list(string.ascii_uppercase[:count])
    words = [" ".join(option.split()) for option in question.options]
    if question.format == "direct":
        if question.options:
            raise place.error("a direct question has no options")
        # a blank one would be scored, and nothing could be right
        if not all(answer.strip() for answer in answers):
            raise place.error("a gold answer is blank; leave it out where none is known")
    elif not 1 <= count <= len(string.ascii_uppercase):
        raise place.error(f"a {question.format} question needs 1 to 26 options, not {count}")
    elif "" in words or len(set(words)) < count:
        raise place.error("an option is blank or occurs twice")
    elif lost := [answer for answer in answers if answer not in letters]:
        raise place.error(f"answer {shown(lost[0])} is not the letter of an option (A to {letters[-1]})")
    elif len(set(answers)) < len(answers):
        raise place.error("an answer occurs twice")
    elif question.format == "single" and len(answers) > 1:
        raise place.error(f"a single question has one answer, not {len(answers)}")
    if far := [index for index in question.images if not 0 <= index < images]:
        raise place.error(f"image index {shown(far[0])} is out of range: the dialogue has {images} images")
