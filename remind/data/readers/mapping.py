"""A mapping file: where JSON of any shape keeps what dialogues and questions are made of."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from remind.core.config_file import ConfigFile
from remind.core.errors import ConfigError, shown
from remind.data.dialogue import DIMENSIONS, FORMATS, SPLITS
from remind.data.readers.source import Place

#: Endings by which a format is known to be a mapping file.
SUFFIXES = (".yaml", ".yml")
#: What each kind of record has; named as in `remind.data.dialogue`, besides `file`, `records` and `join`.
_RECORDS = {
    "dialogue": ("file", "records", "id", "join", "sessions", "turns", "questions"),
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
_PATHS = {f"{kind}.{name}" for kind, names in _RECORDS.items() for name in names}
_VALUES: dict[str, Collection[str]] = {"format": FORMATS, "dimension": DIMENSIONS, "split": SPLITS}
_KEYS = {*_PATHS, "count_from", *(f"values.{name}" for name in _VALUES)}
_log = logging.getLogger(__name__)


class _Path:
    """Dotted keys; numbers count from 0 in lists, `.` is the record itself, and what ends in `?` may be missing."""

    def __init__(self, text: str) -> None:
        self.text = text.removesuffix("?")
        self.optional = text.endswith("?")
        self.keys = [] if self.text == "." else self.text.split(".")
        #: Whether it was looked for, and whether it was ever there.
        self.sought = self.found = False


class FieldMapping:
    """A mapping file.

    Attributes:
        path: of the file.
        files: for "dialogue" and "question" the pattern of their files' names.
        count_from: of whole numbers in the data that count answers, turns, sessions and images: 0 or 1.
        values: for format, dimension and split the value in the data, and its meaning here.

    Raises:
        ConfigError: no sound YAML, an unknown key, a path or value that is none, a key that is missing or that does not
            go with another.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = ConfigFile(path)
        given = dict(_flat(self._file.texts()))
        for key in given:
            if key in (*_RECORDS, "values"):
                raise self._error(f"{key} should be a group of keys, such as {key}.{_first(key)}", key)
            if key not in _KEYS:
                close = get_close_matches(key, _KEYS, 1) or get_close_matches(key, _RECORDS, 1)
                hint = f"did you mean {close[0]}?" if close else f"sections: {', '.join(_RECORDS)}, values"
                raise self._error(f"unknown key {shown(key)}; {hint}", key)
        self.count_from = self._count_from(given.pop("count_from", "0"))
        self.values = {name: self._translation(name, given.pop(f"values.{name}", {})) for name in _VALUES}
        patterns = {kind: given.pop(f"{kind}.file", "*") for kind in ("dialogue", "question")}
        self.files = {kind: self._text(f"{kind}.file", pattern) for kind, pattern in patterns.items()}
        self._paths = {key: self._path(key, value) for key, value in given.items()}
        self._check()

    def has(self, name: str) -> bool:
        """Whether `turn.id`, for example, is mapped."""
        return name in self._paths

    def find(self, name: str, place: Place, record: object) -> Any:
        """What a record has for `turn.text`, for example; None where it is not mapped, or optional and missing.

        Raises:
            DataError: it is not there and not optional.
        """
        path = self._paths.get(name)
        if path is None:
            return None
        path.sought = True
        value: Any = record
        for key in path.keys:
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            elif path.optional:
                return None
            else:
                raise place.error(f"{self._missing(path.text, key, value)} ({name} of {self.path.name})")
        path.found = True
        return value

    def warn(self) -> None:
        """Log the optional paths that no record had."""
        for name, path in self._paths.items():
            if path.sought and not path.found:
                _log.warning("%s: no record has %s, where %s should be", self.path, shown(path.text), name)

    def _missing(self, path: str, key: str, value: object) -> str:
        what = f"no {shown(path)}"
        if not isinstance(value, dict):
            return f"{what}; where it may be missing write {shown(path + '?')}"
        if close := get_close_matches(key, list(value)[:1000], 1):
            return f"{what}; did you mean {shown(close[0])}?"
        there = ", ".join(shown(name) for name in list(value)[:5])
        return f"{what} among {there or 'no keys at all'}; where it may be missing write {shown(path + '?')}"

    def _error(self, what: str, key: str | None = None) -> ConfigError:
        return self._file.error(what, None if key is None else self._file.lines.get(key))

    def _text(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not value.strip(" ?") or len(value) > 1000:
            raise self._error(f"{key} should be text, such as items.0.text; . is the record itself", key)
        return value

    def _path(self, key: str, value: object) -> _Path:
        path = _Path(self._text(key, value))
        if not all(path.keys) or any(len(part) > 9 for part in path.keys if part.isdecimal()):
            raise self._error(f"{key}: {shown(value)} is not a path; keys are joined by single dots", key)
        return path

    def _count_from(self, value: object) -> int:
        if value not in ("0", "1"):
            raise self._error(f"count_from should be 0 or 1, not {shown(value)}", "count_from")
        return int(value)

    def _translation(self, name: str, value: object) -> Mapping[str, str]:
        known, key = _VALUES[name], f"values.{name}"
        if not isinstance(value, dict):
            raise self._error(f"{key} should map values of the data to {', '.join(known)}", key)
        for word, meaning in value.items():
            if meaning not in known:
                close = get_close_matches(str(meaning), known, 1)
                hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
                raise self._error(f"{key}: {shown(meaning)} is no {name}; {hint}", f"{key}.{word}")
        return value

    def _check(self) -> None:
        """Raise ConfigError for keys that are missing or do not go together."""
        has = self.has
        if has("dialogue.sessions") == has("dialogue.turns"):
            raise self._error("dialogue needs either sessions or turns")
        if has("dialogue.turns") and any(has(f"session.{name}") for name in _RECORDS["session"]):
            raise self._error("session goes with dialogue.sessions; with dialogue.turns all is one session")
        for name in ("turn.speaker", "turn.text"):
            if not has(name):
                raise self._error(f"{name} is missing")
        kinds = [has("evidence.id"), has("evidence.session") or has("evidence.turn"), has("evidence.line")]
        if sum(kinds) > 1 or has("evidence.session") != has("evidence.turn"):
            raise self._error("evidence must be given by id, by session and turn, or by line")
        if has("answer.letter") and has("answer.index"):
            raise self._error("answer must be given by letter or by index, with an optional text for direct questions")
        asks = any(name.startswith("question.") for name in self._paths)
        nested, apart = has("dialogue.questions"), has("question.dialogue")
        if (asks or nested) and not has("question.text"):
            raise self._error("question.text is missing")
        if (asks or nested) and nested == apart:
            raise self._error("either dialogue.questions or question.dialogue says which dialogue a question is about")
        for key in ("file", "records"):
            if f"question.{key}" in self._file.lines and not apart:
                raise self._error(f"question.{key} goes with question.dialogue", f"question.{key}")
        given = self._file.lines.keys()
        both = [{f"dialogue.{key}", f"question.{key}"} <= given for key in ("file", "records")]
        if apart and not any(both):
            raise self._error("dialogue and question both need file, or both records, to be distinguished")
        if apart and not (has("dialogue.id") or has("dialogue.records")):
            raise self._error("dialogue.id is missing, which question.dialogue names")


def _first(section: str) -> str:
    return next(iter(_RECORDS.get(section, _VALUES)))


def _flat(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Keys as `turn.text`, also where they are written so."""
    rows: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        inner = isinstance(value, dict) and value and name not in _KEYS
        rows += _flat(value, f"{name}.") if inner else [(name, value)]
    return rows
