"""SAEs on disk and on the hub, ours and those of others: which layer they read, and their parameters as in Eq. 2.

Every layout is brought to the settings of sae-lens's `cfg.json`, and what is computed around Eq. 2 is folded into the
parameters, in float64:

- `rescale_acts_by_decoder_norm`, with n the row norms of W_dec: W_enc <- W_enc n, b_enc <- b_enc n, W_dec <- W_dec / n.
- `normalize_activations: expected_average_only_in` with the factor s in `activation_scaler.json`: W_enc <- s W_enc,
  W_dec <- W_dec / s, b_dec <- b_dec / s.
- architecture gated: W_enc <- W_enc e^r_mag, b_enc = b_mag, threshold = b_mag - b_gate e^r_mag.
- `apply_b_dec_to_input: false`: b_enc <- b_enc + b_dec W_enc, before the factor s.

Architectures read: topk, jumprelu, and what infers as such: standard (thresholds 0), gated, batchtopk.
Normalisations that depend on the token (layer_norm, constant_norm_rescale) cannot be folded and are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from sae import files
from sae.errors import FormatError
from sae.hooks import layer_of
from sae.topk import CONFIG, DTYPES, IDF, SCALER, WEIGHTS, TopKSAE, coder_of

#: Where the parameters of an SAE of another format are; see `Mapping`.
MAPPING = "sae_mapping.json"
#: Entries of a token's codes where the architecture sets no number of active features.
MOST = 256
#: Tensors by architecture, beside W_enc, W_dec and b_dec.
_MORE: dict[str, tuple[str, ...]] = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "r_mag", "b_mag"),
    "batchtopk": ("b_enc", "topk_threshold"),
}
#: What tells an SAE: files in a folder of its own, and files that are one.
_SPARSIFY, _DICTIONARY, _SCOPE = "sae.safetensors", "ae.pt", "params.npz"
_IN_FOLDERS, _ALONE = (CONFIG, WEIGHTS, _SPARSIFY, _DICTIONARY), ("*.sae.pt", _SCOPE)
_ARCHITECTURE = {"topk": "topk", "jumprelu": "jumprelu", "relu": "standard", "gated": "gated"}
_TENSORS = {name: name for name in ("W_enc", "b_enc", "W_dec", "b_dec")}


@dataclass(frozen=True)
class Mapping:
    """Where the parameters of an SAE are in a file of tensors, and what is computed with them.

    Attributes:
        tensors: ours to theirs; W_enc is [d_in, d_sae] and W_dec [d_sae, d_in], so a name that ends in `.T` is
            transposed. Without b_dec it is 0. A jumprelu SAE has a `threshold`, [d_sae] or one number.
        activation: what is applied to the pre-activations.
        k: of topk, the active features of a token; of the others the entries of a token's codes.
        subtract_b_dec: whether the encoder reads h - b_dec, or h.
        layers: number of the hidden state, as in `sae.hooks` (0 embeddings, n the output of block n), to a file below
            the folder: safetensors, npz, or what `torch.save` wrote.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    tensors: dict[str, str] = field(default_factory=lambda: dict(_TENSORS))
    activation: Literal["topk", "jumprelu", "relu", "gated"] = "topk"
    k: int | None = None
    subtract_b_dec: bool = True
    layers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Mapping:
        """Raises FormatError for unknown settings or values of another kind."""
        from pydantic import TypeAdapter, ValidationError  # training and grounding do without

        text = json.dumps(files.read_json(path))
        try:
            mapping = TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part)[:50] for part in first["loc"])
            raise FormatError(f"{place} is {str(first['input'])[:50]}: {first['msg']}", path) from None
        if not mapping.layers or not all(re.fullmatch("[0-9]{1,6}", name) for name in mapping.layers):
            raise FormatError("layers names no hidden states by their numbers", path)
        return mapping

    def of(self, stored: dict[str, Any], path: Path) -> dict[str, Tensor]:
        """The tensors of a file by our names. Raises FormatError for one that is not there."""
        wanted = {"W_enc", "W_dec", *_MORE[_ARCHITECTURE[self.activation]]}
        if missing := sorted(wanted - set(self.tensors)):
            raise FormatError(f"the mapping names no tensor for {missing[0]}", path)
        found = {}
        for ours, theirs in self.tensors.items():
            name = theirs.removesuffix(".T")
            if name not in stored:
                held = ", ".join(sorted(map(str, stored))) or "none"
                raise FormatError(f"holds no tensor {name!r} for {ours}; there are: {held}", path)
            found[ours] = stored[name].t() if theirs.endswith(".T") else stored[name]
        return found


