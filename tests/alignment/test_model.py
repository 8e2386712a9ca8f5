"""The model that is trained: adapters, the marker's token, 4 bits, and how they go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from remind.alignment.model import trainable
from remind.alignment.step import head_of
from remind.alignment.targets import Ema
from remind.core.errors import ModelError
from remind.models.backbone import load_backbone
from remind.train_pra.run import nf4
from tests.alignment.test_export import LORA, nano_folder


class Gradients(TrainerCallback):
    """What the optimiser is given in the last step."""

    seen: dict[str, Tensor]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_tokenizer_of_another_model_is_refused(runs: Any, make_record: Any, tmp_path: Path) -> None:
    own = load_backbone("nano-untrained")
    own.model.resize_token_embeddings(300)
    with pytest.raises(ModelError, match=r"^the tokenizer gives token \d+, but \w+ has 300: [^\n]*$"):
        runs.trainer(tmp_path, [make_record(0)], None, own.model, processing_class=own.tokenizer)


def test_layers_whose_blocks_would_cross_rows_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing in 4 bits is tested")
    folder = nano_folder(tmp_path, tie=True, width=96)
    with pytest.raises(ModelError, match=r"^model\.language_model\.layers\.0\.\S+ in 4 bits: [^\n]*$"):
        trainable(load_backbone(folder, quantization=nf4("float32")).model, LORA)


@pytest.mark.parametrize(
    "more", [{"teacher_model_kind": "ema"}, {"targets": "on_policy", "teacher_model_kind": "base"}]
)
def test_adapters_and_the_marker_have_a_teacher_of_other_weights(
    runs: Any, make_record: Any, tmp_path: Path, more: dict[str, Any]
) -> None:
    """Its head has other rows for the marker: of the average, or as they were."""
    heads = []

    def kept(self: Ema, *args: Any) -> Any:
        fixed = of(self, *args)
        heads.append((fixed.head.weight.clone(), head_of(self.model).weight.detach().clone()))
        return fixed

    told = {"edges": [(0, 1), (0, 2)], "max_decoded": 4, "max_steps": 3, "learning_rate": 1e-2, "marker_token": True}
    small, of = nano_folder(tmp_path / "base", tie=True), Ema.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ema, "of", kept)
        rows = [make_record(n) for n in range(3)]
        runs.trainer(tmp_path / "r", rows, None, small, peft_config=LORA, **{**told, **more}).train()
    first, last = heads[0], heads[-1]
    assert torch.equal(*first)
    assert not torch.equal(*last)
    assert torch.equal(last[0], first[0]) == (more["teacher_model_kind"] == "base")


def test_adapters_learn_on_four_bits(runs: Any, make_record: Any, tmp_path: Path) -> None:
    """The gradients are those on a model in float32 with the values that the bits stand for."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing in 4 bits is tested")
    small = nano_folder(tmp_path / "base", tie=True)
    kept = load_backbone(small, quantization=nf4("float32"))
    seen = []
    for name, model, more in (
        ("small", small, {"quantization_config": nf4("float32")}),
        ("plain", kept.model.dequantize(), {"processing_class": kept.tokenizer}),
    ):
        watch = Gradients()
        more |= {"peft_config": LORA, "callbacks": [watch], "marker_token": True, "max_steps": 2}
        runs.trainer(
            tmp_path / name, [make_record(n) for n in range(3)], None, model, max_grad_norm=0.0, **more
        ).train()
        seen.append(watch.seen)
    found, expected = seen
    assert found.keys() == expected.keys()
    for each, value in expected.items():
        assert float(value.norm()) > 0, each
        assert float((found[each] - value).norm()) < 1e-3 * float(value.norm()), each
