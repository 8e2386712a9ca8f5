"""Settings of training: the objective, the examples, the loop, adapters.

Nothing here imports torch, so that the command line starts fast. `PRAConfig` (`remind.alignment.arguments`) joins them
with transformers' TrainingArguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from remind.core.errors import ConfigError
from sae.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, Range, Share, ShareBelowOne, check_ranges

N_LEVELS = 3
Level = Annotated[int, Range(ge=0, le=N_LEVELS - 1)]


@dataclass(frozen=True)
class Edge:
    """One transition of Eq. 6: the student's distribution is drawn towards the teacher's."""

    student: Level
    """Level that learns: 0, 1 or 2."""
    teacher: Level
    """Level it learns from."""
    gamma: NonNegativeFloat = 3.0
    """Weight γ of this transition in Eq. 7; 0: monitored only."""
    alpha: Share = 0.5
    """Share α of KL(teacher || student); the rest is KL(student || teacher)."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.student == self.teacher:
            raise ConfigError(f"edge {self.student} -> {self.teacher}: they must be two of the levels 0, 1, 2")

    @property
    def name(self) -> str:
        """Student and teacher as named in metrics: "01"."""
        return f"{self.student}{self.teacher}"


def edge_of(value: Any) -> Edge:
    """An edge from one, from its fields, or from (student, teacher[, gamma[, alpha]]). Raises ConfigError."""
    if isinstance(value, Edge):
        return value
    try:
        return Edge(**value) if isinstance(value, Mapping) else Edge(*value)
    except TypeError:
        raise ConfigError(f"edges: {value!r} is not (student, teacher[, gamma[, alpha]])") from None


if not TYPE_CHECKING:  # noqa: SIM108  (the parser of the command line evaluates the other form)
    # as they may be written; the objective makes edges of them
    Edges = tuple[Edge | tuple[int | float, ...], ...]
else:
    Edges = tuple[Edge, ...]


@dataclass
class Objective:
    """What is minimised: λ_hard Σ CE + (1 − λ_hard) τ² Σ γ D (Eq. 7), per sample, averaged over answer positions.

    The defaults are the values of Section 5.1.
    """

    lambda_hard: Share = 0.2
    """Share λ_hard of the hard loss."""
    tau: PositiveFloat = 2.0
    """Temperature of the distillation terms; the hard loss has temperature 1."""
    edges: Edges = (Edge(0, 1), Edge(1, 2))
    """Transitions, each [student, teacher], with γ and α after them if they are not 3 and 0.5. The paper's are [0, 1]
    and [1, 2]; none at all is plain fine-tuning on the hard levels."""
    target_grad: Literal["detach", "flow"] = "detach"
    """detach: in each edge the teacher gets no gradient. flow: it does (all levels are then in memory at once; invites
    collapse). The paper does not say which."""
    hard_levels: tuple[Level, ...] = (0,)
    """Levels with a hard loss, each with weight λ_hard."""
    chunk: PositiveInt = 128
    """Answer positions whose logits are held at once."""
    teacher_model_kind: Literal["live", "base", "ema"] = "live"
    """Whose distributions the teachers' are. live: those of the model that is trained; base: those it began with, which
    never change (edges into level 0 only); ema: those of a running average of its weights."""
    ema_decay: ShareBelowOne = 0.98
    """ema: decay of the running average per step."""
    base_targets: Literal["hidden", "topk"] = "hidden"
    """base: what is cached on disk. hidden: final hidden states of the answer, exact (one vector of the model's width
    per answer token). topk: log-probabilities of the most likely tokens, and of all others together."""
    topk: PositiveInt = 64
    """base_targets topk: tokens kept per position."""

    def __post_init__(self) -> None:
        self.edges = tuple(edge_of(edge) for edge in self.edges)
        self.hard_levels = tuple(self.hard_levels)
        check_ranges(self, ConfigError, Objective)
        if self.target_grad == "flow" and self.teacher_model_kind != "live":
            raise ConfigError("target_grad flow needs teacher_model_kind live: other teachers do not learn")
        if self.teacher_model_kind == "base" and (wrong := [e.name for e in self.edges if e.student != 0]):
            raise ConfigError(f"teacher_model_kind base takes edges into level 0 only, not {', '.join(wrong)}")
        names = [edge.name for edge in self.edges]
        if len({*names, *self.hard_levels}) < len(names) + len(self.hard_levels):
            raise ConfigError(f"an edge ({', '.join(names)}) or one of hard_levels {self.hard_levels} occurs twice")

    @property
    def active(self) -> tuple[Edge, ...]:
        """Edges that contribute to the total."""
        return tuple(edge for edge in self.edges if edge.gamma > 0 and self.lambda_hard < 1)

    @property
    def trained(self) -> frozenset[int]:
        """Levels whose forward pass needs a graph."""
        levels = {edge.student for edge in self.active}
        if self.lambda_hard > 0:
            levels |= set(self.hard_levels)
        if self.target_grad == "flow":
            levels |= {edge.teacher for edge in self.active}
        return frozenset(levels)

    @property
    def taught(self) -> frozenset[int]:
        """Levels that teach with other weights than the present ones (`teacher_model_kind` base or ema)."""
        return frozenset() if self.teacher_model_kind == "live" else frozenset(edge.teacher for edge in self.edges)

    @property
    def levels(self) -> frozenset[int]:
        """Levels that any term reads at the present weights."""
        ends = {edge.student for edge in self.edges} | {edge.teacher for edge in self.edges} - self.taught
        return frozenset(ends | (set(self.hard_levels) if self.lambda_hard > 0 else set()))


