#!/usr/bin/env python
"""Speed of Top-K SAE training and harvesting, each against what it is to be measured by, in one process.

step      one training step of ours, of sae-lens's trainer at its defaults, and the encoder product alone (tokens x d_in
          x d_sae, forward only), which no dense Top-K encoder can do without. The three take turns, round by round.
layers    the same for four layers in one pass, against sae-lens's MultiSAETrainer.
harvest   a pass that gives the kept tokens of four layers, against the backbone's forward up to the deepest of them.

AuxK is at work in ours and in sae-lens's: a share of the features is dead. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import about, headline, seconds
from sae.config import SAETrainConfig
from sae.harvest import harvest
from sae.hooks import hidden_states
from sae.trainer import Trainer

#: d_in, d_sae
SIZES = ((512, 4096), (1024, 32768), (4096, 4096))


def batches(d_in: int, batch: int, count: int) -> list[Tensor]:
    """Sums of a few of 2 d_in directions, so that training has something to learn and features stay alive."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(2 * d_in, d_in, generator=generator), dim=1)
    made = []
    for _ in range(count):
        which = torch.randint(2 * d_in, (batch, 16), generator=generator)
        weights = torch.rand(batch, 16, 1, generator=generator)
        sums = torch.stack([(directions[w] * v).sum(0) for w, v in zip(which, weights, strict=True)])
        made.append(sums + 0.05 * torch.randn(batch, d_in, generator=generator))
    return made


def dead_features(args: argparse.Namespace, d_sae: int) -> Tensor:
    return torch.randperm(d_sae, generator=torch.Generator().manual_seed(1))[: round(args.dead * d_sae)]


def ours(args: argparse.Namespace, data: Sequence[Tensor], d_sae: int, n_layers: int = 1) -> Callable[[int], None]:
    # logged never, since sae-lens does not log here either
    config = SAETrainConfig(
        d_sae=d_sae,
        k=args.k,
        steps=1 << 30,
        batch_size=args.batch,
        log_every=1 << 30,
        lr=3e-4,
        dtype=args.dtype,
    )
    trainer = Trainer(config, args.device)
    trainer.start({layer: torch.cat(list(data)).to(args.device) for layer in range(n_layers)})
    dead = dead_features(args, d_sae)
    # silent for longer than a feature may be, and too weak to come back within the rounds
    trainer.tokens = config.dead_tokens
    for one in trainer.layers.values():
        one.silent[dead] = 1 << 40
        with torch.no_grad():
            one.coder.W_enc[:, dead] *= 1e-3

    def run(i: int) -> None:
        batch = data[i % len(data)]
        trainer.step(trainer.accept(i, dict.fromkeys(range(n_layers), batch)))

    return run


