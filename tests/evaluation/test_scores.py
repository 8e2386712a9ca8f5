"""From outputs to scores: reading outputs, metrics, intervals, who takes part in which average, verdicts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted_answers import Judge

from remind.core.errors import ConfigError
from remind.data.dialogue import DIMENSIONS
from remind.evaluation import metrics
from remind.evaluation.judge import Case, judge_answers
from remind.evaluation.parse import ParsedAnswer, parse_answer
from remind.evaluation.scores import MEASURES, Score, counts, macro, parse_all, score, summarise
from remind.evaluation.statistics import bootstrap, fleiss_kappa, paired_bootstrap, ratio, share, wilson
from remind.models.generate import Generation
from remind.states.records import StateRecord
from remind.text.words import Verdict

OPTIONS = ("red", "green", "blue", "Dark  Grey")


def test_the_asked_form_has_no_problems() -> None:
    parsed = parse_answer("<answer>[A,D]</answer><explanation>Ana: hi\nBo: yes</explanation>", "multi", OPTIONS)
    assert parsed == ParsedAnswer("[A,D]", frozenset("AD"), ("Ana: hi", "Bo: yes"), frozenset(), ())
    parsed = parse_answer("<answer>B</answer><explanation>[0, 12]</explanation>", "single", OPTIONS, visual=True)
    assert parsed == ParsedAnswer("B", frozenset("B"), (), frozenset({0, 12}), ())


NAMED, NONE = ("words of an option for its letter",), ("no option letter",)


@pytest.mark.parametrize(
    ("answer", "options", "letters", "problems"),
    [
        ("a, b", OPTIONS, "AB", ("lower-case letters",)),
        ("B. green", OPTIONS, "B", ("words beside the letter",)),
        ('["A", "C"]', OPTIONS, "AC", ()),
        ("**A**, **C**", OPTIONS, "AC", ()),
        ("A. red; C. blue", OPTIONS, "AC", ("words beside the letter",)),
        ("A. red C. blue", OPTIONS, "AC", ("words beside the letter",)),
        ("(A) red, and (C) blue", OPTIONS, "AC", ("words beside the letter",)),
        ("A. red, as of plan B. It is so", OPTIONS, "A", ("words beside the letter",)),
        ("A. red, not B. green", OPTIONS, "A", ("words beside the letter",)),
        ("(A) red is right, and (B) green is wrong", OPTIONS, "A", ("words beside the letter",)),
        ("A. red. C. blue", OPTIONS, "AC", ("words beside the letter",)),
        ('A. "red" | C. `blue`.', OPTIONS, "AC", ("words beside the letter",)),
        ("A. the red one; C. the blue one", OPTIONS, "AC", ("words beside the letter",)),
        ("A. red. B. green is never mentioned", OPTIONS, "A", ("words beside the letter",)),
        ("A. Dr. Lee, B. Smith", ("Dr. Lee, B. Smith", "B"), "A", ("words beside the letter",)),
        ("dark grey", OPTIONS, "D", NAMED),
        ("A, Z", OPTIONS, "A", ("letters that name no option",)),
        ("", OPTIONS, "", ("empty answer", *NONE)),
        # words name an option where no other has them
        ("red", ("Red", "red"), "B", NAMED),
    ],
)
def test_letters(answer: str, options: tuple[str, ...], letters: str, problems: tuple[str, ...]) -> None:
    parsed = parse_answer(f"<answer>{answer}</answer><explanation>x</explanation>", "multi", options)
    assert ("".join(sorted(parsed.letters)), parsed.problems) == (letters, problems)
    assert parsed.readable == (not set(NONE) & set(problems))


@pytest.mark.parametrize(
    ("output", "answer", "evidence", "problems"),
    [
        ("trip <explanation>Ana: hi</explanation>", "trip", ("Ana: hi",), ("no answer tag",)),
        ("<answer>trip", "trip", (), ("answer tag not closed", "no explanation tag")),
        ("", "", (), ("no answer tag", "empty answer", "no explanation tag")),
        # a thought is no answer, whoever opened it, and one that never ends leaves none
        ("<think><answer>a</answer></think><answer>b</answer>", "b", (), ("no explanation tag",)),
        ("<answer>a</answer></think>\n<answer>b</answer>", "b", (), ("no explanation tag",)),
        ("<think><answer>a</answer>", "", (), ("no answer tag", "empty answer", "no explanation tag")),
        ("<answer>a\n b</answer><explanation>\n- x\n\n* y \n</explanation>", "a b", ("x", "y"), ()),
    ],
)
def test_tags(output: str, answer: str, evidence: tuple[str, ...], problems: tuple[str, ...]) -> None:
    parsed = parse_answer(output)
    assert (parsed.answer, parsed.evidence, parsed.problems) == (answer, evidence, problems)


@pytest.mark.parametrize(
    ("explanation", "expected", "problem"),
    [
        ("[3, 3, 1]", {1, 3}, None),
        ("3 and #5.", {3, 5}, "images not a JSON list"),
        ("[1, -2, true, 1.5, null]", {1}, "images not a JSON list"),
        ("[" * 100_000, set(), "images not a JSON list"),
    ],
)
def test_images(explanation: str, expected: set[int], problem: str | None) -> None:
    parsed = parse_answer(f"<answer>A</answer><explanation>{explanation}</explanation>", "single", OPTIONS, True)
    assert (parsed.images, parsed.problems) == (expected, () if problem is None else (problem,))


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "é"]), max_size=8).map(" ".join)


def unit_rows(lines: list[str]) -> torch.Tensor:
    rows = [np.random.default_rng(sum(map(ord, line))).normal(size=5) for line in lines]
    return torch.tensor(np.array([row / np.linalg.norm(row) for row in rows]))


def test_memory_recall_is_that_of_brute_force_over_sets() -> None:
    gold, predicted = ["one", "two", "three"], ["four", "two"]
    expected = [max(float(unit_rows([g])[0] @ unit_rows([p])[0]) for p in predicted) for g in gold]
    for one, other in ((gold, predicted), (gold * 2, predicted * 3)):
        assert metrics.memory_recall_text(one, other, unit_rows) == pytest.approx(sum(expected) / 3, abs=1e-12)
    assert metrics.memory_recall_text([], ["c"], unit_rows) is metrics.memory_recall_text(["a"], [], unit_rows) is None
    assert metrics.memory_recall_visual({0, 3, 5}, {3, 5, 9}) == pytest.approx(2 / 3)
    assert (metrics.memory_recall_visual({1}, set()), metrics.memory_recall_visual(set(), {1})) == (0.0, None)


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("The CAT!", ["the, cat"], 1.0),
        # best reference, whatever the order
        ("hiking", ["a long walk", "hiking"], 1.0),
        ("Ünïcode 東京", ["東京 ünïcode"], 1.0),
    ],
)
def test_what_words_are_and_the_best_reference(prediction: str, references: list[str], score: float) -> None:
    for metric in (metrics.bleu1, metrics.token_f1):
        assert metric(prediction, references) == pytest.approx(score, abs=1e-12)


@given(WORDS, WORDS)
def test_bleu1_and_f1_against_the_equations(prediction: str, reference: str) -> None:
    p, r = prediction.split(), reference.split()
    overlap = sum(min(p.count(w), r.count(w)) for w in set(p) | set(r))
    bleu = f1 = 0.0
    if overlap:
        precision, recall = overlap / len(p), overlap / len(r)
        bleu = precision * (1.0 if len(p) >= len(r) else math.exp(1 - len(r) / len(p)))
        f1 = 2 * precision * recall / (precision + recall)
    assert metrics.bleu1(prediction, [reference]) == pytest.approx(bleu, abs=1e-12)
    assert metrics.token_f1(prediction, [reference]) == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "answer", "category", "expected"),
    [
        ("she was running", "run", 4, 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        # the stemmer's default mode maps "dying" to "die" and "ties" to "tie" (plain Porter: "dy", "ti")
        ("dying ties", "die tie", 2, 1.0),
        # commas go before anything else, so "1,000" is one token; in categories 2 to 4 they do not split
        ("1,000 dollars", "1000 dollar", 4, 1.0),
        ("2022", 2022, 2, 1.0),
        ("coffee", "coffee; she dislikes tea", 3, 1.0),
        # several answers: best part for each gold part, then the mean over gold parts
        ("pottery, camping", "camping, painting, swimming", 1, 1 / 3),
        ("red cat", "red dog, blue cat", 1, 0.5),
        ("There is No Information Available here", "anything", 5, 1.0),
    ],
)
def test_locomo_f1_by_hand(prediction: str, answer: str, category: int, expected: float) -> None:
    assert metrics.locomo_f1(prediction, answer, category) == pytest.approx(expected, abs=1e-12)


def test_rankings() -> None:
    # DCG = 1 + 1/log2(3), ideal DCG = 1 + 1: ranks 1 and 2 weigh the same
    assert metrics.ndcg_any(["g", "x", "h"], {"g", "h"}, 3) == pytest.approx((1 + 1 / math.log2(3)) / 2)
    # a gold id that was not ranked costs; one ranked twice counts once
    assert metrics.ndcg_any(["g"], {"g", "h"}, 5) == metrics.ndcg_any(["g", "g"], {"g", "h"}, 5) == 0.5
    every = (metrics.recall_any, metrics.recall_all, metrics.ndcg_any)
    assert [metric([], {"g"}, 5) for metric in every] == [0.0, 0.0, 0.0]
    assert [metric(["x"], set(), 5) for metric in every] == [0.0, 1.0, 0.0]
    with pytest.raises(ConfigError, match="at least 1"):
        metrics.recall_any(["g"], {"g"}, 0)
    with pytest.raises(ConfigError, match="no category 6"):
        metrics.locomo_f1("a", "a", 6)


def encode(lines: list[str]) -> torch.Tensor:
    """Different lines are orthogonal."""
    return torch.eye(len(lines))


def scored(
    records: Sequence[StateRecord], outputs: Sequence[Generation], verdicts: Sequence[bool | None]
) -> list[Score]:
    """Nothing is judged without gold answer or output."""
    rulings = [
        Verdict(verdict) if record.format == "direct" and record.answers and output.failure is None else None
        for record, output, verdict in zip(records, outputs, verdicts, strict=True)
    ]
    return score(records, outputs, parse_all(records, outputs), rulings, encode)


def test_scores_by_hand(six: list[StateRecord]) -> None:
    texts = (
        "<answer>B</answer><explanation>Ana: s1 line 1</explanation>",
        "<answer>[A]</answer><explanation>Ana: m1 line 1\nAna: m1 line 5</explanation>",
        "<answer>A</answer><explanation>[1, 4]</explanation>",
        "<answer>Hiking</answer><explanation></explanation>",
        "<answer>no information available.</answer>",
    )
    outputs = [*(Generation(text, 10, 5, True) for text in texts), Generation("", 99, failure="too_long")]
    scores = scored(six[:6], outputs, [None, None, None, True, False, None])
    s1, m1, v1, d1, d2, m2 = scores
    assert [x.accuracy for x in scores] == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert (s1.memory_recall_text, m1.memory_recall_text, d1.memory_recall) == (0.5, 1.0, None)
    assert (v1.memory_recall_text, v1.memory_recall_visual, v1.memory_recall) == (None, 0.5, 0.5)
    assert [(x.bleu1, x.f1, x.locomo_f1) for x in (d1, s1)] == [(1.0, 1.0, 1.0), (None, None, None)]
    assert (d2.f1, d2.locomo_f1) == (1.0, 1.0)
    assert [x.evidence_recall for x in (s1, v1, d2, m2)] == [0.5, 0.5, None, 0.5]
    row = summarise((one.row() for one in scores), resamples=50)
    assert (row["memory_recall"]["value"], row["memory_recall"]["n"]) == (pytest.approx((0.5 + 1.0 + 0.5) / 3), 3)
    assert counts(scores)["problems"] == {"no explanation tag": 1}


def test_equation_8_over_all_questions_that_have_a_verdict(make_record: Callable[..., StateRecord]) -> None:
    """A row for each way to fail, counted by hand: wrong where the model failed, apart where nobody can tell."""
    single = {"format": "single", "options": ("x", "y"), "answers": ("A",)}
    visual = {"dimension": "topic_scoped_visual_prototypes", "evidence": (), "images": (0,)}
    said = "<answer>{}</answer><explanation>[0]</explanation>"
    cases: list[tuple[StateRecord, Generation, bool | None, float | None, float | None]] = [
        # record, output, verdict; s_i of Eq. 9, and whether an answer could be read
        (make_record("right", **single), Generation(said.format("A"), 1, 1, True), None, 1.0, 1.0),
        (make_record("wrong", **single), Generation(said.format("B"), 1, 1, True), None, 0.0, 1.0),
        (make_record("prose", **single), Generation("I would rather not say.", 1, 1, True), None, 0.0, 0.0),
        (make_record("empty", **single), Generation("", 1, 0, True), None, 0.0, 0.0),
        (make_record("thinking", **single), Generation("Let me see: the", 1, 9, False), None, 0.0, 0.0),
        (make_record("cut", **single), Generation("<answer>A</answer><expl", 1, 9, False), None, 1.0, 1.0),
        (make_record("long", **single, **visual), Generation("", 1, failure="too_long"), None, 0.0, 0.0),
        (make_record("refused"), Generation("", 1, failure="refused"), None, 0.0, 0.0),
        (make_record("blank"), Generation("<answer> </answer>", 1, 1, True), False, 0.0, 0.0),
        (make_record("accepted"), Generation("so", 1, 1, True), True, 1.0, 1.0),
        (make_record("unjudged"), Generation("so", 1, 1, True), None, None, 1.0),
        (make_record("away"), Generation("", 1, failure="server"), None, None, None),
        (make_record("memory", **single), Generation("", 1, failure="error"), None, None, None),
        (make_record("no gold", answers=()), Generation("so", 1, 1, True), None, None, 1.0),
        (make_record("no gold, refused", answers=()), Generation("", 1, failure="refused"), None, None, 0.0),
    ]
    records, outputs, verdicts, hits, read = zip(*cases, strict=True)
    scores = scored(records, outputs, verdicts)
    assert [item.accuracy for item in scores] == list(hits)
    assert [item.parse_rate for item in scores] == list(read)
    row = summarise((item.row() for item in scores), 20)
    for name, value, n in (("accuracy", 3 / 10, 10), ("parse_rate", 6 / 13, 13)):
        assert (row[name]["value"], row[name]["n"]) == (pytest.approx(value), n)
    assert (row["n"], row["failed"], row["no_verdict"]) == (15, 7, 3)
    by_id = {item.record.question_id: item for item in scores}
    # nor does the evidence count that stands beside what cannot be read
    record = make_record("evidence", **single)
    unread = Generation(f"<answer>x or y</answer><explanation>{record.evidence_lines[0]}</explanation>", 1, 1, True)
    assert [item.memory_recall for item in scored([record], [unread], [None])] == [None]
    # an empty output: nothing named (Eq. 11), no word in common (Eq. 13, 14), not valid for Eq. 10
    assert by_id["long"].memory_recall == 0.0
    assert (by_id["refused"].f1, by_id["refused"].bleu1, by_id["refused"].memory_recall) == (0.0, 0.0, None)
    assert (by_id["away"].f1, by_id["away"].evidence_recall) == (None, 0.5)


def test_empty_answers_are_wrong_without_asking() -> None:
    judge = Judge(fails=("down",))
    cases = [Case("q", ("up",), text) for text in ("up", " ", "down", "other")]
    assert [ruling.value for ruling in judge_answers(judge, cases)] == [True, False, None, False]  # type: ignore[arg-type]
    assert judge.asked == ["up", "down", "other"]


def test_the_mean_over_dimensions_is_what_table_1_prints() -> None:
    """Table 4's accuracies of the eight dimensions, multiple choice."""
    cells = (60.92, 65.04, 64.20, 52.78, 51.73, 59.60, 60.09, 60.41)
    nothing = dict.fromkeys(MEASURES)
    rows = {
        name: {"n": n, "failed": 0, "no_verdict": 0, **nothing, "accuracy": {"value": value}}
        for n, (name, value) in enumerate(zip(DIMENSIONS, cells, strict=True), start=1)
    }
    found = macro(rows)
    assert found["accuracy"]["value"] == pytest.approx(59.4, abs=0.1)
    assert (found["accuracy"]["n"], found["n"], found["f1"]) == (8, 36, None)


