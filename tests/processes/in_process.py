"""Scripts run in this process, which spares their imports. What they say is kept apart from what pytest says."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from unittest import mock


def run_script(script: str | Path, *words: object) -> tuple[int, str, str]:
    """Status, standard output and standard error, as of a process of its own."""
    said, complaints = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(script), *map(str, words)]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(complaints),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            return status, said.getvalue(), complaints.getvalue()
    return 0, said.getvalue(), complaints.getvalue()
