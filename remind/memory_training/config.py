"""Settings of `remind train-memory`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from remind.alignment.config import LoraConfig
from remind.core.errors import ConfigError
from remind.llm.endpoints import LLMConfig
from remind.llm.request import Stage
from sae.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, PositiveShare, Seed, Share, check_ranges

Method = Literal["sft", "adrpo", "salimory_sft", "salimory"]
#: Endpoints that training on dialogues needs.
STAGES: Mapping[str, tuple[Stage, ...]] = {
    "sft": ("memory",),
    "adrpo": ("memory", "answer", "judge"),
    "salimory_sft": ("memory",),
    "salimory": ("answer", "judge"),
}


@dataclass(frozen=True)
class MemoryWorldConfig:
    """The memory world that a policy is trained in."""

    dialogues: PositiveInt = 400
    """Dialogues of the training part."""
    sessions: PositiveInt = 8
    """Sessions of each."""
    seed: Seed = 0
    """Of the dialogues."""
    evaluate: PositiveInt = 40
    """Dialogues that the trained policy is evaluated on, none of them from training."""


@dataclass(frozen=True)
class MemoryDataConfig:
    """Dialogues to train on, instead of the memory world."""

    input: str | list[str]
    """File or folder of dialogues with questions, in any format the toolkit reads; a list of several is merged. Of use
    are questions with evidence and free answers, such as `remind build-refmem --style session` writes."""
    format: str | None = None
    """Format of the input, or a mapping file (.yaml); None: recognised from the content."""
    split: Literal["train", "dev", "test"] | None = None
    """Use only the questions of this split; None: all."""
    limit: PositiveInt | None = None
    """At most this many dialogues, the first ones."""
    questions: PositiveInt = 5
    """J: questions that are asked after a session, at most."""
    top: PositiveInt = 10
    """Entries that an answer is read from, besides the core block."""


@dataclass(frozen=True)
class RewardConfig:
    """Rewards of MemBuilder (Eq. 6-8). The defaults are the paper's; sessions of the memory world are far shorter."""

    length_penalty: Share = 0.8
    """λ of Eq. 6."""
    core_free: NonNegativeFloat = 150
    """θ_min of Eq. 7: tokens that the core block may grow by."""
    core_full: PositiveFloat = 400
    """θ_max of Eq. 7: growth that costs everything."""
    free_below: NonNegativeFloat = 200
    """δ of Eq. 8: differences to the expert in tokens that cost nothing."""

    def __post_init__(self) -> None:
        if not self.core_free < self.core_full:
            raise ConfigError(f"reward.core_free {self.core_free} is not below core_full {self.core_full}")


@dataclass(frozen=True)
class SaliMoryConfig:
    """Episodes, rewards (Eq. 1-3) and contrastive terms (Eq. 4-6) of SaliMory. The defaults are the paper's.

    With 0 a term is left out: R1 alone is memory_penalty, memory_bonus, profile_weight, filter_weight, boost and
    utilize 0; R1 to R3 are boost and utilize 0.
    """

    turns: PositiveInt = 16
    """Turns of an episode, at most."""
    personalisation: NonNegativeFloat = 0.45
    """λ_p of Eq. 1: weight of personalisation in R1. Questions of the memory world ask for none."""
    memory_penalty: NonNegativeFloat = 0.5
    """λ_pen of Eq. 2."""
    memory_bonus: NonNegativeFloat = 0.3
    """λ_bon of Eq. 2."""
    profile_weight: NonNegativeFloat = 0.15
    """λ_μ of Eq. 3."""
    filter_weight: NonNegativeFloat = 0.1
    """λ_κ of Eq. 3."""
    similarity: Share = 0.15
    """τ_sim of Eq. 4: two rollouts of the utilizer are compared where their memories are more alike."""
    boost: NonNegativeFloat = 0.15
    """λ_b of Eq. 5: weight of the booster's contrastive term."""
    utilize: NonNegativeFloat = 0.1
    """λ_u of Eq. 5: weight of the utilizer's."""
    e2_literal: bool = False
    """Reward an empty memory as the instructions to the paper's judge do (Appendix E.2): most of all."""


