"""The config of a run, as its folder keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

CONFIG = "config.yaml"


def as_dict(cfg: Any) -> dict[str, Any]:
    """A config as plain dicts, lists and scalars."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(cfg)))
    return values


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts with dotted keys; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
