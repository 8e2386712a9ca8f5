from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_retrieval import METHODS, BenchRetrievalConfig, Row, bench_corpus, bench_retrieval, tabulate
from remind.core.files import read_json
from remind.data.dialogue import Corpus, Dialogue, Question, Session, Turn
from remind.data.readers import write_refmem
from remind.llm.auxiliary import OfflineLLM
from remind.perception import Perception, PerceptionConfig


def row(category: str, hybrid: float, turns: float) -> Row:
    recall = dict.fromkeys(METHODS, 0.5) | {"hybrid": hybrid, "turns": turns}
    return Row(category, recall, dict.fromkeys(METHODS, 10), 1.0)


def test_tabulate_against_hand_counts() -> None:
    table = tabulate([row("1", 1.0, 0.0), row("1", 0.5, 0.5), row("4", 1.0, 1.0)])
    assert list(table) == ["1", "4", "all"]
    assert (table["1"]["n"], table["1"]["hybrid"], table["1"]["turns"], table["1"]["gain"]) == (2, 0.75, 0.25, 0.5)
    # two gains 1 and 0: standard deviation sqrt(1/2), standard error 1/2
    assert table["1"]["gain_95"] == pytest.approx(0.98)
    assert table["4"]["gain_95"] == 0
    assert table["all"]["gain"] == pytest.approx(1 / 3)


def test_turn_retrieval_gets_no_fewer_tokens_than_the_hybrid(park: Dialogue, bag: object) -> None:
    questions = (
        Question("a", "park", "Is Pixel shy?", evidence=("1:3", "1:5"), category=1),
        Question("b", "park", "Where does Ben move?", evidence=("2:1",), dimension="temporal_dynamics"),
        Question("c", "park", "No gold here?"),
        Question("d", "park", "What is on the table?", images=(0,), dimension="cross_modal_latent_inference"),
    )
    perception = Perception(PerceptionConfig(), bag, OfflineLLM())  # type: ignore[arg-type]
    rows = bench_corpus(Corpus((park,), questions), perception)
    assert [r.category for r in rows] == ["1", "temporal_dynamics", "cross_modal_latent_inference"]
    for r in rows:
        assert min(r.tokens["turns"], r.tokens["bm25"], r.tokens["dense"]) >= r.tokens["hybrid"]
        assert all(0 <= share <= 1 for share in r.recall.values())


def test_prints_counts_and_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = tuple(Turn(f"1:{n}", "AB"[n % 2], f"I counted {n} geese.") for n in range(6))
    question = Question("q", "c", "Who counted 4 geese?", answers=("A",), evidence=("1:4",))
    path, out = tmp_path / "geese.jsonl", tmp_path / "table.json"
    write_refmem(Corpus((Dialogue("c", (Session("s", None, turns),)),), (question,)), path)
    table = bench_retrieval(BenchRetrievalConfig(str(path), cache=str(tmp_path), out=str(out)))
    assert "references name no turn and are left out" in capsys.readouterr().out
    assert read_json(out) == table
    assert table["geese.jsonl"]["all"]["n"] == 1
