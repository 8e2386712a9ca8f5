"""One SAE per layer, trained on dialogues and saved with what grounding needs (Eq. 2)."""

from __future__ import annotations

import atexit
import math
import platform
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from torch import Tensor
from transformers import TrainerCallback

from remind.core.errors import ConfigError, ModelError
from remind.core.files import atomic_folder, input_hashes, read_json, sha256_json, write_json
from remind.core.processes import Termination
from remind.core.progress import ProgressBar, track
from remind.core.run_folder import CONFIG, REPORT, RunFolder
from remind.data.dialogue import Dialogue
from remind.data.readers import mapping_files
from remind.models.backbone import Backbone, load_backbone
from remind.models.windows import Window, batches, make_windows, mixed, window_size
from remind.train_sae.config import TrainSAEConfig, default_layers
from remind.train_sae.corpus import data_paths, read_corpus
from sae import DocumentFrequency, SAEError, layer_folder, save_idf
from sae.buffer import ShuffleBuffer
from sae.config import SAETrainConfig
from sae.harvest import HarvestStats, TokenBatch, harvest
from sae.hooks import resolve_layers
from sae.metrics import Sums, evaluate
from sae.parallel import Processes
from sae.splice import loss_recovered
from sae.trainer import CHECKPOINTS, METRICS, train

#: Hashes of the dialogues of a run.
DATA = "data.json"
#: Settings in which a resumed run may differ from the one it continues.
_FREE = {"out", "resume", "trackers", "checkpoint_every", "device", "idf_turns", "loss_windows"}


def train_sae(cfg: TrainSAEConfig, *callbacks: TrainerCallback) -> Path:
    """Train, evaluate and save one SAE per layer, alone or under `accelerate launch`, on a part of each batch each.

    SIGTERM and Ctrl-C to any process end the step under way on all of them, save, and raise SystemExit (143, 130).

    Args:
        callbacks: see `sae.trainer.train`.

    Returns:
        The run folder: config.yaml, data.json, metrics.jsonl, report.json and one SAE per layer, each with
        `training.json` and `idf.safetensors`.

    Raises:
        ConfigError, DataError, FormatError: settings or data that cannot be used; a folder that is in use, or holds a
            run that is not to be resumed, or with other settings.
        ModelError: the backbone, its layers or its activations; a disk that is full.
    """
    out = Path(cfg.out)
    folder = RunFolder(out)
    folder.check(cfg.resume)
    processes = _processes(cfg)
    if processes.count > 1:
        cfg.device = str(processes.accelerator.device)
    with folder.held() if processes.main else nullcontext():
        if (out / REPORT).is_file():
            if processes.main:
                print(f"SAEs: {out} (trained before)")
            return out
        try:
            run = _run(cfg, folder, processes, callbacks)
        except SAEError as error:
            raise ModelError(f"{cfg.backbone}: {error}") from None
    if cfg.trackers:
        processes.accelerator.end_training()
    if processes.main:
        run.report()
        print(f"SAEs: {out}")
    return out


def _run(cfg: TrainSAEConfig, folder: RunFolder, processes: Processes, callbacks: Sequence[TrainerCallback]) -> Run:
    training, held_out = read_corpus(cfg)
    backbone = load_backbone(cfg.backbone, dtype=cfg.dtype, device=cfg.device)
    run = Run(cfg, backbone, _layers(cfg, backbone), processes)
    hashes = input_hashes([*data_paths(cfg.data), *mapping_files(cfg.format)])
    if processes.main:
        folder.claim(cfg, cfg.resume, _FREE)
        if (folder.path / DATA).is_file() and read_json(folder.path / DATA) != hashes:
            raise ConfigError(f"{folder.path} was run on other data, which a resumed run must keep")
        write_json(folder.path / DATA, hashes)
    processes.wait()
    try:
        run.train(training, callbacks)
        run.evaluate(held_out)
        if processes.main:
            run.save(hashes)
        processes.wait()
    finally:
        # a run without a checkpoint cannot be resumed and leaves nothing
        if processes.main and not (folder.path / REPORT).is_file() and not any(folder.path.glob(CHECKPOINTS)):
            for name in (CONFIG, DATA, METRICS):
                (folder.path / name).unlink(missing_ok=True)
    return run


