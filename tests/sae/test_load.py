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
    top = pre.topk(k, dim=-1)
    return torch.zeros_like(pre).scatter(-1, top.indices, top.values)


def same(coder: TopKSAE, acts: Tensor, out: Tensor, h: Tensor | None = None) -> None:
    codes = coder.encode(states() if h is None else h)
    torch.testing.assert_close(codes.dense(coder.d_sae), acts, rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(coder.decode(codes), out, rtol=1e-10, atol=1e-9)


def sparsify(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """A folder as sparsify's `save_to_disk` writes it."""
    tensors = {"encoder.weight": random(N, D), "encoder.bias": random(N), "W_dec": random(N, D), "b_dec": random(D)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "sae.safetensors")
    config = {"activation": "topk", "d_in": D, "k": K, "num_latents": N, "transcode": False, "skip_connection": False}
    (folder / "cfg.json").write_text(json.dumps({**config, **changes}))
    return tensors


def test_sparsify(tmp_path: Path) -> None:
    w = sparsify(tmp_path / "layers.3")
    h = states()
    acts = topk(((h - w["b_dec"]) @ w["encoder.weight"].T + w["encoder.bias"]).relu())
    coders = sae.load_layers(tmp_path)
    assert list(coders) == [4]  # the output of block 3
    same(coders[4], acts, acts @ w["W_dec"] + w["b_dec"])
    with pytest.raises(FormatError, match="activation is 'groupmax'"):
        sparsify(tmp_path / "layers.4", activation="groupmax")
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
    assert sae.load(folder / "layer2.sae.pt", k=3).k == 3
    (tmp_path / "layer2.sae.pt").symlink_to(folder / "layer2.sae.pt")
    with pytest.raises(FormatError, match="k is not in the path"):
        sae.load_layers(tmp_path)


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
    same(coders[6], acts, acts @ w["W_dec"] + w["b_dec"])
    # what sae-lens would open
    coders[6].save(tmp_path / "again")
    again = sae.load(tmp_path / "again")
    assert isinstance(again, JumpReLUSAE)
    same(again, acts, acts @ w["W_dec"] + w["b_dec"])


def test_more_features_than_are_kept(tmp_path: Path) -> None:
    coder = JumpReLUSAE(D, N, 5, torch.full((N,), -1.0))
    h = states(torch.float32)
    with pytest.warns(UserWarning, match="features are active at a token; the 5 largest"):
        codes = coder.encode(h)
    assert torch.equal(codes.dense(N), TopKSAE(D, N, 5, torch.Generator()).to(h).encode(h).dense(N)) is False
    expected = topk((h @ coder.W_enc).relu(), 5)
    torch.testing.assert_close(codes.dense(N), expected)


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "npz"])
def test_a_mapping(tmp_path: Path, suffix: str) -> None:
    """The names of dictionary_learning's AutoEncoder."""
    w = {"encoder.weight": random(N, D), "encoder.bias": random(N), "decoder.weight": random(D, N), "bias": random(D)}
    path = tmp_path / f"ae.{suffix}"
    if suffix == "safetensors":
        save_file(w, path)
    elif suffix == "pt":
        torch.save({name: torch.nn.Parameter(tensor) for name, tensor in w.items()}, path)
    else:
        np.savez(path, **{name: tensor.numpy() for name, tensor in w.items()})
    names = {"W_enc": "encoder.weight.T", "b_enc": "encoder.bias", "W_dec": "decoder.weight.T", "b_dec": "bias"}
    mapping = {"tensors": names, "activation": "relu", "layers": {"12": path.name}}
    (tmp_path / "sae_mapping.json").write_text(json.dumps(mapping))
    acts = ((states() - w["bias"]) @ w["encoder.weight"].T + w["encoder.bias"]).relu()
    out = acts @ w["decoder.weight"].T + w["bias"]
    coders = sae.load_layers(tmp_path)
    assert list(coders) == [12]
    same(coders[12], acts, out)
    same(sae.load(tmp_path), acts, out)
    assert sae.load(tmp_path, k=7).k == 7
    mapping["layers"] = {"12": path.name, "13": path.name}
    (tmp_path / "sae_mapping.json").write_text(json.dumps(mapping))
    with pytest.raises(FormatError, match="names 2 layers"):
        sae.load(tmp_path)


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
        ({"subtract_b_dec": "no"}, "subtract_b_dec is 'no'"),
        ({"layers": {"last": "a.safetensors"}}, "'last' is not a number"),
        ({"layers": {"3": "b.safetensors"}}, "No such file"),
        ({"layers": {}}, "names no layers"),
        ({"layers": {"3": "a.bin"}}, "is not a file of tensors"),
    ],
)
def test_a_mapping_that_does_not_fit(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_file({"e": random(N, D), "b": random(N), "d": random(N, D)}, tmp_path / "a.safetensors")
    names = {"W_enc": "e.T", "b_enc": "b", "W_dec": "d"}
    mapping = {"tensors": names, "k": 7, "layers": {"3": "a.safetensors"}, **change}
    (tmp_path / "sae_mapping.json").write_text(json.dumps(mapping))
    with pytest.raises(FormatError, match=message) as raised:
        sae.load_layers(tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    w = qwen_scope(tmp_path / "layer0.sae.pt")
    w["b_enc"][3] = torch.nan
    torch.save(w, tmp_path / "layer0.sae.pt")
    with pytest.raises(FormatError, match="b_enc holds values that are not finite"):
        sae.load(tmp_path / "layer0.sae.pt", k=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "subtract"),
    [("Standard", False), ("JumpReLU", True), ("Gated", True), ("MatryoshkaBatchTopKTraining", False)],
)
def test_architectures_of_sae_lens(tmp_path: Path, name: str, subtract: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sae_lens = pytest.importorskip("sae_lens")
    more = {"k": K} if "TopK" in name else {}
    if name.startswith("Matryoshka"):
        more["matryoshka_widths"] = [32]
    config = getattr(sae_lens, f"{name}SAEConfig")(
        d_in=D, d_sae=N, dtype="float64", apply_b_dec_to_input=subtract, **more
    )
    other = getattr(sae_lens, f"{name}SAE")(config)
    for parameter in other.requires_grad_(False).parameters():
        parameter.copy_(torch.randn_like(parameter))
    if name == "JumpReLU":
        other.threshold.copy_(torch.rand(N) * 10)
    if "TopK" in name:
        other.topk_threshold.fill_(9.0)
        other.save_inference_model(tmp_path / "inference")
        other = sae_lens.SAE.load_from_disk(tmp_path / "inference")
    other.save_model(tmp_path / "a")
    if "TopK" in name:
        assert json.loads((tmp_path / "a" / "cfg.json").read_text())["architecture"] == "jumprelu"
    with torch.no_grad():
        acts = other.encode(states())
        out = other.decode(acts)
    assert 0 < float((acts > 0).double().mean()) < 0.9
    same(sae.load(tmp_path / "a"), acts, out)


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
    torch.save({**w, "more": Path(tmp_path)}, path)
    with pytest.raises(FormatError, match="holds more than tensors"):
        sae.load(path, k=3)
    torch.save([w], path)
    with pytest.raises(FormatError, match="no dictionary of tensors"):
        sae.load(path, k=3)
    np.savez(tmp_path / "a.npz", a=np.zeros(3))
    for content in ((tmp_path / "a.npz").read_bytes()[:99], b"x"):
        (tmp_path / "params.npz").write_bytes(content)
        with pytest.raises(FormatError, match="params"):
            sae.load(tmp_path / "params.npz")
