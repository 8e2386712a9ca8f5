"""Figure 4 with training: what each row learns from, the small form, and the commands of the full form."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_process import run_module

from experiments.paper.__main__ import run
from experiments.paper.config import PaperConfig
from experiments.paper.trained import ALTERED, ROWS, UNTRAINED, objective_of
from remind.alignment.config import Edge, Objective
from remind.core.errors import ConfigError, ModelError
from remind.core.files import read_json, write_json
from remind.perception import PerceptionConfig, RetrieveConfig
from remind.states.dataset import read_states
from remind.testbed.built import BuiltConfig
from remind.testbed.world import WorldConfig
from sae.config import SAETrainConfig

WORLD = WorldConfig(train=1, dev=0, test=1, sessions=2, contrary=(0, 1), second_voice=0.0)
# so short a dialogue would be kept whole
PART = PerceptionConfig(retrieve=RetrieveConfig(method="hybrid", whole_tokens=0))
BUILT = BuiltConfig(sae=SAETrainConfig(d_sae=32, k=4, steps=2, batch_size=64), talk=1, perception=PART)


def test_what_is_left_of_the_objective() -> None:
    printed = Objective(lambda_hard=0.2, edges=(Edge(0, 1, 3.0), Edge(1, 2, 2.0)))
    recommended = replace(printed, edges=(Edge(0, 1, 3.0), Edge(0, 2, 2.0)), teacher_model_kind="base")
    for objective in (printed, recommended):
        assert objective_of(objective, markers=True, summary=True) == objective
        assert objective_of(objective, markers=True, summary=False) == replace(objective, edges=(Edge(0, 1, 3.0),))
        assert objective_of(objective, markers=False, summary=True) == replace(objective, edges=(Edge(0, 2, 2.0),))
        bare = objective_of(objective, markers=False, summary=False)
        assert (bare.lambda_hard, bare.edges, bare.trained) == (1.0, (), {0})
    with pytest.raises(ConfigError, match="no edge left without x2"):
        objective_of(replace(printed, edges=(Edge(0, 2),)), markers=True, summary=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> PaperConfig:
    folder = tmp_path_factory.mktemp("trained")
    cfg = PaperConfig(
        "run", "fig4_trained", str(folder / "small"), small=True, world=WORLD, built=BUILT, steps=1, resamples=20,
        cache=str(folder / "cache"), rows=[UNTRAINED, "evidence + summary", ALTERED],
    )  # fmt: skip
    run(cfg)
    return cfg


@pytest.mark.slow
def test_rows_of_the_small_form(small: PaperConfig) -> None:
    out = Path(str(small.out))
    result = read_json(out / "result.json")
    assert [*result["rows"]] == [name for name in ROWS if name in small.rows]
    assert {row["all"]["all"]["n"] for row in result["rows"].values()} == {20}
    folder = out / "seed-0"
    states = {path.name: {r.question_id: r for r in read_states(path)} for path in folder.glob("states*")}
    assert set(states) == {"states", "states-no-strategy-no-markers", "states-altered-order"}
    # training questions have labels, which the built states have not
    assert all(record.answers for record in states["states"].values())
    for name, record in states["states"].items():
        bare, altered = states["states-no-strategy-no-markers"][name], states["states-altered-order"][name]
        assert bare.x0.text == bare.x1.text
        assert not any(record.x0.text[start:end] in bare.x2.text for start, end in record.x0.reasoning)
        assert "\nReflection\n" in bare.x2.text
        # the summary comes first, the markers on top of it
        assert altered.x0.text == record.x0.text
        assert "\nReflection\n" in altered.x1.text
        assert not altered.x1.markers
        assert len(altered.x2.markers) == len(record.x1.markers)
        assert altered.x1.text.split("\nReflection\n")[1].splitlines()[0] in altered.x2.text
    # kept where it was made, and not taken for another
    before = (folder / "model-altered-order" / "training.json").stat().st_mtime_ns
    run(small)
    assert (folder / "model-altered-order" / "training.json").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="was trained with other settings"):
        run(replace(small, steps=2))


@pytest.mark.slow
def test_the_full_form_runs_commands(small: PaperConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = Path(str(small.out)) / "seed-0" / "states"
    (corpus,) = (Path(small.cache) / "paper").glob("*/states.jsonl")
    asked = {"states": str(states), "model": "unused", "corpus": [str(corpus)], "max_new_tokens": 12, "bootstrap": 20}
    trainer = {"max_steps": 1}
    write_json(tmp_path / "evaluate.yaml", asked)
    write_json(tmp_path / "train.yaml", {"model": "nano", "data": {"unlabelled": "skip"}, "trainer": trainer})
    started: list[list[str]] = []

    def start(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(words)
        status, _, errors = run_module("remind", *words[words.index("remind") + 1 :])
        return subprocess.CompletedProcess(words, status, stderr=errors)

    monkeypatch.setattr(subprocess, "run", start)
    cfg = PaperConfig(
        "run", "fig4_trained", str(tmp_path / "out"), evaluate=str(tmp_path / "evaluate.yaml"), rows=["all (x2)"],
        train=[str(tmp_path / "train.yaml")], launcher="configs/accelerate/cpu_2.yaml", seeds=(5,), resamples=20,
    )  # fmt: skip
    run(cfg)
    assert read_json(tmp_path / "out" / "result.json")["rows"]["all (x2)"]["all"]["all"]["n"] == 20
    assert [words[words.index("remind") + 1] for words in started] == ["train-pra", "export", "evaluate"]
    assert started[0][1:6] == [
        "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "configs/accelerate/cpu_2.yaml",
    ]  # fmt: skip
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 2))
    with pytest.raises(ModelError, match=r"remind train-pra .* ended with status 2"):
        run(replace(cfg, out=str(tmp_path / "other")))
    with pytest.raises(ConfigError, match="no row 'x3'; there are untrained, x0"):
        run(replace(cfg, rows=["x3"]))