def quick_sae(
    backbone: str,
    data: Sequence[str],
    cache: str | Path,
    device: str = "cpu",
    dtype: str = "float32",
    steps: int = 400,
    **settings: Any,
) -> Path:
    """Train a small SAE of one late layer for demos, kept under `cache` by model, data and settings.

    Args:
        settings: fields of `TrainSAEConfig` in place of the small ones; layers may also be "middle" and "late".

    Returns:
        A folder for `sae.load_layers`.
    """
    trainer = SAETrainConfig(
        d_sae=2048,
        steps=steps,
        batch_size=1024,
        lr=1e-3,
        warmup_steps=20,
        decay_share=0.5,
        dead_tokens=50_000,
    )
    small = {"layers": ["late"], "trainer": trainer, "limit": 8000, "loss_windows": 0, "checkpoint_every": 0}
    fields = {**small, "backbone": backbone, "device": device, "dtype": dtype, **settings}
    cfg = TrainSAEConfig("", [str(path) for path in data], **fields)
    hashes = sorted(input_hashes(data_paths(cfg.data)).values())
    # a model folder or GGUF file may be written anew under the same name
    files = sorted(path for path in (Path(backbone), *Path(backbone).rglob("*")) if path.is_file())
    model = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files] or backbone
    parts = [{**asdict(cfg), "data": hashes}, model, version("remind-toolkit")]
    out = Path(cache) / f"{Path(backbone).name}-{sha256_json(parts)[:16]}"
    cfg.out, cfg.resume = str(out), True
    return out if (out / REPORT).is_file() else train_sae(cfg)


def _processes(cfg: TrainSAEConfig) -> Processes:
    """Those of the launcher, joined by accelerate."""
    if missing := [name for name in cfg.trackers if name not in map(str, get_available_trackers())]:
        raise ConfigError(f"trackers: no tracker {missing[0]}; pip install {missing[0]}, or leave it out")
    device = torch.accelerator.current_accelerator(check_available=True)
    # without `cpu`, processes on a machine without a GPU would each train alone; Apple's GPUs have no float64
    accelerator = Accelerator(
        cpu=device is None or device.type == "mps",
        log_with=cfg.trackers or None,
        project_dir=f"{cfg.out}.trackers",
    )
    count = accelerator.num_processes
    if cfg.trainer.batch_size % count:
        raise ConfigError(f"batch_size {cfg.trainer.batch_size} cannot be split among {count} processes")
    if count > 1:
        atexit.register(accelerator.state.destroy_process_group)
    if cfg.trackers:
        accelerator.init_trackers("remind-sae", config={name: str(value) for name, value in asdict(cfg).items()})
    return Processes(accelerator)