_LINEAR = {"W_enc": "encoder.weight.T", "b_enc": "encoder.bias", "W_dec": "decoder.weight.T", "b_dec": "b_dec"}
_SCALAR = {"threshold": "threshold"}
QWEN_SCOPE = Mapping({**_TENSORS, "W_enc": "W_enc.T", "W_dec": "W_dec.T"}, subtract_b_dec=False)
GEMMA_SCOPE = Mapping(_TENSORS | _SCALAR, "jumprelu", subtract_b_dec=False)
SPARSIFY = Mapping({**_LINEAR, "W_dec": "W_dec"})
#: dictionary_learning's, by the class in its config.json.
DICTIONARIES = {
    "AutoEncoder": Mapping({**_LINEAR, "b_dec": "bias"}, "relu"),
    "GatedAutoEncoder": Mapping(
        {name: theirs for name, theirs in _LINEAR.items() if name[0] == "W"}
        | {"b_dec": "decoder_bias", "b_gate": "gate_bias", "b_mag": "mag_bias", "r_mag": "r_mag"},
        "gated",
    ),
    "AutoEncoderTopK": Mapping(_LINEAR),
    "BatchTopKSAE": Mapping(_LINEAR | _SCALAR, "jumprelu"),
    "MatryoshkaBatchTopKSAE": Mapping(_TENSORS | _SCALAR, "jumprelu"),
    "JumpReluAutoEncoder": Mapping(_TENSORS | _SCALAR, "jumprelu", subtract_b_dec=False),
}


class Source(NamedTuple):
    """An SAE on disk: a folder or a file, and, where a mapping says both, how it is read and the hidden state."""

    path: Path
    mapping: Mapping | None = None
    layer: int | None = None


def load(path: str | Path, *, k: int | None = None, device: torch.device | str = "cpu") -> TopKSAE:
    """Read an SAE; its parameters need no gradient.

    Args:
        path: a folder or file of one SAE in any layout of docs/sae.md, or a repository of the Hugging Face hub. What is
            inside of a folder or repository is chosen by a path or pattern after a colon, as in
            `google/gemma-scope-2b-pt-res:layer_20/width_16k/average_l0_71`; of a repository no more is loaded.
        k: entries of a token's codes where the file sets none (see `JumpReLUSAE`), 256 by default.

    Raises FormatError for what is missing, damaged or of another kind.
    """
    with files.reading(path):
        root, found = _sources(path)
        if len(found) != 1:
            raise FormatError(f"holds {len(found)} SAEs; read them with load_layers, or {_choice(root, found)}", path)
        return _read(found[0], k, device)


def load_layers(folder: str | Path, device: torch.device | str = "cpu", k: int | None = None) -> dict[int, TopKSAE]:
    """Read all SAEs of a folder or repository, or those chosen as in `load`, by the number of the hidden state that
    they read, ascending; k as in `load`.

    What the SAE recorded about itself decides, else its name. SAEs beside these that read something else than the
    residual stream (the output of an MLP, ...) are left out with a warning.

    Raises FormatError for no SAE of the residual stream, several of one layer, one that cannot be read, one of which it
    is not known what it reads, or whose name and records contradict each other.
    """
    with files.reading(folder):
        return {layer: _read(source, k, device) for layer, source in _by_layer(folder)[1].items()}


def sae_paths(folder: str | Path) -> dict[int, Path]:
    """The folder or file of each SAE that `load_layers` reads."""
    with files.reading(folder):
        return {layer: source.path for layer, source in _by_layer(folder)[1].items()}