@dataclass
class ExampleConfig:
    """Which questions become training examples, and what their answers are."""

    max_length: Annotated[int, Range(ge=2)] | None = None
    """Maximum length of a prompt with its answer in tokens, in every state; None: the context of the model."""
    max_answer: PositiveInt = 1024
    """Maximum length of an answer in tokens, including the end token."""
    on_long: Literal["error", "skip"] = "error"
    """What to do with longer questions: stop with an error, or leave them out and count them."""
    unlabelled: Literal["x2", "x1", "skip"] = "x2"
    """Questions without a gold answer: the state from which the model before training answers them once, greedily.
    These answers have no hard loss. skip: leave the questions out."""
    targets: Literal["gold", "decoded", "on_policy"] = "gold"
    """Answers whose positions are distilled. gold: gold answers, or see `unlabelled` if there is none. decoded: the
    answer that `unlabelled` gives, for every question. on_policy: the student's own answer from x0. Gold answers have a
    hard loss in every case, which needs one more pass over x0 if the target is another answer."""
    refresh_steps: PositiveInt = 8
    """on_policy: the student answers the questions of this many steps at once. Answers are then at most this many steps
    old, less one; smaller values give newer answers, but cost more because batches are smaller."""
    temperature: NonNegativeFloat = 0.0
    """on_policy: 0 for greedy answers, otherwise the sampling temperature; samples depend on seed and step only."""
    max_decoded: PositiveInt = 256
    """Maximum length of decoded answers in tokens, for `unlabelled` and `targets`."""
    decode_batch: PositiveInt = 8
    """Questions of similar length that are answered in one batch."""
    images: Literal["captions", "pixels"] = "captions"
    """How prompts show the images of the dialogue: by their captions, or as pixels in place of the caption wherever the
    states know the image's file."""
    image_tokens: PositiveInt = 256
    """Approximate maximum number of tokens for an image shown as pixels; larger images are scaled down."""
    image_root: str | None = None
    """Folder that the image files must be in, links followed; None: they are read from the paths in the states, which
    may be anywhere on disk if someone else made the states."""
    cache: str | None = None
    """Folder for tokenised states, decoded answers and fixed targets, which runs may share; None: cache/ in the run
    folder."""

    marker_token: bool = False
    """Give the marker round salient blocks a token of its own, which is trained (under LoRA too) and saved; otherwise
    it is plain text."""
    train_vision: bool = False
    """Train the vision tower too; otherwise it is frozen. Only images shown as pixels reach it."""


