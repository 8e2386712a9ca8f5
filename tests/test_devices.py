"""The device that models run on here, in float32, against float64 on the CPU: CUDA where there is one, else the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from torch import Tensor

from benchmarks.bench_grounding import bench_state
from benchmarks.bench_sae import batches
from remind.alignment.config import Objective
from remind.alignment.examples import Example
from remind.alignment.model import trainable
from remind.alignment.step import AlignmentModel, collate, plan, run
from remind.grounding.config import GroundingConfig
from remind.grounding.ground import Grounder
from remind.models.backbone import Backbone, load_backbone
from remind.models.generate import generate
from sae import TopKSAE
from sae.config import SAETrainConfig
from sae.trainer import Trainer

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Place = tuple[str, str]
REFERENCE: Place = ("cpu", "float64")
HERE: Place = (DEVICE, "float32")


@pytest.fixture(autouse=True)
def full_precision() -> Any:
    """Products in float32 proper, as the default is."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def both(compute: Callable[[Place], Any]) -> tuple[Any, Any]:
    return compute(HERE), compute(REFERENCE)


def assert_near(found: Tensor, expected: Tensor, share: float) -> None:
    """Within a share of the largest value of what is expected."""
    assert found.shape == expected.shape
    difference = (found.double().cpu() - expected).abs().max()
    assert float(difference) <= share * float(expected.abs().max())


@pytest.mark.parametrize("sharing", [False, True])
def test_a_step_on_three_states(sharing: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def ids(n: int) -> Tensor:
        return torch.randint(300, 400, (n,), generator=generator, dtype=torch.int32)

    dialogue, question = ids(60), ids(6)
    states = (dialogue, torch.cat([dialogue, ids(3)]), torch.cat([dialogue, ids(9)]))
    example = Example("a", tuple(torch.cat([state, question]) for state in states), ids(7))

    def compute(place: Place) -> dict[str, Tensor]:
        model = trainable(load_backbone("nano", place[1], place[0]).model, None)
        passes = plan(Objective(), sharing)
        batch = send_to_device(collate([(example, 1.0)]), place[0])
        values = run(AlignmentModel(model, Objective()), batch, passes, lambda loss: loss.backward())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {**{name: value.detach() for name, value in values.items()}, **gradients}

    found, expected = both(compute)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_near(found[name], value, 2e-3)


def test_marks_of_a_dialogue() -> None:
    saes = {layer: TopKSAE(128, 512, 16, generator=torch.Generator().manual_seed(layer)) for layer in (2, 3)}

    def compute(place: Place) -> Any:
        backbone: Backbone = load_backbone("nano", place[1], place[0])
        coders = {layer: sae.to(getattr(torch, place[1])) for layer, sae in saes.items()}
        grounder = Grounder(backbone, coders, None, GroundingConfig(context_codes="joint", idf="dialogue"))
        return grounder.ground(bench_state(backbone, 600))

    found, expected = both(compute)
    assert found.blocks == expected.blocks != ()
    assert_near(torch.tensor(found.salience), torch.tensor(expected.salience, dtype=torch.float64), 1e-3)


def test_steps_of_an_sae() -> None:
    """Both in float32, which is what it trains in; the reference is the CPU."""
    data = batches(64, 256, 4)

    def compute(device: str) -> dict[str, Tensor]:
        trainer = Trainer(SAETrainConfig(d_sae=256, k=8, steps=20, batch_size=256, lr=1e-3, log_every=1), device)
        trainer.start({0: torch.cat(data).to(device)})
        for number in range(12):
            trainer.step(trainer.accept(number, {0: data[number % len(data)]}))
        return {name: value.cpu() for name, value in trainer.layers[0].coder.state_dict().items()}

    found, expected = compute(DEVICE), compute("cpu")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_near(found[name], value.double(), 5e-3)


def test_greedy_answers() -> None:
    prompts = ["Ana: I moved to the city in spring.\nQuestion: where does Ana live?", "Who is kidding?"]

    def compute(place: Place) -> list[str]:
        outputs = generate(load_backbone("nano", place[1], place[0]), prompts, 12, batch_size=2)
        return [output.text for output in outputs if output is not None]

    found, expected = both(compute)
    assert found == expected
    assert len(found) == 2