def file_hashes(folder: str | Path) -> dict[str, str]:
    """SHA-256 of every file that the codes of these SAEs depend on, by its path inside, ascending."""
    with files.reading(folder):
        root, sources = _by_layer(folder)
    found = [root / MAPPING] if (root / MAPPING).exists() else []
    inside = [one for path, *_ in sources.values() for one in (path.iterdir() if path.is_dir() else (path,))]
    found += [path for path in inside if path.suffix in (".safetensors", ".json", ".pt", ".npz")]
    hashes = {}
    for path in sorted(path for path in found if path.name != "training.json"):
        with path.open("rb") as file:
            name = path.relative_to(root) if root.is_dir() else path.name
            hashes[str(name)] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def load_idf(folder: str | Path) -> Tensor | None:
    """Read idf [d_sae] float32 of the layer in `folder`; None if it has none. Raises FormatError for a damaged file."""
    path = Path(folder) / IDF
    if not path.exists():
        return None
    idf = files.read_tensors(path).get("idf")
    if idf is None or idf.ndim != 1:
        raise FormatError("holds no tensor idf [d_sae]", path)
    return idf.float()


def release(name: str, sae_id: str) -> str:
    """The path, for `load`, of an SAE that SAELens calls by a release and an id: a repository and a path in it, or a
    name in the list of SAELens, if that is installed.

    Raises:
        FormatError: SAELens is not installed, or lists no such release or id.
    """
    from importlib.util import find_spec

    import yaml

    if "/" in name:
        return f"{name}:{sae_id}"
    spec = find_spec("sae_lens")
    if spec is None or spec.origin is None:
        raise FormatError("is a name of SAELens, which is not installed; give the repository and path", name)
    listed = Path(spec.origin).with_name("pretrained_saes.yaml").read_text(encoding="utf-8")
    # safe_load, in C where it is there: the list has tens of thousands of lines
    entry = yaml.load(listed, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)).get(name)
    paths = {} if entry is None else {str(one["id"]): one["path"] for one in entry["saes"]}
    if sae_id not in paths:
        raise FormatError(f"SAELens lists no {sae_id!r} of it; there are: {', '.join([*paths][:8]) or 'none'}", name)
    return f"{entry['repo_id']}:{paths[sae_id]}"


# where SAEs are


def _located(given: str | Path) -> tuple[Path, str]:
    """The file, or the folder and what is chosen in it; of a repository of the hub, its snapshot with that alone."""
    if Path(given).exists():
        return _whole(Path(given)), ""
    name, _, chosen = str(given).partition(":")
    if Path(name).is_dir() and chosen:
        return Path(name), chosen
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FormatError("holds no SAE: there is no such file or folder", given)
    from huggingface_hub import HfApi, snapshot_download

    patterns = ["*.json", "*.safetensors", "*.npz", "*.pt"]
    if chosen:
        parts = [_whole(Path(part)).as_posix() for part in chosen.split(",")]
        patterns = [f"{before}{part}{after}" for part in parts for before in ("", "*/") for after in ("", "/*")]
    else:
        # terabytes of which one is to be chosen are not loaded first; offline there is only what was loaded before
        names: list[str] = []
        with suppress(Exception):
            names = [file.rfilename for file in HfApi().model_info(name).siblings or ()]
        _single([Source(Path(name, file)) for file in names if file.endswith(_SCOPE)], Path(name), given)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns)), chosen
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FormatError(f"no such folder, and as a repository not to be had: {reason}", given) from None


def _whole(path: Path) -> Path:
    """The folder of an SAE, of which one file was named."""
    return path.parent if path.name in _IN_FOLDERS else path


def _sources(given: str | Path) -> tuple[Path, list[Source]]:
    """The folder or snapshot, and what is in it."""
    folder, chosen = _located(given)
    if (folder / MAPPING).exists() and not chosen:
        mapping = Mapping.read(folder / MAPPING)
        return folder, [Source(folder / name, mapping, int(layer)) for layer, name in mapping.layers.items()]
    found = []
    for root in [one for part in chosen.split(",") for one in folder.rglob(part)] if chosen else [folder]:
        inside = _whole(root)
        if inside.is_file() or any((inside / name).exists() for name in _IN_FOLDERS):
            found.append(inside)
        else:
            found += [path.parent for name in _IN_FOLDERS for path in inside.rglob(name)]
            found += [path for name in _ALONE for path in inside.rglob(name)]
    # what is hidden is half-written, or of a download
    whole = [path for path in sorted({*found}) if not re.search(r"(^|/)\.\w", path.relative_to(folder).as_posix())]
    if not whole:
        raise FormatError("holds no SAE: expected subfolders such as layer_04 (`remind train-sae` writes them)", given)
    return folder, [Source(path) for path in whole]


