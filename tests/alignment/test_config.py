"""Settings of a training run: the command's are the library's, and what cannot work is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from remind.alignment.arguments import PRAConfig
from remind.alignment.config import Edge, ExampleConfig, LoopConfig, Objective
from remind.core.cli import parse
from remind.core.errors import ConfigError
from remind.train_pra.config import TrainConfig, TrainerConfig
from remind.train_pra.run import arguments_of, make_trainer

ROOT = Path(__file__).parents[2]


def test_edges_may_be_written_in_several_ways() -> None:
    expected = (Edge(0, 1), Edge(0, 2, 1.0, 0.25))
    for edges in (expected, [(0, 1), [0, 2, 1, 0.25]], [{"student": 0, "teacher": 1}, (0, 2, 1.0, 0.25)]):
        assert Objective(edges=edges).edges == expected  # type: ignore[arg-type]


def test_the_command_and_the_library_have_the_same_settings(tmp_path: Path) -> None:
    plain, library = arguments_of(TrainConfig("s", str(tmp_path))), PRAConfig(str(tmp_path))
    for part in (Objective, ExampleConfig, LoopConfig):
        for name in (field.name for field in fields(part)):
            assert getattr(plain, name) == getattr(library, name), name
    more = TrainerConfig(batch_size=6, gradient_accumulation_steps=3, more={"adam_beta2": 0.95})
    args = arguments_of(TrainConfig("s", "o", seed=3, objective=Objective(edges=((0, 2, 1, 0.25),)), trainer=more))  # type: ignore[arg-type]
    assert (args.seed, args.per_device_train_batch_size, args.adam_beta2) == (3, 2, 0.95)
    # written to a checkpoint, and read by trackers
    assert args.to_dict()["edges"] == [[0, 2, 1.0, 0.25]]


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/pra_*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_config_is_one_of_the_trainer(path: Path) -> None:
    cfg: Any = parse(TrainConfig, "", ["--config", str(path), "--states", "s", "--out", "o"])
    assert arguments_of(cfg).objective == cfg.objective


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Edge(0, 0), "two of the levels"),
        (lambda: Objective(edges=(Edge(0, 1), Edge(0, 1, 2.0))), "twice"),
        (lambda: Objective(teacher_model_kind="base"), "level 0 only, not 12"),
        (lambda: Objective(teacher_model_kind="ema", target_grad="flow"), "needs teacher_model_kind live"),
        (lambda: PRAConfig("o", targets="decoded", unlabelled="skip"), "must name the state"),
        (lambda: TrainConfig("s", "o", quantise="nf4"), "set lora"),
        (lambda: make_trainer(TrainConfig(states="", out="", model="")), "must be given"),
        (lambda: arguments_of(TrainConfig("s", "o", trainer=TrainerConfig(more={"odd": 1}))), "trainer: .*odd"),
        (lambda: PRAConfig("o", edges=[], hard_levels=()), "nothing is trained"),
        (lambda: PRAConfig("o", batch_size=6, gradient_accumulation_steps=4), "use a multiple of 4"),
        (lambda: PRAConfig("o", deepspeed="ds.json"), "DeepSpeed is not supported"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^[^\n]*{message}"):
        make()
