"""Memory of one step.

On CUDA the highest mark of torch's allocator. On a CPU the variant runs alone in a process in which the kernel's
highest mark of resident memory is reset before the step, and freed tensors go back to the kernel at once: a process
that runs several variants keeps the mark of the hungriest, and its allocator keeps what others freed.

AdamW's two moments, which lie there during every step of a run, are added to the total by their size, not allocated.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.pra_step.config import BenchStepConfig, Tune, Variant
from remind.core.processes import resident

_RESET = Path("/proc/self/clear_refs")
#: blocks above this many bytes are returned when freed
_MMAP = "65536"


class Memory(NamedTuple):
    """Bytes. total: the highest during the step, weights and moments included; work: beyond what was there before."""

    total: int
    work: int


def moments(model: torch.nn.Module) -> int:
    """Bytes of two tensors like each trained parameter."""
    return sum(2 * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def cuda_memory(step: Callable[[], None], model: torch.nn.Module, device: str) -> Memory:
    """Of one call of `step`, which trains `model`."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return Memory(peak + moments(model), peak - before)


def cpu_memory(cfg: BenchStepConfig, tune: Tune, name: Variant) -> Memory | None:
    """Of one step in a process of its own; None where the kernel does not tell (other systems than Linux)."""
    if not os.access(_RESET, os.W_OK):
        return None
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    kept = {key: os.environ.get(key) for key in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")}
    os.environ.update(dict.fromkeys(kept, _MMAP))
    try:
        process = context.Process(target=_child, args=(theirs, cfg, tune, name))
        process.start()
    finally:
        for key, value in kept.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
    theirs.close()
    try:
        found = ours.recv_bytes().decode()
    except EOFError:
        return None
    finally:
        process.join()
    total, work = map(int, found.split())
    return Memory(total, work)


def _child(connection: Any, cfg: BenchStepConfig, tune: Tune, name: Variant) -> None:
    from benchmarks.pra_step.variants import build, make_step, microbatch

    tiny = BenchStepConfig(arch="nano", tokens=64, answer=8, tune=(tune,))
    # libraries take memory of their own on first use
    make_step(name, build(tiny, tune), microbatch(tiny))()
    gc.collect()
    bare = resident("VmRSS")
    model, batch = build(cfg, tune), microbatch(cfg)
    step = make_step(name, model, batch)
    gc.collect()
    before = resident("VmRSS")
    _RESET.write_text("5")
    step()
    peak = resident("VmHWM")
    connection.send_bytes(f"{peak - bare + moments(model)} {peak - before}".encode())