def _by_layer(given: str | Path) -> tuple[Path, dict[int, Source]]:
    """The folder or snapshot, and what is in it by the hidden state that is read."""
    root, sources = _sources(given)
    found = _single(sources, root, given)
    elsewhere = [source.path for source in sources if source not in found.values()]
    if not found:
        raise FormatError("its SAE does not read the residual stream", elsewhere[0])
    for path in elsewhere:
        warnings.warn(f"{path}: left out, as it does not read the residual stream", stacklevel=4)
    return root, found


def _single(sources: list[Source], root: Path, given: str | Path) -> dict[int, Source]:
    """Those of the residual stream by what they read, ascending. Raises FormatError where several read the same."""
    numbered = [(_layer(one.path) if one.layer is None else one.layer, one) for one in sources]
    found = {layer: [one for number, one in numbered if number == layer] for layer, _ in numbered if layer is not None}
    for layer, several in found.items():
        if len(several) > 1:
            raise FormatError(f"{len(several)} SAEs read layer {layer}; {_choice(root, several)}", given)
    return {layer: found[layer][0] for layer in sorted(found)}


def _choice(root: Path, several: list[Source]) -> str:
    names = ", ".join(str(source.path.relative_to(root)) for source in several[:8])
    return f"choose by name or pattern after a colon (`folder:name,name`): {names}"


def _layer(path: Path) -> int | None:
    """The hidden state that an SAE reads; None: something else. Raises FormatError for what is not known or wrong."""
    places, block = _recorded(path)
    # ours are named by the hidden state, others by the block, whose output they read
    named = re.fullmatch(r"(?:\w+\.)*(?:layers?|h)[._](\d{1,6})", path.name)
    if not places:
        if named and path.name.startswith("layer_"):
            return int(named[1])
        place = re.sub(r"^layer(\d{1,6})\.sae\.pt$", r"layers.\1", path.name)
        if not re.search(r"(?:layers?|h|blocks)[._]\d|_layer_\d|embed_tokens", place):
            raise FormatError(f"it is not known what this SAE reads; write a {MAPPING}, or name it layer_<LL>", path)
        return layer_of(place)
    layer, *others = {layer_of(place.replace("{layer}", str(block))) for place in places}
    numbers = re.findall(r"\d+", places[0])
    wrong = bool(others) or (block is not None and bool(numbers) and str(block) not in numbers)
    if named:
        wrong = wrong or layer is None or layer - int(named[1]) not in (0, 1)
    elif (by_name := layer_of(path.name)) is not None:
        wrong = wrong or layer != by_name
    if wrong:
        told = ", ".join([*places, *([] if block is None else [f"layer {block}"])])
        raise FormatError(f"it recorded that it reads {told}, which contradicts itself or the name", path)
    return layer


def _recorded(path: Path) -> tuple[list[str], Any]:
    """Hooks and modules that an SAE says it reads, and the number of the block."""
    if path.name == _SCOPE:
        if elsewhere := re.search(r"gemma-scope[\w-]*-(?:mlp|att|transcoders?)\b|/embedding/", path.as_posix()):
            return [elsewhere[0]], None
        blocks = [match[1] for part in path.parts[-4:-1] if (match := re.fullmatch(r"layer_(\d{1,6})", part))]
        return [f"layers.{blocks[-1]}"] if blocks else [], None
    if not path.is_dir():
        return [], None
    if (path / _DICTIONARY).exists():
        trainer, folder = files.read_json(path / "config.json")["trainer"], path.parent.name
        block = trainer.get("layer")
        by_folder = folder if re.search(r"_layer_\d", folder) else None if block is None else f"layers.{block}"
        places = [trainer.get("submodule_name") or by_folder]
    else:
        config = files.read_json(path / CONFIG)
        config |= config.get("metadata") or {}
        block = config.get("hook_layer", config.get("hook_point_layer"))
        places = [config.get(name) for name in ("hook_name", "hook_point", "hf_hook_name")]
    if wrong := [place for place in places if place and not isinstance(place, str)]:
        raise FormatError(f"the hook is {wrong[0]!r}, which is no name", path)
    return [place for place in places if place], block