def every_mean(sums: list[float], sizes: list[int]) -> np.ndarray:
    """The mean of every one of the n^n resamples, all equally likely."""
    draws = list(itertools.product(range(len(sums)), repeat=len(sums)))
    return np.array([sum(sums[i] for i in draw) / sum(sizes[i] for i in draw) for draw in draws])


@pytest.mark.parametrize(
    ("first", "second", "clusters", "sums", "sizes"),
    [
        ([0.0, 1.0, 0.25, 0.5, 0.0], [1.0, 1.0, 0.5, 0.25, 0.75], None, [1.0, 0.0, 0.25, -0.25, 0.75], [1] * 5),
        ([0.0] * 7, [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0], "abaacdd", [2.0, 1.0, 0.0, 1.0], [3, 1, 1, 2]),
    ],
)
def test_against_every_resample(
    first: list[float], second: list[float], clusters: str | None, sums: list[float], sizes: list[int]
) -> None:
    means, value = every_mean(sums, sizes), sum(sums) / sum(sizes)
    found = paired_bootstrap(first, second, clusters and list(clusters), resamples=40_000)
    assert found is not None
    assert (found["value"], found["n"], found["units"]) == (pytest.approx(value), len(first), len(sums))
    assert (found["first"], found["second"]) == pytest.approx((np.mean(first), np.mean(second)))
    bounds = [pytest.approx(bound, abs=0.02) for bound in np.percentile(means, [2.5, 97.5])]
    assert [found["low"], found["high"]] == bounds
    assert found["p"] == pytest.approx(np.mean(np.abs(means - value) >= value - 1e-12), abs=0.01)
    if clusters:
        # the interval of a share knows of dialogues, too
        one = share(second, list(clusters), resamples=40_000)
        assert one is not None
        assert [one["value"], one["low"], one["high"]] == [pytest.approx(value), *bounds]


