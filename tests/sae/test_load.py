"""SAEs of other libraries against each library's own equations; files that are damaged, or would run something."""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import sae
from sae import FormatError, JumpReLUSAE, TopKSAE

D, N, K = 24, 96, 7


def states(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(200, D, dtype=dtype, generator=torch.Generator().manual_seed(5)) * 3


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


def topk(pre: Tensor, k: int = K) -> Tensor:
    return torch.zeros_like(pre).scatter(-1, *pre.topk(k, dim=-1)[::-1])


def same(coder: TopKSAE, acts: Tensor, out: Tensor) -> None:
    codes = coder.encode(states())
    torch.testing.assert_close(codes.dense(coder.d_sae), acts, rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(coder.decode(codes), out, rtol=1e-10, atol=1e-9)


def test_sparsify(tmp_path: Path) -> None:
    w = {"encoder.weight": random(N, D), "encoder.bias": random(N), "W_dec": random(N, D), "b_dec": random(D)}
    folder = tmp_path / "layers.3"
    folder.mkdir()
    save_file(w, folder / "sae.safetensors")
    config = {"activation": "topk", "d_in": D, "k": K, "num_latents": N, "transcode": False, "skip_connection": False}
    (folder / "cfg.json").write_text(json.dumps(config))
    acts = topk(((states() - w["b_dec"]) @ w["encoder.weight"].T + w["encoder.bias"]).relu())
    coders = sae.load_layers(tmp_path)
    assert list(coders) == [4]  # the output of block 3
    same(coders[4], acts, acts @ w["W_dec"] + w["b_dec"])
    (folder / "cfg.json").write_text(json.dumps({**config, "activation": "groupmax"}))
    with pytest.raises(FormatError, match="activation is 'groupmax'"):
        sae.load_layers(tmp_path)


def qwen_scope(path: Path) -> dict[str, Tensor]:
    w = {"W_enc": random(N, D), "W_dec": random(D, N), "b_enc": random(N), "b_dec": random(D)}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(w, path)
    return w


def test_qwen_scope(tmp_path: Path) -> None:
    folder = tmp_path / "SAE-Res-Test-W96-L0_7"
    w = qwen_scope(folder / "layer2.sae.pt")
    acts = topk(states() @ w["W_enc"].T + w["b_enc"])  # no b_dec subtracted, no ReLU
    assert bool((acts.topk(K).values > 0).all()), "the ReLU of Eq. 2 must not matter here"
    coders = sae.load_layers(folder)
    assert list(coders) == [3]
    same(coders[3], acts, acts @ w["W_dec"].T + w["b_dec"])


def test_gemma_scope(tmp_path: Path) -> None:
    path = tmp_path / "layer_5" / "width_96" / "average_l0_9" / "params.npz"
    path.parent.mkdir(parents=True)
    w = {"W_enc": random(D, N), "W_dec": random(N, D), "b_enc": random(N), "b_dec": random(D)}
    w["threshold"] = torch.rand(N, dtype=torch.float64) * 10
    np.savez(path, **{name: tensor.numpy() for name, tensor in w.items()})
    pre = states() @ w["W_enc"] + w["b_enc"]
    acts = pre * (pre > w["threshold"])
    coders = sae.load_layers(tmp_path)
    assert list(coders) == [6]
    coders[6].save(tmp_path / "again")
    for coder in (coders[6], sae.load(tmp_path / "again")):
        assert isinstance(coder, JumpReLUSAE)
        same(coder, acts, acts @ w["W_dec"] + w["b_dec"])
    with pytest.warns(UserWarning, match="features are active at a token; the 5 largest"):
        codes = sae.load(path, k=5).encode(states())
    torch.testing.assert_close(codes.dense(N), topk(acts, 5))


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "npz"])
def test_a_mapping(tmp_path: Path, suffix: str) -> None:
    """The names of dictionary_learning's AutoEncoder."""
    w = {"encoder.weight": random(N, D), "encoder.bias": random(N), "decoder.weight": random(D, N), "bias": random(D)}
    path = tmp_path / f"ae.{suffix}"
    {
        "safetensors": lambda: save_file(w, path),
        "pt": lambda: torch.save({name: torch.nn.Parameter(tensor) for name, tensor in w.items()}, path),
        "npz": lambda: np.savez(path, **{name: tensor.numpy() for name, tensor in w.items()}),
    }[suffix]()
    names = {"W_enc": "encoder.weight.T", "b_enc": "encoder.bias", "W_dec": "decoder.weight.T", "b_dec": "bias"}
    mapping = {"tensors": names, "activation": "relu", "layers": {"12": path.name}}
    (tmp_path / "sae_mapping.json").write_text(json.dumps(mapping))
    acts = ((states() - w["bias"]) @ w["encoder.weight"].T + w["encoder.bias"]).relu()
    coders = sae.load_layers(tmp_path)
    assert list(coders) == [12]
    for coder in (coders[12], sae.load(tmp_path)):
        same(coder, acts, acts @ w["decoder.weight"].T + w["bias"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": {"W_enc": "no", "b_enc": "b", "W_dec": "d"}}, "no tensor 'no' for W_enc; there are: b, d, e"),
        ({"tensors": {"W_enc": "e.T", "W_dec": "d"}}, "names no tensor for b_enc"),
        ({"tensors": {"W_enc": "e", "b_enc": "b", "W_dec": "d"}}, "b_enc is .96., not .24."),
        ({"k": None}, "says no k"),
        ({"k": 97}, "k = 97, but there are 96 features"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"layer": {}}, "layer is not a setting"),
        ({"layers": {"3": "b.safetensors"}}, "No such file"),
        ({"layers": {"3": "a.bin"}}, "is not a file of tensors"),
    ],
)
def test_a_mapping_that_does_not_fit(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_file({"e": random(N, D), "b": random(N), "d": random(N, D)}, tmp_path / "a.safetensors")
    names = {"W_enc": "e.T", "b_enc": "b", "W_dec": "d"}
    mapping = {"tensors": names, "k": 7, "layers": {"3": "a.safetensors"}, **change}
    (tmp_path / "sae_mapping.json").write_text(json.dumps(mapping))
    with pytest.raises(FormatError, match=f"{tmp_path}.*{message}"):
        sae.load_layers(tmp_path)


def test_torch_files_that_run_something_or_are_damaged(tmp_path: Path) -> None:
    path, w = tmp_path / "layer0.sae.pt", qwen_scope(tmp_path / "layer0.sae.pt")
    whole = path.read_bytes()
    # a tensor that claims more than the file holds
    source, short = zipfile.ZipFile(io.BytesIO(whole)), io.BytesIO()
    with zipfile.ZipFile(short, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name)[:8] if name.endswith("data/0") else source.read(name))
    for content in (b"", whole[: len(whole) // 2], short.getvalue(), pickle.dumps(Path)):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"layer0\.sae\.pt: (cannot be read|damaged)"):
            sae.load(path, k=3)
    for held, message in (({**w, "more": tmp_path}, "more than tensors"), ([w], "no dictionary of tensors")):
        torch.save(held, path)
        with pytest.raises(FormatError, match=message):
            sae.load(path, k=3)
    (tmp_path / "params.npz").write_bytes(whole[:99])
    with pytest.raises(FormatError, match="params"):
        sae.load(tmp_path / "params.npz")


@pytest.fixture(scope="module")
def sae_lens() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("sae_lens")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("TopK", {}),
        ("TopK", {"rescale_acts_by_decoder_norm": True}),
        ("TopK", {"apply_b_dec_to_input": False}),
        ("Standard", {"apply_b_dec_to_input": False}),
        ("JumpReLU", {}),
        ("Gated", {}),
        ("MatryoshkaBatchTopKTraining", {"matryoshka_widths": [32, N]}),
    ],
)
def test_architectures_of_sae_lens(sae_lens: Any, tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    settings = {**settings, **({"k": K} if "TopK" in name else {})}
    config = getattr(sae_lens, f"{name}SAEConfig")(d_in=D, d_sae=N, dtype="float64", **settings)
    other = getattr(sae_lens, f"{name}SAE")(config)
    for parameter in other.requires_grad_(False).parameters():
        parameter.copy_(torch.randn_like(parameter))
    if name == "JumpReLU":
        other.threshold.copy_(torch.rand(N) * 10)
    if "Training" in name:
        other.topk_threshold.fill_(9.0)
        other.save_inference_model(tmp_path / "inference")
        other = sae_lens.SAE.load_from_disk(tmp_path / "inference")
    other.save_model(tmp_path / "a")
    acts = other.encode(states()).detach()
    assert 0 < float((acts > 0).double().mean()) < 0.9
    ours = sae.load(tmp_path / "a")
    same(ours, acts, other.decode(acts))
    # written back, sae-lens computes the same without rescaling
    ours.save(tmp_path / "again")
    again = sae_lens.SAE.load_from_disk(tmp_path / "again")
    torch.testing.assert_close(again.encode(states()), acts, rtol=1e-10, atol=1e-9)
    assert json.loads((tmp_path / "again" / "cfg.json").read_text())["rescale_acts_by_decoder_norm"] is False


@pytest.mark.slow
def test_sae_lens_opens_ours_bit_for_bit_and_we_a_training_checkpoint_of_theirs(sae_lens: Any, tmp_path: Path) -> None:
    from sae_lens.training.activation_scaler import ActivationScaler

    coder, h = TopKSAE(D, N, K).requires_grad_(False), states(torch.float32)
    coder.metadata = {"hook_name": "blocks.4.hook_resid_pre"}
    coder.save(tmp_path / "ours")
    other = sae_lens.SAE.load_from_disk(tmp_path / "ours")
    # same operations in the same order; decoding sums k rows where sae-lens multiplies by a dense matrix
    assert torch.equal(coder.encode(h).dense(N), other.encode(h))
    torch.testing.assert_close(coder(h), other.decode(other.encode(h)), rtol=1e-5, atol=1e-4)
    assert other.cfg.metadata.hook_name == "blocks.4.hook_resid_pre"
    size = {"d_in": D, "d_sae": N, "k": K, "dtype": "float64"}
    config = sae_lens.TopKTrainingSAEConfig(**size, normalize_activations="expected_average_only_in")
    trained = sae_lens.TopKTrainingSAE(config).requires_grad_(False)
    trained.W_dec.mul_(torch.rand(N, 1, dtype=torch.float64) + 0.5)
    assert config.rescale_acts_by_decoder_norm
    trained.save_model(tmp_path / "theirs")
    scaler = ActivationScaler(scaling_factor=0.31)
    scaler.save(str(tmp_path / "theirs" / "activation_scaler.json"))
    acts = trained.encode(scaler.scale(states()))
    same(sae.load(tmp_path / "theirs"), acts, scaler.unscale(trained.decode(acts)))
