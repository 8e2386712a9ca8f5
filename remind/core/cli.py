"""The command line of all commands: a config dataclass, `--config FILE`, dotted overrides, one-line errors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import takewhile
from typing import Any, NoReturn, TypeVar

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings

from remind.core.config_file import ConfigFile
from remind.core.errors import ConfigError, RemindError

C = TypeVar("C")
set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass
class _ConfigFiles:
    """The config files of one command line.

    Attributes:
        read: those that have been read.
        reading: the one that is being read.
    """

    read: list[ConfigFile] = field(default_factory=list)
    reading: ConfigFile | None = None

    def note(self) -> str:
        """Suffix for errors whose cause may stand in a file or on the command line."""
        return f" (with --config {' and '.join(str(file.path) for file in self.read)})" if self.read else ""


# not an attribute of the parser: optional groups have parsers of their own, whose errors name the files, too
_files: ContextVar[_ConfigFiles] = ContextVar("files")


class _Parser(ArgumentParser):
    """Says what is wrong in one line and exits with status 2, without a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        files = _files.get(_ConfigFiles())
        if files.reading is not None:
            self.refuse(files.reading.error(message, files.reading.line_of(message)))
        note = files.note() if message.startswith("the following arguments are required") else ""
        self.refuse(f"{message}{note}")

    def refuse(self, message: object, hint: str = " (see --help)") -> NoReturn:
        self.exit(2, f"error: {' '.join(str(message).split())}{hint}\n")
        raise AssertionError


class _ReadConfig(ActionConfigFile):  # type: ignore[misc]
    """`--config FILE`; a mistake in it is reported with the file and the line."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        files = _files.get()
        try:
            file = ConfigFile(values)
            for name, line in file.lines.items():
                if name == self.dest or name.startswith("__"):
                    raise file.error(f"Option {name!r} is not accepted", line)
                if name in parser.groups and name not in file.mappings:
                    raise file.error(f"{name} is a group of fields, which neither a list nor one value can be", line)
        except ConfigError as error:
            parser.refuse(error, "")
        files.read.append(file)
        files.reading = file
        try:
            super().__call__(parser, cfg, values, option_string)
            # now, while the file is known; the parser itself would look for unknown keys later
            parser.validate(cfg, skip_required=True)
        except KeyError as error:
            parser.error(str(error.args[0]))
        except TypeError:
            pass  # a group that the command line may yet complete; it is checked after that
        except (ValueError, AttributeError) as error:  # values that do not match their YAML tag
            parser.error(str(error))
        files.reading = None


def make_parser(config: type, description: str, prog: str | None = None) -> _Parser:
    """The argument parser of a config dataclass whose fields carry docstrings."""
    _files.set(_ConfigFiles())
    parser = _Parser(prog=prog, description=description, exit_on_error=True)
    parser.add_argument("--config", action=_ReadConfig, help="YAML file with any of the fields below")
    parser.add_class_arguments(config, nested_key=None, as_group=False, fail_untyped=True)
    _plain_defaults(parser)
    return parser


def parse(config: type[C], description: str, argv: Sequence[str] | None = None, prog: str | None = None) -> C:
    """Fill `config` (a dataclass whose fields carry docstrings) from `--config FILE` and dotted overrides."""
    parser = make_parser(config, description, prog)
    namespace: Namespace = parser.parse_args(argv)
    namespace.pop("config", None)
    try:
        instantiated = parser.instantiate_classes(namespace)
        return config(**{k: v for k, v in vars(instantiated).items() if not k.startswith("__")})
    except (RemindError, ValueError) as error:
        # in an optional group jsonargparse tells all that it tried, with all values; our error is the cause of it
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        parser.refuse(cause, _files.get().note())


def _plain_defaults(parser: ArgumentParser) -> None:
    """Dataclasses inside list defaults as dicts: --print_config can only write those."""

    def plain(value: Any) -> Any:
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    for name, value in parser.get_defaults().items():
        if isinstance(value, list | tuple) and any(plain(item) is not item for item in value):
            parser.set_defaults({name: [plain(item) for item in value]})


def named(argv: Sequence[str], fields: Sequence[str]) -> list[str]:
    """Arguments whose leading plain words are given the names of `fields`: `A B` becomes `--first A --second B`."""
    plain = list(takewhile(lambda word: not word.startswith("-"), argv[: len(fields)]))
    options = [part for field, value in zip(fields, plain, strict=False) for part in (f"--{field}", value)]
    return [*options, *argv[len(plain) :]]


def main(
    config: type[C],
    function: Callable[[C], Any],
    description: str,
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    positional: Sequence[str] = (),
) -> None:
    """Parse and run. Our own errors become one line on standard error and status 2; others keep their traceback.

    Args:
        config: the dataclass to fill.
        function: takes it.
        description: first lines of `--help`.
        argv: arguments; None: those of this process.
        prog: name of the program in `--help`; None: that of the process.
        positional: fields that may be given as leading plain words.
    """
    argv = named(sys.argv[1:] if argv is None else argv, positional)
    settings = parse(config, description, argv, prog)
    # where it is installed peft imports it, and on some CPUs it then advises to install a kernel
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        function(settings)
    except RemindError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror or error}", file=sys.stderr)
        raise SystemExit(2) from None
