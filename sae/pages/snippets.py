"""Top examples in the compact form pages carry them in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sae.pages import utf16

if TYPE_CHECKING:
    from sae.probe import Example, TopExamples


def digits(values: Any, largest: float) -> str:
    """Activations as digits 0 (inactive) to 9 (`largest` or more); anything active is at least 1."""
    given = np.asarray(values, dtype=np.float64)
    scaled = np.clip(np.ceil(9 * given / largest), 0, 9) if largest > 0 else np.zeros_like(given)
    return "".join(str(int(digit)) for digit in scaled)


class Snippets:
    """Texts around peaks, each kept once however many features peak there.

    Attributes:
        rows: [text, ends of its tokens in UTF-16 units, label].
    """

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._known: dict[tuple[int, int, str], int] = {}

    def put(self, example: Example, largest: float) -> list[Any]:
        """[number of the snippet, its peak token, digits of activation, activation at the peak]."""
        key = (example.source, example.position - example.peak, example.text)
        number = self._known.setdefault(key, len(self.rows))
        if number == len(self.rows):
            units = utf16(example.text)
            ends = [int(units[end]) for _, end in example.offsets]
            self.rows.append([example.text, ends, example.label or str(example.source)])
        return [number, example.peak, digits(example.values, largest), round(example.value, 4)]

    def of_feature(self, examples: TopExamples, feature: int, most: int) -> list[list[Any]]:
        """The feature's first `most` examples, as `put` gives them."""
        found = examples.examples(feature, most)
        return [self.put(one, found[0].value) for one in found]
