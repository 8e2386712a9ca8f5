"""The configuration of the chain: states, folds, arms, steps, and what is asked of which model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from remind.alignment.config import Edge, Level, LoraConfig, Objective
from remind.build.config import BuildStatesConfig
from remind.core.errors import ConfigError
from remind.train_pra.config import TrainerConfig
from sae.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveShare, Range, Seed, check_ranges

#: By variant of the states (see `experiments.chain.variants`) what is asked besides x0: levels that no other one has.
PROBES = {
    "built": ("x1", "x2"),
    "gold": ("x1", "x2"),
    "none": ("x2",),
    "other": ("x2",),
    "quoted": ("x2",),
    "quoted_other": ("x2",),
    **{f"top{turns}{whose}": ("x2",) for turns in (2, 4, 8) for whose in ("", "_other")},
    **{f"{what}{whose}": ("x2",) for what in ("said", "chosen", "told") for whose in ("", "_other")},
}
VARIANTS = tuple(PROBES)
#: Arms that answer from these; the others are told by x0 alone.
PROBED = ("untrained", "sft")
Labels = Literal["gold", "none", "decoded", "on_policy"]


@dataclass(frozen=True)
class Arm:
    """One of the methods that are compared.

    Attributes:
        start: the arm whose model it starts from (with `ChainConfig.start` model, the untrained one); None: the
            untrained model.
        aligns: it is trained with PRA; otherwise with the hard loss alone.
        pool: it learns from the pool of questions, not from the labelled ones.
        variant: of the states it learns from.
        labels: of its questions. gold: the answers of the dataset; none: none, and the trainer decodes answers under
            x2; decoded: answers that the starting model gives under x2, taken for labels; on_policy: none, and the
            higher states teach at the answers that the model itself gives from x0.
        trained: False for the untrained model.
    """

    title: str
    start: str | None = None
    aligns: bool = False
    pool: bool = False
    variant: str = "built"
    labels: Labels = "gold"
    trained: bool = True


def _pra(title: str, variant: str = "built", labels: Labels = "none") -> Arm:
    return Arm(title, "sft", aligns=True, pool=True, variant=variant, labels=labels)


#: In the order of the tables.
ARMS = {
    "untrained": Arm("untrained", trained=False),
    "sft": Arm("SFT on x0"),
    "sft_longer": Arm("SFT on x0, as many steps more as PRA takes", "sft"),
    "sft_x2": Arm("SFT on its own answers under x2", "sft", pool=True, labels="decoded"),
    "pra": _pra("PRA without labels"),
    "pra_labels": Arm("PRA with the labels of SFT", "sft", aligns=True),
    "pra_gold": _pra("PRA without labels, gold evidence marked", "gold"),
    "pra_none": _pra("PRA without labels, no marks", "none"),
    "pra_other": _pra("control: summary of another question", "other"),
    "pra_on_policy": _pra("PRA without labels, at its own answers", labels="on_policy"),
    "pra_on_policy_other": _pra("the same, summary of another question", "other", "on_policy"),
    "pra_quoted": _pra("PRA without labels, gold evidence quoted", "quoted"),
    "pra_quoted_other": _pra("control: another question's evidence quoted", "quoted_other"),
    "pra_quoted_labels": Arm("PRA with labels, gold evidence quoted", "sft", True, True, "quoted"),
    "pra_quoted_on_policy": _pra("the same without labels, at its own answers", "quoted", "on_policy"),
    "sft_quoted": Arm("SFT on its own answers, gold evidence quoted", "sft", False, True, "quoted", "decoded"),
}
#: What every trained arm is compared with, where it was run.
RIVALS = ("untrained", "sft", "sft_longer", "pra_other", "pra_on_policy_other", "pra_quoted_other")
#: Settings that may differ from one start to the next: they say which runs there are, not what a run is.
FREE = ("out", "stage", "arms", "seeds", "only_folds", "probes", "resamples")


@dataclass
class ChainConfig:
    """Arms against each other on dialogues that none of them was trained on."""

    out: str
    """Folder of states, models, answers and results. A start with the same settings goes on where it was."""
    build: BuildStatesConfig = field(default_factory=lambda: BuildStatesConfig([], ""))
    """Dialogue files and how their states are built. Its out, split and overwrite are not read."""
    model: str = "smollm2"
    """Model to train: smollm2, nano, or a Hugging Face folder or id."""
    start: Literal["sft", "model"] = "sft"
    """What every arm but sft starts from: the model fine-tuned on the labels, or the model as it comes."""
    x0: Literal["retrieved", "all", "none"] = "retrieved"
    """Which gold evidence x0 holds: what was retrieved; all of it, or none, in as many turns (`x0_turns`). With all or
    none, questions without evidence are left out, and those with more than x0 has room for."""
    chooser: str | None = None
    """Model that chooses the turns of variants chosen and told, as `model` is named."""
    x0_turns: PositiveInt = 10
    """Turns in x0, unless it is as retrieved: gold evidence, and retrieved turns drawn by chance."""
    stage: Literal["all", "run", "report"] = "all"
    """run: states, training, answers. report: tables and plots of the answers there are. all: both."""
    arms: tuple[str, ...] = ("untrained", "sft", "sft_longer", "pra", "pra_other")
    """Which of the arms above; an arm that others start from is run with them."""
    seeds: tuple[Seed, ...] = (1,)
    """Of the training runs: order of the questions, and first values of adapters."""
    folds: Annotated[int, Range(ge=2)] = 3
    """Parts that the dialogues are dealt into; each is the test part once."""
    only_folds: tuple[NonNegativeInt, ...] | None = None
    """Folds to run, from 0; None: all."""
    fold_seed: Seed = 0
    """Order in which dialogues are dealt, and which turns stand in x0 beside the evidence."""
    dev_dialogues: NonNegativeInt = 1
    """Of each input and fold, for the held-out loss and the trace; never trained on, nor tested."""
    labelled: PositiveShare = 0.5
    """Share of the training dialogues whose labels SFT sees."""
    pool: Literal["others", "same"] = "others"
    """Questions that PRA learns from: those of the other training dialogues, or the same ones."""
    categories: tuple[str, ...] | None = ("1", "2", "3", "4")
    """Categories of questions to use; questions without any are always used. None: all."""
    questions: PositiveInt = 60
    """At most so many training questions of a dialogue, spread evenly over it."""
    dev_questions: NonNegativeInt = 10
    """The same of a dev dialogue."""
    test_questions: PositiveInt | None = None
    """The same of a test dialogue; None: all."""
    sft_steps: PositiveInt = 120
    """Steps of SFT."""
    pra_steps: PositiveInt = 120
    """Steps of every arm that starts from SFT, PRA or not."""
    sft_lr: NonNegativeFloat = 5e-5
    """Learning rate of every arm with the hard loss alone."""
    pra_lr: NonNegativeFloat = 3e-5
    """Learning rate of PRA."""
    sft_levels: tuple[Level, ...] = (0,)
    """Levels with the hard loss in SFT. With 2 among them the model learns to use a summary before it teaches by it."""
    sft_variant: str = "built"
    """Variant of the states of SFT, for its x2; with an x0 of all or none there is no built one."""
    objective: Objective = field(
        default_factory=lambda: Objective(0.2, 1.0, (Edge(0, 1), Edge(0, 2)), teacher_model_kind="base")
    )
    """Objective of PRA; without labels its lambda_hard is 0."""
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(save_steps=20))
    """The loop; its learning_rate and max_steps are not read."""
    lora: LoraConfig | None = None
    """Train adapters; each arm merges its own before the next starts. None: all weights."""
    probes: tuple[str, ...] = ("built", "gold", "none", "other")
    """Variants whose x1 and x2 the models before alignment answer from; gold evidence alone comes with them."""
    probe_answers: bool = True
    """False: of probes only log p of the gold answer is measured, in a fraction of the time."""
    trace_every: NonNegativeInt = 0
    """Steps between measurements of the answers to dev questions; 0: none."""
    max_new_tokens: PositiveInt = 96
    """Most tokens of an answer, decoded ones included."""
    batch_size: PositiveInt = 8
    """Questions answered at once."""
    answer_dtype: str = "float32"
    """Precision of the models that answer test questions; bfloat16 takes half the time on processors that have it."""
    resamples: Annotated[int, Range(ge=100)] = 4000
    """Of the bootstrap."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        for name in ("arms", "seeds", "sft_levels", "probes"):
            setattr(self, name, tuple(getattr(self, name)))
        self.categories = None if self.categories is None else tuple(map(str, self.categories))
        for kind, names, known in (("arm", self.arms, ARMS), ("variant", (*self.probes, self.sft_variant), VARIANTS)):
            if unknown := [name for name in names if name not in known]:
                raise ConfigError(f"no {kind} {unknown[0]!r}; there are {', '.join(known)}")
        if not self.build.input:
            raise ConfigError("build.input names no dialogue files")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError("seeds must be distinct, and at least one")
        if any(fold >= self.folds for fold in self.only_folds or ()):
            raise ConfigError(f"only_folds names a fold that is none of 0 to {self.folds - 1}")

    @property
    def plan(self) -> tuple[str, ...]:
        """The arms in the order they are run in, those that others start from included."""
        wanted = {*self.arms} | {start for arm in self.arms if (start := self.begins(arm)) is not None}
        return tuple(arm for arm in ARMS if arm in wanted)

    def begins(self, arm: str) -> str | None:
        """The arm whose model this one starts from; None: the untrained model."""
        return ARMS[arm].start if self.start == "sft" else None
