"""Train one SAE per layer on dialogues and save them with what grounding needs (Eq. 2)."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict, astuple
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.files import atomic_folder, read_json, sha256_file, write_json
from remind.core.progress import Counter
from remind.data.dialogue import Dialogue
from remind.models.windows import Window, make_windows, mixed, window_size
from remind.sae_training.config import TrainSAEConfig, default_layers
from remind.sae_training.corpus import (
    Harvester,
    data_paths,
    files_in,
    part_of,
    read_dialogues,
    split_dialogues,
)
from remind.sae_training.names import with_names
from sae import DocumentFrequency, LayerError, SAEError, layer_folder, save_idf
from sae.buffer import ShuffleBuffer
from sae.cache import ActivationCache
from sae.checkpoint import LATEST
from sae.harvest import HarvestStats
from sae.hooks import resolve_layers
from sae.metrics import evaluate
from sae.parallel import Processes
from sae.splice import loss_recovered
from sae.trainer import Checkpoints, Trained, train

if TYPE_CHECKING:
    from remind.models.backbone import Backbone

_CHECKPOINTS, _METRICS, _RUN = "checkpoints", "metrics.jsonl", "run.json"
#: Settings in which a resumed run may differ from the one it goes on with.
_FREE = {"out", "resume", "overwrite", "trackers", "checkpoint_every", "cache", "device", "idf_turns", "loss_windows"}


def train_sae(cfg: TrainSAEConfig) -> Path:
    """Read, tokenise, harvest, train, evaluate on dialogues held out, count document frequencies, save.

    Runs alone or under `accelerate launch`, where each process harvests and trains on its part of every batch.

    Returns:
        The folder with one SAE per layer, each with `training.json` and `idf.safetensors`, and `metrics.jsonl`.

    Raises:
        ConfigError, DataError, FormatError: settings or data that cannot be used.
        ModelError: the backbone, its layers or its activations; a disk that is full.
    """
    from remind.models.load import load_backbone

    out = Path(cfg.out)
    if out.exists() and not cfg.overwrite:
        raise ConfigError(f"{out} exists; choose another out or set overwrite")
    processes = _processes(cfg)
    if processes.count > 1:
        cfg.device = str(processes.accelerator.device)
    paths = data_paths(cfg.data)
    training, held_out = _split(cfg, paths)
    backbone = load_backbone(cfg.backbone, dtype=cfg.dtype, device=cfg.device)
    try:
        layers = resolve_layers(backbone.model, _asked(cfg, backbone))
    except LayerError as error:
        raise ModelError(f"{cfg.backbone}: {error}") from None
    hashes = {name: sha256_file(path) for name, path in files_in(paths)}
    partial = out.with_name(f"{out.name}.partial")
    _claim(partial, cfg, hashes, processes)
    try:
        run = _Run(cfg, backbone, layers, processes, partial)
        run.train(training)
        run.evaluate(held_out)
        if processes.main:
            run.save(out, hashes, training, held_out)
            shutil.rmtree(partial)
        processes.wait()
    except SAEError as error:
        raise ModelError(f"{cfg.backbone}: {error}") from None
    finally:
        # nothing is left of a run that cannot be gone on with
        if processes.main and not (partial / _CHECKPOINTS / LATEST).exists():
            shutil.rmtree(partial, ignore_errors=True)
    if cfg.trackers:
        processes.accelerator.end_training()
    if processes.main:
        print(f"SAEs: {out}")
    return out


class _Run:
    """What the stages of one run hand on."""

    def __init__(
        self, cfg: TrainSAEConfig, backbone: Backbone, layers: list[int], processes: Processes, folder: Path
    ) -> None:
        self.cfg, self.backbone, self.layers, self.processes, self.folder = cfg, backbone, layers, processes, folder
        self.size = window_size(backbone, cfg.window)
        self.windows: list[Window] = []
        self.stats = HarvestStats()
        self.trained: Trained
        self.scores: dict[int, dict[str, Any]] = {}
        self.recovered: dict[str, Any] | None = None

    def train(self, dialogues: Sequence[Dialogue]) -> None:
        cfg, seed, processes = self.cfg, self.cfg.trainer.seed, self.processes
        if cfg.trainer.batch_size % processes.count:
            raise ConfigError(f"batch_size {cfg.trainer.batch_size} does not divide among {processes.count} processes")
        self.windows = self._cut(dialogues, "tokenise")
        harvester = self._harvester(mixed(self.windows, cfg.windows_per_batch, seed))
        share = cfg.trainer.batch_size // processes.count
        buffer = ShuffleBuffer(
            self._cached(harvester), share, max(cfg.buffer_tokens, 2 * share), seed=seed, epochs=None, drop_last=True
        )
        checkpoints = Checkpoints(self.folder / _CHECKPOINTS, cfg.checkpoint_every) if cfg.checkpoint_every else None
        with Counter("train", cfg.trainer.total_steps) as bar:

            def filling(written: int, wanted: int) -> None:
                bar.step(0, f"filling the activation buffer: {written:,} of {wanted:,} tokens")

            def progress(done: int, _: int, figures: Any) -> None:
                if not figures:
                    # the first step comes next: what was done before, and its time, say nothing of the ETA
                    bar.skip(done)
                    bar.step(0)
                    return
                note = "  ".join(f"layer {layer} FVU {one['fvu']:.3f}" for layer, one in figures.items())
                bar.advance_to(done, note)

            buffer.progress = filling
            self.trained = train(
                buffer,
                cfg.trainer,
                device=cfg.device,
                metrics=self.folder / _METRICS,
                progress=progress,
                checkpoints=checkpoints,
                accelerator=processes.accelerator,
            )
        self.stats = HarvestStats(*processes.totals(list(astuple(harvester.stats)), torch.device(cfg.device)))

    def evaluate(self, dialogues: Sequence[Dialogue]) -> None:
        if not dialogues:
            return
        cfg, device = self.cfg, torch.device(self.cfg.device)
        windows = self._cut(dialogues, "tokenise held-out")
        harvester = self._harvester(windows, "evaluate")
        for layer, result in evaluate(self.trained.coders, harvester(), allow_empty=True).items():
            result.load_sums(self.processes.total(result.sums().to(device)).cpu())
            self.scores[layer] = result.summary()
        if not cfg.loss_windows or not self.backbone.causal:
            return
        # spread over the dialogues, not the first of them
        some = windows[:: max(1, len(windows) // cfg.loss_windows)][: cfg.loss_windows]
        results = loss_recovered(
            self.backbone.model,
            self.trained.coders,
            self._harvester(some, "loss recovered").inputs(),
            special_ids=self.backbone.tokenizer.all_special_ids,
            sink_factor=cfg.sink_factor or None,
            allow_empty=True,
        )
        for one in results.values():
            one.load_sums(self.processes.total(one.sums().to(device)).cpu())
        self.recovered = {str(layer): one.summary() for layer, one in results.items()}

    def save(
        self, out: Path, hashes: dict[str, str], training: Sequence[Dialogue], held_out: Sequence[Dialogue]
    ) -> None:
        frequencies = self._frequencies()
        with atomic_folder(out) as folder:
            shutil.copyfile(self.folder / _METRICS, folder / _METRICS)
            for layer, coder in self.trained.coders.items():
                coder.metadata = self._metadata(layer)
                place = layer_folder(folder, layer)
                coder.save(place)
                save_idf(place, frequencies[layer])
                write_json(place / "training.json", self._record(layer, hashes, training, held_out))
                self._report(layer)

    def _cut(self, dialogues: Sequence[Dialogue], label: str) -> list[Window]:
        return make_windows(self.backbone, dialogues, self.size, label, self.cfg.image_tokens)

    def _harvester(self, windows: Sequence[Window], label: str | None = None) -> Harvester:
        """Over the part of the windows that is this process's."""
        mine = part_of(windows, self.cfg.windows_per_batch, self.processes.rank, self.processes.count)
        return Harvester(self.cfg, self.backbone, self.layers, mine, label)

    def _cached(self, harvester: Harvester) -> Any:
        cfg = self.cfg
        if cfg.cache is None:
            return harvester
        folder = Path(cfg.cache)
        if self.processes.count > 1:
            folder /= f"part-{self.processes.rank}-of-{self.processes.count}"
        key = {
            "model": cfg.backbone,
            "layers": self.layers,
            "dtype": cfg.dtype,
            "sink_factor": cfg.sink_factor,
            "image_tokens": cfg.image_tokens,
            "windows_per_batch": cfg.windows_per_batch,
            "windows": _digest(harvester.windows),
        }
        return ActivationCache(folder, key, harvester)

    def _frequencies(self) -> dict[int, DocumentFrequency]:
        """Document frequencies over the training turns, the first `idf_turns` of them."""
        limit, coders, windows = self.cfg.idf_turns, self.trained.coders, self.windows
        if limit is not None:
            windows = [window for window in windows if window.turns[0] < limit]
        counts = {layer: DocumentFrequency(coder.d_sae) for layer, coder in coders.items()}
        harvester = Harvester(self.cfg, self.backbone, self.layers, windows, "document frequencies")
        for batch in harvester():
            assert harvester.turns is not None
            numbers = harvester.turns[batch.rows.cpu(), batch.positions.cpu()]
            # the last window may run into turns beyond the limit
            inside = numbers < limit if limit is not None else slice(None)
            for layer, coder in coders.items():
                counts[layer].add(coder.encode(batch.activations[layer])[inside], numbers[inside])
        return counts

    def _metadata(self, layer: int) -> dict[str, Any]:
        n_layers = self.backbone.n_layers
        read_at = f"{layer}.hook_resid_pre" if layer < n_layers else f"{layer - 1}.hook_resid_post"
        return {
            "model_name": self.cfg.backbone,
            "hook_name": f"blocks.{read_at}",
            "layer": layer,
            "context_size": self.size,
        }

    def _record(
        self, layer: int, hashes: dict[str, str], training: Sequence[Dialogue], held_out: Sequence[Dialogue]
    ) -> dict[str, Any]:
        groups = {"training": training, "held_out": held_out}
        return {
            "backbone": self.cfg.backbone,
            "layer": layer,
            "data": hashes,
            "dialogues": {name: len(group) for name, group in groups.items()},
            "turns": {name: sum(len(d.turns) for d in group) for name, group in groups.items()},
            # of this run; what came from a cache is not counted
            "harvest": asdict(self.stats),
            "steps": self.trained.steps,
            "tokens": self.trained.tokens,
            "skipped": self.trained.skipped,
            "training": self.trained.figures[layer],
            "held_out": self.scores.get(layer),
            "loss_recovered": self.recovered and {name: self.recovered.get(name) for name in (str(layer), "all")},
            "config": asdict(self.cfg),
            "processes": self.processes.count,
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers", "remind-toolkit")},
            },
        }

    def _report(self, layer: int) -> None:
        trained = self.trained
        line = f"layer {layer}: {trained.steps} steps, {trained.tokens} tokens, FVU {trained.figures[layer]['fvu']:.3f}"
        if score := self.scores.get(layer):
            line += f"; held out: FVU {_shown(score['fvu'])}, cosine {_shown(score['cosine'])}, L0 {score['l0']:.1f}, "
            line += f"dead {score['dead']:.1%} on {score['tokens']} tokens"
        if self.recovered and (one := self.recovered.get(str(layer))):
            line += f", loss recovered {_shown(one['recovered'])}"
        print(line)


