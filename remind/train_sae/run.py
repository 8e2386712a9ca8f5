"""The stages of one run: harvest, train, evaluate, count document frequencies, save."""

from __future__ import annotations

import hashlib
import math
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from remind.core.errors import ConfigError
from remind.core.files import atomic_folder, write_json
from remind.core.processes import TERMINATED, Termination
from remind.core.progress import ProgressBar, track
from remind.data.dialogue import Dialogue
from remind.models.windows import Window, batches, make_windows, mixed, window_size
from remind.train_sae.config import TrainSAEConfig
from remind.train_sae.memory import memory_plan
from sae import DocumentFrequency, layer_folder, save_idf
from sae.buffer import ShuffleBuffer
from sae.cache import ActivationCache
from sae.errors import Stopped
from sae.harvest import HarvestStats, TokenBatch, harvest
from sae.metrics import Sums, evaluate
from sae.parallel import Processes
from sae.splice import loss_recovered
from sae.trainer import Checkpoints, Trained, train

if TYPE_CHECKING:
    from remind.models.backbone import Backbone

CHECKPOINTS, _METRICS = "checkpoints", "metrics.jsonl"


@dataclass
class Harvester:
    """Token batches of windows from a batch number on: a source for `sae.buffer` and `sae.cache`.

    `stats` counts each batch once, and goes into checkpoints; `turns` [B, T] are turn numbers of the latest batch.
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
            skip_nonfinite=self.cfg.trainer.skip_nonfinite,
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

    def state_dict(self) -> dict[str, int]:
        return asdict(self.stats)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.stats = HarvestStats(**state)


class Run:
    """What the stages of one run hand on."""

    def __init__(
        self, cfg: TrainSAEConfig, backbone: Backbone, layers: list[int], processes: Processes, folder: Path
    ) -> None:
        self.cfg, self.backbone, self.layers, self.processes, self.folder = cfg, backbone, layers, processes, folder
        self.size = window_size(backbone, cfg.window)
        self.device = torch.device(cfg.device)
        self.dialogues: dict[str, Sequence[Dialogue]] = {}
        self.windows: list[Window]
        self.stats: HarvestStats
        self.trained: Trained
        self.scores: dict[int, dict[str, Any]] = {}
        self.recovered: dict[str, Any] | None = None

    def train(self, dialogues: Sequence[Dialogue]) -> None:
        """Train on windows of these dialogues, from the last checkpoint if there is one."""
        cfg, seed, processes = self.cfg, self.cfg.trainer.seed, self.processes
        self.dialogues["training"] = dialogues
        if cfg.trainer.batch_size % processes.count:
            raise ConfigError(f"batch_size {cfg.trainer.batch_size} cannot be split among {processes.count} processes")
        self.windows = make_windows(self.backbone, dialogues, self.size, "tokenise", cfg.image_tokens)
        tokens = sum(len(window.ids) for window in self.windows)
        memory = memory_plan(cfg, self.backbone, self.layers, self.size, tokens, processes.count)
        memory.check(self.device, say=processes.main)
        harvester = self._harvester(mixed(self.windows, cfg.windows_per_batch, seed))
        share = cfg.trainer.batch_size // processes.count
        buffer = ShuffleBuffer(
            self._cached(harvester), share, max(cfg.buffer_tokens, 2 * share), seed=seed, epochs=None, drop_last=True,
            device="cpu" if cfg.buffer_on == "host" else None,
        )  # fmt: skip
        checkpoints = Checkpoints(self.folder / CHECKPOINTS, cfg.checkpoint_every) if cfg.checkpoint_every else None
        with ProgressBar("train", cfg.trainer.total_steps) as bar:

            def progress(done: int, _: int, figures: Any) -> None:
                if figures:
                    bar.advance_to(done, "  ".join(f"layer {n} FVU {one['fvu']:.3f}" for n, one in figures.items()))
                else:  # before the first step: the time so far says nothing of the ETA
                    bar.skip(done)
                    bar.step(0)

            buffer.progress = lambda written, wanted: bar.step(
                0, f"filling the activation buffer: {written:,} of {wanted:,} tokens"
            )
            try:
                with Termination() as termination:
                    self.trained = train(
                        buffer,
                        cfg.trainer,
                        device=cfg.device,
                        metrics=self.folder / _METRICS,
                        progress=progress,
                        checkpoints=checkpoints,
                        accelerator=processes.accelerator,
                        stop=lambda: termination.requested > 0,
                    )
            except Stopped as early:
                hint = "set resume to continue" if checkpoints else "checkpoint_every is 0, so nothing is kept"
                if processes.main:
                    print(f"stopped by SIGTERM {early}; {hint}", file=sys.stderr)
                raise SystemExit(TERMINATED) from None
        self.stats = HarvestStats(*processes.totals(list(astuple(harvester.stats)), self.device))

    def evaluate(self, dialogues: Sequence[Dialogue]) -> None:
        """Reconstruction quality, and for causal backbones loss recovered, on held-out dialogues."""
        self.dialogues["held_out"] = dialogues
        if not dialogues:
            return
        cfg, coders = self.cfg, self.trained.coders
        windows = make_windows(self.backbone, dialogues, self.size, "tokenise held-out", cfg.image_tokens)
        results = evaluate(coders, self._harvester(windows, "evaluate")(), allow_empty=True)
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
            allow_empty=True,
        )
        self.recovered = {str(layer): self._summary(result) for layer, result in spliced.items()}

    def save(self, out: Path, hashes: dict[str, str]) -> None:
        """Write the folder of coders, whole or not at all. hashes: of the data, for the record."""
        frequencies = self._frequencies()
        with atomic_folder(out) as folder:
            shutil.copyfile(self.folder / _METRICS, folder / _METRICS)
            for layer, coder in self.trained.coders.items():
                inner = layer < self.backbone.n_layers
                hook = f"blocks.{layer}.hook_resid_pre" if inner else f"blocks.{layer - 1}.hook_resid_post"
                coder.metadata = {"model_name": self.cfg.backbone, "hook_name": hook, "layer": layer}
                coder.metadata["context_size"] = self.size
                place = layer_folder(folder, layer)
                coder.save(place)
                save_idf(place, frequencies[layer])
                write_json(place / "training.json", self._record(layer, hashes))
                self._report(layer)

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

    def _cached(self, harvester: Harvester) -> Any:
        cfg = self.cfg
        if cfg.cache is None:
            return harvester
        folder = Path(cfg.cache)
        if self.processes.count > 1:
            folder /= f"part-{self.processes.rank}-of-{self.processes.count}"
        digest = hashlib.sha256()
        for window in harvester.windows:
            digest.update(repr((window.ids, window.images)).encode())
        key = {name: getattr(cfg, name) for name in ("dtype", "sink_factor", "image_tokens", "windows_per_batch")}
        key |= {"model": cfg.backbone, "layers": self.layers, "windows": digest.hexdigest()}
        return ActivationCache(folder, key, harvester)

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
            "versions": {"python": platform.python_version(), **packages},
        }

    def _report(self, layer: int) -> None:
        trained = self.trained
        line = f"layer {layer}: {trained.steps} steps, {trained.tokens} tokens, FVU {trained.figures[layer]['fvu']:.3f}"
        score = {**self.scores.get(layer, {}), **(self.recovered or {}).get(str(layer), {})}
        names = {"fvu": "FVU", "cosine": "cosine", "l0": "L0", "dead": "dead", "recovered": "loss recovered"}
        figures = [f"{title} {score[name]:.3f}" for name, title in names.items() if score.get(name) is not None]
        print(line + ("; held out: " + ", ".join(figures) if figures else ""))
