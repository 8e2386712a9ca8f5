"""Which turns are marked: selection, window, blocks (Section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from torch import Tensor

from remind.core.errors import ConfigError


def select_blocks(
    salience: Tensor | Sequence[float],
    turn_tokens: Tensor | Sequence[int],
    budget: float | None = None,
    threshold: float | None = None,
    window: int = 1,
    run: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """Blocks B_i of Section 4.3: salient turns with their windows, neighbours merged.

    With a budget, turns are taken by falling salience (ties: the earlier first). Each adds itself and its window; only
    turns not yet taken cost tokens, and the first addition that would pass the budget ends the selection. With a
    threshold δ, every turn with salience above it is taken, plus its window. A turn of salience -inf is never taken on
    its own account, but may be in the window of another.

    Args:
        salience: s_turn [n_turns].
        turn_tokens: length of each turn in tokens [n_turns].
        budget: tokens the blocks may hold in all.
        threshold: δ.
        window: w, turns on either side of a taken one.
        run: run number of each turn; windows and blocks stay within one. None: all turns follow one another.

    Returns:
        Inclusive turn ranges, ascending and disjoint; no two of one run touch.

    Raises:
        ConfigError: not exactly one of budget and threshold, a negative budget, window or length, NaN, lengths that
            differ.
    """
    scores = salience.tolist() if isinstance(salience, Tensor) else [float(value) for value in salience]
    lengths = [int(value) for value in turn_tokens]
    runs = [0] * len(scores) if run is None else list(run)
    if len(lengths) != len(scores) or len(runs) != len(scores):
        raise ConfigError(f"{len(scores)} saliences, {len(lengths)} turn lengths and {len(runs)} run numbers")
    if (budget is None) == (threshold is None):
        raise ConfigError("give exactly one of budget and threshold")
    if any(value is not None and value != value for value in (budget, threshold, *scores)):
        raise ConfigError("salience, budget or threshold is NaN")
    if window < 0 or min(lengths, default=0) < 0 or (budget is not None and budget < 0):
        raise ConfigError("budget, window and turn lengths must be 0 or more")

    def around(turn: int) -> list[int]:
        before = takewhile(lambda other: runs[other] == runs[turn], range(turn, max(-1, turn - window - 1), -1))
        after = takewhile(lambda other: runs[other] == runs[turn], range(turn + 1, min(len(scores), turn + window + 1)))
        return [*before, *after]

    candidates = [turn for turn, score in enumerate(scores) if score != float("-inf")]
    taken: set[int] = set()
    if threshold is not None:
        taken.update(other for turn in candidates if scores[turn] > threshold for other in around(turn))
    else:
        assert budget is not None
        used = 0
        for turn in sorted(candidates, key=lambda turn: -scores[turn]):
            new = [other for other in around(turn) if other not in taken]
            used += sum(lengths[other] for other in new)
            if used > budget:
                break
            taken.update(new)
    blocks: list[tuple[int, int]] = []
    for turn in sorted(taken):
        if blocks and blocks[-1][1] == turn - 1 and runs[turn - 1] == runs[turn]:
            blocks[-1] = (blocks[-1][0], turn)
        else:
            blocks.append((turn, turn))
    return blocks