# what is in them


def _read(source: Source, k: int | None, device: torch.device | str) -> TopKSAE:
    path, mapping = source.path, source.mapping
    with files.reading(path):
        if mapping is not None:
            return _mapped(path, replace(mapping, k=mapping.k or k), device)
        if path.suffix == ".pt":
            return _mapped(path, replace(QWEN_SCOPE, k=k or _k_of(path)), device)
        if path.suffix == ".npz":
            return _mapped(path, replace(GEMMA_SCOPE, k=k), device)
        if (path / _SPARSIFY).exists():
            return _mapped(path / _SPARSIFY, replace(SPARSIFY, k=_sparsify_k(path / CONFIG)), device)
        if (path / _DICTIONARY).exists():
            trainer = files.read_json(path / "config.json")["trainer"]
            kind = DICTIONARIES.get(str(trainer.get("dict_class")))
            if kind is None:
                known = ", ".join(DICTIONARIES)
                raise FormatError(f"dict_class is {trainer.get('dict_class')!r}; {known} can be read", path)
            k = trainer.get("k") if kind.activation == "topk" else k
            return _mapped(path / _DICTIONARY, replace(kind, k=k), device)
        return _of_sae_lens(path, k, device)


def _k_of(path: Path) -> int:
    """k in the name of a repository that is part of the path."""
    numbers = re.findall(r"L0_(\d{1,9})", str(path.absolute()))
    if not numbers:
        raise FormatError(f"k is not in the path (such as ..._L0_50); say k, or write a {MAPPING}", path)
    return int(numbers[-1])


def _sparsify_k(path: Path) -> Any:
    config = files.read_json(path)
    for name, plain in {"activation": "topk", "transcode": False, "skip_connection": False, "signed": False}.items():
        if config.get(name, plain) != plain:
            raise FormatError(f"{name} is {config[name]!r}; only {plain!r} can be read", path)
    return config.get("k")


def _mapped(path: Path, mapping: Mapping, device: torch.device | str) -> TopKSAE:
    tensors = mapping.of(files.read_tensors(path), path)
    tensors.setdefault("b_dec", tensors["W_dec"].new_zeros(tensors["W_dec"].shape[-1]))
    config = {"architecture": _ARCHITECTURE[mapping.activation], "apply_b_dec_to_input": mapping.subtract_b_dec}
    if mapping.activation == "topk":
        config["k"] = mapping.k
    return _built(tensors, config | {"metadata": {"path": str(path)}}, mapping.k, device, path)


def _of_sae_lens(path: Path, k: int | None, device: torch.device | str) -> TopKSAE:
    """A folder of sae-lens, of any version."""
    config = files.read_json(path / CONFIG)
    # settings of before version 6
    kwargs, normalise = config.get("activation_fn_kwargs") or {}, config.get("normalize_activations")
    if config.get("activation_fn", config.get("activation_fn_str")) == "topk" and "k" in kwargs:
        config.update(architecture="topk", k=kwargs["k"])
    if isinstance(normalise, bool | None):
        config["normalize_activations"] = "expected_average_only_in" if normalise else "none"
    known = {"architecture": tuple(_MORE), "activation_fn": ("relu", "topk"), "reshape_activations": ("none",)}
    for name, values in known.items():
        if config.get(name, values[0]) not in values:
            raise FormatError(f"{name} is {config.get(name)!r}; {', '.join(values)} can be read", path / CONFIG)
    stored = files.read_tensors(path / WEIGHTS)
    if not bool((stored.get("scaling_factor", torch.ones(1)) == 1).all()):
        raise FormatError("a fine-tuning scaling_factor other than 1 is not part of Eq. 2", path / WEIGHTS)
    if config["normalize_activations"] == "expected_average_only_in":
        config["scale"] = files.read_json(path / SCALER).get("scaling_factor")
        if type(config["scale"]) not in (int, float) or not 0 < float(config["scale"]) < math.inf:
            raise FormatError(f"scaling_factor must be a positive number, not {config['scale']!r}", path / SCALER)
    elif config["normalize_activations"] != "none":
        message = f"normalize_activations {config['normalize_activations']!r} is applied to each token at run time and"
        raise FormatError(
            f"{message} cannot be folded; train or export with 'none' or 'expected_average_only_in'", path / CONFIG
        )
    return _built(stored, config, k, device, path / WEIGHTS)


