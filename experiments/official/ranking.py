"""LongMemEval's retrieval figures at turn and session level (its `run_retrieval` and `eval_utils`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remind.core.errors import ConfigError, DataError
from remind.data.dialogue import Dialogue, Question
from remind.evaluation.intervals import Estimate, bootstrap
from remind.evaluation.metrics import ndcg_any, recall_all, recall_any

KS = (1, 3, 5, 10, 30, 50)
USER = "user"


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

    def label(self, turn: str) -> tuple[str, bool]:
        """The document a turn belongs to at session level.

        The benchmark renames what holds no evidence, so a gold session falls in two: turns with evidence and others.
        """
        return self.session[turn], turn in self.gold


def haystack_of(dialogue: Dialogue, question: Question) -> Haystack:
    """The haystack of a question that the LongMemEval reader gave; gold are the user's turns among its evidence."""
    turns = tuple(turn.id for turn in dialogue.turns if turn.speaker == USER)
    session = {turn: dialogue.session_of[turn].id for turn in turns}
    return Haystack(question.id, turns, session, frozenset(turns) & frozenset(question.evidence))


def grown(haystack: Haystack, ranked: Sequence[str], k: int) -> int:
    """How many turns of the ranking it takes to see k different documents; all turns there are where it has fewer."""
    if k < 1:
        raise ConfigError(f"k must be at least 1, not {k}")
    seen: set[tuple[str, bool]] = set()
    for place, turn in enumerate(ranked, start=1):
        seen.add(haystack.label(turn))
        if len(seen) >= k:
            return place
    return len(haystack.turns)


def turn_level(haystack: Haystack, ranked: Sequence[str], k: int) -> dict[str, float]:
    """recall_any, recall_all, ndcg_any among the first k turns."""
    gold = set(haystack.gold)
    return {
        "recall_any": recall_any(ranked, gold, k),
        "recall_all": recall_all(ranked, gold, k),
        "ndcg_any": ndcg_any(ranked, gold, k),
    }


def session_level(haystack: Haystack, ranked: Sequence[str], k: int) -> dict[str, float]:
    """The same among the first k documents, from a ranking of turns: `grown` turns are looked at.

    Recall asks for gold sessions. The DCG counts every gold turn, as the benchmark does, so its ideal is all of them.
    """
    size = grown(haystack, ranked, k)
    gold = {haystack.label(turn)[0] for turn in haystack.gold}
    # a session is found by its gold turns only
    found = [haystack.session[turn] for turn in ranked[:size] if turn in haystack.gold]
    return {
        "recall_any": float(bool(found)),
        "recall_all": float(gold <= set(found)),
        "ndcg_any": ndcg_any(ranked, set(haystack.gold), size),
    }


def trivial(haystack: Haystack, ks: Iterable[int] = KS) -> dict[str, list[int]]:
    """The k that reach the size of the corpus, by level: every ranking then has every gold turn."""
    documents = len({haystack.label(turn) for turn in haystack.turns})
    sizes = {"turn": len(haystack.turns), "session": documents}
    return {level: [k for k in ks if k >= size] for level, size in sizes.items()}


def score_ranking(
    haystack: Haystack, ranked: Sequence[str], ks: Sequence[int] = KS, refuse_trivial: bool = False
) -> dict[str, dict[str, float]]:
    """`turn` and `session` → `recall_any@k`, `recall_all@k`, `ndcg_any@k`.

    Args:
        ranked: ids of the user's turns, best first (`user_turns`); those left out count as not found.
        refuse_trivial: raise for a k that reaches the corpus size, instead of computing a figure that says nothing.

    Raises:
        DataError: a turn ranked twice, or one that is not among the user's.
        ConfigError: k below 1, or trivial where that is refused.
    """
    if refuse_trivial and (found := {level: ks_ for level, ks_ in trivial(haystack, ks).items() if ks_}):
        told = "; ".join(f"{level}: {', '.join(map(str, ks_))}" for level, ks_ in found.items())
        raise ConfigError(f"{haystack.question_id}: k as large as the corpus says nothing ({told})")
    if len(set(ranked)) < len(ranked):
        raise DataError("a turn is ranked twice", record=haystack.question_id)
    if strangers := [turn for turn in ranked if turn not in haystack.session]:
        raise DataError(f"{strangers[0]!r} is ranked but is no turn of the user", record=haystack.question_id)
    return {
        level: {f"{name}@{k}": value for k in ks for name, value in figures(haystack, ranked, k).items()}
        for level, figures in (("turn", turn_level), ("session", session_level))
    }


def user_turns(haystack: Haystack, ranked: Iterable[str]) -> list[str]:
    """A ranking without the turns that are not the user's."""
    return [turn for turn in ranked if turn in haystack.session]


def average(
    haystacks: Sequence[Haystack],
    rankings: Sequence[Sequence[str]],
    ks: Sequence[int] = KS,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Means over the questions that take part, with bootstrap intervals, and how many were left out or are trivial.

    Returns:
        `turn`, `session` (figure → `Estimate`), `counts` (questions, abstention, without_gold), and `trivial`: level →
        k → number of questions whose corpus has no more than k documents.
    """
    values: dict[str, dict[str, list[float]]] = {"turn": {}, "session": {}}
    full: dict[str, dict[int, int]] = {"turn": {}, "session": {}}
    for haystack, ranked in zip(haystacks, rankings, strict=True):
        if not haystack.scored:
            continue
        for level, figures in score_ranking(haystack, ranked, ks).items():
            for name, value in figures.items():
                values[level].setdefault(name, []).append(value)
        for level, found in trivial(haystack, ks).items():
            for k in found:
                full[level][k] = full[level].get(k, 0) + 1
    estimates: dict[str, dict[str, Estimate | None]] = {
        level: {name: bootstrap(numbers, resamples, seed) for name, numbers in figures.items()}
        for level, figures in values.items()
    }
    abstention = sum("_abs" in haystack.question_id for haystack in haystacks)
    scored = sum(haystack.scored for haystack in haystacks)
    counts = {
        "questions": scored,
        "abstention": abstention,
        "without_gold": len(haystacks) - abstention - scored,
    }
    return {**estimates, "counts": counts, "trivial": full}
