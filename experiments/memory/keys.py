"""What LongMemEval's keys, values and time ranges find of the gold evidence, without an LLM."""

from __future__ import annotations

import re
import tempfile
from calendar import month_name
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from torch import Tensor

from experiments.evidence.data import DialogueQuestions, load
from remind.build.plan import versions
from remind.core.cli import main
from remind.core.errors import ConfigError
from remind.core.files import input_hashes, write_json, write_text
from remind.core.progress import track
from remind.evaluation.statistics import bootstrap, paired_bootstrap
from remind.evaluation.tables import markdown_table
from remind.memory.base import Query, Retrieval, Services, System
from remind.memory.longmemeval import Join, LongMemEvalSystem
from remind.memory.plain import PlainSystem
from remind.models.encoder import SentenceEncoder
from sae.ranges import PositiveInt, check_ranges

_MONTH = re.compile(rf"\b(?:{'|'.join(month_name[1:])})\b")


@dataclass
class MemoryKeysConfig:
    """Evidence recall of LongMemEval's values, keys and time ranges."""

    data: list[str]
    """Dialogue files or folders with questions and gold evidence; each is a dataset of its own."""
    out: str
    """Folder for result.json and table.md."""
    annotations: str | None = None
    """LoCoMo's file, whose facts expand the keys of its dialogues; None: no such keys."""
    k: PositiveInt = 5
    """Memories retrieved."""
    budgets: tuple[PositiveInt, ...] = (800, 3200)
    """Tokens retrieved, in the vocabulary of the sentence encoder."""
    extractive: bool = True
    """Also expand keys by key sentences of the dialogue."""
    limit: PositiveInt | None = None
    """At most this many questions per dialogue, the first ones; for a quick look."""
    resamples: PositiveInt = 2000
    """Of the bootstrap over dialogues."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


class HoldingEncoder(SentenceEncoder):
    """Encodes each text once for all systems; vectors can differ in the last bits from those of a single system."""

    def encode_apart(self, texts: Any) -> Tensor:
        return self.encode(texts)


@dataclass(frozen=True)
class Found:
    """What one system finds for the questions of a dataset.

    Attributes:
        recall, tokens: by cell ("@5", "800 tokens"), of each question [n].
        ids: by cell, the memories of each question.
    """

    recall: dict[str, list[float]]
    tokens: dict[str, list[float]]
    ids: dict[str, list[tuple[str, ...]]]


def systems(annotated: str | None, extractive: bool) -> dict[str, System]:
    """By name as in the table."""
    found: dict[str, System] = {unit: PlainSystem(unit, unit) for unit in ("turn", "round", "session")}
    found["turn, time"] = LongMemEvalSystem(value="turn", expansion="none", time="rules")
    if annotated is not None:
        replay: dict[str, Any] = {"source": "replay", "annotations": annotated, "time": "none"}
        for join in get_args(Join):
            found[f"turn + facts, {join}"] = LongMemEvalSystem(value="turn", join=join, **replay)
        found["turn + facts, merge, time"] = LongMemEvalSystem(value="turn", **replay | {"time": "rules"})
        found["round + facts, merge"] = LongMemEvalSystem(value="round", **replay)
        found["facts alone"] = LongMemEvalSystem(value="fact", **replay)
    if extractive:
        found["turn + key sentences, merge"] = LongMemEvalSystem(value="turn", source="extractive", time="none")
    return found


def memory_keys(cfg: MemoryKeysConfig) -> dict[str, Any]:
    """Run, write result.json and table.md, print the table; the result is also returned.

    Raises:
        DataError, FormatError: data that cannot be read.
        ConfigError: a dataset without gold evidence.
    """
    asked, facts = load(cfg.data, cfg.limit)
    services = Services(HoldingEncoder())
    result: dict[str, Any] = {"rows": [], "paired": [], "months": [], "data": facts}
    for dataset in dict.fromkeys(one.dataset for one in asked):
        here = [one for one in asked if one.dataset == dataset]
        found = {}
        annotated = cfg.annotations if dataset == "locomo" else None
        chosen = systems(annotated, cfg.extractive)
        for name, system in track(chosen.items(), dataset, len(chosen)):
            found[name] = measure(system, here, services, cfg)
        dialogues = [one.dialogue.id for one in here for _ in one.questions]
        questions = [question.text for one in here for question in one.questions]
        result["rows"] += list(_rows(dataset, found, dialogues, cfg))
        result["paired"] += list(_paired(dataset, found, dialogues, cfg))
        result["months"] += list(_months(dataset, found, questions, dialogues, cfg))
    paths = [*cfg.data, *([cfg.annotations] if cfg.annotations else [])]
    result |= {"config": asdict(cfg), "hashes": input_hashes(paths), "versions": versions()}
    out = Path(cfg.out)
    text = table(result)
    write_json(out / "result.json", result)
    write_text(out / "table.md", text)
    print(text)
    return result


def measure(system: System, asked: list[DialogueQuestions], services: Services, cfg: MemoryKeysConfig) -> Found:
    """Share of each question's gold turns among the sources of what is retrieved, all categories alike."""
    cells: dict[str, dict[str, int]] = {f"@{cfg.k}": {"k": cfg.k}}
    cells |= {f"{budget} tokens": {"budget": budget} for budget in cfg.budgets}
    found = Found({cell: [] for cell in cells}, {cell: [] for cell in cells}, {cell: [] for cell in cells})
    for one in asked:
        with (
            tempfile.TemporaryDirectory() as folder,
            system.open(Path(folder) / "bank", one.dialogue.id, services) as bank,
        ):
            for session in one.dialogue.sessions:
                bank.ingest(session)
            bank.finish()
            for question, gold in zip(one.questions, one.gold, strict=True):
                wanted = {one.dialogue.turns[place].id for place in gold.tolist()}
                for cell, limits in cells.items():
                    retrieval = bank.retrieve(Query.of(question), **limits)
                    found.recall[cell].append(len(wanted & _sources(retrieval)) / len(wanted))
                    found.tokens[cell].append(float(retrieval.tokens))
                    found.ids[cell].append(tuple(memory.id for memory in retrieval.memories))
    return found


