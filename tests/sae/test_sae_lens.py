"""The format in both directions, against sae-lens itself."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sae import TopKSAE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sae_lens() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("sae_lens")


def randomised(coder: Any) -> Any:
    torch.manual_seed(1)
    for parameter in coder.requires_grad_(False).parameters():
        parameter.copy_(torch.randn_like(parameter))
    return coder


def states(dtype: torch.dtype) -> Tensor:
    return torch.randn(200, 24, dtype=dtype, generator=torch.Generator().manual_seed(5)) * 3


def test_sae_lens_opens_ours_bit_for_bit(sae_lens: Any, tmp_path: Path) -> None:
    coder = randomised(TopKSAE(24, 96, 7))
    coder.metadata = {"hook_name": "blocks.4.hook_resid_pre"}
    coder.save(tmp_path)
    other = sae_lens.SAE.load_from_disk(tmp_path)
    h = states(torch.float32)
    codes = coder.encode(h)
    # same operations in the same order; decoding sums k rows where sae-lens multiplies by a dense matrix
    assert torch.equal(codes.dense(96), other.encode(h))
    torch.testing.assert_close(coder.decode(codes), other.decode(other.encode(h)), rtol=1e-5, atol=1e-4)
    assert other.cfg.metadata.hook_name == "blocks.4.hook_resid_pre"
    assert other.cfg.rescale_acts_by_decoder_norm is False
    coder.bfloat16().save(tmp_path)
    assert sae_lens.SAE.load_from_disk(tmp_path).W_enc.dtype == TopKSAE.load(tmp_path).W_enc.dtype == torch.bfloat16


@pytest.mark.parametrize("changes", [{}, {"rescale_acts_by_decoder_norm": True}, {"apply_b_dec_to_input": False}])
def test_folding_keeps_codes_and_outputs(sae_lens: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    other = sae_lens.TopKSAE(sae_lens.TopKSAEConfig(d_in=24, d_sae=96, k=7, dtype="float64", **changes))
    randomised(other)
    other.save_model(tmp_path)
    ours, h = TopKSAE.load(tmp_path), states(torch.float64)
    acts = other.encode(h)
    torch.testing.assert_close(ours.encode(h).dense(96), acts, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(ours.decode(ours.encode(h)), other.decode(acts), rtol=1e-12, atol=1e-11)
    # written back, sae-lens computes the same without rescaling
    ours.save(tmp_path / "again")
    again = sae_lens.SAE.load_from_disk(tmp_path / "again")
    torch.testing.assert_close(again.encode(h), acts, rtol=1e-12, atol=1e-11)
    assert json.loads((tmp_path / "again" / "cfg.json").read_text())["rescale_acts_by_decoder_norm"] is False


def test_a_training_checkpoint_of_theirs_with_its_scale(sae_lens: Any, tmp_path: Path) -> None:
    from sae_lens.training.activation_scaler import ActivationScaler

    size = {"d_in": 24, "d_sae": 96, "k": 7, "dtype": "float64"}
    config = sae_lens.TopKTrainingSAEConfig(**size, normalize_activations="expected_average_only_in")
    other = randomised(sae_lens.TopKTrainingSAE(config))
    assert config.rescale_acts_by_decoder_norm
    other.save_model(tmp_path)
    scaler = ActivationScaler(scaling_factor=0.31)
    scaler.save(str(tmp_path / "activation_scaler.json"))
    ours, h = TopKSAE.load(tmp_path), states(torch.float64)
    acts = other.encode(scaler.scale(h))
    torch.testing.assert_close(ours.encode(h).dense(96), acts, rtol=1e-12, atol=1e-11)
    out = scaler.unscale(other.decode(acts))
    torch.testing.assert_close(ours.decode(ours.encode(h)), out, rtol=1e-12, atol=1e-11)
