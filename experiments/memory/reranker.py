"""RMM's reranker on real dialogues: what learning from citations adds to evidence recall, and what it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from experiments.evidence.data import load
from experiments.memory.candidates import Encoded, Ranked, candidates, centred, encode, fixed, means, with_length
from experiments.memory.config import MemoryExperimentConfig
from experiments.memory.learning import (
    evaluate,
    held_out,
    learned,
    learned_with_lexical,
    leave_one_out,
    online,
    sampled,
    shuffled,
)
from experiments.memory.report import Rows, curve_rows, plot, table
from remind.build.plan import versions
from remind.core.errors import ConfigError
from remind.core.files import input_hashes, write_json
from remind.core.progress import track
from remind.llm.auxiliary import OfflineLLM
from remind.memory.citers import noisy
from remind.memory.reranker import AS_PRINTED, Episode, Reranker, RerankerConfig
from remind.models.encoder import SentenceEncoder
from remind.perception import Perception, PerceptionConfig

#: Updates at which the learning curve is read, as far as it goes.
POINTS = (0, 25, 50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 800, 900, 1000)
NOTES = (
    "recall: share of a question's evidence turns among the retrieved ones, mean over questions with evidence",
    "tokens: of the retrieved turns' lines, mean over questions",
    "recall within a budget of tokens: best first, what does not fit is passed over",
    "a memory is a single turn; candidates are the first K of its dialogue by the cosine (dense) or by z(cosine) + "
    "z(BM25) (hybrid)",
    "intervals: 95 %, dialogues resampled; a question's recall is the mean over the seeds",
    "citations are simulated from gold evidence; no language model answers",
)


def reranker(cfg: MemoryExperimentConfig) -> dict[str, Any]:
    """Run, write the result and the plot; the result is also returned.

    Raises:
        DataError, FormatError: data that cannot be read.
        ConfigError: no gold evidence, or a first dataset of fewer than two dialogues.
    """
    started = perf_counter()
    paths = [cfg.data] if isinstance(cfg.data, str) else list(cfg.data)
    asked, facts = load(paths, cfg.limit)
    sentences = SentenceEncoder(device=cfg.device)
    perception = Perception(
        PerceptionConfig(), sentences, OfflineLLM(sentences), Path(cfg.cache).expanduser() / "index"
    )
    encoded = [encode(one, perception) for one in track(asked, "encode", len(asked))]
    groups = {fact["dataset"]: [one for one in encoded if one.asked.dataset == fact["dataset"]] for fact in facts}
    home, *away = groups
    if len(groups[home]) < 2:
        raise ConfigError(
            "one dialogue is held out and the others are learned from; give a first dataset of two or more"
        )
    result = {
        **_measure(cfg, groups, home, away),
        "milliseconds": milliseconds(cfg.reranker, len(encoded[0].turns[0])),
        "data": facts,
        "hashes": input_hashes(paths),
        "config": asdict(cfg),
        "notes": list(NOTES),
        "versions": versions(),
        "seconds": round(perf_counter() - started, 1),
    }
    write_json(cfg.out, result)
    plot(result, Path(cfg.out).with_suffix(".png"))
    return result


def _measure(
    cfg: MemoryExperimentConfig, groups: dict[str, list[Encoded]], home: str, away: list[str]
) -> dict[str, Any]:
    """Rows and learning curve."""
    rows, most, seeds, last = Rows(cfg.resamples), cfg.reranker.top_m, cfg.seeds, [cfg.updates]
    settings = replace(cfg.reranker, candidates="dense")
    asked = {
        name: [question for one in group for question in candidates(one, "dense", settings.top_k)]
        for name, group in groups.items()
    }
    plain = {name: evaluate(questions, lambda question: question.dense, most) for name, questions in asked.items()}
    lexical = {name: evaluate(questions, fixed, most) for name, questions in asked.items()}
    folds = leave_one_out(asked[home])
    points = sorted({point for point in POINTS if point <= cfg.curve} | {cfg.updates})
    kinds = {"learned": learned, "with lexical": learned_with_lexical, "sampled": sampled}

    curve = held_out(folds, settings, seeds, points, kinds)
    here = {name: found[points.index(cfg.updates)] for name, found in curve.items()}
    found = {home: here} | {
        name: {
            kind: values[0]
            for kind, values in held_out([(asked[home], asked[name])], settings, seeds, last, kinds).items()
        }
        for name in away
    }
    rows.add(home, asked[home], ("dense", "learned"), (plain[home], here["learned"]), 0.07, 0.05)
    for name in away:
        values = plain[name], found[name]["learned"]
        rows.add(name, asked[name], ("dense", f"learned on {home}"), values, 0.06, 0.0)
    citer = partial(noisy, recalls=(cfg.cited_useful, cfg.cited_useless))
    values = plain[home], held_out(folds, settings, seeds, last, {"": learned}, citer)[""][0]
    rows.add(home, asked[home], ("dense", "learned, noisy citer"), values, 0.04, 0.02)
    for in_order, words, least, above in ((False, "shuffled", 0.05, 0.03), (True, "in file order", None, None)):
        values = plain[home], online(asked[home], settings, seeds, in_order)
        rows.add(home, asked[home], ("dense", f"online from zero, {words}"), values, least, above)
    for name in asked:
        values = lexical[name], found[name]["with lexical"]
        rows.add(name, asked[name], ("fixed z(dense) + z(BM25)", "learned + lexical"), values, 0.01, 0.0)
        rows.add(name, asked[name], ("fixed z(dense) + z(BM25)", "learned"), (lexical[name], found[name]["learned"]))
    _hybrid(cfg, groups, home, away, rows)

    values = plain[home], held_out(folds, settings, seeds, last, {"": learned}, shuffled)[""][0]
    rows.add(home, asked[home], ("dense", "learned, citations shuffled"), values, null=True)
    for name, questions in asked.items():
        for words, control in _controls(groups, home, name, questions, most).items():
            demanded = 0.03 if name == home and words.endswith("learned from") else None
            rows.add(name, questions, ("dense", words), (plain[name], control))
            rows.add(name, questions, (words, "learned"), (control, found[name]["learned"]), demanded)

    printed = replace(AS_PRINTED, top_k=settings.top_k, top_m=most)
    for words, literal in (("as printed", printed), ("as printed, scale 20", replace(printed, scale=20.0))):
        values = plain[home], held_out(folds, literal, seeds, last, {"": learned})[""][0]
        rows.add(home, asked[home], ("dense", words), values)
    for scale in (1.0, settings.scale):
        start = Reranker(replace(settings, scale=scale), len(asked[home][0].query))
        values = plain[home], evaluate(asked[home], partial(sampled, start), most)
        rows.add(home, asked[home], ("dense", f"sampled before learning, scale {scale:g}"), values)
    rows.add(home, asked[home], ("dense", "sampled after learning"), (plain[home], here["sampled"]))
    references = {"dense": plain[home], "fixed": lexical[home]}
    return {"rows": rows.rows, "curve": curve_rows(asked[home], points, curve, references, cfg.resamples)}


def _hybrid(
    cfg: MemoryExperimentConfig, groups: dict[str, list[Encoded]], home: str, away: list[str], rows: Rows
) -> None:
    """The residual over hybrid candidates."""
    settings, most = replace(cfg.reranker, candidates="hybrid"), cfg.reranker.top_m
    asked = {
        name: [question for one in group for question in candidates(one, "hybrid", settings.top_k)]
        for name, group in groups.items()
    }
    folds = {home: leave_one_out(asked[home])} | {name: [(asked[home], asked[name])] for name in away}
    for name, questions in asked.items():
        first = evaluate(questions, lambda question: question.hybrid, most)
        second = held_out(folds[name], settings, cfg.seeds, [cfg.updates], {"": learned})[""][0]
        demanded = (0.015, 0.0) if name == home else (0.0, None)
        rows.add(name, questions, ("hybrid", "residual over hybrid"), (first, second), *demanded)


def _controls(
    groups: dict[str, list[Encoded]], home: str, name: str, questions: Sequence[Ranked], most: int
) -> dict[str, np.ndarray]:
    """Cosine with lengths, and centred by the means of the dialogues learned from or of the dialogue itself; [3, Q]."""
    found: dict[str, list[np.ndarray]] = {"centred by what is learned from": [], "centred by the dialogue": []}
    for one in groups[name]:
        own = [question for question in questions if question.dialogue == one.asked.dialogue.id]
        known = [other for other in groups[home] if other is not one]
        for words, dialogues in zip(found, (known, [one]), strict=True):
            found[words].append(evaluate(own, partial(centred, *means(dialogues)), most))
    lengths = {"z(dense) + z(ln tokens)": evaluate(questions, with_length, most)}
    return lengths | {words: np.hstack(parts) for words, parts in found.items()}


def milliseconds(config: RerankerConfig, dimension: int, repeats: int = 300) -> dict[str, dict[str, float]]:
    """Mean processor time and median wall time, on random vectors: candidates scored, sampled, a batch learned from."""
    draws = np.random.default_rng(0)
    rows = draws.standard_normal((1 + config.top_k, dimension)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    query, memories = rows[0], rows[1:]
    one = Reranker(config, dimension)
    choice = one.sample(query, memories, "first")
    # rewards and their negatives in turn, so that the weights stay small
    given = draws.choice([-1.0, 1.0], len(choice.order))
    batches = cycle([Episode(query, memories, choice, sign * given)] * config.batch for sign in (1.0, -1.0))
    timed: dict[str, Callable[[], Any]] = {
        f"score {config.top_k}": lambda: one.scores(query, memories),
        f"sample {config.top_m} of {config.top_k}": lambda: one.sample(query, memories, "again"),
        f"update of {config.batch}": lambda: one.learn(next(batches)),
    }
    found = {}
    for name, call in timed.items():
        wall, before = [], process_time()
        for _ in range(repeats):
            start = perf_counter()
            call()
            wall.append(1000 * (perf_counter() - start))
        found[name] = {"processor": 1000 * (process_time() - before) / repeats, "wall": float(np.median(wall))}
    return found


def reranker_and_show(cfg: MemoryExperimentConfig) -> None:
    """`reranker`, then its table."""
    result = reranker(cfg)
    for fact in result["data"]:
        print(f"{fact['dataset']}: {fact['dialogues']} dialogues, {fact['with_evidence']} questions with evidence")
    print("\n".join(result["notes"]))
    print(f"\n{table(result['rows'], cfg.reranker.top_m)}\n")
    for row in result["curve"]:
        print(f"{row['updates']:>6} updates: {row['recall']:.3f} [{row['low']:.3f}, {row['high']:.3f}]")
    for name, times in result["milliseconds"].items():
        print(f"{name}: {times['processor']:.3f} ms of processor time, {times['wall']:.3f} ms by the clock")
    print(f"{result['seconds']:.0f} s; {cfg.out}")
