"""Official files of LongMemEval and LoCoMo: byte for byte, their figures by definition and by hand, judges."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import run_module
from scripted_chat import Scripted
from sklearn import metrics as reference_metrics
from small_corpus import short_haystack

from experiments.official.agreement import AgreementConfig, agreement, judge_agreement
from experiments.official.export import ExportOfficialConfig, export_official
from experiments.official.files import ResultFile
from experiments.official.locomo import Answered, by_category, recall_of, score_samples
from experiments.official.longmemeval import TYPES, Reference, check_rows, load_references, score_rows
from experiments.official.retrieval import KS, Haystack, ScoreRetrievalConfig, score_ranking, score_retrieval
from experiments.official.score import ScoreOfficialConfig, score_official
from remind.core.errors import DataError, FormatError
from remind.evaluation.judge import Case, LongMemEvalJudge, judge_answers
from remind.evaluation.statistics import bootstrap
from remind.llm.request import Reply


def save(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def lines(path: Path, rows: Sequence[object]) -> str:
    return str(save(path, "".join(json.dumps(row) + "\n" for row in rows).encode()))


def test_the_published_rows_come_back_byte_for_byte(tmp_path: Path, remind_data: Path) -> None:
    (source,) = (remind_data / "longmemeval").glob("*.eval-results*")
    questions = remind_data / "longmemeval" / "longmemeval_s_queries.json"
    command = ("--results", source, "--references", questions, "--out", tmp_path)
    status, printed, errors = run_module("experiments.official.score", *command)
    assert status == 0, errors
    assert "written back: identical" in printed
    raw = source.read_bytes()
    assert (tmp_path / source.name).read_bytes() == raw
    # not because nothing was serialised: the style found for a changed row gives every row's bytes
    file = ResultFile(source)
    for row in file.records:
        row["new"] = 1
    assert file.dump() == b"".join(line[:-1] + b', "new": 1}\n' for line in raw.splitlines())
    assert json.loads((tmp_path / "scores.json").read_text())["overall"]["n"] == 500


# LongMemEval


def test_accuracy_by_type_and_what_a_judge_could_not_say() -> None:
    kinds = {"a": 0, "b": 0, "c": 4, "d": 4, "e": 0, "f_abs": 3}
    references = {name: Reference(name, "?", "x", TYPES[kind]) for name, kind in kinds.items()}
    replies = {
        "a": Reply('{"verdict": true}', {"verdict": True}),
        "b": Reply("No."),
        "c": Reply("Maybe, who knows", failure="invalid"),
        "d": Reply("", failure="server", message="503"),
        "f_abs": Reply("yes"),
    }
    model = Scripted(lambda request: replies[request.sample])
    judge = LongMemEvalJudge({"judge": model}, {name: one.type for name, one in references.items()})
    cases = [Case("?", ("x",), " " if name == "e" else "said") for name in kinds]
    labels = [verdict.value for verdict in judge_answers(judge, cases, list(kinds))]
    assert labels == [True, False, None, None, False, True]
    # the blank one is not asked about; each is judged in the role of its type
    assert (len(model.requests), len({request.prompt_id for request in model.requests})) == (5, 3)
    rows = [
        {"question_id": name, "hypothesis": "said", "autoeval_label": {"model": "j", "label": label}}
        for name, label in zip((*kinds, "stranger"), (*labels, True), strict=True)
    ]
    found = score_rows(rows, references)
    assert found["by_type"][TYPES[0]]["value"] == pytest.approx(1 / 3)
    assert (found["overall"]["value"], found["answerable"]["n"], found["abstention"]["value"]) == (0.5, 3, 1.0)
    counts = {"rows": 7, "judged": 4, "without_verdict": 2, "unknown_question": 1, "unanswered": 0}
    assert found["counts"] == counts


def test_what_is_no_official_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1.*hypothesis"):
        check_rows(ResultFile(lines(tmp_path / "r.jsonl", [{"question_id": "a"}])))
    listed = {"id": "q", "query": "how many?", "gold_answers": [3], "meta": {"question_type": "multi-session"}}
    path = lines(tmp_path / "q.jsonl", [listed])
    with pytest.raises(DataError, match="occurs twice"):
        load_references(lines(tmp_path / "twice.jsonl", [listed, listed]))
    with pytest.raises(DataError, match=r"conv-26-q000\]: category should be 1 to 5"):
        score_samples(samples(tmp_path / "s.json", [item(6, "x", "y")]))
    with pytest.raises(FormatError, match="neither"):
        score_official(ScoreOfficialConfig(path, str(tmp_path / "out")))


def dcg(relevances: Sequence[int], k: int) -> float:
    values = np.asarray(relevances, dtype=float)[:k]
    return float(values[0] + np.sum(values[1:] / np.log2(np.arange(2, values.size + 1)))) if values.size else 0.0


def by_definition(order: list[int], gold: set[str], corpus: list[str], k: int) -> tuple[float, float, float]:
    """The benchmark's three figures over corpus positions and document names."""
    top = {corpus[i] for i in order[:k]}
    relevances = [int(name in gold) for name in corpus]
    found = dcg([relevances[i] for i in order[:k]], k) / dcg(sorted(relevances, reverse=True), k)
    return float(any(g in top for g in gold)), float(all(g in top for g in gold)), found


