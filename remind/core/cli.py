"""The command line of all commands: a config dataclass, `--config FILE`, dotted overrides, one-line errors."""

from __future__ import annotations

import re
import signal
import sys
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from itertools import pairwise, takewhile
from pkgutil import resolve_name
from typing import Any, TypeVar

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from remind.core.errors import ConfigError, RemindError, shown, told
from remind.core.files import read_bytes
from remind.core.processes import Termination
from remind.core.progress import close_bars

C = TypeVar("C")
#: How jsonargparse names the keys that it is at, from the outermost to the one it refuses.
_KEYS = re.compile(r"""(?:Parser key|Group|[Oo]ption|unrecognized arguments:) (?:"|'|--)([\w.-]+)""")
set_parsing_settings(docstring_parse_attribute_docstrings=True)


def make_parser(config: type, description: str, prog: str | None = None) -> ArgumentParser:
    """The argument parser of a config dataclass whose fields carry docstrings."""
    needed = [field.name for field in fields(config) if field.default is field.default_factory is MISSING]
    usage = " ".join(
        ["%(prog)s", *(f"--{name} {name.upper()}" for name in needed), "[--config FILE] [--FIELD VALUE ...]"]
    )
    parser = ArgumentParser(prog=prog, usage=usage, description=description, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the fields below")
    parser.add_class_arguments(config, nested_key=None, as_group=False, fail_untyped=True)
    for name, value in parser.get_defaults().items():
        if isinstance(value, tuple) and any(map(is_dataclass, value)):  # which --print_config cannot write
            parser.set_defaults({name: [asdict(item) for item in value]})
    return parser


def parse(config: type[C], description: str, argv: Sequence[str] | None = None, prog: str | None = None) -> C:
    """Fill `config` (a dataclass whose fields carry docstrings) from `--config FILE` and dotted overrides.

    jsonargparse reads; pydantic checks what was read against the types, with their ranges, and makes the config.
    """
    argv, parser = list(sys.argv[1:] if argv is None else argv), make_parser(config, description, prog)
    files: dict[str, dict[str, int]] = {}
    try:
        files = {path: _lines(path) for word, path in pairwise(argv) if word == "--config"}
        files |= {word[9:]: _lines(word[9:]) for word in argv if word.startswith("--config=")}
        given = parser.parse_args(argv)
        given.pop("config", None)
        from pydantic import TypeAdapter  # not for --help

        return TypeAdapter(config).validate_json(parser.dump(given, format="json", skip_unset=False))
    except (ArgumentError, RemindError, ValueError) as error:
        print(f"error: {explain(error, argv, files, [*parser.get_defaults().keys()])}", file=sys.stderr)
        raise SystemExit(2) from None


def _lines(path: str) -> dict[str, int]:
    """The line, from 1, of every key of a config file; keys of mappings within mappings are dotted.

    Raises:
        DataError: no such file. ConfigError: not YAML, no mapping, or a key twice, of which YAML would keep the last.
    """
    lines: dict[str, int] = {}

    def note(node: yaml.Node, prefix: str) -> None:
        if isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                note(value, f"{prefix}{number}.")
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name, line = f"{prefix}{key.value}", key.start_mark.line + 1
                if name in lines:
                    raise ConfigError(f"{path}:{line}: {name}: the key occurs twice")
                lines[name] = line
                note(value, f"{name}.")

    try:
        root = yaml.compose(read_bytes(path), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise ConfigError(f"{place}: not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: a mapping of fields to values was expected")
    note(root, "")
    return lines


def explain(error: Exception, argv: Sequence[str], files: dict[str, dict[str, int]], options: Sequence[str]) -> str:
    """`file:line: key: reason` from an error of jsonargparse, of pydantic or of a config class.

    Args:
        files: the config files on the command line, with the lines of their keys.
        options: all there are.
    """
    text, key = " ".join(str(error).split()), ""
    if isinstance(error, RemindError):
        reason = text
    elif hasattr(error, "errors"):  # pydantic's
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        reason = f"{first['msg'].removeprefix('Value error, ')}, not {shown(first['input'])}"
    else:
        key = ".".join(_KEYS.findall(text))
        reason = text.partition(" Given value type:")[0].rpartition("Errors: - ")[2]
        reason = reason.removeprefix(f'Parser key "{key}": ')
        if "not accept" in text or text.startswith("unrecognized"):
            last = [name for name in options if name.rpartition(".")[2] == key.rpartition(".")[2]]
            close = get_close_matches(key, options, 1, 0.8) or last[:3]
            reason = "no such option" + (f"; did you mean {' or '.join(close)}?" if close else " (see --help)")
    if not key:
        return reason + (f" (with --config {' and '.join(files)})" if files else "")
    given = {re.split("[+=]", word)[0].removeprefix("--") for word in argv}
    for path, lines in reversed(files.items()) if key not in given else ():
        parts = key.split(".")
        while parts and ".".join(parts) not in lines:
            parts.pop()
        if parts:
            return f"{path}:{lines['.'.join(parts)]}: {key}: {reason}"
    return f"{key}: {reason}"


def named(argv: Sequence[str], fields: Sequence[str]) -> list[str]:
    """Arguments whose leading plain words are given the names of `fields`: `A B` becomes `--first A --second B`."""
    plain = list(takewhile(lambda word: not word.startswith("-"), argv[: len(fields)]))
    options = [part for field, value in zip(fields, plain, strict=False) for part in (f"--{field}", value)]
    return [*options, *argv[len(plain) :]]


def main(
    config: type[C],
    function: Callable[[C], Any] | str,
    description: str,
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    positional: Sequence[str] = (),
    repeatable: Sequence[str] = (),
) -> None:
    """Parse and run. Our own errors become one line on standard error and status 2; others keep their traceback.

    SIGTERM and Ctrl-C become one line, too, and status 143 and 130.

    Args:
        config: the dataclass to fill.
        function: takes it; or its name as "module:name", imported when the settings have been read.
        description: first lines of `--help`.
        argv: arguments; None: those of this process.
        prog: name of the program in `--help`; None: that of the process.
        positional: fields that may be given as leading plain words.
        repeatable: fields that may be given several times, each adding an item to a list.
    """
    with Termination(at_once=True) as stop:
        try:
            argv = named(sys.argv[1:] if argv is None else argv, positional)
            for name in repeatable:  # jsonargparse appends to a list by --name+
                argv = [re.sub(f"^--{name}(?==|$)", f"--{name}+", word) for word in argv]
            settings = parse(config, description, argv, prog)
            work: Any = resolve_name(function) if isinstance(function, str) else function
            if stop.requested:  # and swallowed by what was imported
                raise KeyboardInterrupt
            work(settings)
        except SystemExit:
            raise
        except BaseException as error:
            close_bars()
            if stop.requested or isinstance(error, KeyboardInterrupt):
                number = signal.Signals(stop.requested or signal.SIGINT)
                print(f"stopped by {number.name}", file=sys.stderr)
                raise SystemExit(128 + number) from None
            if not isinstance(error, RemindError | OSError):
                raise
            print(f"error: {told(error)}", file=sys.stderr)
            raise SystemExit(2) from None
