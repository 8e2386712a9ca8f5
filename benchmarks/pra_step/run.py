"""Variants of the step in turns, and the table.

Every variant is one forward and backward over one microbatch, without the optimiser's step, which is the same for all.
Weights are random and built from the configuration; nothing is loaded. The variants take turns round by round, so that
a slow minute of the machine hits all alike, and the first round is not counted. A ratio is the median over rounds of
the variant's time over that of `sft` in the same round. Time is that of the clock on CUDA, and on a CPU that of the
processor over all threads, which other programs on the machine disturb less.

`operations` are those of `flops.executed`, and their ratio to those of `sft` is what the time ratio would be if nothing
else took time. MFU is their rate over the GPU's bfloat16 peak without sparsity. Memory is as `memory` says.
"""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch

from benchmarks.pra_step.config import BenchStepConfig, Tune, Variant
from benchmarks.pra_step.flops import executed
from benchmarks.pra_step.memory import Memory, cpu_memory, cuda_memory
from benchmarks.pra_step.variants import LEGEND, Step, build, make_step, microbatch
from remind.core.files import write_json
from remind.core.progress import Counter

#: bfloat16 peak without sparsity, FLOP/s, by a part of the device's name; the first that fits
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A40": 150e12}


@dataclass
class Row:
    """One variant; None: not measured. `failed`: why there are no figures."""

    variant: str
    seconds: float | None = None
    ratio: float | None = None
    operations: int | None = None
    operations_ratio: float | None = None
    mfu: float | None = None
    memory: Memory | None = None
    total_ratio: float | None = None
    work_ratio: float | None = None
    failed: str | None = None


def bench_step(cfg: BenchStepConfig) -> dict[str, Any]:
    """Run, print and return the figures: `about`, `config`, and `rows` by how the model is tuned."""
    about = _about(cfg)
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    print(f"{cfg.arch}, T {cfg.tokens}, L {cfg.answer}, batch {cfg.batch}, checkpointing {cfg.checkpointing}")
    rows: dict[str, list[dict[str, Any]]] = {}
    found = {"about": about, "config": asdict(cfg), "rows": rows}
    for tune in cfg.tune:
        measured = _measure(cfg, tune)
        print(f"\n{tune}\n{_table(measured)}", flush=True)
        rows[tune] = [asdict(row) | {"memory": row.memory and row.memory._asdict()} for row in measured]
        if cfg.out:
            write_json(cfg.out, found)
    print(f"\n{LEGEND}\nload at the end: {os.getloadavg()[0]:.1f}")
    if cfg.out:
        print(f"figures are in {cfg.out}")
    return found


def _about(cfg: BenchStepConfig) -> dict[str, str]:
    cuda = cfg.device.startswith("cuda")
    device = torch.cuda.get_device_name(cfg.device) if cuda else f"{torch.get_num_threads()} threads"
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"machine": platform.platform(), "device": device, **libraries, "load": f"{os.getloadavg()[0]:.1f}"}


def _measure(cfg: BenchStepConfig, tune: Tune) -> list[Row]:
    names: tuple[Variant, ...] = ("sft", *(name for name in cfg.variants if name != "sft"))
    rows = {name: Row(name) for name in names}
    times: dict[Variant, list[float]] = {name: [] for name in names}
    cuda = cfg.device.startswith("cuda")
    if cfg.memory and not cuda:
        for name in names:
            rows[name].memory = cpu_memory(cfg, tune, name)
    model, batch = build(cfg, tune), microbatch(cfg)
    with Counter(f"{tune}: steps", (cfg.rounds + 1) * len(names)) as bar, _new_alone():
        for number in range(cfg.rounds + 1):
            for name in (name for name in names if not rows[name].failed):
                step: Step | None = None
                try:
                    step = make_step(name, model, batch)
                    if number:
                        times[name].append(_seconds(step, cfg.device))
                    else:
                        rows[name].operations = executed(step)
                        model.zero_grad(set_to_none=True)
                        if cfg.memory and cuda:
                            rows[name].memory = cuda_memory(step, model, cfg.device)
                except torch.OutOfMemoryError:
                    rows[name].failed = "out of memory"
                model.zero_grad(set_to_none=True)
                # what one variant keeps (cached targets, a copy of the head) must not weigh on the next
                step = None
                gc.collect()
                bar.step(note=name)
    base = rows["sft"]
    for name, row in rows.items():
        _compare(row, base, times[name], times["sft"], _peak(cfg.device))
    return list(rows.values())


@contextmanager
def _new_alone() -> Iterator[None]:
    """Inside the block the collector looks at what is made there, not at all the libraries have left."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _compare(row: Row, base: Row, times: list[float], reference: list[float], peak: float | None) -> None:
    if row.failed or base.failed:
        return
    row.seconds = median(times)
    row.ratio = median(one / other for one, other in zip(times, reference, strict=True))
    if row.operations and base.operations:
        row.operations_ratio = row.operations / base.operations
        row.mfu = None if peak is None else row.operations / row.seconds / peak
    if row.memory and base.memory:
        row.total_ratio = row.memory.total / base.memory.total
        row.work_ratio = row.memory.work / base.memory.work


def _seconds(step: Step, device: str) -> float:
    if not device.startswith("cuda"):
        began = process_time()
        step()
        return process_time() - began
    torch.cuda.synchronize(device)
    began = perf_counter()
    step()
    torch.cuda.synchronize(device)
    return perf_counter() - began


def _peak(device: str) -> float | None:
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def _table(rows: list[Row]) -> str:
    def number(value: float | None, unit: float = 1, digits: int = 2) -> str:
        return "-" if value is None else f"{value / unit:.{digits}f}"

    heads = ("seconds", "x sft", "GFLOP", "x sft", "MFU %", "total MB", "x sft", "work MB", "x sft")
    lines = [" " * 12 + "".join(f"{head:>10}" for head in heads)]
    for row in rows:
        total, work = row.memory or (None, None)
        cells = (
            number(row.seconds, digits=3),
            number(row.ratio),
            number(row.operations, 1e9, 1),
            number(row.operations_ratio),
            number(row.mfu, 0.01, 1),
            number(total, 1e6, 1),
            number(row.total_ratio),
            number(work, 1e6, 1),
            number(row.work_ratio),
        )
        lines.append(f"{row.variant:<12}" + (row.failed or "".join(f"{cell:>10}" for cell in cells)))
    return "\n".join(lines)