def sae_lens(args: argparse.Namespace, data: Sequence[Tensor], d_sae: int, n_layers: int = 1) -> Callable[[int], None]:
    """sae-lens's SAETrainer; for several layers its MultiSAETrainer, which drives one of them per layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
        from sae_lens.config import LoggingConfig, SAETrainerConfig
        from sae_lens.training.multi_sae_trainer import MultiSAETrainer
        from sae_lens.training.sae_trainer import SAETrainer

    d_in = data[0].shape[1]
    torch.manual_seed(0)
    names = [f"layer_{layer}" for layer in range(n_layers)]
    coders = {
        name: TopKTrainingSAE(TopKTrainingSAEConfig(d_in=d_in, d_sae=d_sae, k=args.k, device=args.device))
        for name in names
    }
    config = SAETrainerConfig(
        total_training_samples=1 << 40,
        train_batch_size_samples=args.batch,
        lr_end=3e-5,
        device=args.device,
        logger=LoggingConfig(log_to_wandb=False),
    )
    if n_layers == 1:
        trainers = {names[0]: SAETrainer(config, coders[names[0]], iter(()))}
    else:
        trainers = MultiSAETrainer(config, coders, {name: name for name in names}, iter(())).trainers
    dead = dead_features(args, d_sae)
    for name, trainer in trainers.items():
        coders[name].to(args.device)
        trainer.n_forward_passes_since_fired[dead] = 1 << 20
        with torch.no_grad():
            coders[name].W_enc[:, dead] *= 1e-3

    def run(i: int) -> None:
        for trainer in trainers.values():
            trainer.step(data[i % len(data)].to(args.device))
            trainer.n_training_steps += 1

    return run


def product(args: argparse.Namespace, data: Sequence[Tensor], d_sae: int) -> Callable[[int], None]:
    weight = torch.randn(data[0].shape[1], d_sae, device=args.device)
    on_device = [batch.to(args.device) for batch in data]
    out = torch.empty(args.batch, d_sae, device=args.device)

    def run(i: int) -> None:
        torch.mm(on_device[i % len(data)], weight, out=out)

    return run


def take_turns(runs: dict[str, Callable[[int], None]], args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per call in each round, after two calls to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(-1, args.rounds):
        for name, run in runs.items():
            numbers = range(2) if round_ < 0 else range(round_ * args.steps, (round_ + 1) * args.steps)
            taken = seconds(lambda run=run, numbers=numbers: [run(i) for i in numbers], args.device)  # type: ignore[misc]
            if round_ >= 0:
                times[name].append(taken / args.steps)
    return times


def show(
    title: str, times: dict[str, list[float]], tokens: int, ratios: Sequence[tuple[str, str, str]]
) -> dict[str, float]:
    """Print and return medians: tokens a second by name of `times`, and the ratios by their words.

    Args:
        ratios: (words, name above, name below).
    """
    figures = {name: tokens / statistics.median(values) for name, values in times.items()}
    print(f"\n{title}", flush=True)
    for name, values in times.items():
        middle = statistics.median(values)
        spread = f"{1e3 * min(values):.1f}-{1e3 * max(values):.1f}"
        print(f"  {name:<24}{1e3 * middle:9.1f} ms ({spread}){tokens / middle:12.0f} tokens/s")
    for words, above, below in ratios:
        each = [one / other for one, other in zip(times[above], times[below], strict=True)]
        middle = statistics.median(times[above]) / statistics.median(times[below])
        print(f"  {words}: {middle:.2f} (per round {min(each):.2f}-{max(each):.2f})", flush=True)
        figures[words] = middle
    return figures


def bench_step(args: argparse.Namespace, d_in: int, d_sae: int) -> dict[str, float]:
    data = batches(d_in, args.batch, 4)
    runs = {"ours": ours(args, data, d_sae), "encoder product": product(args, data, d_sae)}
    ratios = [("a step of ours in encoder products", "ours", "encoder product")]
    if not args.no_sae_lens:
        runs["sae-lens"] = sae_lens(args, data, d_sae)
        ratios.append(("as fast as sae-lens's trainer", "sae-lens", "ours"))
    title = f"step: d {d_in} -> {d_sae}, k {args.k}, batch {args.batch}, {args.dtype}, {args.dead:.0%} dead"
    return show(title, take_turns(runs, args), args.batch, ratios)


def bench_layers(args: argparse.Namespace) -> None:
    data = batches(512, args.batch, 4)
    runs = {"ours": ours(args, data, 4096, 4)}
    ratios = []
    if not args.no_sae_lens:
        runs["sae-lens MultiSAETrainer"] = sae_lens(args, data, 4096, 4)
        ratios.append(("as fast as sae-lens's trainer", "sae-lens MultiSAETrainer", "ours"))
    show(
        f"layers: four of d 512 -> 4096, k {args.k}, batch {args.batch}, {args.dtype}, {args.dead:.0%} dead",
        take_turns(runs, args),
        args.batch,
        ratios,
    )


def backbone(args: argparse.Namespace) -> tuple[Any, list[int], int]:
    """(model, layers, tokens per row)."""
    if args.backbone == "qwen3-vl-8b":
        from transformers import Qwen3VLForConditionalGeneration

        from experiments.flops import config_of

        with torch.device(args.device):
            torch.set_default_dtype(torch.bfloat16)
            model = Qwen3VLForConditionalGeneration(config_of("qwen3-vl-8b", None)).eval().requires_grad_(False)
            torch.set_default_dtype(torch.float32)
        return model, [7, 14, 22, 29], args.length
    from remind.models.backbone import load_backbone
    from remind.train_sae.config import default_layers

    loaded = load_backbone(args.backbone, device=args.device)
    return loaded.model, default_layers(loaded.n_layers), min(args.length, loaded.max_length)


def bench_harvest(args: argparse.Namespace) -> dict[str, float]:
    model, layers, length = backbone(args)
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    rows = max(1, args.harvest_tokens // length)
    ids = torch.randint(1000, vocabulary - 1000, (rows, length), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][-1, length // 2 :] = 0
    inputs = {name: value.to(args.device) for name, value in inputs.items()}

    def forward(_: int) -> None:
        with torch.no_grad():
            hidden_states(model, [max(layers)], **inputs)

    def gather(_: int) -> None:
        for _batch in harvest(model, [inputs], layers, special_ids=[0, 1, 2]):
            pass

    times = take_turns({"forward alone": forward, "harvest": gather}, args)
    return show(
        f"harvest: {args.backbone}, layers {layers}, {rows} x {length} tokens",
        times,
        rows * length,
        [("time of a harvest in forwards", "harvest", "forward alone")],
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Settings from words as on a command line; None: those of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["step", "layers", "harvest"], help="step, layers, harvest")
    parser.add_argument("--sizes", type=json.loads, default=SIZES, help='e.g. "[[512, 4096]]"')
    for name, default in (("k", 32), ("batch", 2048), ("threads", 2), ("rounds", 5), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dead", type=float, default=0.2, help="share of the features that are dead")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of our encoder product")
    parser.add_argument("--no_sae_lens", action="store_true", help="leave sae-lens out (it need not be installed)")
    parser.add_argument("--backbone", default="minilm", help="for harvest: minilm, nano, qwen3-vl-8b (random weights)")
    parser.add_argument("--length", type=int, default=256, help="tokens per row of a harvest")
    parser.add_argument("--harvest_tokens", type=int, default=4096, help="tokens per harvest")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(words)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    print(headline(about("torch", *([] if args.no_sae_lens else ["sae-lens"]), device=args.device)))
    if "step" in args.parts:
        for d_in, d_sae in args.sizes:
            bench_step(args, d_in, d_sae)
    if "layers" in args.parts:
        bench_layers(args)
    if "harvest" in args.parts:
        bench_harvest(args)


if __name__ == "__main__":
    main()
