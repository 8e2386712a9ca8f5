"""One colour for each of the three states, in every picture."""

from sae.figures import COLOURS

LEVEL_COLOURS = {"x0": COLOURS[0], "x1": COLOURS[4], "x2": COLOURS[2]}
LEVEL_SHAPES = {"x0": "o", "x1": "s", "x2": "^"}
