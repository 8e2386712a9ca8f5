"""The command line of all commands: a config dataclass, `--config FILE`, dotted overrides, one-line errors."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings

from remind.core.config_file import ConfigFile
from remind.core.errors import ConfigError, RemindError

C = TypeVar("C")
#: Types by the words that a message has for their values.
_EXPECTED = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text", "list": "a list"}
#: How the parser names an option that it does not know.
_UNKNOWN = re.compile(r"(?:Group '(?P<group>[^']+)' does not accept option|^Option) '(?P<key>[^']+)'")
#: How it refuses a value.
_VALUE = re.compile(r'Parser key "(?P<key>[^"]+)":\s(?P<types>.*)(?:Got|Given) value: (?P<value>.*)', re.DOTALL)
#: Options that the usage line of `--help` shows.
_SHOWN = 5
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
        """Suffix for errors whose cause may be in a file or on the command line."""
        return f" (with --config {' and '.join(str(file.path) for file in self.read)})" if self.read else ""


# not an attribute of the parser: optional groups have parsers of their own, whose errors name the files, too
_files: ContextVar[_ConfigFiles] = ContextVar("files")


class _Parser(ArgumentParser):
    """Says what is wrong in one line and exits with status 2, without a page of usage.

    Attributes:
        renamed: options of before, and what they are called now.
    """

    renamed: Mapping[str, str] = {}

    def error(self, message: str, ex: Exception | None = None) -> Any:
        files = _files.get(_ConfigFiles())
        said = f"{_in_words(message)}{self._suggestion(message)}"
        if files.reading is not None:
            self.refuse(files.reading.error(said, files.reading.line_of(message)))
        note = files.note() if message.startswith("the following arguments are required") else ""
        self.refuse(f"{said}{note}")

    def _suggestion(self, message: str) -> str:
        """The options whose names, or last parts of names, are closest to one that a message calls unknown."""
        unknown, dashes = _UNKNOWN.search(message), ""
        if unknown is None:
            unknown, dashes = re.match(r"unrecognized arguments: .*?--(?P<group>)(?P<key>[\w.-]+)", message), "--"
        if unknown is None:
            return ""
        wrong = ".".join(filter(None, unknown.group("group", "key")))
        wrong = wrong.replace("-", "_")
        names = [name[2:] for action in self._actions for name in action.option_strings if name.startswith("--")]
        parts = {name.rpartition(".")[2] for name in names}
        part = get_close_matches(wrong.rpartition(".")[2], parts, 1)
        close = get_close_matches(wrong, names, 1, 0.8) or [name for name in names if [name.rpartition(".")[2]] == part]
        return f"; did you mean {' or '.join(dashes + name for name in close[:3])}?" if close else ""

    def refuse(self, message: object, hint: str = " (see --help)") -> NoReturn:
        self.exit(2, f"error: {' '.join(str(message).split())}{hint}\n")
        raise AssertionError


def _in_words(message: str) -> str:
    """A parser's message about a value of the wrong type, in words; any other as it is."""
    about = _VALUE.match(message)
    kinds = [] if about is None else re.findall(r"Expected a <class '(\w+)'>", about["types"])
    wanted = [_EXPECTED[kind] for kind in kinds if kind in _EXPECTED]
    choices = [] if about is None else re.findall(r"Literal\[(.*?)\]", about["types"])
    if about is None or set(kinds) - {*_EXPECTED, "NoneType"} or not (wanted or choices):
        return message
    wanted += [f"one of {choice}" for choice in choices]
    return f"{about['key']}: {' or '.join(wanted)} is expected, not {about['value']!r}"


class _ReadConfig(ActionConfigFile):  # type: ignore[misc]
    """`--config FILE`; a mistake in it is reported with the file and the line."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        files = _files.get()
        try:
            file = ConfigFile(values)
            for name, line in file.lines.items():
                if name in parser.renamed:
                    raise file.error(f"{name} is now {parser.renamed[name]}", line)
                if name == self.dest or name.startswith("__"):
                    raise file.error(f"Option {name!r} is not accepted", line)
                if name in parser.groups and name not in file.mappings:
                    raise file.error(f"{name} is a group of fields, not a list or a single value", line)
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
    parser = _Parser(prog=prog, usage=_usage(config), description=description, exit_on_error=True)
    parser.add_argument("--config", action=_ReadConfig, help="YAML file with any of the fields below")
    parser.add_class_arguments(config, nested_key=None, as_group=False, fail_untyped=True)
    _plain_defaults(parser)
    parser.renamed = getattr(config, "RENAMED", {})
    return parser


def _usage(config: type) -> str:
    """The first options of a config, in place of a page of all."""
    hints = get_type_hints(config)
    words = []
    groups = {name for name, hint in hints.items() if any(map(is_dataclass, (hint, *get_args(hint))))}
    for entry in [entry for entry in fields(config) if entry.name not in groups][:_SHOWN]:
        word = f"--{entry.name} {entry.name.upper()}"
        required = entry.default is MISSING and entry.default_factory is MISSING
        words.append(word if required else f"[{word}]")
    return " ".join(["%(prog)s", *words, "[--config FILE] [--FIELD VALUE ...]"])


def parse(config: type[C], description: str, argv: Sequence[str] | None = None, prog: str | None = None) -> C:
    """Fill `config` (a dataclass whose fields carry docstrings) from `--config FILE` and dotted overrides."""
    parser = make_parser(config, description, prog)
    for word in sys.argv[1:] if argv is None else argv:
        # said here, since the parser takes the beginning of another option's name for it
        if (name := word.partition("=")[0].removeprefix("--")) in parser.renamed and word.startswith("--"):
            parser.refuse(f"--{name} is now {parser.renamed[name]}")
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


def appending(argv: Sequence[str], repeatable: Sequence[str]) -> list[str]:
    """Arguments in which options of lists add to what came before: `--a x --a y` becomes `--a+ x --a+ y`."""
    options = "|".join(map(re.escape, repeatable))
    return [re.sub(rf"^--({options})(?==|$)", r"--\1+", word) for word in argv] if repeatable else [*argv]


def main(
    config: type[C],
    function: Callable[[C], Any],
    description: str,
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    positional: Sequence[str] = (),
    repeatable: Sequence[str] = (),
) -> None:
    """Parse and run. Our own errors become one line on standard error and status 2; others keep their traceback.

    Args:
        config: the dataclass to fill.
        function: takes it.
        description: first lines of `--help`.
        argv: arguments; None: those of this process.
        prog: name of the program in `--help`; None: that of the process.
        positional: fields that may be given as leading plain words.
        repeatable: fields that may be given several times, each adding an item to a list.
    """
    argv = appending(named(sys.argv[1:] if argv is None else argv, positional), repeatable)
    settings = parse(config, description, argv, prog)
    # where it is installed peft imports it, and on some CPUs it then advises to install a kernel
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        function(settings)
    except RemindError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        # the second name is what a file was copied or moved to
        name = error.filename2 or error.filename
        place = f"{name}: " if name else ""
        print(f"error: {place}{error.strerror or error}", file=sys.stderr)
        raise SystemExit(2) from None
