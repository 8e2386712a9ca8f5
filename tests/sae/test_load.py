"""SAEs of other libraries against each library's own equations; what they say they read; files made to harm."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import sae
from sae import FormatError, JumpReLUSAE, TopKSAE
from sae.published import file_hashes

D, N, K = 24, 96, 7
SIZES = {"d_in": D, "d_sae": N, "k": K, "dtype": "float64"}
TOPK = {"architecture": "topk", **SIZES}


def states() -> Tensor:
    return torch.randn(200, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 3


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def topk(pre: Tensor, k: int = K) -> Tensor:
    return torch.zeros_like(pre).scatter(-1, *pre.topk(k, dim=-1)[::-1])


def same(coder: TopKSAE, acts: Tensor, out: Tensor) -> None:
    codes = coder.encode(states())
    torch.testing.assert_close(codes.dense(coder.d_sae), acts, rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(coder.decode(codes), out, rtol=1e-10, atol=1e-9)


def read(folder: Path) -> int | None:
    """The layer that the one SAE in a folder reads; None where it is refused by its path."""
    try:
        [layer] = sae.load_layers(folder)
    except FormatError as error:
        return None if str(error).startswith(str(folder)) else -1
    return layer


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def publish(kind: str, folder: Path, **config: Any) -> dict[str, Tensor]:
    """Write a random SAE as a library does; dictionary_learning's with a scalar threshold, a bool buffer and a bool."""
    w = {"W_enc": random(D, N), "W_dec": random(N, D), "b_enc": random(N), "b_dec": random(D)}
    linear = {"encoder.weight": w["W_enc"].t().contiguous(), "encoder.bias": w["b_enc"], "b_dec": w["b_dec"]}
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "sae-lens":
        write(folder / "cfg.json", config.get("cfg", {**TOPK, "metadata": {"sae_lens_version": "6.0.0", **config}}))
        save_file(w, folder / "sae_weights.safetensors")
    elif kind == "sparsify":
        write(folder / "cfg.json", {"activation": "topk", "d_in": D, "k": K, "num_latents": N, **config})
        save_file({**linear, "W_dec": w["W_dec"]}, folder / "sae.safetensors")
    elif kind == "Gemma Scope":
        w["threshold"] = torch.rand(N, dtype=torch.float64) * 10
        np.savez(folder / "params.npz", **{name: tensor.numpy() for name, tensor in w.items()})
    elif kind == "Qwen-Scope":
        torch.save({**w, "W_enc": w["W_enc"].T, "W_dec": w["W_dec"].T}, folder / "layer2.sae.pt")
    else:
        w["threshold"] = torch.tensor(9.0)
        buffers = {"threshold": w["threshold"], "k": torch.tensor(K), "trained": torch.tensor(True), "scaled": True}
        torch.save({**linear, "decoder.weight": w["W_dec"].T, **buffers}, folder / "ae.pt")
        write(folder / "config.json", {"trainer": {"dict_class": kind, "k": K, **config}})
    return w


@pytest.mark.parametrize(
    ("kind", "folder", "layer", "sparse", "subtract"),
    [
        ("sparsify", "layers.3", 4, True, True),  # the output of block 3
        ("Qwen-Scope", "SAE-Res-Test-W96-L0_7", 3, True, False),
        ("Gemma Scope", "layer_5/width_96/average_l0_9", 6, False, False),
        ("AutoEncoderTopK", "resid_post_layer_3/trainer_0", 4, True, True),
        ("BatchTopKSAE", "resid_post_layer_3/trainer_0", 4, False, True),
    ],
)
def test_formats_by_their_own_equations(
    tmp_path: Path, kind: str, folder: str, layer: int, sparse: bool, subtract: bool
) -> None:
    w = publish(kind, tmp_path / folder)
    pre = (states() - w["b_dec"] * subtract) @ w["W_enc"] + w["b_enc"]
    acts = topk(pre.relu()) if sparse else pre * (pre > w["threshold"])
    coders = sae.load_layers(tmp_path)
    assert list(coders) == [layer]
    coders[layer].save(tmp_path / "again")
    for coder in (coders[layer], sae.load(tmp_path / "again")):
        assert isinstance(coder, JumpReLUSAE) != sparse
        same(coder, acts, acts @ w["W_dec"] + w["b_dec"])


def test_what_is_not_of_the_residual_stream_or_has_no_fixed_number_of_features(tmp_path: Path) -> None:
    for name in ("layers.3", "layers.3.mlp"):
        publish("sparsify", tmp_path / name)
    with pytest.warns(UserWarning, match=r"layers\.3\.mlp: left out"):
        assert list(sae.load_layers(tmp_path)) == [4]
    publish("sparsify", tmp_path / "layers.3", activation="groupmax")
    with pytest.raises(FormatError, match="activation is 'groupmax'"):
        sae.load_layers(f"{tmp_path}:layers.3")
    publish("Gemma Scope", tmp_path)
    with pytest.warns(UserWarning, match="features are active at a token; the 5 largest"):
        sae.load(tmp_path / "params.npz", k=5).encode(states())


