"""Self-contained HTML pages: one file with style, script and data inside that loads nothing else.

Text from data is safe in three ways: templates escape it, data is JSON in an element that is not run (`script_json`),
and a content security policy allows only the page's own script, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

if TYPE_CHECKING:
    from sae.probe import Example

_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def script_json(value: Any) -> Markup:
    """JSON that is safe inside a script element. Raises ValueError for numbers that are not finite."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(_UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def utf16(text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Offset of each character of `text`, and of its end, in UTF-16 units as browsers count; [len(text) + 1]."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return np.concatenate([[0], np.cumsum(1 + (codes > 0xFFFF))]).astype(np.int64)


def page(package: str, template: str, *parts: str, data: Any = None, pictures: bool = False, **values: Any) -> str:
    """Assemble the HTML of a page.

    Every page has the style and the script of this package: the theme, sortable tables, search and its keys.

    Args:
        package, template: the Jinja template, which extends "base.html.j2" of this package, or that one itself with
            `body`, HTML. Its globals: `words`, text kept apart from the direction of what is around it, and `number`.
        parts: the page's own files of the package, .css and .js, after base.css and common.js.
        data: JSON for the script, in the element `data`.
        pictures: whether images inside the page, as data: URLs, may be shown.
        values: variables of the template, among them `title`; every text is escaped.
    """
    texts = {".css": [_asset("sae.pages", "base.css")], ".js": [_asset("sae.pages", "common.js")]}
    for part in parts:
        texts[part[part.rindex(".") :]].append(_asset(package, part))
    script = "\n".join([*texts[".js"], 'document.documentElement.dataset.ready = "true";\n'])
    if "</script" in script.lower():
        raise ValueError("a page's script must not contain </script")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
    policy += f"form-action 'none'{'; img-src data:' if pictures else ''}"
    style = Markup("\n".join(texts[".css"]))
    text = section(
        package, template, **values, style=style, script=Markup(script), policy=policy, data=script_json(data)
    )
    return _SURROGATE.sub("\ufffd", text)


def data_of(html: str) -> Any:
    """The `data` of a page. Raises ValueError for other HTML."""
    found = re.search('id="data">(.*?)</script>', html)
    if found is None:
        raise ValueError("not a page")
    return json.loads(found[1])


def section(package: str, template: str, **values: Any) -> Markup:
    """A template of a package as HTML, for a place in a page."""
    return Markup(_environment(package).get_template(template).render(**values))


@cache
def _environment(package: str) -> Environment:
    loader = FunctionLoader(lambda name: _asset("sae.pages" if name == "base.html.j2" else package, name))
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"words": words, "number": number}
    return environment


def words(text: object) -> Markup:
    """Text whose direction is its own."""
    return Markup('<bdi dir="auto">{}</bdi>').format(text)


def _asset(package: str, name: str) -> str:
    return (files(package) / name).read_text(encoding="utf-8")


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with this many significant digits; None is a dash."""
    if value is None:
        return "–"
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text.replace("-", "−", 1) if text.startswith("-") else text


def digits(values: Any, largest: float) -> str:
    """Activations as digits 0 (inactive) to 9 (`largest` or more); anything active is at least 1."""
    array = np.asarray(values, dtype=np.float64)
    scaled = np.clip(np.ceil(9 * array / largest), 0, 9) if largest > 0 else np.zeros_like(array)
    return "".join(str(int(digit)) for digit in scaled)


class Snippets:
    """Texts around peaks, each stored once; `rows` are [text, ends of its tokens in UTF-16 units, label]."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._numbers: dict[tuple[int, int, str], int] = {}

    def put(self, example: Example, largest: float) -> list[Any]:
        """Add an example: [number of its snippet, peak token, digits of activation, those > 0, that at the peak]."""
        key = (example.source, example.position - example.peak, example.text)
        number = self._numbers.setdefault(key, len(self.rows))
        if number == len(self.rows):
            units = utf16(example.text)
            ends = [int(units[end]) for _, end in example.offsets]
            self.rows.append([example.text, ends, example.label or str(example.source)])
        active = [float(f"{value:.3g}") for value in example.values if value > 0]
        return [number, example.peak, digits(example.values, largest), active, round(example.value, 4)]
