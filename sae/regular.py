"""The check before any file of a model, an SAE, states or a dialogue is opened; shared with the package `remind`."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from sae.errors import FormatError


def check_regular(path: str | Path, error: Callable[[str, str | Path], Exception] = FormatError) -> None:
    """Refuse, before it is opened, what is no regular file: a pipe is waited for, and a device may have no end.

    Args:
        error: makes the error that is raised from a message and the path.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise error("no such file", path) from None
    except (OSError, ValueError) as reason:  # ValueError: a NUL in the path
        raise error(f"cannot be read: {getattr(reason, 'strerror', None) or reason}", path) from None
    if not stat.S_ISREG(mode):
        what = "is a folder, a file was expected" if stat.S_ISDIR(mode) else "is not a regular file"
        raise error(what, path)