def test_retrieval_at_both_levels_against_the_benchmarks_definition() -> None:
    generator = random.Random(0)
    for k in [1, 3, 10, 50] * 30:
        sessions = {f"s{n}": generator.randint(1, 6) for n in range(generator.randint(1, 12))}
        turns = [(name, f"{name}:{n}") for name, count in sessions.items() for n in range(count)]
        gold = {turn for name, turn in turns if name in ("s0", "s3") and generator.random() < 0.5}
        if not gold:
            continue
        # as the benchmark names them: in a gold session what holds no evidence becomes a document of its own
        special = {name for name, turn in turns if turn in gold}
        names = [
            f"{'answer' if turn in gold else 'noans'}-{name}_{n}" if name in special else f"{name}_{n}"
            for n, (name, turn) in enumerate(turns)
        ]
        gold_names = {name for name, (_, turn) in zip(names, turns, strict=True) if turn in gold}
        haystack = Haystack("q", tuple(t for _, t in turns), {t: s for s, t in turns}, frozenset(gold))
        order = generator.sample(range(len(turns)), len(turns))
        found = score_ranking(haystack, [turns[i][1] for i in order], [k])
        # turn names cut to their session; k grows until k sessions are seen
        documents, size = [name.rsplit("_", 1)[0] for name in names], k
        while size <= len(documents) and len({documents[i] for i in order[:size]}) < k:
            size += 1
        wanted = {name.rsplit("_", 1)[0] for name in gold_names}
        for level, expected in (
            ("turn", by_definition(order, gold_names, names, k)),
            ("session", by_definition(order, wanted, documents, size)),
        ):
            figures = tuple(found[level][f"{name}@{k}"] for name in ("recall_any", "recall_all", "ndcg_any"))
            assert figures == pytest.approx(expected, abs=1e-12), (level, order)


def test_our_rankings_of_a_real_haystack(remind_data: Path, tmp_path: Path) -> None:
    path, _ = short_haystack(remind_data, tmp_path, others=1)
    config = ScoreRetrievalConfig(str(path), cache=str(tmp_path), out=str(tmp_path / "out.json"), bootstrap=5)
    result = score_retrieval(config)
    for method in config.methods:
        values = [result["methods"][method]["turn"][f"recall_any@{k}"]["value"] for k in KS]
        assert values == sorted(values)
        assert values[-1] == 1.0


# LoCoMo


def item(category: int, said: str | None, answer: Any = None, **more: Any) -> dict[str, Any]:
    """A question with a prediction of the model m."""
    gold = {} if answer is None else {"answer": answer}
    given = {} if said is None else {"m_prediction": said}
    return {"question": f"question {category}?", **gold, "evidence": ["D1:3"], "category": category, **given, **more}


def samples(path: Path, *found: list[dict[str, Any]]) -> ResultFile:
    value = [{"sample_id": f"conv-{n}", "qa": items} for n, items in enumerate(found, start=26)]
    return ResultFile(save(path, json.dumps(value, indent=2).encode()))