def _built(
    stored: dict[str, Tensor], config: dict[str, Any], k: int | None, device: torch.device | str, path: Path
) -> TopKSAE:
    """A coder of tensors, and settings of sae-lens; `scale` in them is that of normalised activations."""
    architecture = config.get("architecture", "standard")
    names = ("W_enc", "W_dec", "b_dec", *_MORE[architecture])
    if missing := [name for name in names if name not in stored]:
        raise FormatError(f"tensor {missing[0]} is missing", path)
    tensors = {name: stored[name] for name in names}
    if tensors["W_enc"].ndim != 2:
        raise FormatError(f"W_enc is {list(tensors['W_enc'].shape)}, not [d_in, d_sae]", path)
    d_in, d_sae = tensors["W_enc"].shape
    sizes = config.get("d_in", d_in), config.get("d_sae", d_sae)
    shapes = {"W_enc": sizes, "W_dec": sizes[::-1], "b_dec": sizes[:1]}
    for name, tensor in tensors.items():
        if "threshold" in name and tensor.numel() == 1:
            tensors[name] = tensor = tensor.reshape(1).expand(d_sae)
        shape = shapes.get(name, sizes[1:])
        if tuple(tensor.shape) != shape:
            raise FormatError(f"{name} is {list(tensor.shape)}, not {list(shape)}", path)
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise FormatError(f"{name} holds values that are not finite numbers", path)
    k = config.get("k") if architecture == "topk" else min(k or MOST, d_sae)
    if type(k) is not int or not 1 <= k <= d_sae:
        raise FormatError(f"k must be a positive integer up to the {d_sae} features, not {k!r}", path)
    dtype = DTYPES.get(str(config.get("dtype", tensors["W_enc"].dtype)).removeprefix("torch."))
    if dtype is None:
        raise FormatError(f"dtype {config['dtype']!r} is not known", path)
    if architecture == "standard":
        tensors["threshold"] = torch.zeros_like(tensors["b_enc"])
    folded = _fold({name: tensor.to(dtype) for name, tensor in tensors.items()}, config)
    return coder_of(
        {n: tensor.to(dtype) for n, tensor in folded.items()}, k, dict(config.get("metadata") or {}), device
    )


def _fold(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The parameters of Eq. 2, of tensors already in the declared dtype, as sae-lens computes with them."""
    rescale, scale = bool(config.get("rescale_acts_by_decoder_norm", False)), config.get("scale")
    w = dict(tensors)
    if rescale or scale or "b_gate" in w:
        w = {name: tensor.double() for name, tensor in w.items()}
    if "b_gate" in w:
        magnitude = w.pop("r_mag").exp()
        w["W_enc"] *= magnitude
        w["b_enc"] = w.pop("b_mag")
        w["threshold"] = w["b_enc"] - w.pop("b_gate") * magnitude
    if "topk_threshold" in w:
        w["threshold"] = w.pop("topk_threshold")
    if rescale:
        norm = torch.linalg.vector_norm(w["W_dec"], dim=1)
        w["W_enc"] *= norm
        w["b_enc"] *= norm
        # a row of length 0 never fires after this
        w["W_dec"] /= torch.where(norm > 0, norm, 1.0)[:, None]
    if not config.get("apply_b_dec_to_input", True):
        # by parts: in float64 all of it may be larger than what is left of the memory
        shift = [w["b_dec"].double() @ part.double() for part in w["W_enc"].split(4096, dim=1)]
        w["b_enc"] = w["b_enc"].double() + torch.cat(shift)
    if scale:
        w["W_enc"] *= scale
        w["W_dec"] /= scale
        w["b_dec"] /= scale
    return w
