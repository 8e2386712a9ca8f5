"""Time, operations and memory of an alignment step, variant by variant, beside a fine-tuning step on the same x0.

Every variant is one forward and backward over one microbatch, without the optimiser's step, which is the same for all.
Weights are random and built from the configuration; nothing is loaded. The variants take turns round by round, so that
a slow minute of the machine affects all alike, and the first round is not counted. A ratio is the median over rounds of
the variant's time over that of `sft` in the same round. Time is that of the clock on CUDA, and on a CPU that of the
processor over all threads, which other programs on the machine disturb less.

`operations` are those of `flops.executed`, and their ratio to those of `sft` is what the time ratio would be if nothing
else took time.

Memory on CUDA is the peak of torch's allocator. On a CPU the variant runs alone in a process in which the kernel's peak
of resident memory is reset before the step, and freed tensors go back to the kernel at once: a process that runs
several variants keeps the largest peak, and its allocator keeps what others freed. AdamW's two moments, which are there
during every step of a run, are added to the total by their size, not allocated.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.measure import about, headline, seconds
from experiments.flops import Arch, config_of, executed
from remind.alignment.config import DataConfig, Edge, LoraConfig, Objective
from remind.alignment.model import checkpoint_activations, head_weight, quantise, trainable
from remind.alignment.objective import FixedTeacher, HiddenTeacher, TopKTeacher, pra_loss
from remind.alignment.step import AlignmentModel, MicroBatch, Pass, collate, plan, run
from remind.alignment.teachers import teach, topk_targets
from remind.alignment.tokens import Example
from remind.core.errors import ConfigError
from remind.core.files import write_json
from remind.core.processes import resident, spawned_pool
from remind.core.progress import ProgressBar
from remind.models.generate import continue_rows

Tune = Literal["full", "lora"]
Variant = Literal[
    "sft", "sequential", "shared", "joint", "base_hidden", "base_topk", "naive", "two_answers", "answering"
]
Step = Callable[[], None]
TOP_K = 64
_DATA = DataConfig(targets="on_policy")
LEGEND = f"""sft: cross-entropy on x0 alone, logits of the answer only.
sequential: x2 without gradient, then x1 forward and back, then x0 forward and back.
shared: the same, with the common prefix of x1 and x2 computed once. joint: all levels forward, then back.
base_hidden, base_topk: edges 0 <- 1 and 0 <- 2 with cached targets: hidden states and a frozen head, or top-64.
naive: three forwards with whole logits [T, V], one backward through all three.
two_answers: as shared, and the hard loss on a gold answer that is another: one more pass over x0.
answering: from x0, the questions of {_DATA.refresh_steps} steps, L tokens each, {_DATA.decode_batch} together.
on_policy: not run but added up: two_answers and 1/{_DATA.refresh_steps} of answering."""
_RESET = Path("/proc/self/clear_refs")
_SFT = Objective(lambda_hard=1.0, edges=())
_PRA = Objective()
_BASE = Objective(edges=(Edge(0, 1), Edge(0, 2)), teacher_weights="base")


@dataclass
class BenchStepConfig:
    """Compare variants of the alignment step with a fine-tuning step on the same x0."""

    arch: Arch = "small"
    """small: Qwen3-VL's shape at width 512, 6 layers and a vocabulary of 8,192, where matrix products already dominate
    on a CPU; nano; or the real sizes. Weights are random."""
    device: str = "cpu"
    """cpu or cuda."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights; adapters are float32."""
    tokens: int = 1024
    """T: tokens of x0 with its answer."""
    answer: int = 48
    """L: tokens of the answer."""
    markers: float = 0.02
    """Tokens of x1 beyond those of x0 (markers and reminder), as a share of T."""
    summary: float = 0.04
    """Tokens of x2 beyond those of x1, as a share of T."""
    question: float = 0.015
    """Tokens between the summary and the answer, as a share of T."""
    batch: int = 1
    """Samples in the microbatch, all of one length."""
    layers: int | None = None
    """Keep only so many decoder layers; None: all."""
    tune: tuple[Tune, ...] = ("full", "lora")
    """full: all weights of the language model. lora: adapters of rank 64 on it, of rank 8 on small and nano."""
    variants: tuple[Variant, ...] = (
        "sequential",
        "shared",
        "joint",
        "base_hidden",
        "base_topk",
        "naive",
        "two_answers",
        "answering",
    )
    """Which variants, besides sft."""
    checkpointing: bool = True
    """Compute the activations inside each layer again in the backward pass."""
    rounds: int = 5
    """Rounds that count."""
    memory: bool = True
    """Measure memory as well; on a CPU this takes a process for each variant."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""

    def __post_init__(self) -> None:
        self.tune, self.variants = tuple(self.tune), tuple(self.variants)
        if self.rounds < 1 or self.batch < 1 or self.answer < 1 or self.tokens < 2 * self.answer:
            raise ConfigError("rounds, batch and answer must be 1 or more, and tokens at least twice the answer")
        if min(self.markers, self.summary, self.question) < 0 or self.question > 0.4:
            raise ConfigError("markers, summary and question are shares of 0 or more, question at most 0.4")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"device {self.device}: there is no CUDA device here; set device cpu")


def build(cfg: BenchStepConfig, tune: Tune, nf4: bool = False) -> Any:
    """The model with random weights on its device, ready to be tuned; in training mode. nf4: on a base in 4 bits."""
    from transformers import Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, cfg.dtype))
    try:
        with torch.device(cfg.device):
            model = Qwen3VLForConditionalGeneration(config_of(cfg.arch, cfg.layers))
    finally:
        torch.set_default_dtype(default)
    if nf4:
        quantise(model, cfg.device)
    rank = 8 if cfg.arch in ("small", "nano") else 64
    tuned = trainable(model, LoraConfig(r=rank, alpha=2 * rank) if tune == "lora" else None)
    if cfg.checkpointing:
        checkpoint_activations(model)
    return tuned


def microbatch(cfg: BenchStepConfig) -> MicroBatch:
    """Random tokens laid out as states are: x2 is x1 with a summary before the question."""
    markers, summary, question = (round(share * cfg.tokens) for share in (cfg.markers, cfg.summary, cfg.question))
    vocabulary = config_of(cfg.arch, cfg.layers).text_config.vocab_size - 8
    generator = torch.Generator().manual_seed(0)

    def ids(n: int) -> Tensor:
        return torch.randint(0, vocabulary, (n,), generator=generator, dtype=torch.int32)

    examples = []
    for number in range(cfg.batch):
        query, dialogue, reminder = ids(question + 1), ids(cfg.tokens - cfg.answer - question - 1), ids(markers)
        x0 = torch.cat([dialogue, query])
        x1 = torch.cat([dialogue, reminder, query])
        x2 = torch.cat([dialogue, reminder, ids(summary), query])
        examples.append(Example(str(number), (x0, x1, x2), ids(cfg.answer)))
    return collate(examples, [1 / cfg.batch] * cfg.batch).to(cfg.device)


def make_step(name: Variant, model: Any, batch: MicroBatch) -> Step:
    """One forward and backward of a variant. Cached targets are computed here, outside the step."""
    if name == "naive":
        return lambda: _naive(model, batch)
    if name == "answering":
        return lambda: _answer(model, batch)
    fixed: dict[int, FixedTeacher] = {}
    objective = _SFT if name == "sft" else _PRA
    if name in ("base_hidden", "base_topk"):
        objective = _BASE
        fixed = _cached(AlignmentModel(model, objective), batch, name == "base_topk")
    passes = plan(objective, "joint" if name == "joint" else "sequential", name in ("shared", "two_answers"))
    wrapped = AlignmentModel(model, objective)
    gold = replace(batch, hard_only=True)

    def step() -> None:
        if name == "two_answers":
            run(wrapped, gold, [Pass((0,), True)], lambda loss: loss.backward())
        run(wrapped, batch, passes, lambda loss: loss.backward(), fixed=fixed)

    return step


def _cached(wrapped: AlignmentModel, batch: MicroBatch, top_k: bool) -> dict[int, FixedTeacher]:
    head = head_weight(wrapped.model)
    hidden = teach(wrapped, batch, (1, 2))
    if top_k:
        return {
            level: TopKTeacher(*topk_targets(h, head.detach(), wrapped.objective.tau, TOP_K))
            for level, h in hidden.items()
        }
    # a head that is trained has to be kept as it was
    weight = head.detach().clone() if head.requires_grad else None
    return {level: HiddenTeacher(h, weight) for level, h in hidden.items()}


def _answer(model: Any, batch: MicroBatch) -> None:
    from transformers import GenerationConfig

    length = int(batch.lengths[0])
    tokens = {"min_new_tokens": length, "max_new_tokens": length, "eos_token_id": [0], "pad_token_id": 0}
    prompts = batch.input_ids[0][:, : int(batch.starts[0, 0]) + 1].tolist() * _DATA.refresh_steps
    for start in range(0, len(prompts), _DATA.decode_batch):
        continue_rows(model, prompts[start : start + _DATA.decode_batch], GenerationConfig(**tokens))


def _naive(model: Any, batch: MicroBatch) -> None:
    logits = []
    for ids in batch.input_ids:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        # as libraries' own losses do: all of them, widened
        logits.append(model(input_ids=ids, position_ids=positions, use_cache=False).logits.float())
    total: Any = 0
    for row, length in enumerate(batch.lengths.tolist()):
        starts = batch.starts[:, row].tolist()
        parts = [z[row, start : start + length] for z, start in zip(logits, starts, strict=True)]
        targets = batch.targets[batch.rows == row]
        loss = pra_loss(parts[0], parts[1], parts[2], targets, target_grad="flow")
        total = total + batch.weights[row].float() * loss.total
    total.backward()


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
    # blocks above so many bytes are returned when freed
    mmap = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
    try:
        with patch.dict(os.environ, mmap), spawned_pool(1) as pool:
            return pool.submit(_child, cfg, tune, name).result()
    except BrokenProcessPool:
        return None


def _child(cfg: BenchStepConfig, tune: Tune, name: Variant) -> Memory:
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
    return Memory(peak - bare + moments(model), peak - before)


@dataclass
class Row:
    """One variant; None: not measured. `failed`: why there are no figures."""

    variant: str
    seconds: float | None = None
    ratio: float | None = None
    operations: int | None = None
    operations_ratio: float | None = None
    memory: Memory | None = None
    total_ratio: float | None = None
    work_ratio: float | None = None
    failed: str | None = None


def bench_step(cfg: BenchStepConfig) -> dict[str, Any]:
    """Run, print and return the figures: `about`, `config`, and `rows` by how the model is tuned."""
    machine = about("torch", "transformers", device=cfg.device) | {"load": f"{os.getloadavg()[0]:.1f}"}
    print(headline(machine), flush=True)
    print(f"{cfg.arch}, T {cfg.tokens}, L {cfg.answer}, batch {cfg.batch}, checkpointing {cfg.checkpointing}")
    rows: dict[str, list[dict[str, Any]]] = {}
    figures = {"about": machine, "config": asdict(cfg), "rows": rows}
    for tune in cfg.tune:
        measured = _measure(cfg, tune)
        print(f"\n{tune}\n{_table(measured)}", flush=True)
        rows[tune] = [asdict(row) | {"memory": row.memory and row.memory._asdict()} for row in measured]
        if cfg.out:
            write_json(cfg.out, figures)
    print(f"\n{LEGEND}\nload at the end: {os.getloadavg()[0]:.1f}")
    if cfg.out:
        print(f"figures are in {cfg.out}")
    return figures


def _measure(cfg: BenchStepConfig, tune: Tune) -> list[Row]:
    names: tuple[Variant, ...] = ("sft", *(name for name in cfg.variants if name != "sft"))
    rows = {name: Row(name) for name in names}
    times: dict[Variant, list[float]] = {name: [] for name in names}
    cuda = cfg.device.startswith("cuda")
    if cfg.memory and not cuda:
        for name in names:
            rows[name].memory = cpu_memory(cfg, tune, name)
    model, batch = build(cfg, tune), microbatch(cfg)
    # what the libraries have left need not be looked at again and again
    gc.freeze()
    with ProgressBar(f"{tune}: steps", (cfg.rounds + 1) * len(names)) as bar:
        for number in range(cfg.rounds + 1):
            for name in (name for name in names if not rows[name].failed):
                step: Step | None = None
                try:
                    step = make_step(name, model, batch)
                    if number:
                        times[name].append(seconds(step, cfg.device, perf_counter if cuda else process_time))
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
        _compare(row, base, times[name], times["sft"])
    found = list(rows.values())
    if {"two_answers", "answering"} <= rows.keys():
        found.append(_on_policy(rows["two_answers"], rows["answering"], base, times))
    return found


def _on_policy(step: Row, answering: Row, base: Row, times: dict[Variant, list[float]]) -> Row:
    row = Row("on_policy", failed=step.failed or answering.failed)
    share = 1 / _DATA.refresh_steps
    row.operations = round((step.operations or 0) + share * (answering.operations or 0)) or None
    if step.memory and answering.memory:
        row.memory = Memory(*map(max, zip(step.memory, answering.memory, strict=True)))
    both = zip(times["two_answers"], times["answering"], strict=False)
    _compare(row, base, [one + share * other for one, other in both], times["sft"])
    return row


def _compare(row: Row, base: Row, times: list[float], reference: list[float]) -> None:
    if row.failed or base.failed:
        return
    row.seconds = median(times)
    row.ratio = median(one / other for one, other in zip(times, reference, strict=True))
    if row.operations and base.operations:
        row.operations_ratio = row.operations / base.operations
    if row.memory and base.memory:
        row.total_ratio = row.memory.total / base.memory.total
        row.work_ratio = row.memory.work / base.memory.work


def _table(rows: list[Row]) -> str:
    def number(value: float | None, unit: float = 1, digits: int = 2) -> str:
        return "-" if value is None else f"{value / unit:.{digits}f}"

    heads = ("seconds", "x sft", "GFLOP", "x sft", "total MB", "x sft", "work MB", "x sft")
    lines = [" " * 12 + "".join(f"{head:>10}" for head in heads)]
    for row in rows:
        total, work = row.memory or (None, None)
        cells = [number(row.seconds, digits=3), number(row.ratio)]
        cells += [number(row.operations, 1e9, 1), number(row.operations_ratio)]
        cells += [number(total, 1e6, 1), number(row.total_ratio), number(work, 1e6, 1), number(row.work_ratio)]
        lines.append(f"{row.variant:<12}" + (row.failed or "".join(f"{cell:>10}" for cell in cells)))
    return "\n".join(lines)


if __name__ == "__main__":
    from remind.core.cli import main

    main(BenchStepConfig, bench_step, __doc__)
