"""Time, operations and memory of an alignment step, variant by variant, beside a fine-tuning step on the same x0.

Every variant is one forward and backward over one microbatch, without the optimiser's step, which is the same for all;
or, with `loop`, a whole step of `PRATrainer`: optimiser, metrics and transformers' loop included. Weights are random.
Variants take turns round by round, so that a slow minute of the machine affects all alike; the first round is not
counted. A ratio is the median over rounds of the variant's time over that of `sft` in the same round. Time is that of
the clock on CUDA, and on a CPU that of the processor over all threads, which other programs disturb less. The ratio of
operations (`flops.executed`) is what that of times would be if nothing else took time.

sft: cross-entropy on x0 alone, logits of the answer only. sequential: x2 without gradient, then x1 forward and back,
then x0 forward and back. shared: the same, with the common prefix of x1 and x2 computed once. base_hidden, base_topk:
edges 0 <- 1 and 0 <- 2 with cached targets: hidden states and a frozen head, or top-64. naive: three forwards with
whole logits [T, V], one backward through all three. two_answers: as shared, and the hard loss on a gold answer that is
another: one more pass over x0. answering: from x0, the questions of as many steps as are answered at once, L tokens
each. A step on-policy is two_answers and such a share of answering.

Memory is the highest during the step, weights and AdamW's two moments included, which are added by their size unless
`loop` allocates them. On CUDA it is the peak of torch's allocator. On a CPU a variant runs alone in a process in which
the kernel's peak of resident memory is reset before the step, and freed tensors go back to the kernel at once.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import rmtree
from statistics import median
from tempfile import mkdtemp
from time import perf_counter, process_time
from typing import Any, Literal
from unittest.mock import patch
from weakref import finalize

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback

from benchmarks.measure import about, headline, resident
from experiments.flops import Arch, config_of, executed
from remind.alignment.arguments import PRAConfig
from remind.alignment.config import Edge, ExampleConfig, LoraConfig, Objective
from remind.alignment.examples import Example, Examples
from remind.alignment.model import trainable
from remind.alignment.objective import FixedTeachers, pra_loss
from remind.alignment.step import AlignmentModel, MicroBatch, collate, head_of, plan, run
from remind.alignment.targets import topk_targets
from remind.alignment.trainer import PRATrainer
from remind.core.errors import ConfigError
from remind.core.files import write_json
from remind.core.processes import spawned_pool
from remind.core.progress import ProgressBar
from remind.models.backbone import load_backbone
from remind.models.generate import continue_rows

Tune = Literal["full", "lora"]
Variant = Literal["sft", "sequential", "shared", "base_hidden", "base_topk", "naive", "two_answers", "answering"]
Step = Callable[[], Any]
_DATA = ExampleConfig(targets="on_policy")
#: As shares of T: tokens of x1 beyond x0's (markers), of x2 beyond x1's (summary), and from there to the answer.
_MARKERS, _SUMMARY, _QUESTION = 0.02, 0.04, 0.015
_RESET = Path("/proc/self/clear_refs")
_BASE = {"edges": (Edge(0, 1), Edge(0, 2)), "teacher_model_kind": "base"}
#: What each variant minimises, where it is not the default.
_OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {"lambda_hard": 1.0, "edges": ()},
    "base_hidden": _BASE,
    "base_topk": {**_BASE, "base_targets": "topk"},
}
#: Not steps of `PRATrainer`.
_BARE: tuple[Variant, ...] = ("naive", "answering")


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
    batch: int = 1
    """Samples in the microbatch, all of one length."""
    tune: tuple[Tune, ...] = ("full", "lora")
    """full: all weights of the language model. lora: adapters of rank 64 on it, of rank 8 on small and nano."""
    variants: tuple[Variant, ...] = ("sequential", "shared", "base_hidden", "base_topk", "two_answers", *_BARE)
    """Which variants, besides sft."""
    loop: bool = False
    """Measure whole steps of `PRATrainer`; variants that it has no settings for are left out."""
    optim: str = "adamw_torch_fused"
    """loop: optimiser, by transformers' name."""
    bf16: bool = False
    """loop: compute in bfloat16 with weights in float32."""
    checkpointing: bool = True
    """Compute the activations inside each layer again in the backward pass."""
    rounds: int = 5
    """Rounds that count."""
    memory: bool = True
    """Measure memory as well; on a CPU this takes a process for each variant."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""

    def __post_init__(self) -> None:
        self.tune = tuple(self.tune)
        self.variants = tuple(name for name in self.variants if not self.loop or name not in _BARE)
        if self.rounds < 1 or self.batch < 1 or self.answer < 1 or self.tokens < 2 * self.answer:
            raise ConfigError("rounds, batch and answer must be 1 or more, and tokens at least twice the answer")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"device {self.device}: there is no CUDA device here; set device cpu")


def build(cfg: BenchStepConfig, tune: Tune) -> Any:
    """The model with random weights on its device, ready to be tuned; in training mode."""
    from transformers import Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, cfg.dtype))
    try:
        with torch.device(cfg.device):
            model = Qwen3VLForConditionalGeneration(config_of(cfg.arch, None))
    finally:
        torch.set_default_dtype(default)
    rank = 8 if cfg.arch in ("small", "nano") else 64
    tuned: Any = trainable(model, LoraConfig(r=rank, alpha=2 * rank) if tune == "lora" else None)
    if cfg.checkpointing:
        # the name before transformers 5.2x
        enable = getattr(tuned, "activation_checkpointing_enable", None) or tuned.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return tuned


def examples(cfg: BenchStepConfig, two_answers: bool = False) -> list[Example]:
    """Random tokens laid out as states are: x2 is x1 with a summary before the question."""
    markers, summary, question = (round(share * cfg.tokens) for share in (_MARKERS, _SUMMARY, _QUESTION))
    vocabulary = config_of(cfg.arch, None).text_config.vocab_size - 8
    generator = torch.Generator().manual_seed(0)

    def ids(n: int) -> Tensor:
        return torch.randint(0, vocabulary, (n,), generator=generator, dtype=torch.int32)

    found = []
    for number in range(cfg.batch):
        query, dialogue, reminder = ids(question + 1), ids(cfg.tokens - cfg.answer - question - 1), ids(markers)
        x0 = torch.cat([dialogue, query])
        x1 = torch.cat([dialogue, reminder, query])
        x2 = torch.cat([dialogue, reminder, ids(summary), query])
        example = Example(str(number), (x0, x1, x2), ids(cfg.answer))
        found.append(example.answering(ids(cfg.answer).tolist()) if two_answers else example)
    return found


def make_step(name: Variant, model: Any, cfg: BenchStepConfig) -> Step:
    """One step of a variant. Cached targets are computed here, outside of it."""
    if cfg.loop:
        return LoopStep(name, model, cfg)
    samples = [(example, 1 / cfg.batch) for example in examples(cfg, name == "two_answers")]
    batch: MicroBatch = send_to_device(collate(samples), cfg.device)
    if name == "naive":
        return lambda: _naive(model, batch)
    if name == "answering":
        return lambda: _answer(model, batch)
    objective = Objective(**_OBJECTIVES.get(name, {}))
    wrapped = AlignmentModel(model, objective)
    fixed = _cached(wrapped, batch) if objective.taught else None
    passes = plan(objective, name in ("shared", "two_answers"))

    def step() -> None:
        run(wrapped, batch, passes, lambda loss: loss.backward(), fixed=fixed, hard_levels=objective.hard_levels)

    return step


class LoopStep(TrainerCallback):
    """A run of `PRATrainer` over two steps; `taken`: seconds of the second, which finds the optimiser's moments."""

    def __init__(self, name: Variant, model: Any, cfg: BenchStepConfig) -> None:
        self.device, self.taken = cfg.device, 0.0
        folder = mkdtemp()
        finalize(self, rmtree, folder, ignore_errors=True)
        quiet: dict[str, Any] = dict.fromkeys(("save_strategy", "logging_strategy", "eval_strategy"), "no")
        args = PRAConfig(
            folder,
            max_steps=2,
            batch_size=cfg.batch,
            prefix_sharing=name in ("shared", "two_answers"),
            optim=cfg.optim,
            bf16=cfg.bf16,
            gradient_checkpointing=cfg.checkpointing,
            use_cpu=cfg.device == "cpu",
            disable_tqdm=True,
            **_OBJECTIVES.get(name, {}),
            **quiet,
        )
        self.trainer = PRATrainer(model, args, processing_class=load_backbone("nano").tokenizer)
        self.trainer.train_dataset = Examples(examples(cfg, name == "two_answers"))
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.add_callback(self)

    def __call__(self) -> None:
        self.trainer.train()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = _now(self.device)
        self.taken, self._last = now - getattr(self, "_last", now), now


