"""Pages that open from disk: one HTML file with style, script and data inside, and nothing fetched.

Text is safe in three ways: templates escape it, data stands in a block that is no script, and a content security policy
lets only the page's own script run, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

#: Shades of `--v1` to `--v8` in base.css, faint to strong.
SHADES = 8
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def script_json(value: Any) -> Markup:
    """JSON that may stand inside `<script type="application/json">`, whatever strings it holds.

    Raises:
        ValueError: a number that is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(_UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", text))


def packed(values: Any, dtype: str) -> str:
    """Numbers as base64 of little-endian `dtype` (f4, u1, u2, u4), which `unpack` of common.js reads."""
    return base64.b64encode(np.ascontiguousarray(values, dtype=f"<{dtype}").tobytes()).decode("ascii")


def asset(package: str, name: str) -> str:
    """A file of a package, as text."""
    return (files(package) / name).read_text(encoding="utf-8")


def utf16(text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each character of `text` starts in a browser, which counts UTF-16 units; [len(text) + 1]."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return np.concatenate([[0], np.cumsum(1 + (codes > 0xFFFF))]).astype(np.int64)


def page(
    package: str,
    template: str,
    *,
    scripts: Sequence[tuple[str, str]] = (),
    styles: Sequence[tuple[str, str]] = (),
    data: Any = None,
    pictures: bool = False,
    **values: Any,
) -> str:
    """The HTML of a page.

    Args:
        package, template: the Jinja template, which extends "base.html.j2" of this package.
        scripts, styles: pairs of package and file that go in after common.js and base.css.
        data: JSON for the script, in the element `data`.
        pictures: whether images that stand in the page itself, as data: URLs, may be shown.
        values: what the template reads; every text is escaped.
    """
    script = _joined((("sae.pages", "common.js"), *scripts))
    if "</script" in script.lower():
        raise ValueError("a page's script must not spell the end of a script element")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    text = (
        _environment(package)
        .get_template(template)
        .render(
            style=Markup(_joined((("sae.pages", "base.css"), *styles))),
            script=Markup(script),
            policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
            f"form-action 'none'{'; img-src data:' if pictures else ''}",
            data=script_json(data),
            **values,
        )
    )
    return _SURROGATE.sub("\ufffd", text)


def _joined(parts: Sequence[tuple[str, str]]) -> str:
    return "\n" + "\n".join(asset(*part).strip() for part in parts) + "\n"


@cache
def _environment(package: str) -> Environment:
    def load(name: str) -> str:
        return asset("sae.pages" if name == "base.html.j2" else package, name)

    environment = Environment(
        loader=FunctionLoader(load), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    return environment


def number(value: float | None, digits: int = 3) -> str:
    """A figure with so many significant digits; a dash where there is none."""
    if value is None:
        return "–"
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text.replace("-", "−", 1) if text.startswith("-") else text
