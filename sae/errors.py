"""Typed errors of the package. Each message is one line that says what is wrong, where, and what to do."""

from __future__ import annotations

from pathlib import Path


class SAEError(Exception):
    """Base of every error the package raises on purpose."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(SAEError, ValueError):
    """Settings that cannot be used: a value out of range, or parts that do not fit together."""


class LayerError(SAEError):
    """A layer the model does not have, or a model whose blocks cannot be found."""


class ShapeError(SAEError):
    """A tensor whose shape does not fit."""


class ActivationError(SAEError):
    """Activations that cannot be used: not finite, or none at all."""


class FileError(SAEError):
    """What is wrong with the file or folder `path`."""

    def __init__(self, message: str, path: str | Path) -> None:
        super().__init__(f"{path}: {message}")
        self.path = Path(path)


class FormatError(FileError):
    """A file or folder that is missing, damaged, or of another kind than expected."""


class StorageError(FileError, OSError):
    """A file that could not be written: no space, no permission, a limit of the system."""
