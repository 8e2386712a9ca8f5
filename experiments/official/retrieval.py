"""LongMemEval's retrieval figures at turn and session level (its `run_retrieval` and `eval_utils`), and our own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from remind.core.errors import ConfigError
from remind.core.files import sha256_file, write_json
from remind.core.progress import track
from remind.data.dialogue import Dialogue, Question
from remind.evaluation.metrics import ndcg_any, recall_all, recall_any
from remind.evaluation.statistics import Estimate, bootstrap
from remind.evaluation.tables import percent, plain
from remind.perception import PerceptionConfig
from sae.ranges import PositiveInt, Resamples, check_ranges

if TYPE_CHECKING:
    from torch import Tensor

    from remind.perception.perceive import DialogueIndex

KS = (1, 3, 5, 10, 30, 50)
USER = "user"
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
    cache: str = "~/.cache/remind"
    """Folder for dialogue indexes; safe to delete."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""
    limit: PositiveInt | None = None
    """At most this many instances, the first ones; for a quick look."""
    bootstrap: Resamples = 1000
    """Resamples behind each interval."""
    device: str = "cpu"
    """Device of the text encoder."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown or not self.methods:
            problem = f"no method {unknown[0]!r}" if unknown else "no method is named"
            raise ConfigError(f"{problem}; there are {', '.join(METHODS)}")


@dataclass(frozen=True)
class Haystack:
    """What is ranked for one question: the user's turns, as the benchmark has it.

    Attributes:
        turns: turn ids in time order.
        session: session of each turn.
        gold: turns that hold evidence.
    """

    question_id: str
    turns: tuple[str, ...]
    session: Mapping[str, str]
    gold: frozenset[str]

    @property
    def scored(self) -> bool:
        """Whether the question takes part: it can be answered, and from something the user said."""
        return "_abs" not in self.question_id and bool(self.gold)


def haystack_of(dialogue: Dialogue, question: Question) -> Haystack:
    """The haystack of a question that the LongMemEval reader gave; gold are the user's turns among its evidence."""
    turns = tuple(turn.id for turn in dialogue.turns if turn.speaker == USER)
    session = {turn: dialogue.session_of[turn].id for turn in turns}
    return Haystack(question.id, turns, session, frozenset(turns) & frozenset(question.evidence))


def grown(haystack: Haystack, ranked: Sequence[str], k: int) -> int:
    """How many turns of the ranking it takes to see k different documents; all turns there are where it has fewer.

    A document is a session. The benchmark renames what holds no evidence, so a gold session falls in two: turns with
    evidence and others.
    """
    seen: set[tuple[str, bool]] = set()
    for place, turn in enumerate(ranked, start=1):
        seen.add((haystack.session[turn], turn in haystack.gold))
        if len(seen) >= k:
            return place
    return len(haystack.turns)


def score_ranking(haystack: Haystack, ranked: Sequence[str], ks: Sequence[int] = KS) -> dict[str, dict[str, float]]:
    """`turn` and `session` → `recall_any@k`, `recall_all@k`, `ndcg_any@k`.

    At session level `grown` turns are looked at, and recall asks for gold sessions. The DCG counts every gold turn, as
    the benchmark does, so its ideal is all of them.

    Args:
        ranked: ids of the user's turns, best first (`user_turns`), each once; those left out count as not found.
    """
    gold = set(haystack.gold)
    gold_sessions = {haystack.session[turn] for turn in gold}
    by_turn: dict[str, float] = {}
    by_session: dict[str, float] = {}
    for k in ks:
        size = grown(haystack, ranked, k)
        # a session is found by its gold turns only
        found = {haystack.session[turn] for turn in ranked[:size] if turn in gold}
        by_turn |= {
            f"recall_any@{k}": recall_any(ranked, gold, k),
            f"recall_all@{k}": recall_all(ranked, gold, k),
            f"ndcg_any@{k}": ndcg_any(ranked, gold, k),
        }
        by_session |= {
            f"recall_any@{k}": float(bool(found)),
            f"recall_all@{k}": float(gold_sessions <= found),
            f"ndcg_any@{k}": ndcg_any(ranked, gold, size),
        }
    return {"turn": by_turn, "session": by_session}


def user_turns(haystack: Haystack, ranked: Iterable[str]) -> list[str]:
    """A ranking without the turns that are not the user's."""
    return [turn for turn in ranked if turn in haystack.session]