@pytest.mark.parametrize(
    ("suffix", "written"),
    [("safetensors", save_file), ("pt", torch.save), ("npz", lambda w, path: np.savez(path, **w))],
)
def test_a_mapping(tmp_path: Path, suffix: str, written: Any) -> None:
    """The names of dictionary_learning's AutoEncoder."""
    w = {"encoder.weight": random(N, D), "encoder.bias": random(N), "decoder.weight": random(D, N), "bias": random(D)}
    written(w, path := tmp_path / f"ae.{suffix}")
    names = {"W_enc": "encoder.weight.T", "b_enc": "encoder.bias", "W_dec": "decoder.weight.T", "b_dec": "bias"}
    write(tmp_path / "sae_mapping.json", {"tensors": names, "activation": "relu", "layers": {"12": path.name}})
    acts = ((states() - w["bias"]) @ w["encoder.weight"].T + w["encoder.bias"]).relu()
    coders = sae.load_layers(tmp_path)
    assert list(coders) == [12]
    same(coders[12], acts, acts @ w["decoder.weight"].T + w["bias"])
    assert list(file_hashes(tmp_path)) == [path.name, "sae_mapping.json"]


def test_a_mapping_that_does_not_fit(tmp_path: Path) -> None:
    save_file({"e": random(N, D), "b": random(N), "d": random(N, D)}, tmp_path / "a.safetensors")
    names = {"W_enc": "e.T", "b_enc": "b", "W_dec": "d"}
    for change, message in (
        ({"tensors": {**names, "W_enc": "no"}}, "no tensor 'no' for W_enc; there are: b, d, e"),
        ({"activation": "tanh"}, "activation is tanh"),
        ({"layers": {"3": "a.bin"}}, "is not a file of tensors"),
    ):
        write(tmp_path / "sae_mapping.json", {"tensors": names, "k": 7, "layers": {"3": "a.safetensors"}, **change})
        with pytest.raises(FormatError, match=f"{tmp_path}.*{message}"):
            sae.load_layers(tmp_path)


@pytest.mark.parametrize(
    ("name", "recorded", "layer"),
    [
        ("layer_12", {"hook_name": "blocks.12.hook_resid_post"}, 13),
        ("layer_11", {"hook_name": "blocks.12.hook_resid_post"}, None),
        ("layer_12", {}, 12),
        ("blocks.12.hook_resid_pre", {"hook_name": "blocks.12.hook_resid_post"}, None),
        ("a", {}, None),
        ("layer_12", {"hook_name": "blocks.12.hook_resid_mid"}, None),
        ("a", {"hook_name": "transformer.h.12.output"}, 13),
        ("a", {"hook_name": "blocks.12.hook_resid_post", "hook_layer": 12, "hf_hook_name": "model.layers.12"}, 13),
        ("a", {"hook_name": "blocks.12.hook_resid_post", "hf_hook_name": "model.layers.3"}, None),
        ("trainer_0", {"layer": 3, "submodule_name": "resid_pre_layer_3"}, 3),
        ("trainer_0", {"layer": 3}, 4),
    ],
)  # fmt: skip
def test_the_recorded_hook_decides(tmp_path: Path, name: str, recorded: dict[str, Any], layer: int | None) -> None:
    """Of sae-lens, and the submodule of dictionary_learning, whose folders are named trainer_0."""
    publish("BatchTopKSAE" if name == "trainer_0" else "sae-lens", tmp_path / name, **recorded)
    assert read(tmp_path) == read(tmp_path / name) == layer


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Folders of repositories in the cache of the hub, which cannot be reached."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def make(repository: str) -> Path:
        folder = tmp_path / f"models--{repository.replace('/', '--')}"
        write(folder / "refs" / "main", 40)
        (folder / "snapshots" / "40").mkdir(parents=True)
        return folder / "snapshots" / "40"

    return make


def test_repositories_of_the_hub(snapshot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = snapshot("google/gemma-scope-2b-pt-res")
    for path in ("5/width_96/average_l0_9", "5/width_96/average_l0_70", "7/width_96/average_l0_71"):
        publish("Gemma Scope", root / f"layer_{path}")
    with pytest.raises(FormatError, match=r"2 SAEs read layer 6; .*: layer_5/width_96/average_l0_70/.*_l0_9/params"):
        sae.load_layers("google/gemma-scope-2b-pt-res")
    for chosen, layers in (
        ("layer_5/width_96/average_l0_9", [6]),
        ("average_l0_9,average_l0_71", [6, 8]),
        ("layer_*/*/average_l0_7?", [6, 8]),
    ):
        for given in (f"google/gemma-scope-2b-pt-res:{chosen}", f"{root}:{chosen}"):
            assert list(sae.load_layers(given)) == layers
    publish("Gemma Scope", snapshot("google/gemma-scope-2b-pt-mlp") / "layer_5/width_96/average_l0_9")
    for missing, message in (
        ("google/gemma-scope-2b-pt-mlp", "does not read the residual stream"),
        ("google/none", "no such folder, and as a repository"),
    ):
        with pytest.raises(FormatError, match=message):
            sae.load_layers(missing)
    # where there is a hub, what was named is asked of it and no more
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **more: asked.append(more) or str(root))
    sae.load("google/gemma-scope-2b-pt-res:layer_5/width_96/average_l0_9")
    listed = [path.relative_to(root).as_posix() for path in root.rglob("*.npz")]
    found = huggingface_hub.utils.filter_repo_objects(listed, **asked[0])
    assert list(found) == ["layer_5/width_96/average_l0_9/params.npz"]


