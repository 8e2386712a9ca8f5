"""Settings of a training run: the defaults are the paper's, and what cannot work is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from remind.alignment.config import (
    DataConfig,
    Edge,
    LoraConfig,
    Objective,
    TeacherConfig,
    TrainConfig,
    TrainerConfig,
)
from remind.alignment.trainer import Trainer
from remind.core.errors import ConfigError

LORA = LoraConfig(r=4, alpha=8)


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(states="s", out="o", **settings)


def test_the_default_objective_is_the_papers() -> None:
    objective = Objective()
    assert objective.edges == (Edge(0, 1, 3.0, 0.5), Edge(1, 2, 3.0, 0.5))
    assert (objective.lambda_hard, objective.tau, objective.hard_levels) == (0.2, 2.0, (0,))
    assert objective.trained == {0, 1}
    assert Objective(target_grad="flow").trained == {0, 1, 2}
    assert Objective(edges=()).levels == {0}


@pytest.mark.parametrize(
    # numbers out of range: tests/core/test_ranges.py
    ("make", "message"),
    [
        (lambda: Edge(0, 0), "two of the levels"),
        (lambda: Edge(0, 3), "teacher must be"),
        (lambda: Edge(0, 1, alpha=1.5), "alpha"),
        (lambda: Objective(lambda_hard=1.1), "lambda_hard"),
        (lambda: Objective(hard_levels=(3,)), "hard_levels"),
        (lambda: Objective(edges=(Edge(0, 1), Edge(0, 1, 2.0))), "twice"),
        (lambda: Objective(teacher_weights="base"), "level 0 only, not 12"),
        (lambda: Objective(teacher_weights="ema", target_grad="flow"), "needs teacher_weights live"),
        (lambda: TeacherConfig(ema_decay=1.0), "ema_decay"),
        (lambda: LoraConfig(target_modules=()), "target module"),
        (lambda: DataConfig(targets="decoded", unlabelled="skip"), "must name the state"),
        (lambda: config(data=DataConfig(targets="on_policy"), objective=Objective(edges=())), "is distilled"),
        (lambda: config(data=DataConfig(targets="decoded"), objective=Objective(lambda_hard=1.0)), "is distilled"),
        (lambda: TrainerConfig(warmup=2.0), "warmup"),
        (lambda: config(objective=Objective(target_grad="flow")), "joint"),
        (lambda: config(dtype="bfloat16"), "adamw8bit"),
        (lambda: config(dtype="bfloat16", lora=LORA, train_vision=True), "adamw8bit"),
        (lambda: config(quantise="nf4"), "set lora"),
        (lambda: Trainer(TrainConfig(states="", out="", model="")), "must be given"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_bfloat16_goes_with_an_optimiser_that_rounds_or_with_adapters() -> None:
    loop = TrainerConfig(optimizer="adamw8bit")
    for settings in ({"trainer": loop}, {"trainer": loop, "train_vision": True}, {"lora": LORA}):
        config(dtype="bfloat16", **settings)
    config(quantise="nf4", lora=LORA)