def average(
    haystacks: Sequence[Haystack],
    rankings: Sequence[Sequence[str]],
    resamples: int = 1000,
) -> dict[str, Any]:
    """Means over the questions that take part, with bootstrap intervals, and how many were left out.

    Returns:
        `turn`, `session` (figure → `Estimate`), and `counts` (questions, abstention, without_gold).
    """
    values: dict[str, dict[str, list[float]]] = {"turn": {}, "session": {}}
    for haystack, ranked in zip(haystacks, rankings, strict=True):
        if not haystack.scored:
            continue
        for level, figures in score_ranking(haystack, ranked).items():
            for name, value in figures.items():
                values[level].setdefault(name, []).append(value)
    estimates: dict[str, dict[str, Estimate | None]] = {
        level: {name: bootstrap(numbers, resamples) for name, numbers in figures.items()}
        for level, figures in values.items()
    }
    abstention = sum("_abs" in haystack.question_id for haystack in haystacks)
    scored = sum(haystack.scored for haystack in haystacks)
    counts = {"questions": scored, "abstention": abstention, "without_gold": len(haystacks) - abstention - scored}
    return {**estimates, "counts": counts}


def rankings(
    index: DialogueIndex, question: str, vector: Tensor, methods: Sequence[str] = METHODS
) -> dict[str, list[str]]:
    """Turn ids of the dialogue by each method, best first; equals in time order.

    Args:
        question, vector: the question's text and φ of it [d].
    """
    from remind.perception.perceive import relevance, turn_scores
    from remind.text.words import stems

    def scores(method: str) -> np.ndarray:
        if method == "hybrid":
            return turn_scores(index, question, vector)
        if method == "bm25":
            return np.asarray(index.bm25.scores(stems(question)))
        if method == "dense":
            return relevance(vector, index.vectors)
        of_segments = relevance(vector, index.cues(None).vectors)
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
    from remind.models.encoder import SentenceEncoder
    from remind.perception import Perception
    from remind.perception.auxiliary import OfflineLLM

    corpus = read(cfg.input, "longmemeval")
    encoder = SentenceEncoder(device=cfg.device)
    perception = Perception(PerceptionConfig(), encoder, OfflineLLM(), Path(cfg.cache).expanduser() / "index")
    haystacks: list[Haystack] = []
    ranked: dict[str, list[list[str]]] = {name: [] for name in cfg.methods}
    questions = corpus.questions[: cfg.limit]
    for question in track(questions, "rank", len(questions)):
        dialogue = corpus.dialogue(question.dialogue_id)
        haystack = haystack_of(dialogue, question)
        haystacks.append(haystack)
        # those that take no part are counted, and need no index
        by_method: dict[str, list[str]] = {}
        if haystack.scored:
            vector = encoder.encode([question.text])[0]
            by_method = rankings(perception.index(dialogue), question.text, vector, cfg.methods)
        for name in cfg.methods:
            ranked[name].append(user_turns(haystack, by_method.get(name, ())))
    result = {
        "format": "remind-longmemeval-retrieval",
        "config": asdict(cfg),
        "inputs": {Path(cfg.input).name: sha256_file(cfg.input)},
        "encoder": encoder.name,
        "methods": {name: average(haystacks, ranked[name], cfg.bootstrap) for name in cfg.methods},
    }
    if cfg.out is not None:
        write_json(cfg.out, result)
    return result


def table(result: Mapping[str, Any]) -> str:
    """The figures in plain lines, in percent."""
    counts = next(iter(result["methods"].values()))["counts"]
    rows = [
        [f"{method} {level} {name}", *(percent(row[level].get(f"{name}@{k}")) for k in KS)]
        for method, row in result["methods"].items()
        for level in ("turn", "session")
        for name in ("recall_any", "recall_all", "ndcg_any")
    ]
    left_out = f"{counts['abstention']} abstention, {counts['without_gold']} without evidence from the user"
    return f"{counts['questions']} questions; left out: {left_out}\n{plain(['', *(f'@{k}' for k in KS)], rows)}"


if __name__ == "__main__":
    from remind.core.cli import main

    main(
        ScoreRetrievalConfig,
        lambda cfg: print(table(score_retrieval(cfg))),
        "Score our retrieval on LongMemEval's haystacks by the benchmark's own figures.",
    )
