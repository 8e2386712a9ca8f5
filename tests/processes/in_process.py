"""Programs run in this process, which saves their imports; their output is kept apart from that of pytest."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock


def run_script(script: str | Path, *words: object) -> tuple[int, str, str]:
    """Run a file. Status, standard output and standard error, as of a process of its own."""
    return _run(lambda: runpy.run_path(str(script), run_name="__main__"), script, words)


def run_module(module: str, *words: object) -> tuple[int, str, str]:
    """The same for `python -m module`."""

    def start() -> None:
        with warnings.catch_warnings():
            # another test may have imported the module, which a process of its own would not have
            warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
            runpy.run_module(module, run_name="__main__", alter_sys=True)

    return _run(start, module, words)


def _run(start: Callable[[], object], name: object, words: tuple[object, ...]) -> tuple[int, str, str]:
    said, complaints = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(name), *map(str, words)]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(complaints),
    ):
        try:
            start()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            return status, said.getvalue(), complaints.getvalue()
    return 0, said.getvalue(), complaints.getvalue()
