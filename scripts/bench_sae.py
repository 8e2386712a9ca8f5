#!/usr/bin/env python
"""Speed of one Top-K SAE training step: ours, sae-lens's trainer at its defaults, and the encoder product alone.

All three take turns in one process, round by round; the figure is the median over the rounds. The encoder product
(tokens x d_in x d_sae, forward only) is what no dense Top-K encoder can do without.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version

import torch
from torch import Tensor

from sae.trainer import SAETrainConfig, Trainer


def batches(d_in: int, batch: int, count: int = 8) -> list[Tensor]:
    """Sums of a few of 2 d_in directions, so that training has something to learn and features stay alive."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(2 * d_in, d_in, generator=generator), dim=1)
    made = []
    for _ in range(count):
        which = torch.randint(2 * d_in, (batch, 16), generator=generator)
        weights = torch.rand(batch, 16, 1, generator=generator)
        made.append((directions[which] * weights).sum(1) + 0.05 * torch.randn(batch, d_in, generator=generator))
    return made


def ours(args: argparse.Namespace, data: list[Tensor]) -> Callable[[int], None]:
    # logged never, since sae-lens does not log here either
    config = SAETrainConfig(
        d_sae=args.d_sae, k=args.k, steps=1 << 30, batch_size=args.batch, log_every=1 << 30, lr=3e-4
    )
    trainer = Trainer(config, args.device, None)
    trainer.start({0: torch.cat(data).to(args.device)})

    def run(i: int) -> None:
        ready = trainer.accept(i, {0: data[i % len(data)]})
        assert ready is not None
        trainer.step(ready)

    return run


def sae_lens_default(args: argparse.Namespace, data: list[Tensor]) -> Callable[[int], None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
        from sae_lens.config import LoggingConfig, SAETrainerConfig
        from sae_lens.training.sae_trainer import SAETrainer

    def provider() -> Iterator[Tensor]:
        while True:
            yield from data

    torch.manual_seed(0)
    coder = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=args.d_in, d_sae=args.d_sae, k=args.k, device=args.device))
    config = SAETrainerConfig(
        total_training_samples=1 << 40,
        train_batch_size_samples=args.batch,
        lr_end=3e-5,
        device=args.device,
        logger=LoggingConfig(log_to_wandb=False),
    )
    trainer = SAETrainer(config, coder, provider())

    def run(i: int) -> None:
        trainer.step(data[i % len(data)])
        trainer.n_training_steps += 1

    return run


def product(args: argparse.Namespace, data: list[Tensor]) -> Callable[[int], None]:
    weight = torch.randn(args.d_in, args.d_sae, device=args.device)
    on_device = [batch.to(args.device) for batch in data]
    out = torch.empty(args.batch, args.d_sae, device=args.device)

    def run(i: int) -> None:
        torch.mm(on_device[i % len(data)], weight, out=out)

    return run


def seconds(run: Callable[[int], None], start: int, steps: int, device: str) -> float:
    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    wait()
    before = time.perf_counter()
    for i in range(start, start + steps):
        run(i)
    wait()
    return (time.perf_counter() - before) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("d_in", 512), ("d_sae", 4096), ("k", 32), ("batch", 2048), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which the three take turns")
    parser.add_argument("--steps", type=int, default=4, help="steps of each per round")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = batches(args.d_in, args.batch)
    runs = {
        "ours": ours(args, data),
        "sae-lens default": sae_lens_default(args, data),
        "encoder product": product(args, data),
    }
    for run in runs.values():
        seconds(run, 0, 2, args.device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(args.rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, round_ * args.steps, args.steps, args.device))
    median = {name: statistics.median(values) for name, values in times.items()}

    gpu = f", {torch.cuda.get_device_name()}" if args.device.startswith("cuda") else ""
    print(
        f"{platform.machine()} {cpu_name()}, {args.threads} threads{gpu}; Python {platform.python_version()}, ", end=""
    )
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "sae-lens")))
    print(f"d {args.d_in} -> {args.d_sae}, k {args.k}, batch {args.batch}, float32; median of {args.rounds} rounds")
    for name, value in median.items():
        spread = f"{1e3 * min(times[name]):.0f}-{1e3 * max(times[name]):.0f}"
        print(f"{name:<18}{1e3 * value:8.1f} ms ({spread}){args.batch / value:10.0f} tokens/s")
    ratio = [one / other for one, other in zip(times["sae-lens default"], times["ours"], strict=True)]
    bound = [one / other for one, other in zip(times["ours"], times["encoder product"], strict=True)]
    print(f"ours is {statistics.median(ratio):.2f}x as fast as sae-lens's trainer (per round {_range(ratio)})")
    print(f"a step of ours takes {statistics.median(bound):.2f} encoder products (per round {_range(bound)})")


def _range(values: list[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown CPU"


if __name__ == "__main__":
    main()
