"""From an item's name to result.json, table.md and a picture."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from experiments.paper.config import PaperConfig
from experiments.paper.items import ITEMS, listing
from remind.build.plan import versions
from remind.core.errors import ConfigError
from remind.core.files import read_json, write_json, write_text
from remind.core.run_folder import RunFolder
from remind.evaluation.run import machine

RESULT = "result.json"
_FORMAT = "remind-paper-item"


def paper(cfg: PaperConfig) -> None:
    """List the items, or make one and print its table.

    Raises:
        ConfigError: no such item, inputs that it lacks, or an `out` that holds another item.
        As the parts that an item is made of.
    """
    if cfg.action == "list":
        print(listing())
        return
    if cfg.item not in ITEMS:
        raise ConfigError(f"no item {cfg.item!r}; there are {', '.join(ITEMS)}")
    item = ITEMS[cfg.item]
    if cfg.out is None:
        raise ConfigError(f"{cfg.item} needs --out, a folder")
    item.check(cfg.item, cfg)
    out, form = Path(cfg.out), "small" if cfg.small else "full"
    if (out / RESULT).exists():
        before = read_json(out / RESULT)
        if not isinstance(before, dict) or (before.get("item"), before.get("form")) != (cfg.item, form):
            raise ConfigError(f"{out} holds the result of something else; choose another out")
    started = time.perf_counter()
    with RunFolder(out).held():
        result = item.make(cfg)
        kind = _kind(cfg) if "evaluate" in item.needs else None
        about = {"format": _FORMAT, "item": cfg.item, "title": item.title, "form": form, "seeds": list(cfg.seeds)}
        seconds = {"seconds": round(time.perf_counter() - started, 1)}
        context = {"config": asdict(cfg), "machine": machine("cpu"), "versions": versions()}
        head = f"# {item.title}\n\nForm: {form}. Seeds: {', '.join(map(str, cfg.seeds))}."
        head += f" Kind of question: {kind}." if kind else ""
        write_text(out / "table.md", f"{head}\n\n" + result.tables.rstrip() + "\n")
        if result.picture is not None:
            result.picture.save(out / f"{cfg.item}.png")
        write_json(out / RESULT, {**about, "kind_of_question": kind, **result.data, **seconds, **context})
    print(f"{result.tables.rstrip()}\n\n{out / RESULT}, {seconds['seconds']:.0f} s")


def _kind(cfg: PaperConfig) -> str:
    from experiments.paper.settings import kind_of_question

    return kind_of_question(cfg)
