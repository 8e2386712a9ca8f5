"""Eq. 2 against brute force in float64, and the folder format."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from sae import FormatError, ShapeError, SparseCodes, TopKSAE, layer_folder, load_layers
from sae.errors import ActivationError, ConfigError
from sae.topk import largest


def random_coder(d_in: int, d_sae: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> TopKSAE:
    torch.manual_seed(seed)
    coder = TopKSAE(d_in, d_sae, k).to(dtype)
    with torch.no_grad():
        for parameter in coder.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return coder.requires_grad_(False)


def dense_codes(coder: TopKSAE, h: Tensor) -> Tensor:
    """Eq. 2 word by word, one token at a time."""
    out = torch.zeros(*h.shape[:-1], coder.d_sae, dtype=h.dtype)
    for place in itertools.product(*(range(n) for n in h.shape[:-1])):
        pre = [
            sum(float((h[place] - coder.b_dec)[i]) * float(coder.W_enc[i, j]) for i in range(coder.d_in))
            + float(coder.b_enc[j])
            for j in range(coder.d_sae)
        ]
        best = sorted(range(coder.d_sae), key=lambda j: (-max(pre[j], 0.0), j))[: coder.k]
        for j in best:
            out[(*place, j)] = max(pre[j], 0.0)
    return out


@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 3)])
@pytest.mark.parametrize("k", [1, 5, 12])
def test_encode_and_decode_match_brute_force(leading: tuple[int, ...], k: int) -> None:
    coder = random_coder(6, 12, k)
    h = torch.randn(*leading, 6, dtype=torch.float64)
    codes = coder.encode(h)
    expected = dense_codes(coder, h)
    assert codes.values.shape == codes.indices.shape == (*leading, k)
    assert codes.indices.dtype == torch.int64
    torch.testing.assert_close(codes.dense(12), expected, rtol=0, atol=1e-12)
    reconstruction = coder.decode(codes)
    assert reconstruction.shape == h.shape
    torch.testing.assert_close(reconstruction, expected @ coder.W_dec + coder.b_dec, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.data())
def test_codes_are_valid_for_any_size(d_in: int, d_sae: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, d_sae))
    coder = random_coder(d_in, d_sae, k, seed=data.draw(st.integers(0, 99)), dtype=torch.float32)
    codes = coder.encode(torch.randn(data.draw(st.integers(0, 4)), d_in))
    assert bool((codes.values >= 0).all())
    for row in codes.indices.tolist():
        assert len(set(row)) == k
        assert all(0 <= j < d_sae for j in row)


def test_ties_go_to_the_lowest_index_and_do_not_depend_on_company() -> None:
    coder = TopKSAE(2, 40, 3).requires_grad_(False)
    coder.W_enc[:] = 0.0
    coder.W_enc[0, 7:] = 1.0
    coder.W_enc[0, 30] = 2.0
    codes = coder.encode(torch.tensor([[1.0, 0.0]]))
    assert codes.indices.tolist() == [[7, 8, 30]]
    assert codes.values.tolist() == [[1.0, 1.0, 2.0]]
    many = coder.encode(torch.tensor([[1.0, 0.0]] * 500 + [[-1.0, 0.0]]))
    assert bool((many.indices[:500] == codes.indices).all())
    assert not bool(many.active()[500].any())


def test_long_inputs_in_chunks_give_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    coder = random_coder(6, 32, 4)
    h = torch.randn(50, 6, dtype=torch.float64)
    whole = coder.encode(h)
    monkeypatch.setattr("sae.topk._CHUNK", 32 * 7)
    parts = coder.encode(h)
    assert torch.equal(whole.indices, parts.indices)
    torch.testing.assert_close(whole.values, parts.values, rtol=0, atol=1e-13)


def test_encode_is_differentiable_like_a_dense_one() -> None:
    coder = random_coder(5, 20, 4).requires_grad_(True)
    h = torch.randn(7, 5, dtype=torch.float64)
    (coder(h) ** 2).sum().backward()
    got = {name: p.grad.clone() for name, p in coder.named_parameters() if p.grad is not None}
    coder.zero_grad()
    pre = (h - coder.b_dec) @ coder.W_enc + coder.b_enc
    values, indices = pre.relu().topk(4)
    ((torch.zeros_like(pre).scatter(1, indices, values) @ coder.W_dec + coder.b_dec) ** 2).sum().backward()
    for name, parameter in coder.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(got[name], parameter.grad, rtol=0, atol=1e-10)


def test_no_tokens() -> None:
    coder = random_coder(6, 12, 3)
    codes = coder.encode(torch.empty(2, 0, 6))
    assert codes.values.shape == (2, 0, 3)
    assert coder.decode(codes).shape == (2, 0, 6)


def test_other_dtypes_are_computed_in_the_coders() -> None:
    coder = random_coder(6, 12, 3, dtype=torch.float32)
    h = torch.randn(4, 6).bfloat16()
    assert coder.encode(h).values.dtype == torch.float32
    assert torch.equal(coder.encode(h).values, coder.encode(h.float()).values)


def test_sparse_codes_index_leading_dimensions_only() -> None:
    codes = SparseCodes(torch.rand(4, 5, 3), torch.arange(3).expand(4, 5, 3))
    assert codes[1].values.shape == (5, 3)
    assert codes[:, 2:4].values.shape == (4, 2, 3)
    assert torch.equal(codes[torch.tensor([0, 3])].values, codes.values[[0, 3]])
    with pytest.raises(ShapeError, match="leading"):
        codes[..., 0]
    with pytest.raises(ShapeError):
        SparseCodes(torch.rand(4, 3), torch.zeros(4, 2, dtype=torch.int64))


def test_padded_codes_stay_harmless_when_dense() -> None:
    codes = SparseCodes(torch.tensor([[0.5, 0.0]]), torch.tensor([[0, 0]]))
    assert codes.dense(2).tolist() == [[0.5, 0.0]]
    assert codes.active().tolist() == [[True, False]]


def test_wrong_inputs_are_named() -> None:
    coder = random_coder(6, 12, 3)
    with pytest.raises(ShapeError, match=r"\[2, 5\] must be \[\.\.\., 6\]"):
        coder.encode(torch.zeros(2, 5))
    with pytest.raises(ActivationError, match="1 of 2 tokens"):
        coder.encode(torch.tensor([[0.0] * 6, [float("nan")] * 6]))
    with pytest.raises(ConfigError):
        TopKSAE(6, 4, 5)


def test_finalize_makes_a_normalised_coder_take_raw_states() -> None:
    coder = random_coder(6, 24, 4)
    h, mean, scale = torch.randn(9, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64), 0.37
    normalised = (h - mean) * scale
    codes, reconstruction = coder.encode(normalised), coder.decode(coder.encode(normalised)) / scale + mean
    assert coder.finalize(scale, mean) is coder
    after = coder.encode(h)
    assert torch.equal(after.indices, codes.indices)
    torch.testing.assert_close(after.values, codes.values, rtol=0, atol=1e-12)
    torch.testing.assert_close(coder.decode(after), reconstruction, rtol=0, atol=1e-12)
    before = {name: p.clone() for name, p in coder.named_parameters()}
    coder.finalize()
    assert all(torch.equal(p, before[name]) for name, p in coder.named_parameters())
    with pytest.raises(ConfigError):
        coder.finalize(0.0)


def test_save_and_load_are_exact(tmp_path: Path) -> None:
    coder = random_coder(6, 24, 4, dtype=torch.float32)
    coder.metadata = {"layer": 4, "model_name": "modèle"}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "training.json").write_text("{}")
    coder.save(tmp_path / "a")
    loaded = TopKSAE.load(tmp_path / "a")
    for name, parameter in coder.named_parameters():
        assert torch.equal(getattr(loaded, name), parameter)
    assert (loaded.d_in, loaded.d_sae, loaded.k) == (6, 24, 4)
    assert loaded.metadata["layer"] == 4
    assert loaded.metadata["model_name"] == "modèle"
    config = json.loads((tmp_path / "a" / "cfg.json").read_text())
    assert config["rescale_acts_by_decoder_norm"] is False
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "cfg.json",
        "sae_weights.safetensors",
        "training.json",
    ]


def test_an_interrupted_save_never_loads_as_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_coder(6, 24, 4, dtype=torch.float32).save(tmp_path)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sae.files.write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        random_coder(6, 24, 2, seed=1, dtype=torch.float32).save(tmp_path)
    with pytest.raises(FormatError, match=r"cfg\.json: no such file"):
        TopKSAE.load(tmp_path)


def _spoil(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "standard"}, "architecture is 'standard'"),
        ({"normalize_activations": "layer_norm"}, "'layer_norm' is applied to each token"),
        ({"normalize_activations": "expected_average_only_in"}, r"needs activation_scaler\.json, which is missing"),
        ({"reshape_activations": "hook_z"}, "hook_z"),
        ({"k": 0}, "k must be a positive integer"),
        ({"k": 25}, "k = 25 exceeds d_sae = 24"),
        ({"d_in": 7}, r"W_dec is \[24, 6\]|W_enc is \[6, 24\]"),
        ({"dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_folders_that_cannot_be_read_say_why(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    random_coder(6, 24, 4, dtype=torch.float32).save(tmp_path)
    _spoil(tmp_path, **changes)
    with pytest.raises(FormatError, match=message) as caught:
        TopKSAE.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such folder"):
        TopKSAE.load(tmp_path / "none")
    random_coder(6, 24, 4, dtype=torch.float32).save(tmp_path)
    weights = tmp_path / "sae_weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match="damaged"):
        TopKSAE.load(tmp_path)
    tensors = {name: torch.zeros(2) for name in ("W_enc", "W_dec", "b_enc")}
    save_file(tensors, weights)
    with pytest.raises(FormatError, match=r"b_dec is missing|W_enc is \[2\]"):
        TopKSAE.load(tmp_path)
    coder = random_coder(6, 24, 4, dtype=torch.float32)
    coder.b_enc[3] = float("inf")
    coder.save(tmp_path)
    with pytest.raises(FormatError, match="b_enc holds values that are not finite"):
        TopKSAE.load(tmp_path)
    coder.metadata = {"what": object()}
    with pytest.raises(FormatError, match="JSON"):
        coder.save(tmp_path)
    coder.metadata = {}
    coder.save(tmp_path)
    weights.unlink()
    with pytest.raises(FormatError, match="no such file"):
        TopKSAE.load(tmp_path)
    (tmp_path / "cfg.json").write_text("{")
    with pytest.raises(FormatError, match="not readable as JSON"):
        TopKSAE.load(tmp_path)


def test_the_package_imports_without_torch() -> None:
    import sae

    code = "import sys, sae; assert not {'torch', 'numpy', 'remind'} & set(sys.modules); print(*sae.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == sae.__all__
    assert all(getattr(sae, name).__name__ == name and name in dir(sae) for name in sae.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sae.nothing


def test_load_layers(tmp_path: Path) -> None:
    for layer in (12, 4):
        random_coder(6, 24, 4, seed=layer, dtype=torch.float32).save(layer_folder(tmp_path, layer))
    (tmp_path / "layer_notes").mkdir()
    coders = load_layers(tmp_path)
    assert list(coders) == [4, 12]
    assert (tmp_path / "layer_04").is_dir()
    assert torch.equal(coders[12].W_enc, random_coder(6, 24, 4, seed=12, dtype=torch.float32).W_enc)
    with pytest.raises(FormatError, match="holds no SAE"):
        load_layers(tmp_path / "nothing")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([40, 256, 768, 1000, 4096]), st.integers(1, 33))
def test_largest_finds_what_sorting_finds(seed: int, n: int, width: int, k: int) -> None:
    # few distinct values, so that ties abound
    x = torch.randint(-9, 50, (n, width), generator=torch.Generator().manual_seed(seed)).float()
    values, indices = largest(x, k)
    assert torch.equal(values.sort(1, descending=True).values, x.sort(1, descending=True).values[:, :k])
    assert torch.equal(x.gather(1, indices), values)
    assert all(len(set(row)) == k for row in indices.tolist())