def test_figures_of_locomo_by_hand_and_as_its_scorer_writes_them(tmp_path: Path) -> None:
    file = samples(
        tmp_path / "r.json",
        [
            item(1, "camping, running", "painting, camps", m_prediction_context=["D1:3"]),  # 1 of 2 parts
            item(2, "7 May, 2023", "7 May 2023", m_prediction_context=["D1:4"]),
            item(3, "she hikes", "hiking; for fun"),  # 2 * 1/2 * 1 / (1/2 + 1)
            item(4, "2022", 2022, evidence=[], m_prediction_context=["D1:4"]),
            item(4, "nothing alike", "lamp"),
            item(5, "No information available.", adversarial_answer="a lamp"),
            item(4, None, "lamp"),
            item(4, "lamp"),
        ],
    )
    answered, counts = score_samples(file)
    values = [1 / 2, 1.0, 2 / 3, 1.0, 0.0, 1.0, None]
    assert [one.f1 for one in answered] == [None if v is None else pytest.approx(v) for v in values]
    assert [one.recall for one in answered[:4]] == [1.0, 0.0, None, None]
    expected = {"model": "m", "questions": 8, "answered": 7, "unanswered": 1, "without_gold_answer": 1, "changed": 0}
    assert counts == expected
    written = [[question.get(name, "none") for question in file.records[0]["qa"]] for name in ("m_f1", "m_recall")]
    # whole numbers where the scorer has them: nothing in common outside category 1, and all of category 5
    assert json.dumps(written[0]) == '[0.5, 1.0, 0.667, 1.0, 0, 1, "none", "none"]'
    assert written[1] == [1.0, 0.0, "none", 1, *["none"] * 4]
    found = by_category(answered, resamples=50)
    assert [found[name]["n"] for name in ("1", "4", "5", "1-4", "all")] == [1, 3, 1, 6, 7]
    assert found["1-4"]["f1"]["value"] == pytest.approx((0.5 + 1 + 2 / 3 + 1) / 5)
    assert found["all"]["f1"]["value"] == pytest.approx((0.5 + 1 + 2 / 3 + 1 + 1) / 6)
    # questions of a dialogue are no independent ones
    lives = [Answered(f"conv-{n % 4}", "", 4, float(n % 4 > 1), None) for n in range(40)]
    whole = by_category(lives, resamples=200)["4"]["f1"]
    assert whole == bootstrap([one.f1 for one in lives], 200, 0, [one.sample_id for one in lives])
    assert whole["high"] - whole["low"] > 0.5
    assert recall_of(["D1:3", "D2:4", "D2:5"], ["S2", "S7"]) == pytest.approx(2 / 3)


def test_our_answers_in_both_formats(tmp_path: Path) -> None:
    data, run, out = tmp_path / "locomo.json", tmp_path / "run", tmp_path / "out.json"
    samples(data, [item(4, None, "lamp"), item(5, None), item(2, None, "May")], [item(4, None, "x")])
    said = (("conv-26-q000", "a lamp", None), ("conv-26-q001", "lamp", None), ("conv-26-q002", "", "error"))
    rows = [{"question_id": q, "answer": answer, "failure": failure, "accuracy": None} for q, answer, failure in said]
    run.mkdir()
    (run / "report.json").write_text(json.dumps({"identity": {"split": "test"}, "overall": {"parse_rate": None}}))
    lines(run / "predictions.jsonl", rows)
    assert export_official(ExportOfficialConfig(str(run), str(out), "locomo", str(data), "m")) == 2
    (sample,) = json.loads(out.read_text())
    figures = [(question.get("m_prediction"), question.get("m_f1")) for question in sample["qa"]]
    assert (sample["sample_id"], figures) == ("conv-26", [("a lamp", 1.0), ("lamp", 0), (None, None)])
    # it goes in again as it came out
    report = score_official(ScoreOfficialConfig(str(out), str(tmp_path / "again")))
    assert (report["written_back"], report["counts"]["unanswered"]) == ("identical", 1)
    assert export_official(ExportOfficialConfig(str(run), str(tmp_path / "o.jsonl"), "longmemeval")) == 2
    first = json.loads((tmp_path / "o.jsonl").read_text().splitlines()[0])
    assert first == {"question_id": "conv-26-q000", "hypothesis": "a lamp"}


# judges


def test_agreement_against_scikit_learn_and_with_a_judge(tmp_path: Path) -> None:
    generator = random.Random(0)
    for _ in range(20):
        labels = [generator.random() < 0.6 for _ in range(generator.randint(2, 60))]
        verdicts = [label if generator.random() < 0.8 else not label for label in labels]
        figures = agreement(verdicts, labels)
        assert figures["accuracy"]["value"] == pytest.approx(reference_metrics.accuracy_score(labels, verdicts))
        for name in ("precision", "recall", "f1", "cohen_kappa"):
            if (value := figures[name.removeprefix("cohen_")]) is not None:
                assert value == pytest.approx(getattr(reference_metrics, f"{name}_score")(labels, verdicts)), name
    labelled = {"question_id": "1", "dimension": "x", "question": "?", "references": ["a"], "prediction": "a"}
    result = judge_agreement(AgreementConfig(lines(tmp_path / "l.jsonl", [{**labelled, "label": True}])))
    assert result["groups"]["x"]["agree"] == 1
    with pytest.raises(DataError, match=r"line 1.*true or false"):
        judge_agreement(AgreementConfig(lines(tmp_path / "l.jsonl", [{"question_id": "1", "label": "yes"}])))
