"""Runs under FSDP2 or DDP on the CPU, for test_fsdp.py: `torchrun --nproc_per_node N sharded.py fsdp/KIND/OUT ...`.

Accelerate turns FSDP into plain processes where there is no GPU, so that its plugin is put in place by hand.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from remind.alignment import PRAConfig, PRATrainer
from remind.alignment.examples import Example, Examples
from remind.models.nano import nano_model, nano_tokenizer

#: What is special about each kind of run.
KINDS: dict[str, dict[str, Any]] = {
    "live": {},
    "bf16": {"bf16": True},
    "base": {"teacher_model_kind": "base", "edges": [(0, 1), (0, 2)]},
    "ema": {"teacher_model_kind": "ema"},
    "pixels": {"prefix_sharing": False, "train_vision": True},
}


_IMAGE = ("vision_start", "image", "vision_end")
config = cache(lambda: nano_model().config)


class Shown(Example):
    """An example with one image of 4 x 4 patches that is not from a file."""

    def pixels(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(int(self.id))
        vision = config().vision_config
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.randn(16, values, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
        }


class Sharded(PRATrainer):
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not self.args.sharded:
            return
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        if self.args.bf16:
            plugin.set_mixed_precision("bf16")
        self.accelerator.state.fsdp_plugin = plugin
        self.accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True


class Seen(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        shards = sum(isinstance(parameter, DTensor) for parameter in kwargs["model"].parameters())
        assert (shards > 0) == args.sharded, f"{shards} parameters are sharded"


def examples(pixels: bool) -> Examples:
    """7 examples of unequal lengths; x2 is x1 with more tokens before its end."""
    generator = torch.Generator().manual_seed(0)
    start_of, image_token, end_of = (getattr(config(), f"{name}_token_id") for name in _IMAGE)
    image = [start_of, *[image_token] * 4, end_of] if pixels else []

    def ids(n: int) -> list[int]:
        return torch.randint(10, 300, (n,), generator=generator).tolist()

    made = []
    for number in range(7):
        start, end = [*ids(9 + number), *image], ids(4)
        rows = ([*image, *ids(7), *end], [*start, *end], [*start, *ids(5), *end], ids(2 + number % 3))
        x0, x1, x2, answer = (torch.tensor(row, dtype=torch.int32) for row in rows)
        kind = Shown if pixels else Example
        made.append(kind(str(number), (x0, x1, x2), answer))
    return Examples(made)


def train(kind: str, out: str) -> None:
    torch.manual_seed(0)
    args = PRAConfig(
        out,
        batch_size=6,
        max_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        warmup_steps=0,
        save_steps=2,
        eval_strategy="no",
        disable_tqdm=True,
        **KINDS[kind],
    )
    trainer = Sharded(nano_model(), args, processing_class=nano_tokenizer(), callbacks=[Seen()])
    trainer.train_dataset = examples(kind == "pixels")
    trainer.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    for job in sys.argv[1:]:
        strategy, kind, out = job.split("/", 2)
        os.environ["ACCELERATE_USE_FSDP"] = str(strategy == "fsdp").lower()
        train(kind, f"/{out}")
    sys.stdout.flush()
    sys.stderr.flush()
    # torch's own threads now and then abort a process that tears down as usual, after all is done
    os._exit(0)
