"""Every table and figure in its small form, one in its full form, and the commands that make them."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Proxy, completion

from experiments.paper.__main__ import run, with_flag
from experiments.paper.ablation import STAGES
from experiments.paper.config import PaperConfig
from experiments.paper.items import ITEMS, NEEDS, listing
from experiments.paper.settings import settings
from experiments.paper.systems import OURS, foreign_rows
from remind.core.cli import main
from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json
from remind.data.sample import sample_path
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.perception import PerceptionConfig, RetrieveConfig
from remind.testbed.built import BuiltConfig
from remind.testbed.ladder import LadderConfig, write_states
from remind.testbed.world import WorldConfig, make_world
from sae.config import SAETrainConfig

WORLD = WorldConfig(train=0, dev=0, test=1, sessions=2, contrary=(0, 1), second_voice=0.0)
# so short a dialogue would be kept whole
PART = PerceptionConfig(retrieve=RetrieveConfig(method="hybrid", whole_tokens=0))
BUILT = BuiltConfig(sae=SAETrainConfig(d_sae=32, k=4, steps=2, batch_size=64), talk=1, perception=PART)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("paper")

    def made(item: str, **values: Any) -> Path:
        cfg = PaperConfig(
            "run",
            item,
            str(folder / item),
            small=True,
            world=WORLD,
            built=BUILT,
            cache=str(folder / "cache"),
            resamples=20,
        )
        run(replace(cfg, **values))
        return folder / item

    return made


@pytest.mark.slow
@pytest.mark.parametrize("item", [name for name in ITEMS if name != "fig4_trained"])
def test_a_small_form(item: str, make: Callable[..., Path]) -> None:
    values: dict[str, Any] = {
        "fig5": {"alphas": (6.0,), "betas": (0.0, 4.0)},
        "table2": {"benchmark": [str(sample_path() / "dev.jsonl")]},
    }.get(item, {})
    out = make(item, **values)
    result = read_json(out / "result.json")
    assert (result["item"], result["form"], result["seeds"]) == (item, "small", [0])
    assert (out / "table.md").read_text().startswith(f"# {ITEMS[item].title}\n")
    asks = "evaluate" in ITEMS[item].needs
    assert result["kind_of_question"] == ("its gold dimension" if asks else None)
    assert ("Kind of question: its gold dimension." in (out / "table.md").read_text()) == asks
    picture = out / ("fig6.html" if item == "fig6" else f"{item}.png")
    assert picture.stat().st_size > 1000
    CHECKS.get(item, lambda *_: None)(result, out)


def _fig4(result: dict[str, Any], out: Path) -> None:
    rows = result["rows"]
    assert set(STAGES) <= set(rows)
    assert {row["all"]["all"]["n"] for row in rows.values()} == {20}
    gain = result["differences"]["all (x2)"]["added to evidence"]
    base, whole = (rows[name]["all"]["all"]["accuracy"]["value"] for name in ("evidence", "all (x2)"))
    assert gain["value"] == pytest.approx(whole - base)


def _table1(result: dict[str, Any], out: Path) -> None:
    # baselines are those of a run of memory systems, which explain nothing
    memory = {"no_context", "full_context", "gold", "dense", "bm25", "hybrid", "remind"}
    assert set(result["systems"]) == {*OURS, *memory}
    assert {result["systems"][name]["all"]["all"]["n"] for name in memory} == {20}
    assert {result["systems"][name]["all"]["all"]["memory_recall"] for name in memory} == {None}
    assert {row["system"] for row in result["memory"]} == memory
    assert "| dense | NaiveRAG | 33.6 | 45.9 |" in (out / "table.md").read_text()


def _fig11(result: dict[str, Any], out: Path) -> None:
    # what the build counted of the same states
    (manifest,) = (out.parent / "cache" / "paper").glob("*/states/manifest.json")
    counted = read_json(manifest)["evidence_recall"]["all"]
    most, shipped = (result["points"][name]["value"] for name in ("x0", "as shipped"))
    assert (most, shipped) == (pytest.approx(counted["x0"]), pytest.approx(counted["marked"]))
    assert "whole history" in result["curves"]
    for name, values in result["curves"].items():
        shares = [value["value"] for value in values]
        # more tokens mark no less, and no one marks what was not retrieved
        assert shares == sorted(shares)
        assert shares[-1] <= most + 1e-9 or name == "whole history"


def _fig12(result: dict[str, Any], out: Path) -> None:
    by_name = {row["condition"]: row for row in result["conditions"]}
    assert by_name["x0"]["tokens_read"] < by_name["x1"]["tokens_read"] < by_name["x2"]["tokens_read"]
    assert by_name["x0"]["operations"] < by_name["x2"]["operations"]
    assert all(row["seconds"] > 0 for row in result["conditions"])


def _table3(result: dict[str, Any], out: Path) -> None:
    with (out / "labels.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == result["sampled"]
    (judge,) = result["judges"].values()
    assert judge["all"]["n"] == result["sampled"]


CHECKS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "fig4": _fig4,
    "table1": _table1,
    "fig11": _fig11,
    "fig12_table8": _fig12,
    "table3": _table3,
}


@pytest.mark.slow
def test_a_full_form_reads_its_config_and_people_label(make: Callable[..., Path], tmp_path: Path) -> None:
    """The full form on the world's states: a sheet to fill in first, then agreement; its answers are a system."""
    (small,) = settings(PaperConfig(small=True, world=WORLD, built=BUILT, cache=str(make("table3").parent / "cache")))
    config = tmp_path / "evaluate.yaml"
    asked = {
        name: getattr(small.evaluate, name) for name in ("states", "model", "corpus", "max_new_tokens", "bootstrap")
    }
    config.write_text(json.dumps({**asked, "llm": {"cache": None}}))
    cfg = PaperConfig("run", "table3", str(tmp_path / "out"), evaluate=str(config), resamples=20)
    run(cfg)
    assert read_json(tmp_path / "out" / "result.json")["labels"] is None
    sheet = tmp_path / "out" / "labels.csv"
    with sheet.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        row["label"] = "0" if number else "1"
    with sheet.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    answers = tmp_path / "out" / "answers"
    with Proxy(answer=lambda body: (200, {}, completion('{"verdict": true}'))) as server:
        # further judges, and the answers of the finished run
        judges = [EndpointConfig(name, server.url) for name in ("one", "two")]
        again = replace(cfg, out=str(tmp_path / "again"), systems=[f"own={answers}"], judges=judges)
        run(replace(again, labels=str(sheet)))
    first, *lenient = read_json(tmp_path / "again" / "result.json")["judges"].items()
    assert [name.split("judge=")[1] for name, _ in lenient] == [f"{one}@{server.url}" for one in ("one", "two")]
    # what is empty is wrong without asking
    agree = sum(bool(row["prediction"]) == (row["label"] == "1") for row in rows)
    assert {(one["all"]["agree"], one["all"]["n"]) for _, one in lenient} == {(agree, len(rows))}
    assert not (tmp_path / "again" / "answers").exists()
    run(replace(cfg, labels=str(sheet)))
    (judge,) = read_json(tmp_path / "out" / "result.json")["judges"].values()
    assert judge == first[1]
    stored = tmp_path / "out" / "answers" / "predictions.jsonl"
    verdicts = {row["question_id"]: row["accuracy"] == 1 for row in map(json.loads, stored.read_text().splitlines())}
    expected = sum(verdicts[row["question_id"]] == (row["label"] == "1") for row in rows)
    assert (judge["all"]["agree"], judge["all"]["n"]) == (expected, len(rows))
    # the folder of a finished run is a system, if it was asked the same questions
    (asked_now,) = settings(cfg)
    found = foreign_rows(asked_now, "own", tmp_path / "out" / "answers", tmp_path / "unused")
    assert {row["question_id"] for row in found.values()} >= {row["question_id"] for row in rows}
    # which may be more than are asked now, and no fewer
    fewer = replace(asked_now, evaluate=replace(asked_now.evaluate, limit=3))
    assert set(foreign_rows(fewer, "own", answers, tmp_path / "unused")) < set(found)
    states = write_states(make_world(replace(WORLD, test=2)), tmp_path / "states", LadderConfig())
    more = replace(asked_now, evaluate=replace(asked_now.evaluate, states=str(states)))
    with pytest.raises(DataError, match="is a run on other questions \\(20 differ"):
        foreign_rows(more, "own", answers, tmp_path / "unused")
    llm = LLMConfig(judge=EndpointConfig("m", "http://localhost:1/v1"))
    other = replace(asked_now, evaluate=replace(asked_now.evaluate, judge="llm", llm=llm))
    with pytest.raises(DataError, match="was judged by offline"):
        foreign_rows(other, "own", tmp_path / "out" / "answers", tmp_path / "unused")


