"""Tables and figures of the paper: cells by hand counts, answers of others, every small form, a full form."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_answers import Lines

from experiments.paper.ablation import STAGES, without
from experiments.paper.cells import product
from experiments.paper.config import PaperConfig
from experiments.paper.items import ITEMS, paper
from experiments.paper.judging import read_sheet
from experiments.paper.settings import Setting, pooled
from experiments.paper.systems import OURS, FileAnswers, foreign_rows
from experiments.paper.trained import ALTERED, UNTRAINED
from remind.core.cli import main
from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json
from remind.data.sample import sample_path
from remind.evaluation.config import EvaluateConfig
from remind.perception import PerceptionConfig, RetrieveConfig
from remind.states.dataset import read_states
from remind.testbed.built import BuiltConfig
from remind.testbed.ladder import LadderConfig, records, write_states
from remind.testbed.world import World, WorldConfig, make_world
from sae.config import SAETrainConfig

WORLD = WorldConfig(train=0, dev=0, test=1, sessions=2, contrary=(0, 1), second_voice=0.0)
# so short a dialogue would be kept whole
PART = PerceptionConfig(retrieve=RetrieveConfig(method="hybrid", whole_tokens=0))
BUILT = BuiltConfig(sae=SAETrainConfig(d_sae=32, k=4, steps=2, batch_size=64), talk=1, perception=PART)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(WORLD)


def write_answers(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_of_another_system_against_a_hand_count(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third question is right, every fourth of the rest cannot be read, the others are wrong."""
    monkeypatch.setattr("remind.models.encoder.SentenceEncoder", Lines)
    states = write_states(world, tmp_path / "states", LadderConfig())
    asked = Setting(0, EvaluateConfig(str(states), "none", "", bootstrap=20))
    known = read_states(states)
    rows, right = [], {}
    for number, record in enumerate(known):
        gold = ",".join(record.answers) if record.format == "multi" else record.answers[0]
        wrong = {"multi": "", "single": next(x for x in "ABCD" if x not in record.answers), "direct": "never so"}
        # null: it failed
        unread = None if record.format == "direct" else "no idea"
        answer = gold if number % 3 == 0 else unread if number % 4 == 0 else wrong[record.format]
        evidence = record.images[:1] if record.visual else record.evidence_lines[:1]
        quoted = str(list(evidence)) if record.visual else "\n".join(map(str, evidence))
        rows.append({"question_id": record.question_id, "answer": answer, "explanation": quoted * (number % 2 == 0)})
        right[record.question_id] = number % 3 == 0
    found = foreign_rows(asked, "other", write_answers(tmp_path / "other.jsonl", rows), tmp_path / "out")
    table = product(pooled([(asked, found)]), 20)
    for format in ("single", "multi", "direct", "all"):
        here = [record for record in known if format in ("all", record.format)]
        hits = sum(right[record.question_id] for record in here)
        assert table[format]["all"]["accuracy"]["value"] == pytest.approx(hits / len(here))
    # Eq. 10: samples that quote nothing are not in V; Eq. 11: they are, with 0
    whole = table["all"]["all"]
    # what names no option is like an empty output
    quotes = {row["question_id"] for row in rows if row["explanation"] and row["answer"] not in (None, "no idea", "")}
    text = [1 / len(set(r.evidence_lines)) for r in known if not r.visual and r.question_id in quotes]
    images = [(r.question_id in quotes) / len(r.images) for r in known if r.visual]
    for measure, shares in (("memory_recall_text", text), ("memory_recall_visual", images)):
        assert (whole[measure]["n"], whole[measure]["value"]) == (len(shares), pytest.approx(sum(shares) / len(shares)))
    assert whole["parse_rate"]["value"] < 1


def test_answers_and_labels_that_cannot_be_used(tmp_path: Path) -> None:
    rows = [{"question_id": name, "answer": "A"} for name in ("q9", "q1")]
    with pytest.raises(DataError, match=r"1 ids that are no question here.*2 questions without"):
        FileAnswers("other", write_answers(tmp_path / "a.jsonl", rows), ["q1", "q2", "q3"], ["q2", "q3"])
    sheet = tmp_path / "labels.csv"
    sheet.write_text("question_id,label\nq1,yes\nq2, 0\n")
    with pytest.raises(DataError, match="1 answers without a label"):
        read_sheet(sheet, ["q1", "q2", "q3"])


def test_every_combination_of_strategy_markers_and_summary(world: World) -> None:
    whole, found = records(world, LadderConfig()), set()
    for strategy, markers, summarised in STAGES.values():
        level = "x2" if summarised else "x1" if markers else "x0"
        texts = [record.level(level).text for record in without(whole, world.corpus, strategy, markers)]
        for record, text in zip(whole, texts, strict=True):
            guides = [record.x0.text[start:end] for start, end in record.x0.reasoning]
            assert all((guide in text) == strategy for guide in guides)
            assert ("[ATTENTION]" in text.split("\n\nConversation\n")[1]) == (markers and bool(record.x1.markers))
            assert ("\nReflection\n" in text) == summarised
        found.add(tuple(texts))
    assert len(found) == len(STAGES) == 8


