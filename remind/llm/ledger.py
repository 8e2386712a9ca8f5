"""What was asked and what it cost: calls, tokens, USD and seconds per stage, per sample and in total."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from remind.llm.cache import Spent
from remind.llm.endpoints import EndpointConfig
from remind.llm.request import Reply, Request


@dataclass(frozen=True)
class Payment:
    """What one request to the server cost.

    Attributes:
        key: the request's cache key, by which nothing is counted twice.
        now: paid by this process.
        before: paid by earlier runs or other processes, as the cache recorded it.
    """

    key: str
    now: Spent
    before: Spent


@dataclass
class Account:
    """Sums over requests."""

    requests: int = 0
    cached: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    now: Spent = field(default_factory=Spent)
    before: Spent = field(default_factory=Spent)
    cost_now: float = 0.0
    cost_before: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Plain numbers. cost in USD; seconds per request that was answered, those of cached replies as first paid."""
        return {
            "requests": self.requests,
            "cached": self.cached,
            "failures": dict(sorted(self.failures.items())),
            **_sums(self.now + self.before, self.cost_now + self.cost_before),
            "now": _sums(self.now, self.cost_now),
            "seconds": {"p50": percentile(self.seconds, 50), "p95": percentile(self.seconds, 95)},
        }

    def dump(self) -> dict[str, Any]:
        """As JSON, for `merge`."""
        # asdict makes nonsense of a Counter
        return {**asdict(self), "failures": dict(self.failures)}

    def merge(self, dumped: Mapping[str, Any]) -> None:
        """Add what another account has counted."""
        self.requests += dumped["requests"]
        self.cached += dumped["cached"]
        self.failures.update(dumped["failures"])
        self.now += Spent(**dumped["now"])
        self.before += Spent(**dumped["before"])
        self.cost_now += dumped["cost_now"]
        self.cost_before += dumped["cost_before"]
        self.seconds += dumped["seconds"]


class Ledger:
    """Books of one run over all its endpoints. Threads may share it.

    With a cache the books are those of the whole work, not of the last start: what a killed run paid for is counted
    when its replies are asked for again. `now` holds what this process paid itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._total = Account()
        self._stages: dict[str, Account] = {}
        self._endpoints: dict[str, Account] = {}
        self._samples: dict[str, Account] = {}

    def add(self, request: Request, reply: Reply, payments: Sequence[Payment], endpoint: EndpointConfig) -> None:
        """Count a reply and what was paid for it."""
        with self._lock:
            accounts = [self._total]
            for table, name in (
                (self._stages, str(request.stage)),
                (self._endpoints, endpoint.title),
                (self._samples, request.sample),
            ):
                accounts.append(table.setdefault(name, Account()))
            for account in accounts:
                account.requests += 1
                account.cached += reply.cached
                if reply.failure:
                    account.failures[reply.failure] += 1
            fresh = [payment for payment in payments if payment.key not in self._seen]
            self._seen.update(payment.key for payment in payments)
            now = sum((payment.now for payment in payments), Spent())
            before = sum((payment.before for payment in fresh), Spent())
            seconds = now.seconds + before.seconds
            for account in accounts:
                account.now += now
                account.before += before
                account.cost_now += endpoint.cost(now.prompt_tokens, now.completion_tokens)
                account.cost_before += endpoint.cost(before.prompt_tokens, before.completion_tokens)
                if (now + before).calls and reply.failure in (None, "invalid"):
                    account.seconds.append(seconds)

    def summary(self) -> dict[str, Any]:
        """`total`, and the same by stage and by endpoint; `samples`: how many, and their mean and highest cost."""
        with self._lock:
            costs = [account.cost_now + account.cost_before for account in self._samples.values()]
            return {
                "total": self._total.summary(),
                "stages": {name: account.summary() for name, account in sorted(self._stages.items())},
                "endpoints": {name: account.summary() for name, account in sorted(self._endpoints.items())},
                "samples": {
                    "count": len(costs),
                    "cost_usd_mean": sum(costs) / len(costs) if costs else 0.0,
                    "cost_usd_max": max(costs, default=0.0),
                },
            }

    def take(self) -> dict[str, Any]:
        """All books as JSON, for `merge`; they are empty then, but what was counted once is not counted again."""
        with self._lock:
            found = {
                "total": self._total.dump(),
                **{name: {key: one.dump() for key, one in books.items()} for name, books in self._books().items()},
            }
            self._total = Account()
            for books in self._books().values():
                books.clear()
            return found

    def merge(self, taken: Mapping[str, Any]) -> None:
        """Add the books of another ledger."""
        with self._lock:
            self._total.merge(taken["total"])
            for name, books in self._books().items():
                for key, dumped in taken[name].items():
                    books.setdefault(key, Account()).merge(dumped)

    def _books(self) -> dict[str, dict[str, Account]]:
        return {"stages": self._stages, "endpoints": self._endpoints, "samples": self._samples}

    def samples(self) -> dict[str, dict[str, Any]]:
        """The sums of each sample, by its id."""
        with self._lock:
            return {name: account.summary() for name, account in self._samples.items()}


def table(summary: Mapping[str, Any]) -> str:
    """The summary as lines of text, one per stage, then the total."""
    heads = f"{'requests':>9}{'cached':>8}{'failed':>8}{'calls':>8}{'tokens':>12}{'USD':>10}{'p50 s':>8}{'p95 s':>8}"
    lines = [f"{'stage':<10}{heads}"]
    for name, row in (*summary["stages"].items(), ("total", summary["total"])):
        tokens = row["prompt_tokens"] + row["completion_tokens"]
        times = "".join("       -" if value is None else f"{value:>8.2f}" for value in row["seconds"].values())
        counts = f"{row['requests']:>9}{row['cached']:>8}{sum(row['failures'].values()):>8}{row['calls']:>8}"
        lines.append(f"{name:<10}{counts}{tokens:>12}{row['cost_usd']:>10.4f}{times}")
    return "\n".join(lines)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank); None of none."""
    if not values:
        return None
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def _sums(spent: Spent, cost: float) -> dict[str, Any]:
    return {
        "calls": spent.calls,
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": spent.completion_tokens,
        "cost_usd": cost,
    }
