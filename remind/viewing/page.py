"""HTML that a notebook shows: coloured tokens and tables. All text is escaped; nothing in it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from remind.core.files import write_text

#: R, G, B of what is shaded; the page's own colours stay, so that it can be read in dark and in light.
ORANGE, BLUE = (230, 159, 0), (0, 114, 178)


class Page:
    """A piece of HTML. The last line of a notebook's cell shows it; `+` joins two; `save` writes a file to open.

    Attributes:
        html: what is shown.
        text: the same in words, for a terminal.
    """

    def __init__(self, html: str, text: str = "") -> None:
        self.html, self.text = html, text

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text or "Page"

    def __add__(self, other: Page) -> Page:
        return Page(self.html + other.html, f"{self.text}\n{other.text}")

    def save(self, path: str | Path) -> Path:
        """Write it as an HTML file."""
        head = '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        write_text(path, f'{head}<body style="font-family:system-ui,sans-serif">{self.html}</body>\n')
        return Path(path)


def shaded(pieces: Iterable[tuple[str, float, str]], colour: tuple[int, int, int] = ORANGE) -> str:
    """Pieces of text on a ground as strong as their shade.

    Args:
        pieces: text, shade from 0 to 1, and what stands in the tooltip.
    """
    red, green, blue = colour
    out = []
    for text, shade, tip in pieces:
        body, title = escape(text), f' title="{escape(tip)}"' if tip else ""
        strength = min(1.0, max(0.0, shade)) * 0.65
        style = (
            f' style="background:rgba({red},{green},{blue},{strength:.2f});border-radius:2px"'
            if strength > 0.01
            else ""
        )
        out.append(f"<span{style}{title}>{body}</span>" if style or title else body)
    return "".join(out)


def paragraph(html: str, marked: bool = False, faint: bool = False) -> str:
    """A line of a dialogue; a bar stands beside what is marked."""
    edge = "3px solid rgb(230,159,0)" if marked else "3px solid transparent"
    style = f"border-left:{edge};padding:1px 0 1px 8px;margin:0;white-space:pre-wrap;unicode-bidi:plaintext"
    return f'<p style="{style}{";opacity:.6" if faint else ""}">{html}</p>'


def heading(text: str) -> str:
    return f'<p style="margin:8px 0 4px;font-weight:600;unicode-bidi:plaintext">{escape(text)}</p>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML, column heads text. Only the last column breaks its lines."""
    cell = 'style="text-align:left;vertical-align:top;padding:2px 12px 2px 0;white-space:nowrap"'
    wide = cell.replace("nowrap", "normal")
    top = "".join(f"<th {cell}>{escape(name)}</th>" for name in head)
    lines = [
        "".join(f"<td {wide if place == len(head) - 1 else cell}>{one}</td>" for place, one in enumerate(row))
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    style = "border-collapse:collapse;font-size:90%"
    return f'<table style="{style}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