def _shown(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.3f}"


def _processes(cfg: TrainSAEConfig) -> Processes:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not cfg.trackers:
        return Processes()
    from remind.core.distributed import make_accelerator

    accelerator = make_accelerator(Path(cfg.out).with_name(f"{Path(cfg.out).name}.trackers"), cfg.trackers)
    if accelerator.distributed_type.value == "FSDP":
        raise ConfigError("SAEs are trained data-parallel; launch with a DDP configuration, not FSDP")
    if cfg.trackers:
        accelerator.init_trackers("remind-sae", config={name: str(value) for name, value in asdict(cfg).items()})
    return Processes(accelerator)


def _split(cfg: TrainSAEConfig, paths: Sequence[Path]) -> tuple[list[Dialogue], list[Dialogue]]:
    dialogues = read_dialogues(paths, cfg)
    if not cfg.evaluate_on:
        training, held_out = split_dialogues(dialogues, cfg.held_out, cfg.trainer.seed)
        return _named(cfg, training), held_out
    others = data_paths(cfg.evaluate_on)
    known = {sha256_file(path) for _, path in files_in(paths)}
    for name, path in files_in(others):
        if sha256_file(path) in known:
            raise DataError(f"{name} is trained on and cannot be evaluated on", path)
    return _named(cfg, dialogues), read_dialogues(others, TrainSAEConfig(out="", trainer=cfg.trainer))


