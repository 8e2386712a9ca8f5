"""The model, the microbatch and the steps that are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.pra_step.config import Arch, BenchStepConfig, Tune, Variant
from remind.alignment.batch import MicroBatch, collate
from remind.alignment.config import LoraConfig
from remind.alignment.example import Example
from remind.alignment.fixed import FixedTeacher, HiddenTeacher, TopKTeacher, teach, topk_targets
from remind.alignment.losses import pra_loss
from remind.alignment.model import checkpoint_activations, trainable
from remind.alignment.objective import Edge, Objective
from remind.alignment.step import AlignmentModel, head_weight, plan, run

Step = Callable[[], None]
TOP_K = 64
LEGEND = """sft: cross-entropy on x0 alone, logits of the answer only.
sequential: x2 without gradient, then x1 forward and back, then x0 forward and back.
shared: the same, with the common prefix of x1 and x2 computed once. joint: all levels forward, then back.
base_hidden, base_topk: edges 0 <- 1 and 0 <- 2 with cached targets: hidden states and a frozen head, or top-64.
naive: three forwards with whole logits [T, V], one backward through all three."""
_SFT = Objective(lambda_hard=1.0, edges=())
_PRA = Objective()
_BASE = Objective(edges=(Edge(0, 1), Edge(0, 2)), teacher_weights="base")


def config_of(arch: Arch, layers: int | None) -> Any:
    """The Qwen3-VL configuration of that size, with at most `layers` decoder layers."""
    from transformers import Qwen3VLConfig

    from remind.models.nano import nano_config

    if arch == "nano":
        config = nano_config()
    else:
        # width, MLP, layers, query heads, key/value heads, head_dim, vocabulary, tied
        sizes = {
            "small": (512, 1536, 6, 8, 4, 64, 8192, True),
            "qwen3-vl-2b": (2048, 6144, 28, 16, 8, 128, 151_936, True),
            "qwen3-vl-8b": (4096, 12288, 36, 32, 8, 128, 151_936, False),
        }
        vision_sizes = {
            "small": (2, 64, 128, 2, [0, 1]),
            "qwen3-vl-2b": (24, 1024, 4096, 16, [5, 11, 17]),
            "qwen3-vl-8b": (27, 1152, 4304, 16, [8, 16, 24]),
        }
        width, mlp, depth, heads, kv_heads, head_dim, vocabulary, tied = sizes[arch]
        side = head_dim // 2 * 20 // 64
        text = {
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 262_144,
            "tie_word_embeddings": tied,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [head_dim // 2 - 2 * side, side, side],
                "mrope_interleaved": True,
            },
        }
        blocks, vision_width, vision_mlp, vision_heads, deep = vision_sizes[arch]
        vision = {
            "depth": blocks,
            "hidden_size": vision_width,
            "intermediate_size": vision_mlp,
            "num_heads": vision_heads,
            "out_hidden_size": width,
            "deepstack_visual_indexes": deep,
        }
        last = vocabulary - 8
        tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        config = Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            tie_word_embeddings=tied,
            **{name: last + number for number, name in enumerate(tokens)},
        )
    if layers is not None:
        config.text_config.num_hidden_layers = min(layers, config.text_config.num_hidden_layers)
    return config


def build(cfg: BenchStepConfig, tune: Tune) -> Any:
    """The model with random weights on its device, ready to be tuned; in training mode."""
    from transformers import Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, cfg.dtype))
    try:
        with torch.device(cfg.device):
            model = Qwen3VLForConditionalGeneration(config_of(cfg.arch, cfg.layers))
    finally:
        torch.set_default_dtype(default)
    rank = 8 if cfg.arch in ("small", "nano") else 64
    tuned = trainable(model, LoraConfig(r=rank, alpha=2 * rank) if tune == "lora" else None)
    if cfg.checkpointing:
        checkpoint_activations(model)
    return tuned


def microbatch(cfg: BenchStepConfig, tokens: int | None = None) -> MicroBatch:
    """Random tokens laid out as states are: x2 is x1 with a summary before the question.

    `tokens`: another T.
    """
    size = tokens or cfg.tokens
    answer = min(cfg.answer, size // 2)
    markers, summary, question = (round(share * size) for share in (cfg.markers, cfg.summary, cfg.question))
    vocabulary = config_of(cfg.arch, cfg.layers).text_config.vocab_size - 8
    generator = torch.Generator().manual_seed(0)

    def ids(n: int) -> Tensor:
        return torch.randint(0, vocabulary, (n,), generator=generator, dtype=torch.int32)

    examples = []
    for number in range(cfg.batch):
        asked, dialogue, reminder = ids(question + 1), ids(size - answer - question - 1), ids(markers)
        x0 = torch.cat([dialogue, asked])
        x1 = torch.cat([dialogue, reminder, asked])
        x2 = torch.cat([dialogue, reminder, ids(summary), asked])
        examples.append(Example(str(number), (x0, x1, x2), ids(answer)))
    return collate(examples, [1 / cfg.batch] * cfg.batch).to(cfg.device)


def make_step(name: Variant, model: Any, batch: MicroBatch) -> Step:
    """One forward and backward of a variant. Cached targets are computed here, outside the step."""
    if name == "naive":
        return lambda: _naive(model, batch)
    fixed: dict[int, FixedTeacher] = {}
    objective = _SFT if name == "sft" else _PRA
    if name in ("base_hidden", "base_topk"):
        objective = _BASE
        fixed = _cached(AlignmentModel(model, objective), batch, name == "base_topk")
    passes = plan(objective, "joint" if name == "joint" else "sequential", name == "shared")
    wrapped = AlignmentModel(model, objective)

    def step() -> None:
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
