"""YAML files of settings, checked before they are used, so that each mistake is one line with its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from remind.core.errors import ConfigError, DataError
from remind.core.files import read_bytes

#: Limits for configs, which are written by hand.
MAX_BYTES = 1 << 20
_MAX_DEPTH = 50

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map")}
#: How jsonargparse names the key it refuses.
_BAD_KEY = (
    re.compile(r"Group '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'"),
    re.compile(r"Option '(?P<key>[^']+)' is not accepted"),
    re.compile(r"Parser key \"(?P<key>[^\"]+)\""),
)


class ConfigFile:
    """A config file, checked to be sound YAML with a mapping at its top.

    Attributes:
        path: as it was given.
        lines: line, from 1, of every key; keys of mappings within mappings are dotted.
        mappings: those keys whose value is a mapping.

    Raises:
        ConfigError: no such file, no regular one, too large, not UTF-8, not YAML, no mapping, a key twice, an alias, a
            tag of other than plain values.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.lines: dict[str, int] = {}
        self.mappings: set[str] = set()
        root = self._compose(self._read())
        if not isinstance(root, yaml.MappingNode):
            raise self._at("a mapping of fields to values was expected", root)
        self._note(root, "")
        self._root = root

    def texts(self) -> dict[str, Any]:
        """The content with every scalar as it is written: `no` is a word."""
        content: dict[str, Any] = yaml.constructor.BaseConstructor().construct_document(self._root)
        return content

    def line_of(self, message: str) -> int | None:
        """The line of the key that a parser's message is about, if it is one of this file's."""
        for match in (pattern.search(message) for pattern in _BAD_KEY):
            if match is None:
                continue
            named = ".".join(part for part in (match.groupdict().get("group"), match["key"]) if part)
            # for keys within an optional group or a list the parser names the last part alone
            for key, line in self.lines.items():
                if key == named or key.endswith(f".{named}"):
                    return line
        return None

    def error(self, what: str, line: int | None = None) -> ConfigError:
        """An error that names the file, and the line if it is known."""
        return ConfigError(f"{self.path}: {what}" if line is None else f"{self.path} [line {line}]: {what}")

    def _read(self) -> str:
        try:
            content = read_bytes(self.path, MAX_BYTES)
        except DataError as error:
            raise ConfigError(str(error)) from None
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise self.error(f"not UTF-8 (byte {error.start})", line) from None

    def _compose(self, text: str) -> yaml.Node | None:
        try:
            depth = 0
            # composing goes down by recursion, which must not be as deep as the file likes
            for event in yaml.parse(text, Loader=_LOADER):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if depth > _MAX_DEPTH:
                    raise self._at("nested too deeply", event)
                if isinstance(event, yaml.AliasEvent):
                    raise self._at("aliases are not accepted; write the value out", event)
                tag = getattr(event, "tag", None)
                if tag is not None and tag not in _TAGS:
                    raise self._at(f"the tag {tag[:80]} is not that of a plain value", event)
            return yaml.compose(text, Loader=_LOADER)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = None if mark is None else mark.line + 1
            raise self.error(f"not YAML: {error.problem or error.context}", line) from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise self.error(f"not YAML: {error.reason}", line) from None

    def _note(self, node: yaml.Node, prefix: str) -> None:
        """Fill `lines` and `mappings` from what is below a node."""
        if isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                self._note(value, f"{prefix}{number}.")
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise self._at("a list or mapping cannot be a key", key)
                # `a.b` on a line of its own is the same as b within a
                name = f"{prefix}{key.value}"
                if name in self.lines:
                    raise self._at(f"the key {name[:80]!r} occurs twice; it is unclear which value counts", key)
                self.lines[name] = key.start_mark.line + 1
                if isinstance(value, yaml.MappingNode):
                    self.mappings.add(name)
                self._note(value, f"{name}.")

    def _at(self, what: str, at: yaml.Node | yaml.Event | None) -> ConfigError:
        mark = None if at is None else at.start_mark
        return self.error(what, None if mark is None else mark.line + 1)
