"""A mapping file: where JSON of any shape keeps what dialogues and questions are made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from remind.core.errors import ConfigError, DataError, brief, shown
from remind.core.files import read_bytes
from remind.data.dialogue import DIMENSIONS, FORMATS, SPLITS
from remind.data.readers.builder import Place

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


class FieldMapping:
    """A mapping file. A path is dotted keys; numbers count from 0 in lists, `.` is the record itself, and what ends in
    `?` may be missing.

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
        self.files = {kind: str(given.get(f"{kind}.file", "*")) for kind in ("dialogue", "question")}
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


def _flat(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Keys as `turn.text`, also where they are written so."""
    rows: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        inner = isinstance(value, dict) and value and name not in _KEYS
        rows += _flat(value, f"{name}.") if inner else [(name, value)]
    return rows
