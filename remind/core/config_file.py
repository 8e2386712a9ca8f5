"""YAML files of settings, checked before they are used, so that each mistake is one line with its place."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import yaml

from remind.core.errors import ConfigError

#: Limits for configs, which are written by hand.
MAX_BYTES = 1 << 20
_MAX_DEPTH = 50
_MAX_VALUES = 100_000

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: A date without quotes has the tag of one; it is read as text.
_PLAIN = ("str", "int", "float", "bool", "null", "seq", "map", "merge", "timestamp")
_TAGS = {f"tag:yaml.org,2002:{name}" for name in _PLAIN}
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
        plain: by key the text of every value that is neither a mapping nor a list.

    Args:
        path: the file.
        group: the group of fields whose values it holds; empty for a config of a whole command.

    Raises:
        ConfigError: no such file, no regular one, too large, not UTF-8, not YAML, no mapping, a key twice, tags of
            other than plain values, aliases that hold themselves or make too much of it.
    """

    def __init__(self, path: str | Path, group: str = "") -> None:
        self.path = path
        root = self._compose(self._read())
        if not isinstance(root, yaml.MappingNode):
            raise self._at("a mapping of fields to values was expected", root)
        self._count(root, {})
        self.lines: dict[str, int] = {}
        self.mappings: set[str] = set()
        self.plain: dict[str, str] = {}
        self._note(root, f"{group}." if group else "")

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
            status = Path(self.path).stat()
            if not stat.S_ISREG(status.st_mode):
                what = "is a folder, a file was expected" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
                raise self.error(what)
            if status.st_size > MAX_BYTES:
                raise self.error(f"has {status.st_size:,} bytes; a config has {MAX_BYTES:,} at most")
            content = Path(self.path).read_bytes()
        except FileNotFoundError:
            raise self.error("no such file") from None
        except (OSError, ValueError) as error:
            raise self.error(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
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
            return yaml.compose(text, Loader=_LOADER)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = None if mark is None else mark.line + 1
            raise self.error(f"not YAML: {error.problem or error.context}", line) from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise self.error(f"not YAML: {error.reason}", line) from None

    def _count(self, node: yaml.Node, sizes: dict[int, int | None]) -> int:
        """Values below a node, an alias counted as what it stands for; `sizes` has those counted, None: under way."""
        if node.tag not in _TAGS:
            raise self._at(f"the tag {node.tag[:80]} is of no plain value", node)
        if isinstance(node, yaml.ScalarNode):
            return 1
        if (size := sizes.get(id(node), 0)) is None:
            raise self._at("holds itself by an alias", node)
        if not size:
            sizes[id(node)] = None
            parts = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
            size = sizes[id(node)] = 1 + sum(self._count(part, sizes) for part in parts)
        if size > _MAX_VALUES:
            raise self._at(f"more than {_MAX_VALUES:,} values, aliases counted as what they stand for", node)
        return size

    def _note(self, node: yaml.Node, prefix: str) -> None:
        """Fill `lines` and `plain` from what is below a node."""
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
                    raise self._at(f"the key {name[:80]!r} stands twice; which value counts is unclear", key)
                self.lines[name] = key.start_mark.line + 1
                if isinstance(value, yaml.ScalarNode):
                    self.plain[name] = value.value
                elif isinstance(value, yaml.MappingNode):
                    self.mappings.add(name)
                self._note(value, f"{name}.")

    def _at(self, what: str, at: yaml.Node | yaml.Event | None) -> ConfigError:
        mark = None if at is None else at.start_mark
        return self.error(what, None if mark is None else mark.line + 1)
