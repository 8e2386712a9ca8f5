"""YAML files of settings, with the line of every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from remind.core.errors import ConfigError, DataError
from remind.core.files import read_bytes

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ConfigFile:
    """A YAML file with a mapping at its top.

    Attributes:
        path: as it was given.
        lines: line, from 1, of every key; keys of mappings within mappings are dotted.

    Raises:
        ConfigError: no such file, not UTF-8, not YAML, no mapping, a key twice.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.lines: dict[str, int] = {}
        try:
            self._text = read_bytes(path).decode("utf-8-sig")
            root = yaml.compose(self._text, _LOADER)
        except DataError as error:
            raise ConfigError(str(error)) from None
        except UnicodeDecodeError as error:
            raise self.error("not UTF-8", error.object.count(b"\n", 0, error.start) + 1) from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            raise self.error(f"not YAML: {getattr(error, 'problem', error)}", mark and mark.line + 1) from None
        if not isinstance(root, yaml.MappingNode):
            raise self.error("a mapping of fields to values was expected", 1)
        self._note(root, "")

    def texts(self) -> dict[str, Any]:
        """The content with every scalar as it is written: `no` is a word."""
        content: dict[str, Any] = yaml.load(self._text, yaml.BaseLoader)
        return content

    def error(self, what: str, line: int | None = None) -> ConfigError:
        """An error that names the file, and the line if it is known."""
        return ConfigError(f"{self.path}: {what}" if line is None else f"{self.path}:{line}: {what}")

    def _note(self, node: yaml.Node, prefix: str) -> None:
        """Fill `lines` from what is below a node."""
        if isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                self._note(value, f"{prefix}{number}.")
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name, line = f"{prefix}{key.value}", key.start_mark.line + 1
                if name in self.lines:  # of which YAML would silently keep the last
                    raise self.error(f"{name}: the key occurs twice", line)
                self.lines[name] = line
                self._note(value, f"{name}.")
