"""How much gold evidence x0 holds: Eq. 1 and the hybrid against retrieval of single turns at equal tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from torch import Tensor

from benchmarks.measure import about, headline
from experiments.evidence.data import gold_turns
from remind.core.errors import ConfigError
from remind.core.files import write_json
from remind.core.progress import track
from remind.data.dialogue import Corpus, Question
from remind.data.readers import read
from remind.llm.auxiliary import OfflineLLM
from remind.models.encoder import SentenceEncoder
from remind.perception import Perception, PerceptionConfig
from remind.perception.perceive import DialogueIndex, relevance, retrieve
from remind.states.pyramid import Segment
from remind.text.words import stems

METHODS = ("cue", "hybrid", "turns", "bm25", "dense")
_LEGEND = """cue: Eq. 1 as it stands; hybrid: method "hybrid", within the tokens cue spends.
turns: single turns of the whole dialogue by the summed z-scores of BM25 and the cosine, until the tokens of hybrid's
turns are spent, the turn that passes them included; bm25, dense: the same by one of the two. Session headings and gap
lines are charged to hybrid, not to the last three."""


@dataclass
class BenchRetrievalConfig:
    """Compare retrieval methods by the share of gold evidence turns they find."""

    input: str | list[str]
    """Dialogue files or folders with questions and gold evidence; each is a dataset of its own in the table."""
    perception: PerceptionConfig = field(default_factory=PerceptionConfig)
    """Segments, cues, retrieval. retrieve.method is ignored: both are run."""
    cache: str = "~/.cache/remind"
    """Folder for dialogue indexes; safe to delete."""
    out: str | None = None
    """JSON file for the table; None: it is only printed."""
    limit: int | None = None
    """At most this many questions per dialogue, the first ones; for a quick look."""
    device: str = "cpu"
    """Device of the text encoder."""


@dataclass(frozen=True)
class Row:
    """One question: its category, evidence recall and turn tokens of each method, milliseconds the hybrid took."""

    category: str
    recall: dict[str, float]
    tokens: dict[str, int]
    milliseconds: float


def bench_retrieval(cfg: BenchRetrievalConfig) -> dict[str, dict[str, dict[str, float]]]:
    """Run, print and return the table: dataset → category ("all" last) → figures.

    Raises:
        ConfigError: an input without gold evidence.
    """
    paths = [cfg.input] if isinstance(cfg.input, str) else list(cfg.input)
    corpora = [(path, read(path)) for path in paths]
    encoder = SentenceEncoder(device=cfg.device)
    perception = Perception(cfg.perception, encoder, OfflineLLM(), Path(cfg.cache).expanduser() / "index")
    tables = {}
    print(f"{headline(about('torch', 'sentence-transformers', 'bm25s'))}\n{_LEGEND}")
    for path, corpus in corpora:
        rows = list(bench_corpus(corpus, perception, cfg.limit))
        if not rows:
            raise ConfigError(f"{path} has no question with gold evidence")
        table = tabulate(rows)
        tables[Path(path).name] = table
        asked = f"{len(corpus.questions)} questions, {len(rows)} with evidence"
        print(f"\n{path}: {len(corpus.dialogues)} dialogues, {asked}")
        print(f"{len(corpus.dangling)} of {corpus.references} references name no turn and are left out")
        print(f"{'category':<32}{'n':>6}" + "".join(f"{name:>9}" for name in METHODS) + "   hybrid - turns")
        for category, line in table.items():
            figures = "".join(f"{line[name]:>9.3f}" for name in METHODS)
            print(f"{category:<32}{line['n']:>6.0f}{figures}   {line['gain']:+.3f} ± {line['gain_95']:.3f}")
        spent = "".join(f"{np.mean([row.tokens[name] for row in rows]):>9.0f}" for name in METHODS)
        print(f"{'turn tokens, mean':<38}{spent}")
        print(f"hybrid, question encoded: {np.mean([row.milliseconds for row in rows]):.1f} ms per question")
    if cfg.out is not None:
        write_json(cfg.out, tables)
    return tables


def bench_corpus(corpus: Corpus, perception: Perception, limit: int | None = None) -> list[Row]:
    """A row per question that has gold evidence in its dialogue."""
    rows = []
    for dialogue, questions in corpus.by_dialogue():
        asked = [question for question in questions if len(gold_turns(dialogue, question))][:limit]
        if not asked:
            continue
        index = perception.index(dialogue)
        vectors = perception.encoder.encode([question.text for question in asked])
        for question, vector in track(list(zip(asked, vectors, strict=True)), f"retrieve {dialogue.id}", len(asked)):
            rows.append(_row(index, question, vector, perception.config))
    return rows


def _row(index: DialogueIndex, question: Question, vector: Tensor, config: PerceptionConfig) -> Row:
    def positions(segments: Sequence[Segment]) -> list[int]:
        return [p for part in segments for p in range(part.start, part.end + 1)]

    found: dict[str, list[int]] = {}
    for method in ("cue", "hybrid"):
        started = perf_counter()
        chosen = replace(config.retrieve, method=method)
        found[method] = positions(retrieve(index, question.text, vector, question.dimension, chosen).segments)
        milliseconds = 1000 * (perf_counter() - started)
    costs = np.asarray(index.costs.turns)
    lexical = index.bm25.scores(stems(question.text))
    dense = relevance(vector, index.vectors)
    budget = int(costs[found["hybrid"]].sum())
    for method, scores in (("turns", _z(lexical) + _z(dense)), ("bm25", lexical), ("dense", dense)):
        order = np.argsort(-scores, kind="stable")
        found[method] = order[: int(np.searchsorted(np.cumsum(costs[order]), budget)) + 1].tolist()
    gold = set(gold_turns(index.dialogue, question).tolist())
    return Row(
        category=str(question.dimension or question.category or "none"),
        recall={name: len(gold & set(kept)) / len(gold) for name, kept in found.items()},
        tokens={name: int(costs[kept].sum()) for name, kept in found.items()},
        milliseconds=milliseconds,
    )


def _z(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / max(float(values.std()), 1e-9)


def tabulate(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Mean recall of every method by category, then over all; gain: hybrid less turns, with 1.96 standard errors."""
    table = {}
    for category in [*sorted({row.category for row in rows}), "all"]:
        group = [row for row in rows if category in ("all", row.category)]
        gains = np.array([row.recall["hybrid"] - row.recall["turns"] for row in group])
        error = float(gains.std(ddof=1) / len(group) ** 0.5) if len(group) > 1 else 0.0
        means = {name: float(np.mean([row.recall[name] for row in group])) for name in METHODS}
        table[category] = {"n": float(len(group)), **means, "gain": float(gains.mean()), "gain_95": 1.96 * error}
    return table


if __name__ == "__main__":
    from remind.core.cli import main

    main(
        BenchRetrievalConfig,
        bench_retrieval,
        "Evidence recall of x0: Eq. 1 and the hybrid against BM25 + dense turn retrieval at equal tokens.",
    )