def _layers(cfg: TrainSAEConfig, backbone: Backbone) -> list[int]:
    # late: after the last block but one, where grounding gains most on real text; middle: where steering changes most
    named = {"late": max(1, backbone.n_layers - 1), "middle": max(1, backbone.n_layers // 2)}
    names = default_layers(backbone.n_layers) if cfg.layers is None else cfg.layers
    return resolve_layers(backbone.model, [named.get(str(name), name) for name in names])


@dataclass
class Harvester:
    """Token batches of windows from a batch number on: a source for `sae.buffer`.

    `stats` counts each batch once, of a resumed run those since; `turns` [B, T] are turn numbers of the latest batch.
    """

    cfg: TrainSAEConfig
    backbone: Backbone
    layers: Sequence[int]
    windows: Sequence[Window]
    label: str | None = None
    stats: HarvestStats = field(default_factory=HarvestStats)
    turns: Tensor | None = None

    def __call__(self, start: int = 0) -> Iterator[TokenBatch]:
        yield from harvest(
            self.backbone.model,
            self.inputs(start),
            self.layers,
            special_ids=self.backbone.tokenizer.all_special_ids,
            sink_factor=self.cfg.sink_factor or None,
            stats=self.stats,
            start=start,
        )

    def inputs(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """The model inputs alone."""
        per_batch = self.cfg.windows_per_batch
        windows = self.windows[start * per_batch :]
        rows = batches(self.backbone, windows, per_batch, self.cfg.image_tokens)
        if self.label is not None:
            rows = track(rows, self.label, math.ceil(len(windows) / per_batch))
        for inputs, self.turns in rows:
            yield inputs


class _OfTheCommand(TrainerCallback):
    """The bar on the screen, and the signals that end a run."""

    def __init__(self, signals: Termination, buffer: ShuffleBuffer, total: int) -> None:
        self.signals, self.bar, self.note = signals, ProgressBar("train", total), ""
        buffer.progress = lambda written, wanted: self.bar.step(
            0, f"filling the activation buffer: {written:,} of {wanted:,} tokens"
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # the time so far says nothing of the ETA
        self.bar.skip(state.global_step)
        self.bar.step(0)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = {name.removesuffix("/fvu"): value for name, value in kwargs["logs"].items() if name.endswith("/fvu")}
        self.note = "  ".join(f"{name.replace('_', ' ')} FVU {fvu:.3f}" for name, fvu in named.items())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.advance_to(state.global_step, self.note)
        if self.signals.requested:
            control.should_save = control.should_training_stop = True


class Run:
    """What the stages of one run hand on."""

    def __init__(self, cfg: TrainSAEConfig, backbone: Backbone, layers: list[int], processes: Processes) -> None:
        self.cfg, self.backbone, self.layers, self.processes = cfg, backbone, layers, processes
        self.size = window_size(backbone, cfg.window)
        self.device = torch.device(cfg.device)
        self.dialogues: dict[str, Sequence[Dialogue]] = {}
        self.scores: dict[int, dict[str, Any]] = {}
        self.recovered: dict[str, Any] | None = None

    def train(self, dialogues: Sequence[Dialogue], callbacks: Sequence[TrainerCallback] = ()) -> None:
        """Train on windows of these dialogues, from the last checkpoint if there is one."""
        cfg, seed, processes = self.cfg, self.cfg.trainer.seed, self.processes
        self.dialogues["training"] = dialogues
        self.windows = make_windows(self.backbone, dialogues, self.size, "tokenise", cfg.image_tokens)
        tokens = sum(len(window.ids) for window in self.windows)
        harvester = self._harvester(mixed(self.windows, cfg.windows_per_batch, seed))
        share = cfg.trainer.batch_size // processes.count
        # whole corpora need no more room than they take
        capacity = max(min(cfg.buffer_tokens, tokens + share), 2 * share)
        buffer = ShuffleBuffer(harvester, share, capacity, seed, "cpu")
        with Termination() as signals:
            own = _OfTheCommand(signals, buffer, cfg.trainer.total_steps)
            with own.bar:
                self.trained = train(
                    buffer,
                    cfg.trainer,
                    device=cfg.device,
                    folder=cfg.out,
                    save_steps=cfg.checkpoint_every,
                    accelerator=processes.accelerator,
                    callbacks=[own, *callbacks],
                )
        if processes.totals([signals.requested], self.device)[0] and self.trained.steps < cfg.trainer.total_steps:
            number = signal.Signals(signals.requested or signal.SIGTERM)
            hint = "resume to continue" if cfg.checkpoint_every else "checkpoint_every is 0, so nothing is kept"
            if processes.main:
                step = f"step {self.trained.steps} of {cfg.trainer.total_steps}"
                print(f"stopped by {number.name} at {step}; {hint}", file=sys.stderr)
            raise SystemExit(128 + number)
        self.stats = HarvestStats(*processes.totals(list(astuple(harvester.stats)), self.device))

    def evaluate(self, dialogues: Sequence[Dialogue]) -> None:
        """Reconstruction quality, and for causal backbones loss recovered, on held-out dialogues."""
        self.dialogues["held_out"] = dialogues
        if not dialogues:
            return
        cfg, coders = self.cfg, self.trained.coders
        windows = make_windows(self.backbone, dialogues, self.size, "tokenise held-out", cfg.image_tokens)
        results = evaluate(coders, self._harvester(windows, "evaluate")())
        self.scores = {layer: self._summary(result) for layer, result in results.items()}
        if not cfg.loss_windows or not self.backbone.causal:
            return
        # spread over the dialogues, not the first of them
        some = windows[:: max(1, len(windows) // cfg.loss_windows)][: cfg.loss_windows]
        spliced = loss_recovered(
            self.backbone.model,
            coders,
            self._harvester(some, "loss recovered").inputs(),
            special_ids=self.backbone.tokenizer.all_special_ids,
            sink_factor=cfg.sink_factor or None,
        )
        self.recovered = {str(layer): self._summary(result) for layer, result in spliced.items()}

    def save(self, hashes: dict[str, str]) -> None:
        """Write the coders, each whole, and then the report; checkpoints go. hashes: of the data, for the record."""
        out, frequencies, records = Path(self.cfg.out), self._frequencies(), {}
        for layer, coder in self.trained.coders.items():
            inner = layer < self.backbone.n_layers
            hook = f"blocks.{layer}.hook_resid_pre" if inner else f"blocks.{layer - 1}.hook_resid_post"
            coder.metadata = {"model_name": self.cfg.backbone, "hook_name": hook, "layer": layer}
            coder.metadata["context_size"] = self.size
            records[layer] = self._record(layer, hashes)
            with atomic_folder(layer_folder(out, layer)) as place:
                coder.save(place)
                save_idf(place, frequencies[layer])
                write_json(place / "training.json", records[layer])
        write_json(out / REPORT, {"layers": records})
        for checkpoint in out.glob(CHECKPOINTS):
            shutil.rmtree(checkpoint)

    def report(self) -> None:
        """Print the figures of each layer."""
        names = {"fvu": "FVU", "cosine": "cosine", "l0": "L0", "dead": "dead", "recovered": "loss recovered"}
        for layer, figures in self.trained.figures.items():
            line = f"layer {layer}: {self.trained.steps} steps, {self.trained.tokens} tokens, FVU {figures['fvu']:.3f}"
            score = {**self.scores.get(layer, {}), **(self.recovered or {}).get(str(layer), {})}
            shown = [f"{title} {score[name]:.3f}" for name, title in names.items() if score.get(name) is not None]
            print(line + ("; held out: " + ", ".join(shown) if shown else ""))

    def _summary(self, result: Sums) -> dict[str, Any]:
        """Figures over the tokens of all processes."""
        result.load_sums(self.processes.total(result.sums().to(self.device)).cpu())
        return result.summary()

    def _harvester(self, windows: Sequence[Window], label: str | None = None) -> Harvester:
        """Over the windows of this process: whole batches, every `count`-th from its own on."""
        size, processes = self.cfg.windows_per_batch, self.processes
        starts = range(processes.rank * size, len(windows), processes.count * size)
        mine = [window for start in starts for window in windows[start : start + size]]
        return Harvester(self.cfg, self.backbone, self.layers, mine, label)

    def _frequencies(self) -> dict[int, DocumentFrequency]:
        """Document frequencies over the training turns, the first `idf_turns` of them."""
        limit, coders = self.cfg.idf_turns or math.inf, self.trained.coders
        windows = [window for window in self.windows if window.turns[0] < limit]
        counts = {layer: DocumentFrequency(coder.d_sae) for layer, coder in coders.items()}
        harvester = Harvester(self.cfg, self.backbone, self.layers, windows, "document frequencies")
        for batch in harvester():
            assert harvester.turns is not None
            numbers = harvester.turns[batch.rows.cpu(), batch.positions.cpu()]
            # the last window may run into turns beyond the limit
            inside = numbers < limit
            for layer, coder in coders.items():
                counts[layer].add(coder.encode(batch.activations[layer])[inside], numbers[inside])
        return counts

    def _record(self, layer: int, hashes: dict[str, str]) -> dict[str, Any]:
        packages = {name: version(name) for name in ("torch", "transformers", "remind-toolkit")}
        return {
            "backbone": self.cfg.backbone,
            "layer": layer,
            "data": hashes,
            "dialogues": {name: len(group) for name, group in self.dialogues.items()},
            "turns": {name: sum(len(d.turns) for d in group) for name, group in self.dialogues.items()},
            # of this run
            "harvest": asdict(self.stats),
            "steps": self.trained.steps,
            "tokens": self.trained.tokens,
            "training": self.trained.figures[layer],
            "held_out": self.scores.get(layer),
            "loss_recovered": self.recovered and {name: self.recovered.get(name) for name in (str(layer), "all")},
            "config": asdict(self.cfg),
            "processes": self.processes.count,
            "versions": {"python": platform.python_version(), **packages},
        }