def test_edges_of_intervals() -> None:
    values = [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert bootstrap([]) is wilson([]) is share([], []) is paired_bootstrap([], []) is None
    # one dialogue, and a dialogue for each question
    assert share(values, ["a"] * 7) == share(values, list("abcdefg")) == wilson(values)
    # six answers about two dialogues that are all right say as much as two
    assert share([1.0] * 6, list("aaabbb")) == {**(wilson([1.0, 1.0]) or {}), "n": 6}
    same = paired_bootstrap(values, values) or {}
    assert [same[name] for name in ("value", "low", "high", "p")] == [0.0, 0.0, 0.0, 1.0]
    for single in (paired_bootstrap([0.0], [1.0]), paired_bootstrap([0.0, 0.0], [1.0, 0.0], ["a", "a"])):
        assert [(single or {})[name] for name in ("low", "high", "p", "units")] == [None, None, None, 1]


def test_the_ratio_of_sums_over_dialogues() -> None:
    # a twice, a and b, b twice
    found = ratio([(1.0, 2.0), (2.0, 2.0), (0.0, 4.0)], ["a", "a", "b"], 500)
    assert found == {"value": 3 / 8, "low": 0.0, "high": 3 / 4}
    assert ratio([(1.0, 0.0), (1.0, 2.0)], "ab", 500) == {"value": 1.0, "low": 0.5, "high": 1.0}
    assert ratio([(0.0, 0.0)], ["a"], 10)["value"] is None


#: Votes of 14 raters on 10 subjects over 5 categories: the worked example in the article on Fleiss' κ.
WORKED = [
    (0, 0, 0, 0, 14), (0, 2, 6, 4, 2), (0, 0, 3, 5, 6), (0, 3, 9, 2, 0), (2, 2, 8, 1, 1),
    (7, 7, 0, 0, 0), (3, 2, 6, 3, 0), (2, 5, 3, 2, 2), (6, 5, 2, 1, 0), (0, 2, 2, 3, 7),
]  # fmt: skip


def test_kappa_of_worked_examples() -> None:
    pytest.importorskip("statsmodels", reason="needs statsmodels: pip install 'remind-toolkit[refmem]'")
    subjects = [tuple(str(c) for c, n in enumerate(counts) for _ in range(n)) for counts in WORKED]
    assert fleiss_kappa(subjects) == pytest.approx(0.210, abs=5e-4)
    # P̄ = (1 + 1/3 + 1) / 3 = 7/9; p(x) = 5/9, p(y) = 4/9, P̄e = 41/81; κ = (63 - 41) / (81 - 41)
    assert fleiss_kappa([("x", "x", "x"), ("x", "x", "y"), ("y", "y", "y")]) == pytest.approx(22 / 40)
    for undefined in ([], [("x",), ("y",)], [("x", "x"), ("x", "x")]):
        assert fleiss_kappa(undefined) is None
