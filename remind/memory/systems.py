"""The base of memory systems, and all of them by name: the one place that scripts and documents list them from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter, ValidationError

from remind.core.errors import ConfigError, shown
from remind.memory.base import System

#: Columns of `TABLE_1`: formats and measures as `remind evaluate` calls them.
_MEASURES = {
    "multi": ("accuracy", "memory_recall"),
    "single": ("accuracy", "memory_recall"),
    "direct": ("accuracy", "memory_recall", "bleu1", "f1"),
}
COLUMNS = tuple((kind, measure) for kind, measures in _MEASURES.items() for measure in measures)
#: Table 1 of the REMIND paper, in percent; None: not reported. All answers are Qwen3-VL-8B's or, of the memory systems
#: that are not trained, gpt-4o-mini's.
TABLE_1: Mapping[str, tuple[float | None, ...]] = {
    "Qwen3-VL-8B": (33.2, 45.0, 45.0, 37.8, 21.1, 37.9, 17.8, 21.3),
    "NaiveRAG": (33.6, 45.9, 47.6, 38.6, 19.8, 38.7, 17.0, 19.8),
    "MemGPT": (38.4, 41.4, 47.7, 39.3, 17.3, 34.3, 16.5, 19.3),
    "Mem0": (42.5, None, 48.5, None, 21.8, None, 17.5, 19.9),
    "MemoryOS": (41.2, 48.9, 53.1, 40.9, 19.0, 35.6, 18.6, 21.2),
    "LangMem": (41.2, None, 57.8, None, 21.1, None, 19.9, 22.3),
    "A-Mem": (46.3, 48.5, 57.4, 44.2, 22.9, 39.6, 16.4, 18.5),
    "LightMem": (48.3, 48.5, 56.9, 44.1, 23.2, 39.9, 20.1, 23.2),
    "GAM": (47.0, 46.2, 56.4, 41.4, 23.2, 36.8, 19.9, 23.0),
    "MemAgent-7B": (25.0, 40.6, 53.5, 43.9, 12.6, 29.7, 12.1, 14.2),
    "MEM1-7B": (19.8, 33.9, 49.2, 36.9, 12.7, 24.6, 10.7, 12.9),
    "Qwen3-VL-30B": (36.3, 46.0, 58.3, 40.5, 23.6, 40.4, 19.5, 22.4),
    "DS-Distill-Qwen-14B": (24.6, 43.8, 54.9, 45.7, 19.1, 39.1, 15.4, 18.8),
    "REMIND": (59.4, 58.1, 66.2, 52.3, 32.9, 55.4, 27.6, 30.4),
}


@dataclass(frozen=True)
class Listed:
    """A system that can be named.

    Attributes:
        kind: its class, as "module.Class" in this package; a dataclass whose fields are the options.
        help: one line.
        defaults: options that differ from those of the class.
        row: of `TABLE_1`; None: the paper has no such system.
        title: what tables call it; None: its name.
        replays: whether it takes, where no `annotations` are given, the LoCoMo file that is read for theirs.
    """

    kind: str
    help: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    row: str | None = None
    title: str | None = None
    replays: bool = False


SYSTEMS: Mapping[str, Listed] = {
    "dense": Listed("plain.PlainSystem", "turns by cosine of sentence vectors", {"method": "dense"}, row="NaiveRAG"),
    "bm25": Listed("plain.PlainSystem", "turns by BM25 over stems", {"method": "bm25"}),
    "hybrid": Listed("plain.PlainSystem", "turns by the sum of the z-scores of cosine and BM25", {"method": "hybrid"}),
    "round": Listed("plain.PlainSystem", "rounds by the cosine of all their words", {"unit": "round", "keys": "whole"}),
    "session": Listed("plain.PlainSystem", "sessions by the cosine of their best turn", {"unit": "session"}),
    "newest": Listed(
        "plain.PlainSystem", "the newest turns: what a model reads of a conversation itself", {"method": "newest"}
    ),
    "remind": Listed(
        "own.RemindSystem",
        "REMIND as printed: turns as retrieved for x0 by Eq. 1, segments by their cues",
        row="REMIND",
        title="REMIND as printed",
    ),
    "remind_recommended": Listed(
        "own.GroundedSystem",
        "REMIND as recommended: turns by hybrid retrieval and grounding fused with it, over the whole conversation",
        {
            "perception": {
                "retrieve": {"method": "hybrid", "top_share": 1.0, "max_context_tokens": None, "whole_tokens": 0}
            },
            "grounding": {
                "fuse": {},
                "anchor_codes": "question",
                "window": 0,
                "context_codes": "windowed",
                # all turns are marked, so that their salience ranks them
                "budget_tokens": 10**9,
                "budget_share": 1.0,
            },
        },
        row="REMIND",
        title="REMIND as recommended",
    ),
    "remind_hybrid": Listed(
        "own.RemindSystem",
        "an ablation: turns as retrieved for x0 by cosine and BM25, mixed with scores of neighbours; no grounding",
        {"perception": {"retrieve": {"method": "hybrid"}}},
    ),
    "remind_x1": Listed("own.GroundedSystem", "an ablation: the turns marked in x1, by salience; then as `remind`"),
    "lme": Listed(
        "longmemeval.LongMemEvalSystem",
        "LongMemEval's recommended design: rounds, found by words and user facts, and by time",
    ),
    "lme_round": Listed(
        "longmemeval.LongMemEvalSystem", "LongMemEval's rounds without expansion", {"expansion": "none", "time": "none"}
    ),
    "lme_facts": Listed(
        "longmemeval.LongMemEvalSystem",
        "turns found by words and by the facts that LoCoMo ships with",
        {"value": "turn", "source": "replay", "time": "none"},
        replays=True,
    ),
    "lme_time": Listed(
        "longmemeval.LongMemEvalSystem",
        "turns by cosine; turns outside the time named in the question (found by rules) come last",
        {"value": "turn", "expansion": "none", "time": "rules"},
    ),
    "mem0": Listed(
        "mem0.Mem0System", "Mem0 as published: facts are extracted, then added, updated or deleted", row="Mem0"
    ),
    "langmem": Listed(
        "langmem.LangMemSystem",
        "the package langmem: a manager adds, changes and deletes memories by tool calls",
        row="LangMem",
    ),
    "amem": Listed("amem.AMemSystem", "A-Mem: linked notes that evolve", row="A-Mem"),
    "gam": Listed(
        "gam.GAMSystem", "GAM: pages with abstracts, and a researcher who reads them for the question", row="GAM"
    ),
    "memagent": Listed(
        "trained.MemAgentSystem",
        "MemAgent: a memory written while the dialogue is read for the question",
        row="MemAgent-7B",
    ),
    "mem1": Listed("trained.Mem1System", "MEM1: an internal state, searches, and an answer of its own", row="MEM1-7B"),
    "lightmem": Listed(
        "lightmem.LightMemSystem",
        "LightMem: facts from topics that fill a short-term memory, updated at the end",
        row="LightMem",
    ),
    "memoryos": Listed(
        "memoryos.MemoryOSSystem",
        "MemoryOS: a queue of exchanges, segments with heat, and a long-term profile and knowledge",
        row="MemoryOS",
    ),
    "memgpt": Listed(
        "memgpt.MemGPTSystem",
        "MemGPT: a model that maintains core, archival and recall memory with tools, and answers by searching them",
        row="MemGPT",
    ),
    "rmm": Listed(
        "rmm.RmmSystem", "topics of each speaker, merged as sessions come, by a reranker that learns from citations"
    ),
    "rmm_lexical": Listed(
        "rmm.RmmSystem", "turns, the nearest 20 by z(learned score) + z(BM25)", {"source": "turns", "lexical": True}
    ),
    "rmm_residual": Listed(
        "rmm.RmmSystem",
        "turns, the best 20 of hybrid by their score plus what is learned",
        {"source": "turns", "reranker": {"candidates": "hybrid"}},
    ),
    "membuilder": Listed(
        "membuilder.MemBuilderSystem",
        "MemBuilder: a core block, events, knowledge and procedures, written by four roles of one policy",
    ),
    "salimory": Listed(
        "salimory.SaliMorySystem",
        "SaliMory: facts, preferences and a working memory of a week, summarised as a profile for the question",
    ),
}


#: Rows of `TABLE_1` by the names of systems and of the control that reads the whole conversation.
ROWS: Mapping[str, str | None] = {
    **{name: name for name in TABLE_1},
    "full_context": "Qwen3-VL-8B",
    **{one.title or name: one.row for name, one in SYSTEMS.items()},
}


def title(name: str) -> str:
    """What tables call a system."""
    return (SYSTEMS[name].title if name in SYSTEMS else None) or name


def make_system(system: str, options: Mapping[str, Any] | None = None, name: str | None = None) -> System:
    """A system with its defaults and these options; options that are groups are mappings themselves.

    Args:
        system: one of `SYSTEMS`.
        name: what it is called in reports, where it stands there with several settings; None: `system`.

    Raises:
        ConfigError: no such system or option, an option that is missing, or a value that it cannot have.
    """
    if system not in SYSTEMS:
        raise ConfigError(f"no memory system {shown(system)}; there are {', '.join(SYSTEMS)}")
    entry = SYSTEMS[system]
    module, _, kind = entry.kind.partition(".")
    values = _merged(entry.defaults, options or {})
    try:
        # imported when it is needed, and torch with it
        adapter: TypeAdapter[System] = TypeAdapter(getattr(import_module(f"{__package__}.{module}"), kind))
        made = adapter.validate_python({**values, "name": name or system})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (system, *first["loc"])))
        given = "" if first["type"] == "missing" else f", not {shown(first['input'])}"
        raise ConfigError(f"{place}: {first['msg']}{given}") from None
    _check_names(made, values, system)
    return made


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options given, and the defaults of all others, group by group."""
    merged = {**defaults, **given}
    for option in defaults.keys() & given.keys():
        if isinstance(defaults[option], Mapping) and isinstance(given[option], Mapping):
            merged[option] = _merged(defaults[option], given[option])
    return merged


def _check_names(made: Any, options: Mapping[str, Any], where: str) -> None:
    """Refuse options that a dataclass, or one in its fields, does not have, which pydantic passes over."""
    names = [one.name for one in fields(made) if one.name != "name"]
    for option, value in options.items():
        if option not in names:
            raise ConfigError(f"{where} has no option {shown(option)}; there are {', '.join(names)}")
        if isinstance(value, Mapping) and is_dataclass(inner := getattr(made, option)):
            _check_names(inner, value, f"{where}.{option}")