@dataclass(frozen=True)
class PolicyGradientConfig:
    """Reinforcement learning with groups of rollouts. The defaults are MemBuilder's."""

    group: Literal[2, 4, 8, 16] = 8
    """G: rollouts of each session."""
    inner_epochs: PositiveInt = 1
    """Optimiser steps on each generation."""
    clip: PositiveFloat = 0.2
    """ε of the clipped ratio."""
    beta: NonNegativeFloat = 0.02
    """Weight of the KL to the policy training began with (k3)."""
    alpha: PositiveFloat = 4.0
    """α of Eq. 10: weight of the role whose entries were retrieved most; 1 is plain GRPO."""
    weighting: Literal["advantage", "printed"] = "advantage"
    """Where α acts. advantage: on both terms of the clipped surrogate, as described; printed: on the unclipped one
    alone, as Eq. 12 stands."""
    density: PositiveShare = 1.0
    """Share of MemBuilder's sessions that have a task reward, drawn for each apart (Appendix E.2). In the others
    r_task is 1, so that valid replies and their lengths alone count."""
    temperature: PositiveFloat = 0.8
    """Of sampling."""
    reply_tokens: PositiveInt | None = None
    """Longest reply, in tokens; none: 24 of pico's commands, 1024 of JSON."""
    vllm: Literal["off", "colocate", "server"] = "off"
    """Sampling by the model itself, by vLLM on the same GPUs, or by a vLLM server that receives the weights. vLLM uses
    its own random generators, so a resumed run is then not bit-identical."""
    vllm_server: str = "http://127.0.0.1:8000"
    """Address of the server. Its weight endpoints need no key, so use an address that only you can reach."""
    vllm_memory: PositiveShare = 0.3
    """Share of a GPU's memory for vLLM (colocate)."""
    kl_stop: NonNegativeFloat | None = None
    """Limit in nats per token for the KL between the sampling policy and the current one; beyond it, the remaining
    steps of a generation are skipped. None: no limit."""


@dataclass
class TrainMemoryConfig:
    """Train a policy that writes memories: on an expert's replies, or by reinforcement learning."""

    out: str
    """Run folder: config.yaml, metrics.jsonl, checkpoint-N, and policy/ when done, a plain Hugging Face folder."""
    method: Method = "sft"
    """sft: next tokens of the replies of MemBuilder's expert. adrpo: its rewards and weights. salimory_sft, salimory:
    the same two for SaliMory's roles, with its rewards and contrastive terms."""
    model: str = "pico"
    """The initial policy. pico: a small one with random weights and the vocabulary of the memory world, trained in its
    own commands. Others, smollm2 or a Hugging Face folder or id of an instruction model, are trained in the prompts and
    the JSON of `remind run-memory`, with their chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the loaded weights; bfloat16 needs lora, whose adapters stay in float32."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights; they are merged in policy/."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    world: MemoryWorldConfig = field(default_factory=MemoryWorldConfig)
    """Where it is trained."""
    data: MemoryDataConfig | None = None
    """Dialogues that it is trained on instead."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Endpoints of training on dialogues: memory is the expert, answer and judge are for rewards."""
    rl: PolicyGradientConfig = field(default_factory=PolicyGradientConfig)
    """Of adrpo and salimory."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Of adrpo."""
    salimory: SaliMoryConfig = field(default_factory=SaliMoryConfig)
    """Of salimory; its turns of salimory_sft, too."""
    steps: PositiveInt = 150
    """Generations, or optimiser steps of SFT."""
    batch_size: PositiveInt = 8
    """Sessions or episodes of a generation, over all processes; replies of a step of SFT."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "constant"] = "constant"
    """Learning rate after the warm-up."""
    warmup: Share = 0.1
    """Share of the steps in which it rises."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""
    seed: Seed = 0
    """Of the order of rows and of sampling."""
    save_every: PositiveInt = 50
    """Steps between checkpoints, of which the newest is kept; the last step has one, too."""
    resume: bool = False
    """Continue from the newest checkpoint in out; the result equals that of an uninterrupted run."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.lora is not None and self.model == "pico":
            raise ConfigError("lora: pico starts from random weights, which adapters do not train; leave it out")
        if self.lora is None and self.dtype == "bfloat16":
            raise ConfigError("weights in bfloat16 do not move at small learning rates: set dtype float32, or lora")
        if self.data is None:
            return
        if self.model == "pico":
            raise ConfigError("data: pico knows the words of the memory world only; name an instruction model")
        if self.llm.dry_run is not None:
            raise ConfigError("train-memory has no dry run; leave llm.dry_run out")
        if self.llm.cache is None:
            raise ConfigError("data needs llm.cache: a resumed run takes the replies from there")
        missing = [f"llm.{stage}" for stage in STAGES[self.method] if self.llm.endpoint(stage) is None]
        if missing:
            raise ConfigError(f"data: {self.method} needs endpoints for {', '.join(missing)} (or llm.default)")
