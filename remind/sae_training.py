"""Train the sparse autoencoders that grounding reads, on dialogues that share nothing with the benchmark (Eq. 2)."""

from __future__ import annotations

import hashlib
import math
import platform
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from remind.dialogue import Dialogue
from remind.errors import ConfigError, DataError, ModelError
from remind.io import atomic_folder, sha256_file, sha256_json, write_json
from remind.progress import Counter, track
from remind.readers import read
from remind.windows import Window, batches, make_windows, mixed, window_size
from sae import DocumentFrequency, SAEError, TopKSAE, layer_folder, save_idf
from sae.harvest import HarvestStats, ShuffleBuffer, TokenBatch, harvest
from sae.metrics import evaluate
from sae.trainer import SAETrainConfig, Trained, train

if TYPE_CHECKING:
    from remind.backbone import Backbone


@dataclass
class TrainSAEConfig:
    """Train one Top-K SAE per layer of a backbone on dialogue text."""

    out: str
    """Folder to write: one subfolder layer_<LL> per layer. Must not exist unless overwrite is set."""
    data: str | list[str] = field(default_factory=list)
    """Files or folders of dialogues (DialogCC, MSC, Friends, one's own). Empty: the bundled synthetic small talk."""
    format: str | None = None
    """Format of the data; None: recognised from the content of each file."""
    backbone: str = "minilm"
    """Model whose hidden states are learned: minilm, nano, or a Hugging Face folder or id."""
    layers: list[int] | None = None
    """Layers (0 embeddings … n output of the last block). None: four spread evenly, or the last but one of a model of
    fewer than 8 blocks."""
    limit: int | None = None
    """Use at most this many turns, of dialogues drawn at random."""
    held_out: float = 0.1
    """Share of the dialogues kept for evaluation."""
    window: int | None = None
    """Tokens of text per forward. None: 256 for encoders, 2048 for causal models, or what the model can take."""
    windows_per_batch: int = 16
    """Windows per forward."""
    buffer_tokens: int = 1 << 18
    """Tokens per layer held for shuffling; a corpus that fits is run through the model once."""
    sink_factor: float = 10.0
    """Tokens whose norm exceeds this many times the median are dropped as attention sinks; 0 keeps all."""
    idf_turns: int | None = 10_000
    """Training turns over which document frequencies are counted (another pass over them); None: all."""
    trainer: SAETrainConfig = field(default_factory=SAETrainConfig)
    """Size, optimiser and schedule."""
    device: str = "cpu"
    """Device of backbone and SAEs."""
    dtype: str = "float32"
    """Precision of the backbone."""
    overwrite: bool = False
    """Replace an existing folder."""

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ConfigError(f"held_out must be at least 0 and below 1, not {self.held_out}")
        for name in ("limit", "window", "windows_per_batch", "idf_turns"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")


def train_sae(cfg: TrainSAEConfig) -> Path:
    """Read, tokenise, harvest, train, evaluate on dialogues held out, count document frequencies, save.

    Returns:
        The folder with one SAE per layer, each with `training.json` and `idf.safetensors`, and `metrics.jsonl`.

    Raises:
        ConfigError, DataError, FormatError: settings or data that cannot be used.
        ModelError: the backbone, its layers or its activations.
    """
    from remind.backbone import load_backbone

    out = Path(cfg.out)
    if out.exists() and not cfg.overwrite:
        raise ConfigError(f"{out} exists; choose another out or set overwrite")
    paths = _paths(cfg)
    training, held_out = split_dialogues(read_dialogues(paths, cfg), cfg.held_out, cfg.trainer.seed)
    backbone = load_backbone(cfg.backbone, dtype=cfg.dtype, device=cfg.device)
    layers = default_layers(backbone.n_layers) if cfg.layers is None else sorted(set(cfg.layers))
    if wrong := [layer for layer in layers if not 0 <= layer <= backbone.n_layers]:
        raise ModelError(f"{cfg.backbone} has layers 0 (embeddings) to {backbone.n_layers}, not {wrong[0]}")
    try:
        with atomic_folder(out) as folder:
            _train(
                cfg, backbone, layers, training, held_out, {name: sha256_file(p) for name, p in _files(paths)}, folder
            )
    except SAEError as error:
        raise ModelError(f"{cfg.backbone}: {error}") from None
    print(f"SAEs: {out}")
    return out


def _train(
    cfg: TrainSAEConfig,
    backbone: Backbone,
    layers: list[int],
    training: list[Dialogue],
    held_out: list[Dialogue],
    hashes: dict[str, str],
    folder: Path,
) -> None:
    size = window_size(backbone, cfg.window)
    windows = make_windows(backbone, training, size, "tokenise")
    stats = HarvestStats()
    buffer = ShuffleBuffer(
        lambda: _harvest(cfg, backbone, layers, mixed(windows, cfg.windows_per_batch, cfg.trainer.seed), stats),
        cfg.trainer.batch_size,
        max(cfg.buffer_tokens, 2 * cfg.trainer.batch_size),
        seed=cfg.trainer.seed,
        epochs=None,
        drop_last=True,
    )
    with Counter("train", cfg.trainer.total_steps) as bar:
        trained = train(
            (shuffled.activations for shuffled in buffer),
            cfg.trainer,
            device=cfg.device,
            metrics=folder / "metrics.jsonl",
            progress=lambda done, total, figures: bar.step(
                note="  ".join(f"layer {layer} FVU {one['fvu']:.3f}" for layer, one in figures.items())
            ),
        )
    scores: dict[int, Any] = dict.fromkeys(layers)
    if held_out:
        unseen = make_windows(backbone, held_out, size, "tokenise held-out")
        harvested = _harvest(cfg, backbone, layers, unseen, None, "evaluate")
        results = evaluate(trained.coders, (batch.activations for batch in harvested))
        scores = {layer: result.summary() for layer, result in results.items()}
    frequencies = _frequencies(cfg, backbone, trained.coders, windows)
    for layer, coder in trained.coders.items():
        read_at = f"{layer}.hook_resid_pre" if layer < backbone.n_layers else f"{layer - 1}.hook_resid_post"
        coder.metadata = {
            "model_name": cfg.backbone,
            "hook_name": f"blocks.{read_at}",
            "layer": layer,
            "context_size": size,
        }
        place = layer_folder(folder, layer)
        coder.save(place)
        save_idf(place, frequencies[layer])
        record = _record(cfg, layer, hashes, training, held_out, trained, stats)
        write_json(place / "training.json", {**record, "held_out": scores[layer]})
        _report(layer, trained, scores[layer])


def _report(layer: int, trained: Trained, score: dict[str, float] | None) -> None:
    line = f"layer {layer}: {trained.steps} steps, {trained.tokens} tokens, FVU {trained.figures[layer]['fvu']:.3f}"
    if score:
        line += f"; held out: FVU {score['fvu']:.3f}, cosine {score['cosine']:.3f}, "
        line += f"L0 {score['l0']:.1f}, dead {score['dead']:.1%}"
    print(line)


def _record(
    cfg: TrainSAEConfig,
    layer: int,
    hashes: dict[str, str],
    training: Sequence[Dialogue],
    held_out: Sequence[Dialogue],
    trained: Trained,
    stats: HarvestStats,
) -> dict[str, Any]:
    return {
        "backbone": cfg.backbone,
        "layer": layer,
        "data": hashes,
        "dialogues": {"training": len(training), "held_out": len(held_out)},
        "turns": {
            name: sum(len(d.turns) for d in group) for name, group in (("training", training), ("held_out", held_out))
        },
        "harvest": asdict(stats),
        "steps": trained.steps,
        "tokens": trained.tokens,
        "training": trained.figures[layer],
        "config": asdict(cfg),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "remind-toolkit")},
        },
    }