def test_files_that_claim_more_than_they_hold_run_something_or_are_damaged(tmp_path: Path) -> None:
    arrays, path, w = tmp_path / "params.npz", tmp_path / "layer2.sae.pt", publish("Qwen-Scope", tmp_path)
    header, one = io.BytesIO(), torch.zeros(1)
    shape = {"descr": "<f4", "fortran_order": False, "shape": (10**5, 10**5)}
    np.lib.format.write_array_header_1_0(header, shape)
    with zipfile.ZipFile(arrays, "w") as target:
        target.writestr("W_enc.npy", header.getvalue() + bytes(64))
    with pytest.raises(FormatError, match="is not as large as"):
        sae.load(arrays)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match=r"layer2\.sae\.pt: (cannot be read|damaged)"):
        sae.load(path, k=3)
    for more, message in (({"W_enc": one.expand(10**6, 10**5)}, "larger than the file"), ({"p": path}, "than tensors")):
        torch.save({**w, **more}, path)
        with pytest.raises(FormatError, match=message):
            sae.load(path, k=3)


def test_settings_that_make_no_sense_end_in_one_line(tmp_path: Path) -> None:
    publish("sae-lens", folder := tmp_path / "layer_03")
    write(folder / "activation_scaler.json", {"scaling_factor": 10**400})
    for changes in (
        {"activation_fn": "topk", "activation_fn_kwargs": ["k"]},
        {"metadata": {"hook_name": f"blocks.{'9' * 5000}.hook_resid_pre"}},
        {"normalize_activations": True},
    ):
        write(folder / "cfg.json", {**TOPK, **changes})
        with pytest.raises(FormatError, match=r"^[^\n]*layer_03[^\n]*$"):
            sae.load_layers(tmp_path)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "old",
    [
        {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}},
        {"activation_fn_str": "relu", "apply_b_dec_to_input": False, "normalize_activations": False},
    ],
)
def test_folders_of_sae_lens_before_version_6(sae_lens: Any, tmp_path: Path, old: dict[str, Any]) -> None:
    sizes = {name: SIZES[name] for name in ("d_in", "d_sae", "dtype")}
    publish("sae-lens", tmp_path / "a", cfg={**sizes, "hook_point": "blocks.3.hook_resid_pre", **old})
    other = sae_lens.SAE.load_from_disk(tmp_path / "a")
    acts = other.encode(states()).detach()
    coders = sae.load_layers(tmp_path)
    assert list(coders) == [3]
    same(coders[3], acts, other.decode(acts).detach())


@pytest.mark.slow
def test_a_release_of_sae_lens(snapshot: Any, sae_lens: Any) -> None:
    publish("sae-lens", snapshot("jbloom/GPT2-Small-SAEs-Reformatted") / "blocks.8.hook_resid_pre")
    for release in ("gpt2-small-res-jb", "jbloom/GPT2-Small-SAEs-Reformatted"):
        assert TopKSAE.from_pretrained(release, "blocks.8.hook_resid_pre").d_sae == N
    with pytest.raises(FormatError, match=r"lists no 'blocks\.99'"):
        TopKSAE.from_pretrained("gpt2-small-res-jb", "blocks.99")


@pytest.mark.slow
def test_sae_lens_opens_ours_bit_for_bit_and_we_a_training_checkpoint_of_theirs(sae_lens: Any, tmp_path: Path) -> None:
    from sae_lens.training.activation_scaler import ActivationScaler

    coder, h = TopKSAE(D, N, K).requires_grad_(False), states().float()
    coder.metadata = {"hook_name": "blocks.4.hook_resid_pre"}
    coder.save(tmp_path / "ours")
    other = sae_lens.SAE.load_from_disk(tmp_path / "ours")
    # same operations in the same order; decoding sums k rows where sae-lens multiplies by a dense matrix
    assert torch.equal(coder.encode(h).dense(N), other.encode(h))
    torch.testing.assert_close(coder(h), other.decode(other.encode(h)), rtol=1e-5, atol=1e-4)
    assert other.cfg.metadata.hook_name == "blocks.4.hook_resid_pre"
    config = sae_lens.TopKTrainingSAEConfig(**SIZES, normalize_activations="expected_average_only_in")
    trained = sae_lens.TopKTrainingSAE(config).requires_grad_(False)
    trained.W_dec.mul_(torch.rand(N, 1, dtype=torch.float64) + 0.5)
    trained.save_model(tmp_path / "theirs")
    scaler = ActivationScaler(scaling_factor=0.31)
    scaler.save(str(tmp_path / "theirs" / "activation_scaler.json"))
    acts = trained.encode(scaler.scale(states()))
    same(sae.load(tmp_path / "theirs"), acts, scaler.unscale(trained.decode(acts)))
