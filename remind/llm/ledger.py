"""What was asked and what it cost: calls, tokens, USD and seconds per stage, per endpoint and in total."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remind.llm.endpoints import EndpointConfig
from remind.llm.request import Reply, Request

_SUMS = ("calls", "prompt_tokens", "completion_tokens", "cost_usd", "unknown_usage")


@dataclass(frozen=True)
class Exchange:
    """One request to a model and its reply.

    Attributes:
        key: the request's cache key, by which nothing is counted twice.
        reply: as it came, or as it was recorded; `calls`, tokens and seconds are what it cost then.
        cached: whether it was recorded before.
    """

    key: str
    reply: Reply
    cached: bool = False


class Ledger:
    """Costs of one run over all its endpoints. Threads may share it.

    With a cache the costs are those of the whole work, not of the last start: what a killed run paid for is counted
    when its replies are asked for again. `now` holds what this process paid itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._rows: list[dict[str, Any]] = []

    def add(self, request: Request, reply: Reply, exchanges: Sequence[Exchange], endpoint: EndpointConfig) -> None:
        """Count a reply and the exchanges it took; a recorded exchange counts once, however often it is read."""
        with self._lock:
            now = [one.reply for one in exchanges if not one.cached]
            before = [one.reply for one in exchanges if one.cached and one.key not in self._seen]
            self._seen.update(one.key for one in exchanges)
            timed = (now or before) and reply.failure in (None, "invalid")
            self._rows.append({
                "stage": request.stage,
                "endpoint": endpoint.title,
                "cached": reply.cached,
                "failure": reply.failure,
                "now": _paid(now, endpoint),
                "before": _paid(before, endpoint),
                "seconds": sum(one.seconds for one in (*now, *before)) if timed else None,
            })  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """`total`, and the same by stage and by endpoint, costs in USD.

        Seconds are per request that was answered, those of cached replies as first paid. `unknown_usage` is the number
        of replies whose tokens the server did not count; they are in no sum.
        """
        with self._lock:
            rows = list(self._rows)

        def grouped(field: str) -> dict[str, Any]:
            names = sorted({row[field] for row in rows})
            return {name: _summary([row for row in rows if row[field] == name]) for name in names}

        return {"total": _summary(rows), "stages": grouped("stage"), "endpoints": grouped("endpoint")}

    def take(self) -> list[dict[str, Any]]:
        """All that was counted, as JSON for `merge`; the ledger is empty then, but counts nothing a second time."""
        with self._lock:
            rows, self._rows = self._rows, []
            return rows

    def merge(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add what another ledger has counted."""
        with self._lock:
            self._rows += rows


def table(summary: Mapping[str, Any]) -> str:
    """The summary as lines of text, one per stage, then the total."""
    heads = f"{'requests':>9}{'cached':>8}{'failed':>8}{'calls':>8}{'tokens':>12}{'USD':>10}{'p50 s':>8}{'p95 s':>8}"
    lines = [f"{'stage':<10}{heads}"]
    for name, row in (*summary["stages"].items(), ("total", summary["total"])):
        tokens = row["prompt_tokens"] + row["completion_tokens"]
        times = "".join("       -" if value is None else f"{value:>8.2f}" for value in row["seconds"].values())
        counts = f"{row['requests']:>9}{row['cached']:>8}{sum(row['failures'].values()):>8}{row['calls']:>8}"
        lines.append(f"{name:<10}{counts}{tokens:>12}{row['cost_usd']:>10.4f}{times}")
    if unknown := summary["total"]["unknown_usage"]:
        lines.append(f"{unknown} replies came without a usable count of tokens; tokens and USD leave them out")
    return "\n".join(lines)


def _paid(replies: Sequence[Reply], endpoint: EndpointConfig) -> dict[str, Any]:
    calls, prompt_tokens, completion_tokens = (sum(getattr(one, name) for one in replies) for name in _SUMS[:3])
    cost = endpoint.cost(prompt_tokens, completion_tokens)
    unknown = sum(not one.usage_known for one in replies)
    return dict(zip(_SUMS, (calls, prompt_tokens, completion_tokens, cost, unknown), strict=True))


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # rows that lie in caches may be older than a sum
    now, before = ({name: sum(row[when].get(name, 0) for row in rows) for name in _SUMS} for when in ("now", "before"))
    seconds = sorted(row["seconds"] for row in rows if row["seconds"] is not None)
    return {
        "requests": len(rows),
        "cached": sum(row["cached"] for row in rows),
        "failures": dict(sorted(Counter(row["failure"] for row in rows if row["failure"]).items())),
        **{name: now[name] + before[name] for name in _SUMS},
        "now": now,
        "seconds": {f"p{percent}": _percentile(seconds, percent) for percent in (50, 95)},
    }


def _percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least `percent` % of the ordered values do not exceed (nearest rank)."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else None