def _named(cfg: TrainSAEConfig, dialogues: list[Dialogue]) -> list[Dialogue]:
    return [with_names(dialogue, cfg.trainer.seed) for dialogue in dialogues] if cfg.name_speakers else dialogues


def _asked(cfg: TrainSAEConfig, backbone: Backbone) -> list[int | str]:
    if cfg.layers is None:
        return list(default_layers(backbone.n_layers))
    # after the last block but one: what grounding gains most from on real text
    return [max(1, backbone.n_layers - 1) if layer == "late" else layer for layer in cfg.layers]


def _claim(partial: Path, cfg: TrainSAEConfig, hashes: dict[str, str], processes: Processes) -> None:
    """Make the folder of the run, or see that the one there is of the same run. Every process looks before any writes.

    Raises:
        ConfigError: an interrupted run that is not to be gone on with, or one of other settings or data.
    """
    kept = {name: value for name, value in asdict(cfg).items() if name not in _FREE}
    mine = {"data": hashes, "processes": processes.count, "config": kept}
    found = read_json(partial / _RUN) if (partial / _RUN).exists() else None
    if found is not None:
        if not cfg.resume and not cfg.overwrite:
            raise ConfigError(
                f"{partial} holds an interrupted run; set resume to go on with it, overwrite to forget it"
            )
        if cfg.resume and (odd := _difference(found, _plain(mine))):
            raise ConfigError(f"{partial} is of a run with another {odd}, which a resume must keep; or set overwrite")
    processes.wait()
    if processes.main:
        if not cfg.resume:
            shutil.rmtree(partial, ignore_errors=True)
        write_json(partial / _RUN, mine)
    processes.wait()


def _plain(value: Any) -> Any:
    """As it would come back from JSON."""
    import json

    return json.loads(json.dumps(value))


def _difference(one: Any, other: Any, name: str = "") -> str | None:
    """The first name under which two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if found := _difference(one.get(key), other.get(key), f"{name}.{key}".lstrip(".")):
                return found
        return None
    return None if one == other else name


def _digest(windows: Sequence[Window]) -> str:
    """What the backbone is shown, and in which order."""
    import hashlib

    digest = hashlib.sha256()
    for window in windows:
        digest.update(repr((window.ids, window.images)).encode())
    return digest.hexdigest()
