"""Our retrieval by LongMemEval's figures: turns of each haystack ranked, then scored at turn and session level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.official.ranking import KS, Haystack, average, haystack_of, user_turns
from remind.core.errors import ConfigError
from remind.core.files import sha256_file, write_json
from remind.core.progress import track
from remind.perception import PerceptionConfig

if TYPE_CHECKING:
    from torch import Tensor

    from remind.perception.index import DialogueIndex

#: cue: Eq. 1, segments by their cues, the turns of a segment in time order. hybrid: BM25 and sentence vectors over
#: neighbouring turns. bm25, dense: one of the two, each turn by itself.
METHODS = ("cue", "hybrid", "bm25", "dense")


@dataclass
class ScoreRetrievalConfig:
    """Rank the turns of LongMemEval's haystacks by our retrieval and score the rankings as the benchmark does."""

    input: str
    """File of native instances, with haystacks."""
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    """What ranks: cue, hybrid, bm25, dense."""
    ks: list[int] = field(default_factory=lambda: list(KS))
    """How many turns, and sessions, are looked at."""
    perception: PerceptionConfig = field(default_factory=PerceptionConfig)
    """Segments and smoothing; retrieve.method and budgets do not matter to a ranking."""
    cache: str = "~/.cache/remind"
    """Folder for dialogue indexes; safe to delete."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""
    limit: int | None = None
    """At most this many instances, the first ones; for a quick look."""
    bootstrap: int = 1000
    """Resamples behind each interval."""
    seed: int = 0
    """Of the resampling."""
    device: str = "cpu"
    """Device of the text encoder."""

    def __post_init__(self) -> None:
        strangers = [name for name in self.methods if name not in METHODS]
        if strangers or not self.methods:
            told = f"no method {strangers[0]!r}" if strangers else "no method is named"
            raise ConfigError(f"{told}; there are {', '.join(METHODS)}")
        if not self.ks or min(self.ks) < 1:
            raise ConfigError("ks must be numbers of at least 1")


def rankings(
    index: DialogueIndex, question: str, vector: Tensor, config: PerceptionConfig, methods: Sequence[str] = METHODS
) -> dict[str, list[str]]:
    """Turn ids of the dialogue by each method, best first; equals in time order.

    Args:
        question, vector: the question's text and φ of it [d].
    """
    from remind.perception.retrieve import relevance, turn_scores
    from remind.text.words import stems

    def scores(method: str) -> np.ndarray:
        if method == "hybrid":
            return turn_scores(index, question, vector, config.retrieve)
        if method == "bm25":
            return np.asarray(index.bm25.scores(stems(question)))
        if method == "dense":
            return relevance(vector, index.vectors).double().numpy()
        of_segments = relevance(vector, index.cues(None).vectors).double().numpy()
        spread = np.empty(len(index.dialogue.turns))
        for segment, score in zip(index.segments, of_segments, strict=True):
            spread[segment.start : segment.end + 1] = score
        return spread

    turns = index.dialogue.turns
    return {name: [turns[n].id for n in np.argsort(-scores(name), kind="stable")] for name in methods}


def score_retrieval(cfg: ScoreRetrievalConfig) -> dict[str, Any]:
    """See `ScoreRetrievalConfig`.

    Returns:
        `methods`: name → what `average` returns.

    Raises:
        FormatError, DataError: a file that is not of native instances.
    """
    from remind.data.readers import read
    from remind.llm.offline import OfflineLLM
    from remind.models.encoder import SentenceEncoder
    from remind.perception import Perception

    corpus = read(cfg.input, "longmemeval")
    encoder = SentenceEncoder(device=cfg.device)
    perception = Perception(cfg.perception, encoder, OfflineLLM(), Path(cfg.cache).expanduser() / "index")
    haystacks: list[Haystack] = []
    ranked: dict[str, list[list[str]]] = {name: [] for name in cfg.methods}
    questions = corpus.questions[: cfg.limit]
    for question in track(questions, "rank", len(questions)):
        dialogue = corpus.dialogue(question.dialogue_id)
        haystack = haystack_of(dialogue, question)
        haystacks.append(haystack)
        # those that take no part are counted, and need no index
        vector = encoder.encode([question.text])[0] if haystack.scored else None
        found = (
            {name: [] for name in cfg.methods}
            if vector is None
            else rankings(perception.index(dialogue), question.text, vector, cfg.perception, cfg.methods)
        )
        for name in cfg.methods:
            ranked[name].append(user_turns(haystack, found[name]))
    result = {
        "format": "remind-longmemeval-retrieval",
        "config": asdict(cfg),
        "inputs": {Path(cfg.input).name: sha256_file(cfg.input)},
        "encoder": encoder.name,
        "methods": {name: average(haystacks, ranked[name], cfg.ks, cfg.bootstrap, cfg.seed) for name in cfg.methods},
    }
    if cfg.out is not None:
        write_json(cfg.out, result)
    return result


def table(result: Mapping[str, Any]) -> str:
    """The figures in plain lines, in percent; k that reach the size of a corpus are marked."""
    ks = result["config"]["ks"]
    first = next(iter(result["methods"].values()))
    counts = first["counts"]
    lines = [
        f"{counts['questions']} questions; left out: {counts['abstention']} abstention, "
        f"{counts['without_gold']} without evidence from the user",
        f"{'':<9}{'':<9}{'':<12}" + "".join(f"{f'@{k}':>8}" for k in ks),
    ]
    for method, row in result["methods"].items():
        for level in ("turn", "session"):
            for name in ("recall_any", "recall_all", "ndcg_any"):
                cells = [_cell(row[level].get(f"{name}@{k}"), k in row["trivial"][level]) for k in ks]
                lines.append(f"{method:<9}{level:<9}{name:<12}" + "".join(f"{cell:>8}" for cell in cells))
    if any(first["trivial"].values()):
        lines.append("* some corpora have no more than k documents: the figure says little")
    return "\n".join(lines)


def _cell(estimate: Mapping[str, Any] | None, trivial: bool) -> str:
    return "–" if estimate is None else f"{100 * estimate['value']:.1f}{'*' if trivial else ''}"


def score_and_show(cfg: ScoreRetrievalConfig) -> None:
    """`score_retrieval`, then the table and where it is."""
    print(table(score_retrieval(cfg)))
    if cfg.out is not None:
        print(f"figures: {cfg.out}")


if __name__ == "__main__":
    from remind.core.cli import main

    main(
        ScoreRetrievalConfig,
        score_and_show,
        "Score our retrieval on LongMemEval's haystacks by the benchmark's own figures.",
    )
