"""The command line every script shares: one config dataclass, `--config FILE`, dotted overrides, one-line errors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from remind.errors import RemindError

C = TypeVar("C")
set_parsing_settings(docstring_parse_attribute_docstrings=True)


class _Parser(ArgumentParser):
    """Says what is wrong in one line and exits with status 2, without a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        self.exit(2, f"error: {' '.join(str(message).split())} (see --help)\n")


def parse(config: type[C], description: str, argv: Sequence[str] | None = None) -> C:
    """Fill `config` (a dataclass whose fields carry docstrings) from `--config FILE` and dotted overrides."""
    parser = _Parser(description=description, exit_on_error=True)
    parser.add_argument("--config", action="config", help="YAML file with any of the fields below")
    parser.add_class_arguments(config, nested_key=None, as_group=False, fail_untyped=True)
    _plain_defaults(parser)
    namespace: Namespace = parser.parse_args(argv)
    namespace.pop("config", None)
    try:
        instantiated = parser.instantiate_classes(namespace)
        return config(**{k: v for k, v in vars(instantiated).items() if not k.startswith("__")})
    except (RemindError, ValueError) as error:  # ValueError: what jsonargparse makes of ours in an optional group
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")
        raise


def _plain_defaults(parser: ArgumentParser) -> None:
    """Dataclasses inside list defaults as dicts: --print_config can only write those."""

    def plain(value: Any) -> Any:
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    for name, value in parser.get_defaults().items():
        if isinstance(value, list | tuple) and any(plain(item) is not item for item in value):
            parser.set_defaults({name: [plain(item) for item in value]})


def main(config: type[C], run: Callable[[C], Any], description: str, argv: Sequence[str] | None = None) -> None:
    """Parse and run. Errors of ours become one line on standard error and status 2; others keep their traceback."""
    cfg = parse(config, description, argv)
    # where it is installed peft imports it, and on some CPUs it then advises to install a kernel nobody asked for
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        run(cfg)
    except RemindError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror or error}", file=sys.stderr)
        raise SystemExit(2) from None
