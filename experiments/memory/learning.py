"""A reranker that learns from simulated citations, and how well it ranks questions it has not learned from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np

from experiments.memory.candidates import Ranked, with_lexical
from remind.memory.reranker import Episode, Reranker, RerankerConfig, rewards

#: Which candidates an answer would cite if it saw them, bool [K], given which hold evidence.
Citer = Callable[[np.ndarray, np.random.Generator], np.ndarray]
#: Scores [K] by which a question's candidates are ranked.
Measure = Callable[[Reranker, Ranked], np.ndarray]
#: Questions to learn from, and questions to rank.
Fold = tuple[Sequence[Ranked], Sequence[Ranked]]


def oracle(gold: np.ndarray, _: np.random.Generator) -> np.ndarray:
    """All evidence and nothing else."""
    return gold


def shuffled(gold: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """As many candidates as hold evidence, whichever: citations that say nothing."""
    return draws.permutation(gold)


def learned(one: Reranker, question: Ranked) -> np.ndarray:
    return one.scores(question.query, question.memories, question.base)


def learned_with_lexical(one: Reranker, question: Ranked) -> np.ndarray:
    return with_lexical(question, learned(one, question))


def sampled(one: Reranker, question: Ranked) -> np.ndarray:
    """Scores with the noise of a sample, which users see while it explores."""
    noise = one.sample(question.query, question.memories, f"asked {question.name}", question.base).noise
    return learned(one, question) + (0 if noise is None else noise)


def evaluate(questions: Sequence[Ranked], scores: Callable[[Ranked], np.ndarray], most: int) -> np.ndarray:
    """Recall of the best `most` candidates, their tokens, and recall within `BUDGET` tokens; float64 [3, Q]."""
    return np.array([question.shares(scores(question), most) for question in questions], np.float64).T


def feedback(one: Reranker, question: Ranked, name: str, cite: Citer, draws: np.random.Generator) -> Episode:
    """A retrieval under that name, with the citations of an answer from it."""
    choice = one.sample(question.query, question.memories, name, question.base)
    cited = np.flatnonzero(cite(question.gold, draws)[choice.order])
    given = rewards(choice.order, set(cited.tolist()))
    return Episode(question.query, question.memories, choice, given, question.base)


def training(questions: Sequence[Ranked], config: RerankerConfig, updates: int, cite: Citer) -> Iterator[Reranker]:
    """One reranker, before the first update and after each: passes over the questions, each in an order of its own."""
    draws = np.random.default_rng(config.seed)
    one = Reranker(config, len(questions[0].query))
    yield one
    order: list[tuple[int, int]] = []
    passes = 0
    for _ in range(updates):
        while len(order) < config.batch:
            order += [(passes, place) for place in draws.permutation(len(questions)).tolist()]
            passes += 1
        batch, order = order[: config.batch], order[config.batch :]
        chosen = [(f"{turn} {questions[place].name}", questions[place]) for turn, place in batch]
        one.learn([feedback(one, question, name, cite, draws) for name, question in chosen])
        yield one


def held_out(
    folds: Sequence[Fold],
    config: RerankerConfig,
    seeds: Sequence[int],
    points: Sequence[int],
    measures: Mapping[str, Measure],
    cite: Citer = oracle,
) -> dict[str, np.ndarray]:
    """`evaluate` of the ranked questions of all folds, in order, after so many updates; mean over the seeds.

    Returns:
        For each measure float64 [points, 3, Q], as `evaluate`.
    """
    total = {name: [np.zeros((3, 0))] * len(points) for name in measures}
    for known, asked in folds:
        sums = {name: np.zeros((len(points), 3, len(asked))) for name in measures}
        for seed in seeds:
            for step, one in enumerate(training(known, replace(config, seed=seed), max(points), cite)):
                for place in [place for place, point in enumerate(points) if point == step]:
                    for name, measure in measures.items():
                        found = evaluate(asked, partial(measure, one), config.top_m)
                        sums[name][place] += found / len(seeds)
        total = {name: [np.hstack(pair) for pair in zip(total[name], sums[name], strict=True)] for name in measures}
    return {name: np.stack(found) for name, found in total.items()}


def leave_one_out(questions: Sequence[Ranked]) -> list[Fold]:
    """A fold for every dialogue: questions of the others to learn from, its own to rank."""
    names = dict.fromkeys(question.dialogue for question in questions)
    return [
        ([one for one in questions if one.dialogue != name], [one for one in questions if one.dialogue == name])
        for name in names
    ]


def online(
    questions: Sequence[Ranked], config: RerankerConfig, seeds: Sequence[int], in_order: bool, cite: Citer = oracle
) -> np.ndarray:
    """Each dialogue from zero: a question is ranked first, then learned from; `evaluate`, mean over the seeds.

    Args:
        questions: of a dialogue together. in_order: as they stand in the file, else shuffled within the dialogue.
    """
    total = np.zeros((3, len(questions)))
    for seed in seeds:
        draws = np.random.default_rng(seed)
        for _, group in groupby(range(len(questions)), key=lambda place: questions[place].dialogue):
            places = list(group)
            if not in_order:
                draws.shuffle(places)
            one, batch = Reranker(replace(config, seed=seed), len(questions[0].query)), []
            for place in places:
                question = questions[place]
                total[:, place] += question.shares(learned(one, question), config.top_m)
                batch.append(feedback(one, question, question.name, cite, draws))
                if len(batch) == config.batch:
                    one.learn(batch)
                    batch = []
    return total / len(seeds)