def _sources(retrieval: Retrieval) -> set[str]:
    return {source for memory in retrieval.memories for source in memory.sources or ()}


def _rows(
    dataset: str, found: Mapping[str, Found], dialogues: list[str], cfg: MemoryKeysConfig
) -> Iterator[dict[str, Any]]:
    for name, one in found.items():
        for cell, values in one.recall.items():
            estimate = bootstrap(values, cfg.resamples, clusters=dialogues)
            tokens = float(np.mean(one.tokens[cell]))
            yield {"dataset": dataset, "system": name, "at": cell, "tokens": tokens, **dict(estimate or {})}


def _paired(
    dataset: str, found: Mapping[str, Found], dialogues: list[str], cfg: MemoryKeysConfig
) -> Iterator[dict[str, Any]]:
    pairs = [("round", "session"), *((name, "turn") for name in found if name.startswith(("turn +", "turn,")))]
    pairs += [("turn + facts, merge, time", "turn + facts, merge")] * ("turn + facts, merge" in found)
    for name, minus in pairs:
        for cell in found[name].recall:
            gain = paired_bootstrap(found[minus].recall[cell], found[name].recall[cell], dialogues, cfg.resamples)
            yield {"dataset": dataset, "system": name, "minus": minus, "at": cell, **dict(gain or {})}


def _months(
    dataset: str, found: Mapping[str, Found], questions: list[str], dialogues: list[str], cfg: MemoryKeysConfig
) -> Iterator[dict[str, Any]]:
    """The gain of time ranges by whether the question names a month, and how many rankings they leave alone."""
    for name, minus in (("turn, time", "turn"), ("turn + facts, merge, time", "turn + facts, merge")):
        if name not in found:
            continue
        for group, named in (("names a month", True), ("names none", False)):
            chosen = [place for place, text in enumerate(questions) if bool(_MONTH.search(text)) is named]
            if not chosen:
                continue
            for cell in found[name].recall:
                first, second = ([found[side].recall[cell][place] for place in chosen] for side in (minus, name))
                same = sum(found[name].ids[cell][place] == found[minus].ids[cell][place] for place in chosen)
                gain = paired_bootstrap(first, second, [dialogues[place] for place in chosen], cfg.resamples)
                about = {"dataset": dataset, "system": name, "minus": minus, "questions": group, "at": cell}
                yield {**about, "same": same, **dict(gain or {})}


def table(result: Mapping[str, Any]) -> str:
    """Recall with its tokens, then the differences."""
    heads = ("dataset", "system", "at")
    recall = [
        (*map(row.get, heads), f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]", f"{row['tokens']:.0f}")
        for row in result["rows"]
    ]
    differences = []
    for row in [*result["paired"], *result["months"]]:
        group = f"{row['questions']}: {row['n']}, {row['same']} unchanged" if "questions" in row else "all"
        spread = "" if row["low"] is None else f" [{row['low']:+.3f}, {row['high']:+.3f}]"
        figure = f"{row['first']:.3f} → {row['second']:.3f}: {row['value']:+.3f}{spread}"
        differences.append([row["dataset"], row["system"], row["minus"], group, row["at"], figure])
    tables = [markdown_table([*heads, "recall", "tokens"], recall)]
    tables.append(markdown_table(["dataset", "system", "less", "questions", "at", "difference"], differences))
    return "\n".join(tables)


if __name__ == "__main__":
    main(MemoryKeysConfig, memory_keys, __doc__)