def test_the_preset_of_the_tables_is_read() -> None:
    preset = Path(__file__).parents[2] / "configs" / "paper" / "evaluate_base.yaml"
    (one,) = settings(PaperConfig(evaluate=str(preset), out="o"))
    assert (one.evaluate.answers, one.evaluate.judge, len(one.evaluate.corpus)) == ("vllm", "llm", 1)


def command(*words: str) -> None:
    main(PaperConfig, run, "", with_flag(list(words)), positional=("action", "item"))


def test_the_list_names_every_item_and_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    command("list")
    shown = capsys.readouterr().out
    assert shown.strip() == listing()
    for name, item in ITEMS.items():
        block = re.search(rf"^{name}: (.*\n    .*\n    .*)$", shown, re.MULTILINE)
        assert block, f"{name} is not in the list"
        assert all(f"--{option}" in block[1] for option in item.needs)
        assert item.small in block[1]
        assert set(item.needs) <= set(NEEDS)


def test_what_is_missing_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            command(*words)
        assert end.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        return lines[0]

    told = refused("run", "fig12_table8", "--out", str(tmp_path / "a"))
    assert "--evaluate (config file of remind evaluate" in told
    assert "--cost (" in told
    assert not (tmp_path / "a").exists()
    assert "no item 'fig7'; there are fig4, fig4_trained, table1" in refused("run", "fig7", "--out", str(tmp_path))
    (tmp_path / "e.yaml").write_text("{states: no/states, model: nano, out: x, corpus: [no.json, also.json]}")
    files = ["--evaluate", str(tmp_path / "e.yaml"), "--cost", "no.yaml", "--systems", '["a=no.jsonl", "runs/no"]']
    told = refused("run", "fig12_table8", "--out", str(tmp_path / "a"), *files)
    assert "there is no no.jsonl, runs/no, no.yaml, no/states, no.json, also.json; or --small" in told
    assert "needs --out" in refused("run", "fig4", "--small")
    assert "seeds must be distinct" in refused("run", "fig4", "--seeds", "[1, 1]")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "result.json").write_text('{"item": "fig4", "form": "full"}')
    assert "holds the result of something else" in refused("run", "fig4", "--small", "--out", str(tmp_path / "b"))


def test_a_config_of_evaluate_serves_every_seed(tmp_path: Path) -> None:
    path = tmp_path / "evaluate.yaml"
    path.write_text("states: runs/states\nmodel: runs/model-{seed}\nout: x\ncorpus: [d.json]\nsplit: dev\n")
    cfg = PaperConfig(evaluate=str(path), out=str(tmp_path), seeds=(3, 5))
    assert [(one.seed, one.evaluate.model, one.evaluate.split) for one in settings(cfg)] == [
        (3, "runs/model-3", "dev"),
        (5, "runs/model-5", "dev"),
    ]
    path.write_text("states: runs/states\nmodel: runs/model\nout: x\n")
    with pytest.raises(ConfigError, match=r"must name \{seed\}"):
        settings(cfg)
    assert len(settings(replace(cfg, seeds=(3,)))) == 1
