"""What was asked and what it cost: calls, tokens, USD and seconds by stage and endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from remind.llm.endpoints import EndpointConfig
from remind.llm.request import Reply, Request

SUMS = ("calls", "prompt_tokens", "completion_tokens", "cost_usd", "unknown_usage")


class Ledger:
    """Costs of one run over all its endpoints: a row for each reply. Threads may share it.

    Sums take every answered request once, however often and by whom it was asked. So with a cache they are those of
    the whole work, not of the last start: what a killed run paid is counted when its replies are asked for again.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, request: Request, reply: Reply, endpoint: EndpointConfig) -> None:
        """Count a reply; its calls, tokens and seconds are what it cost when it was paid for."""
        tokens = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
        # a failed request is asked again and counted again, but for others with the same words
        answered = reply.failure in (None, "invalid")
        self._rows.append({
            "stage": request.stage, "endpoint": endpoint.title, "system": request.system, "dialogue": request.dialogue,
            "key": reply.key if answered else None, "cached": reply.cached, "failure": reply.failure,
            "calls": reply.calls if answered or not reply.cached else 0, **tokens, "cost_usd": endpoint.cost(**tokens),
            "unknown_usage": int(answered and not reply.prompt_tokens), "seconds": reply.seconds,
        })  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """`total`, and the same by stage and by endpoint, as `groups` has them."""
        (total,) = self.groups()
        stages, places = ({row[name]: row for row in self.groups(name)} for name in ("stage", "endpoint"))
        return {"total": total, "stages": stages, "endpoints": places}

    def groups(self, *names: str) -> list[dict[str, Any]]:
        """Costs by fields of a row: system, dialogue, stage, endpoint; none: one group of all.

        Returns:
            For each group in order its fields, counts of requests, sums of tokens and USD, of which `now` was paid by
            this process, and percentiles of the seconds of answered requests, of cached ones as first paid.
            `unknown_usage` is the number of replies whose tokens the server did not count; they are in no sum. What
            several groups ask for is in each of them.
        """
        places: dict[tuple[str, ...], list[dict[str, Any]]] = {} if names else {(): []}
        for row in list(self._rows):
            places.setdefault(tuple(row[name] for name in names), []).append(row)
        return [{**dict(zip(names, place, strict=True)), **_sums(own)} for place, own in sorted(places.items())]

    def take(self) -> list[dict[str, Any]]:
        """All that was counted, as JSON for `merge`; the ledger is empty then."""
        rows, self._rows = self._rows, []
        return rows

    def merge(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add what another ledger has counted."""
        self._rows += rows


def table(summary: Mapping[str, Any], dry: bool = False) -> str:
    """The summary as lines of text, one per stage, then the total; of a dry run what would be paid now, at most."""
    heads = ("requests", "cached", "failed", "calls", "prompt", "reply", "USD", "p50 s", "p95 s")
    lines = [f"{'stage':<10}" + "".join(f"{head:>10}" for head in heads)]
    for name, row in (*summary["stages"].items(), ("total", summary["total"])):
        paid = row["now"] if dry else row
        counts = (row["requests"], row["cached"], sum(row["failures"].values()), paid["calls"])
        times = ("-" if value is None else f"{value:.2f}" for value in row["seconds"].values())
        cells = (*counts, paid["prompt_tokens"], paid["completion_tokens"], f"{paid['cost_usd']:.4f}", *times)
        lines.append(f"{name:<10}" + "".join(f"{cell:>10}" for cell in cells))
    if unknown := summary["total"]["unknown_usage"]:
        lines.append(f"{unknown} replies came without a usable count of tokens; tokens and USD leave them out")
    return "\n".join(lines)


def _sums(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    answered = {row["key"]: row for row in rows if row["key"] is not None}.values()
    spent = [*answered, *(row for row in rows if row["key"] is None)]
    now = [row for row in rows if not row["cached"]]
    seconds = [row["seconds"] for row in answered]
    return {
        "requests": len(rows),
        "cached": sum(row["cached"] for row in rows),
        "failures": dict(sorted(Counter(row["failure"] for row in rows if row["failure"]).items())),
        **{name: sum(row[name] for row in spent) for name in SUMS},
        "now": {name: sum(row[name] for row in now) for name in SUMS},
        "seconds": {f"p{percent}": percentile(seconds, percent) for percent in (50, 95)},
    }


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank); None: of no values."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if values else None