def default_layers(n_layers: int) -> list[int]:
    """Four layers at fifths of the depth; the last but one where the model has fewer than 8 blocks."""
    if n_layers < 8:
        return [max(1, n_layers - 1)]
    return [round(n_layers * part / 5) for part in (1, 2, 3, 4)]


def read_dialogues(paths: Sequence[Path], cfg: TrainSAEConfig) -> list[Dialogue]:
    """Dialogues of all paths in a random order fixed by the seed, cut after `cfg.limit` turns in all."""
    dialogues = [
        (f"{number}:{dialogue.id}", dialogue)
        for number, path in enumerate(paths)
        for dialogue in read(path, cfg.format).dialogues
    ]
    dialogues.sort(key=lambda item: hashlib.sha256(f"{cfg.trainer.seed}:{item[0]}".encode()).digest())
    chosen, turns = [], 0
    for _, dialogue in dialogues:
        if cfg.limit is not None and turns >= cfg.limit:
            break
        chosen.append(dialogue)
        turns += len(dialogue.turns)
    if not chosen:
        raise DataError("no dialogues to train on", paths[0])
    return chosen


def split_dialogues(dialogues: list[Dialogue], share: float, seed: int) -> tuple[list[Dialogue], list[Dialogue]]:
    """(training, held out). Whole dialogues; at least one is held out if there are two and share > 0."""
    order = list(range(len(dialogues)))
    random.Random(seed).shuffle(order)
    count = min(math.ceil(share * len(dialogues)), len(dialogues) - 1)
    aside = set(order[:count])
    return (
        [d for number, d in enumerate(dialogues) if number not in aside],
        [d for number, d in enumerate(dialogues) if number in aside],
    )