# whole items


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    folder = tmp_path_factory.mktemp("paper")
    common = PaperConfig("run", small=True, world=WORLD, built=BUILT, cache=str(folder / "cache"), resamples=20)

    def made(item: str, **values: Any) -> Path:
        cfg = replace(common, **{"item": item, "out": str(folder / item), **values})
        paper(cfg)
        return Path(str(cfg.out))

    with pytest.MonkeyPatch.context() as patch:
        # room for an answer, and for no explanation
        patch.setattr("experiments.paper.settings.MAX_NEW_TOKENS", 16)
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("item", [name for name in ITEMS if name != "fig4_trained"])
def test_a_small_form(item: str, make: Callable[..., Path]) -> None:
    fig5, table2 = {"alphas": (6.0,), "betas": (0.0, 4.0)}, {"benchmark": [str(sample_path() / "dev.jsonl")]}
    out = make(item, **{"fig5": fig5, "table2": table2}.get(item, {}))
    result = read_json(out / "result.json")
    assert (result["item"], result["form"], result["seeds"]) == (item, "small", [0])
    assert (out / {"fig6": "grounding.html", "table2": "table.md"}.get(item, f"{item}.png")).stat().st_size > 500
    if item == "fig4":
        rows, gain = result["rows"], result["differences"]["all (x2)"]["added to evidence"]
        base, whole = (rows[name]["all"]["all"]["accuracy"]["value"] for name in ("evidence", "all (x2)"))
        assert gain["value"] == pytest.approx(whole - base)
    elif item == "table1":
        # baselines are those of a run of memory systems
        names = {"no_context", "full_context", "gold", "dense", "REMIND as printed"}
        assert set(OURS) | names <= set(result["systems"])
        assert all(result["systems"][name]["all"]["all"]["memory_recall_visual"] for name in names)
        # and the run itself says the same of them
        reported = read_json(out / "seed-0" / "memory" / "report.json")["conditions"]
        for name in names & set(reported):
            whole = result["systems"][name]["all"]["all"]
            assert reported[name]["overall"]["accuracy"]["value"] == whole["accuracy"]["value"]
        assert names & set(reported) >= names - {"REMIND as printed"}
    elif item == "fig11":
        # what the build counted of the same states
        (manifest,) = (out.parent / "cache" / "paper").glob("*/states/manifest.json")
        counted = read_json(manifest)["evidence_recall"]["all"]
        most, shipped = (result["points"][name]["value"] for name in ("x0", "as shipped"))
        assert (most, shipped) == (pytest.approx(counted["x0"]), pytest.approx(counted["marked"]))


@pytest.mark.slow
def test_judges_against_people_who_label_the_sheet(make: Callable[..., Path], tmp_path: Path) -> None:
    out, sheet = make("table3"), tmp_path / "labels.csv"
    with (out / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    # to people, the first of the answers alone is right
    with sheet.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, "label": str(int(number == 0))} for number, row in enumerate(rows))
    result = read_json(make("table3", labels=str(sheet), out=str(tmp_path / "again")) / "result.json")
    stored = map(json.loads, (out / "answers" / "predictions.jsonl").read_text().splitlines())
    verdicts = {row["question_id"]: row["accuracy"] == 1 for row in stored}
    expected = sum(verdicts[row["question_id"]] == (number == 0) for number, row in enumerate(rows))
    (ours,) = result["judges"].values()
    assert (ours["all"]["agree"], ours["all"]["n"]) == (expected, len(rows))


@pytest.mark.slow
def test_rows_that_are_trained(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"world": replace(WORLD, train=1), "built": BUILT, "steps": 1, "resamples": 20}
    sizes |= {"rows": [UNTRAINED, "evidence + summary", ALTERED], "cache": str(tmp_path / "cache")}
    cfg = PaperConfig("run", "fig4_trained", str(tmp_path / "small"), small=True, **sizes)
    paper(cfg)
    result, folder = read_json(tmp_path / "small" / "result.json"), tmp_path / "small" / "seed-0"
    assert {row["all"]["all"]["n"] for row in result["rows"].values()} == {20}
    states = {path.name: {r.question_id: r for r in read_states(path)} for path in folder.glob("states*")}
    for name, record in states["states"].items():
        bare, altered = states["states-no-strategy-no-markers"][name], states["states-altered-order"][name]
        assert bare.x0.text == bare.x1.text
        # the summary comes first, the markers on top of it
        assert "\nReflection\n" in altered.x1.text
        assert len(altered.x2.markers) == len(record.x1.markers)
    with pytest.raises(ConfigError, match="was trained with other settings"):
        paper(replace(cfg, steps=2))


def test_what_is_missing_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.yaml").write_text("{states: no/states, model: nano, out: x, corpus: [no.json, also.json]}")
    files = ["--evaluate", str(tmp_path / "e.yaml"), "--cost", "no.yaml", "--systems", '["a=no.jsonl", "runs/no"]']
    files += ["--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(PaperConfig, paper, "", ["run", "fig12_table8", *files], positional=("action", "item"))
    missing = "there is no no.jsonl, runs/no, no.yaml, no/states, no.json, also.json; or --small"
    assert missing in capsys.readouterr().err
