"""The command line every script shares: one config dataclass, `--config FILE`, dotted overrides, one-line errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
    namespace: Namespace = parser.parse_args(argv)
    namespace.pop("config", None)
    instantiated = parser.instantiate_classes(namespace)
    try:
        return config(**{k: v for k, v in vars(instantiated).items() if not k.startswith("__")})
    except RemindError as error:
        parser.exit(2, f"error: {error}\n")
        raise


def main(config: type[C], run: Callable[[C], Any], description: str, argv: Sequence[str] | None = None) -> None:
    """Parse and run. Errors of ours become one line on standard error and status 2; others keep their traceback."""
    cfg = parse(config, description, argv)
    try:
        run(cfg)
    except RemindError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror or error}", file=sys.stderr)
        raise SystemExit(2) from None