def _harvest(
    cfg: TrainSAEConfig,
    backbone: Backbone,
    layers: Sequence[int],
    windows: Sequence[Window],
    stats: HarvestStats | None,
    label: str | None = None,
    turns: list[torch.Tensor] | None = None,
) -> Iterator[TokenBatch]:
    """Token batches of the windows; `turns`, if given, receives the turn numbers [B, T] of each batch."""
    source = batches(backbone, windows, cfg.windows_per_batch)
    if label is not None:
        source = iter(track(source, label, math.ceil(len(windows) / cfg.windows_per_batch)))

    def inputs() -> Iterator[dict[str, Any]]:
        for batch, numbers in source:
            if turns is not None:
                turns[:] = [numbers]
            yield batch

    yield from harvest(
        backbone.model,
        inputs(),
        layers,
        special_ids=backbone.tokenizer.all_special_ids,
        sink_factor=cfg.sink_factor or None,
        stats=stats,
    )


def _frequencies(
    cfg: TrainSAEConfig, backbone: Backbone, coders: dict[int, TopKSAE], windows: Sequence[Window]
) -> dict[int, DocumentFrequency]:
    """Document frequencies over the training turns, the first `cfg.idf_turns` of them."""
    if cfg.idf_turns is not None:
        windows = [window for window in windows if window.turns[0] < cfg.idf_turns]
    counts = {layer: DocumentFrequency(coder.d_sae) for layer, coder in coders.items()}
    current: list[torch.Tensor] = []
    for batch in _harvest(cfg, backbone, list(coders), windows, None, "document frequencies", current):
        numbers = current[0][batch.rows.cpu(), batch.positions.cpu()]
        # the last window may run into turns beyond the limit
        inside = numbers < cfg.idf_turns if cfg.idf_turns is not None else slice(None)
        for layer, coder in coders.items():
            counts[layer].add(coder.encode(batch.activations[layer])[inside], numbers[inside])
    return counts


def _paths(cfg: TrainSAEConfig) -> list[Path]:
    if cfg.data:
        return [Path(cfg.data)] if isinstance(cfg.data, str) else [Path(path) for path in cfg.data]
    from remind.testbed.sample import corpus_path

    return [Path(corpus_path())]


def _files(paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    for path in paths:
        if path.is_dir():
            yield from ((str(f.relative_to(path.parent)), f) for f in sorted(path.rglob("*")) if f.is_file())
        else:
            yield path.name, path


def quick_sae(
    backbone: str,
    data: Sequence[str],
    cache: str | Path,
    device: str = "cpu",
    dtype: str = "float32",
    steps: int = 400,
) -> Path:
    """A small SAE for demos and first looks, trained once and kept under `cache` by model, data and settings.

    Returns:
        A folder for `sae.load_layers`.
    """
    cfg = TrainSAEConfig(
        out="",
        data=[str(path) for path in data],
        backbone=backbone,
        limit=8000,
        trainer=SAETrainConfig(
            d_sae=2048, steps=steps, batch_size=1024, lr=1e-3, warmup_steps=20, decay_share=0.5, dead_tokens=50_000
        ),
        device=device,
        dtype=dtype,
    )
    parts = {
        "config": {**asdict(cfg), "data": sorted(sha256_file(path) for _, path in _files(_paths(cfg)))},
        # a model folder may be written anew under the same name
        "model": [(name, (stat := path.stat()).st_size, stat.st_mtime_ns) for name, path in _files([Path(backbone)])]
        if Path(backbone).is_dir()
        else backbone,
        "version": version("remind-toolkit"),
    }
    cfg.out = str(Path(cache) / f"{Path(backbone).name}-{sha256_json(parts)[:16]}")
    return Path(cfg.out) if Path(cfg.out).is_dir() else train_sae(cfg)
