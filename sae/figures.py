"""Matplotlib figures that need no display and that notebooks show."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from sae.files import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, distinguishable for the colour-blind.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#E69F00", "#D55E00", "#000000", "#F0E442")
_DPI = 110


class Picture:
    """A matplotlib `figure` that notebooks show; `save` writes it as PNG, SVG or PDF, by the file's name."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def save(self, path: str | Path, dpi: int = 150) -> Path:
        """Write the figure atomically; returns the path. Raises ValueError for a format matplotlib does not have."""
        path = Path(path)
        with atomic(path) as temporary:
            self.figure.savefig(temporary, format=path.suffix[1:] or "png", dpi=dpi, bbox_inches="tight")
        return path

    def svg(self) -> str:
        """The figure as an element of an HTML page, whose ink, in light and dark, takes the place of black."""
        from matplotlib import rc_context

        out = io.StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "remind"}):
            self.figure.savefig(out, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        drawn = out.getvalue()
        return re.sub("(fill|stroke): #000000", r"\1: currentColor", drawn[drawn.index("<svg") :])

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.figure.savefig(out, format="png", dpi=_DPI, bbox_inches="tight")
        return out.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
