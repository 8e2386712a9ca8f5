"""Programs run in this process, which saves their imports; their output is kept apart from that of pytest."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import warnings
from unittest import mock


def run_module(module: str, *words: object) -> tuple[int, str, str]:
    """`python -m module`: status, standard output and standard error, as of a process of its own."""
    said, complaints = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [module, *map(str, words)]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(complaints),
        warnings.catch_warnings(),
    ):
        # another test may have imported the module, which a process of its own would not have
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            return status, said.getvalue(), complaints.getvalue()
    return 0, said.getvalue(), complaints.getvalue()