def _now(device: str) -> float:
    if device == "cpu":
        return process_time()
    torch.cuda.synchronize(device)
    return perf_counter()


def taken(step: Step, device: str) -> float:
    """Seconds of a step."""
    began = _now(device)
    step()
    return step.taken if isinstance(step, LoopStep) else _now(device) - began


@torch.no_grad()
def _cached(wrapped: AlignmentModel, batch: MicroBatch) -> FixedTeachers:
    head, objective = head_of(wrapped.model), wrapped.objective
    hidden = wrapped(batch, tuple(sorted(objective.taught)), terms=False)[1]
    if objective.base_targets == "topk":
        return FixedTeachers({n: topk_targets(h, head, objective.tau, objective.topk) for n, h in hidden.items()})
    # a head that is trained has to be kept as it was
    kept = head._replace(weight=head.weight.detach().clone()) if head.weight.requires_grad else None
    return FixedTeachers(hidden, kept)


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


def moments(model: nn.Module, cfg: BenchStepConfig) -> int:
    """Bytes of two tensors like each trained parameter; 0 where the step itself has made them."""
    return 0 if cfg.loop else sum(2 * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def cuda_memory(step: Step, device: str) -> int:
    """Bytes of torch's allocator at their highest during a step."""
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def cpu_memory(cfg: BenchStepConfig, tune: Tune, name: Variant) -> int | None:
    """Bytes of one step in a process of its own; None where the kernel does not tell (other systems than Linux)."""
    if not os.access(_RESET, os.W_OK):
        return None
    # blocks above so many bytes are returned when freed
    mmap = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
    with patch.dict(os.environ, mmap), spawned_pool(1) as pool:
        return pool.submit(_child, cfg, tune, name).result()


def _child(cfg: BenchStepConfig, tune: Tune, name: Variant) -> int:
    tiny = replace(cfg, arch="nano", tokens=64, answer=8)
    # libraries take memory of their own on first use
    make_step(name, build(tiny, tune), tiny)()
    gc.collect()
    bare = resident("VmRSS")
    model = build(cfg, tune)
    step = make_step(name, model, cfg)
    gc.collect()
    _RESET.write_text("5")
    step()
    return resident("VmHWM") - bare + moments(model, cfg)


@dataclass
class Row:
    """One variant; None: not measured. `failed`: why there are no figures."""

    variant: str
    seconds: float | None = None
    ratio: float | None = None
    operations: int | None = None
    memory: int | None = None
    failed: str | None = None


def bench_step(cfg: BenchStepConfig) -> dict[str, Any]:
    """Run, print and return the figures: `about`, `config`, and `rows` by how the model is tuned."""
    machine = about("torch", "transformers", device=cfg.device) | {"load": f"{os.getloadavg()[0]:.1f}"}
    print(headline(machine), flush=True)
    what = "PRATrainer" if cfg.loop else "passes alone"
    print(f"{cfg.arch}, T {cfg.tokens}, L {cfg.answer}, batch {cfg.batch}, {what}")
    rows: dict[str, list[dict[str, Any]]] = {}
    figures = {"about": machine, "config": asdict(cfg), "rows": rows}
    for tune in cfg.tune:
        measured = _measure(cfg, tune)
        print(f"\n{tune}\n{_table(measured)}", flush=True)
        rows[tune] = [asdict(row) for row in measured]
        if cfg.out:
            write_json(cfg.out, figures)
    print(f"\n{__doc__}\nload at the end: {os.getloadavg()[0]:.1f}")
    return figures


def _measure(cfg: BenchStepConfig, tune: Tune) -> list[Row]:
    names: tuple[Variant, ...] = ("sft", *(name for name in cfg.variants if name != "sft"))
    rows = {name: Row(name) for name in names}
    times: dict[Variant, list[float]] = {name: [] for name in names}
    cuda = cfg.device.startswith("cuda")
    if cfg.memory and not cuda:
        for name in names:
            rows[name].memory = cpu_memory(cfg, tune, name)
    model = build(cfg, tune)
    with ProgressBar(f"{tune}: steps", (cfg.rounds + 1) * len(names)) as bar:
        for number in range(cfg.rounds + 1):
            for name in (name for name in names if not rows[name].failed):
                step: Step | None = None
                try:
                    step = make_step(name, model, cfg)
                    if number:
                        times[name].append(taken(step, cfg.device))
                    else:
                        rows[name].operations = None if cfg.loop else executed(step)
                        model.zero_grad(set_to_none=True)
                        if cfg.memory and cuda:
                            rows[name].memory = cuda_memory(step, cfg.device) + moments(model, cfg)
                except torch.OutOfMemoryError:
                    rows[name].failed = "out of memory"
                model.zero_grad(set_to_none=True)
                # what one variant keeps (cached targets, a copy of the head) must not weigh on the next
                step = None
                gc.collect()
                bar.step(note=name)
    base = rows["sft"]
    for name, row in rows.items():
        if row.failed or base.failed:
            continue
        row.seconds = median(times[name])
        row.ratio = median(one / other for one, other in zip(times[name], times["sft"], strict=True))
    return list(rows.values())


def _table(rows: list[Row]) -> str:
    def number(value: float | None, unit: float | None = 1, digits: int = 2) -> str:
        return "-" if value is None or not unit else f"{value / unit:.{digits}f}"

    heads = ("seconds", "x sft", "GFLOP", "x sft", "MB", "x sft")
    lines = [" " * 12 + "".join(f"{head:>10}" for head in heads)]
    for row in rows:
        cells = [number(row.seconds, digits=3), number(row.ratio)]
        cells += [number(row.operations, 1e9, 1), number(row.operations, rows[0].operations)]
        cells += [number(row.memory, 1e6, 1), number(row.memory, rows[0].memory)]
        lines.append(f"{row.variant:<12}" + (row.failed or "".join(f"{cell:>10}" for cell in cells)))
    return "\n".join(lines)


if __name__ == "__main__":
    from remind.core.cli import main

    main(BenchStepConfig, bench_step, __doc__)
