"""The check before training: log p by hand in float64, a world in which x2 helps, and its control."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from remind.alignment.examples import example_of
from remind.check_states import check_states, measure, questions_of, warn_of, with_other_summaries
from remind.commands import run
from remind.core.errors import DataError
from remind.core.files import read_json
from remind.evaluation.likelihood import log_probabilities
from remind.models.backbone import Backbone, load_backbone
from remind.states.dataset import write_states
from remind.states.records import StateRecord, summary_of
from remind.testbed.ladder import LadderConfig, records
from remind.testbed.world import WorldConfig, make_world
from remind.train_pra.config import CheckStatesConfig


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return load_backbone("nano")


@pytest.fixture(scope="module")
def made() -> list[StateRecord]:
    world = make_world(WorldConfig(train=2, dev=2, test=0))
    return records(world, LadderConfig())


@pytest.fixture(scope="module")
def folder(made: list[StateRecord], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("world") / "states"
    write_states(path, made, {"inputs": {}})
    return path


def test_log_p_is_that_of_the_words_between_the_tags(nano: Backbone, made: list[StateRecord]) -> None:
    one, tokenizer = made[0], nano.tokenizer
    said = one.target.split("<answer>")[1].split("</answer>")[0]  # type: ignore[union-attr]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": one.x2.text}], tokenize=False, add_generation_prompt=True
    )
    whole = tokenizer(f"{chat}{one.target}", add_special_tokens=False).input_ids
    logits = nano.model(input_ids=torch.tensor([whole])).logits[0].detach().double().log_softmax(-1)
    ends = [len(tokenizer.decode(whole[:place])) for place in range(len(whole) + 1)]
    start = len(chat) + len("<answer>")
    inside = [p for p in range(len(whole)) if ends[p] < start + len(said) and ends[p + 1] > start]
    expected = [float(logits[place - 1, whole[place]]) for place in inside]
    assert inside
    expected = [sum(expected) / len(expected)]
    assert log_probabilities(nano, [(one, "x2")]) == pytest.approx(expected, abs=1e-4)
    # behind what it has in common with others
    assert log_probabilities(nano, [(one, "x0"), (one, "x2"), (one, "x2")])[1:] == pytest.approx(2 * expected, abs=1e-4)


def test_what_the_states_of_a_world_add(nano: Backbone, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dev = questions_of(folder, "dev", 16)
    assert len(dev) == 16
    assert {record.split for record in dev} == {"dev"}
    bare = replace(dev[1], x2=dev[1].x1)
    assert with_other_summaries([bare, *dev[2:]])[0] == bare
    changed = with_other_summaries(dev)
    for before, after in zip(dev, changed, strict=True):
        assert summary_of(after) in {summary_of(other) for other in dev if other is not before}
        assert after.x2.text.replace(summary_of(after), "") == before.x2.text.replace(summary_of(before), "")
    found = check_states(CheckStatesConfig(str(folder), questions=16))
    assert found["gain"]["x2"]["low"] > 0
    assert found["own"]["low"] > 0
    by_hand = [[log_probabilities(nano, [(record, level)])[0] for level in ("x0", "x2")] for record in dev]
    assert found["gain"]["x2"]["value"] == pytest.approx(sum(x2 - x0 for x0, x2 in by_hand) / 16, abs=1e-5)
    assert "warning" not in capsys.readouterr().err


def test_it_warns_where_the_teacher_adds_nothing(
    nano: Backbone, made: list[StateRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    same = [replace(record, x1=record.x0, x2=record.x0) for record in made[:6]]
    assert with_other_summaries(same) == []
    found = measure(nano, same)
    assert found["own"] is None
    warn_of(found, "x2")
    assert "x2 is not shown to make the gold answers more probable than x0" in capsys.readouterr().err
    # as good, and so is that of another question
    warn_of({"questions": 9, "gain": {"x2": {"low": 0.1}}, "own": {"value": 0.0, "low": -0.1, "high": 0.1}}, "x2")
    assert "another question's summary does as well" in capsys.readouterr().err


def test_states_that_cannot_be_checked(made: list[StateRecord], tmp_path: Path) -> None:
    for name, change in (("unlabelled", {"target": None, "answers": ()}), ("no-dev", {"split": "train"})):
        write_states(tmp_path / name, [replace(record, **change) for record in made[:4]])  # type: ignore[arg-type]
        with pytest.raises(DataError, match="no question of split dev has a gold answer"):
            check_states(CheckStatesConfig(str(tmp_path / name)))


def test_questions_that_are_too_long_in_any_state_are_left_out(
    nano: Backbone, made: list[StateRecord], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = made[:6]
    lengths = [example_of(nano.tokenizer, one).longest for one in some]
    long = some[3].x2.text.replace(summary_of(some[3]), "tea " * 40)
    # the control of the first one has its summary
    asked = [*some[:3], replace(some[3], x2=replace(some[3].x2, text=long)), *some[4:]]
    with monkeypatch.context() as patch:
        patch.setattr(nano, "max_length", max(lengths))
        found = measure(nano, asked)
    assert (found["questions"], found["too_long"]) == (4, 2)
    kept = [asked[n] for n in (1, 2, 4, 5)]
    gains = [log_probabilities(nano, [(one, "x0"), (one, "x2")]) for one in kept]
    assert found["gain"]["x2"]["value"] == pytest.approx(sum(x2 - x0 for x0, x2 in gains) / 4, abs=1e-5)
    with monkeypatch.context() as patch, pytest.raises(DataError, match="every question is longer than the 10 tokens"):
        patch.setattr(nano, "max_length", 10)
        measure(nano, asked)
    warn_of(measure(nano, some[:1]), "x2")
    assert "x2 is not shown to make" in capsys.readouterr().err


def test_an_answer_without_tags_counts_as_a_whole(nano: Backbone, made: list[StateRecord]) -> None:
    [bare] = log_probabilities(nano, [(replace(made[0], target="tea"), "x0")])
    ids = example_of(nano.tokenizer, replace(made[0], target="tea"))
    whole = torch.cat([ids.prompts[0], ids.answer[:-1]]).long()[None]
    logits = nano.model(input_ids=whole).logits[0].detach().double().log_softmax(-1)[-len(ids.answer) : -1]
    expected = logits.gather(-1, ids.answer[:-1, None].long()).mean()
    assert bare == pytest.approx(float(expected), abs=1e-4)


def test_a_run_in_which_x0_teaches_is_not_checked(folder: Path, tmp_path: Path) -> None:
    command = ["--states", str(folder), "--out", str(tmp_path / "run"), "--trainer.max_steps", "1"]
    run("train-pra", [*command, "--objective.edges", "[[1, 0]]"])
    assert read_json(tmp_path / "run" / "data.json")["check"] is None


def test_train_pra_checks_its_teacher_first(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--states", str(folder), "--out", str(tmp_path / "run"), "--trainer.lr_scheduler_type", "constant"]
    command += ["--trainer.warmup_steps", "0", "--trainer.max_steps"]
    run("train-pra", [*command, "1"])
    assert "nats a token, 12 dev questions" in capsys.readouterr().err
    check = read_json(tmp_path / "run" / "data.json")["check"]
    assert check["questions"] == 12
    assert check["own"]["n"] == 12
    # a run that is gone on with keeps it, and measures nothing of a model that has learned
    run("train-pra", [*command, "2", "--resume", "true"])
    assert "nats a token" not in capsys.readouterr().err
    assert read_json(tmp_path / "run" / "data.json")["check"] == check