@dataclass
class LoopConfig:
    """The loop, in the words of transformers' TrainingArguments: what people set, with our defaults."""

    batch_size: PositiveInt = 2
    """Samples per optimiser step, over all processes and accumulated microbatches together (2: Appendix E.2)."""
    gradient_accumulation_steps: PositiveInt = 1
    """Microbatches into which each process cuts its share of the batch. Changes memory, not the result."""
    learning_rate: NonNegativeFloat = 1e-5
    """Peak learning rate. 1e-5 is the paper's (Appendix E.2), for a model of 8 billion weights."""
    lr_scheduler_type: str = "cosine"
    """Learning rate after the warm-up, e.g. cosine, linear, constant_with_warmup."""
    warmup_steps: NonNegativeFloat = 0.03
    """Steps over which the learning rate rises from 0; below 1: as a share of all steps."""
    max_steps: Annotated[int, Range(ge=-1)] = -1
    """Optimiser steps; overrides num_train_epochs. -1: by epochs. A resumed run may raise it where the learning rate
    does not depend on it: lr_scheduler_type constant."""
    num_train_epochs: PositiveFloat = 1.0
    """Passes over the training examples."""
    optim: str = "adamw_torch_fused"
    """Optimiser, by transformers' name. For weights in bfloat16: adamw_torch_8bit (torchao, moments of 8 bits, rounded
    stochastically, so that they move at small learning rates too)."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decay; norms and biases have none."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Largest gradient norm; 0: no clipping."""
    bf16: bool = False
    """Compute in bfloat16 with weights in float32 (autocast)."""
    gradient_checkpointing: bool | None = None
    """Compute activations again in the backward pass instead of keeping them."""
    prefix_sharing: bool = True
    """Compute the common prefix of x1 and x2 once, if x2 is only a teacher. Faster; same result up to rounding.
    Needs sdpa or flash attention without sliding windows, and no other layers that mix tokens: else it is not done."""
    eval_strategy: str = "steps"
    """When the held-out loss is measured: steps, epoch or no; unless no, also before the first step and at the end."""
    eval_steps: PositiveInt = 50
    """Steps between measurements of the held-out loss."""
    save_steps: PositiveInt = 100
    """Steps between checkpoints; one is always written at the end."""
    save_total_limit: PositiveInt | None = 2
    """Number of checkpoints to keep, the newest and the best among them."""
    logging_steps: PositiveInt = 10
    """Steps between lines on the screen and in trackers; metrics.jsonl has every step."""
    report_to: str | list[str] = "none"
    """Trackers, e.g. tensorboard or wandb, in addition to metrics.jsonl; each must be installed."""
    guard: Literal["warn", "stop", "off"] = "warn"
    """What happens when the held-out loss collapses. warn: print and record a warning. stop: save, and end the run with
    an error. off: no check."""
    guard_ce_rise: NonNegativeFloat = 0.8
    """Nats per token by which the cross-entropy under any state may rise above the lowest one measured so far, the one
    before the first step included. A measured collapse raised the teacher's from 0.31 to 1.97; this is half of it."""
    guard_entropy_share: Share = 0.2
    """Share of its first value below which the entropy under a state counts as collapsed, provided the cross-entropy
    there is no lower than at the start: more certain, but not more accurate. The default is a choice, not measured."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on the language model; all other weights are frozen.

    There is no dropout: with it, equal contexts would have unequal distributions.
    """

    r: PositiveInt = 64
    """Rank."""
    alpha: PositiveInt = 128
    """Scale: an adapter's product is multiplied by alpha / r."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        object.__setattr__(self, "target_modules", tuple(self.target_modules))
