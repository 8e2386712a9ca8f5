"""What was asked and what it cost: calls, tokens, USD and seconds by stage, endpoint, memory system and dialogue."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remind.core.errors import DataError
from remind.llm.endpoints import EndpointConfig
from remind.llm.request import Reply, Request

_SUMS = ("calls", "prompt_tokens", "completion_tokens", "cost_usd", "unknown_usage")
_EMBEDDINGS = ("calls", "texts", "tokens", "seconds")


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

    Args:
        path: JSON lines, one for each reply as it is counted. What an earlier process wrote there is counted as paid
            before, also where it is never asked for again. One process at a time.

    Raises:
        DataError: the file cannot be read or written, or holds something else.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self._lock = threading.Lock()
        # keys of requests, and with the system that asked
        self._seen: set[str] = set()
        self._asked: set[tuple[str, str]] = set()
        self._rows: list[dict[str, Any]] = []
        if self.path is not None:
            self._resume(self.path)

    def add(self, request: Request, reply: Reply, exchanges: Sequence[Exchange], endpoint: EndpointConfig) -> None:
        """Count a reply and the exchanges it took; a recorded exchange counts once, however often it is read.

        What another memory system has paid for counts once more as `shared`, which is in no sum of all systems.
        """
        with self._lock:
            now = [one.reply for one in exchanges if not one.cached]
            new = [one for one in exchanges if one.cached and (request.system, one.key) not in self._asked]
            before = [one.reply for one in new if one.key not in self._seen]
            shared = [one.reply for one in new if one.key in self._seen and request.system]
            # a request that failed was not paid for, and may be by another process
            keys = [one.key for one in exchanges if one.reply.failure is None]
            self._note(request.system, keys)
            spent = (*now, *before, *shared)
            row = {
                "stage": request.stage,
                "endpoint": endpoint.title,
                "system": request.system,
                "dialogue": request.dialogue,
                "cached": reply.cached,
                "failure": reply.failure,
                "now": _paid(now, endpoint),
                "before": _paid(before, endpoint),
                "shared": _paid(shared, endpoint),
                "seconds": sum(one.seconds for one in spent) if spent and reply.failure in (None, "invalid") else None,
            }
            self._add(row, keys)

    def paid(self, request: Request, key: str) -> None:
        """A reply to be recorded was paid for by this process; `add` will say more."""
        with self._lock:
            self._note(request.system, [key])

    def add_embeddings(
        self, system: str, dialogue: str, stage: str, encoder: str, texts: int, tokens: int, seconds: float
    ) -> None:
        """Count a call of the sentence encoder."""
        spent = dict(zip(_EMBEDDINGS, (1, texts, tokens, seconds), strict=True))
        with self._lock:
            place = {"stage": stage, "endpoint": encoder, "system": system, "dialogue": dialogue}
            self._add({**place, "embeddings": spent}, [])

    def summary(self) -> dict[str, Any]:
        """`total`, and the same by stage and by endpoint, costs in USD.

        Seconds are per request that was answered, those of cached replies as first paid. `unknown_usage` is the number
        of replies whose tokens the server did not count; they are in no sum.
        """
        with self._lock:
            rows = [row for row in self._rows if "embeddings" not in row]

        def grouped(field: str) -> dict[str, Any]:
            names = sorted({row[field] for row in rows})
            return {name: _summary([row for row in rows if row[field] == name]) for name in names}

        return {"total": _summary(rows), "stages": grouped("stage"), "endpoints": grouped("endpoint")}

    def groups(self, *names: str) -> list[dict[str, Any]]:
        """Costs by fields of a row: system, dialogue, stage, endpoint; none: one group of all.

        Returns:
            For each group in order its fields and the figures of `summary`, of which the sums are without `shared`;
            further `shared`, `seconds_in_all` of answered requests, and `embeddings` of the sentence encoder.
        """
        with self._lock:
            rows = list(self._rows)
        places: dict[tuple[str, ...], list[dict[str, Any]]] = {} if names else {(): []}
        for row in rows:
            places.setdefault(tuple(row.get(name, "") for name in names), []).append(row)
        result = []
        for place, members in sorted(places.items()):
            chats = [row for row in members if "embeddings" not in row]
            texts = [row["embeddings"] for row in members if "embeddings" in row]
            result.append({
                **dict(zip(names, place, strict=True)),
                **_summary(chats),
                "shared": _sums(chats, "shared"),
                "seconds_in_all": sum(row["seconds"] or 0.0 for row in chats),
                "embeddings": {name: sum(one[name] for one in texts) for name in _EMBEDDINGS},
            })  # fmt: skip
        return result

    def take(self) -> list[dict[str, Any]]:
        """All that was counted, as JSON for `merge`; the ledger is empty then, but counts nothing a second time."""
        with self._lock:
            rows, self._rows = self._rows, []
            return rows

    def merge(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add what another ledger has counted."""
        with self._lock:
            self._rows += rows

    def _note(self, system: str, keys: Sequence[str]) -> None:
        self._seen.update(keys)
        self._asked.update((system, key) for key in keys)

    def _add(self, row: dict[str, Any], keys: Sequence[str]) -> None:
        self._rows.append(row)
        if self.path is not None:
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**row, "keys": keys}) + "\n")
            except OSError as error:
                raise DataError(f"cannot be written: {error.strerror}", self.path) from None

    def _resume(self, path: Path) -> None:
        """Count what the file holds as paid before. A last line that a killed process left unfinished is removed."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.truncate(path, len(whole))
        except OSError as error:
            raise DataError(f"cannot be used: {error.strerror}", path) from None
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                self._note(row["system"], row.pop("keys"))
                if "embeddings" not in row:
                    row["before"] = {name: row["now"][name] + row["before"][name] for name in _SUMS}
                    row["now"] = dict.fromkeys(_SUMS, 0)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise DataError("is not a record of costs; choose another file", path, f"line {number}") from None
            self._rows.append(row)


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


def _sums(rows: Sequence[Mapping[str, Any]], when: str) -> dict[str, Any]:
    # rows that lie in caches may be older than a sum
    return {name: sum(row.get(when, {}).get(name, 0) for row in rows) for name in _SUMS}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    now, before = _sums(rows, "now"), _sums(rows, "before")
    seconds = sorted(row["seconds"] for row in rows if row["seconds"] is not None)
    return {
        "requests": len(rows),
        "cached": sum(row["cached"] for row in rows),
        "failures": dict(sorted(Counter(row["failure"] for row in rows if row["failure"]).items())),
        **{name: now[name] + before[name] for name in _SUMS},
        "now": now,
        "seconds": {f"p{percent}": percentile(seconds, percent) for percent in (50, 95)},
    }


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least `percent` % of the ordered values do not exceed (nearest rank)."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else None
