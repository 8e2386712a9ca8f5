"""Settings of the tables and figures. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from remind.core.errors import ConfigError
from remind.llm.endpoints import EndpointConfig
from remind.testbed.built import BuiltConfig
from remind.testbed.world import WorldConfig
from sae.config import SAETrainConfig
from sae.ranges import NonNegativeFloat, PositiveInt, Resamples, Seed, check_ranges


def _built() -> BuiltConfig:
    """As in the demo, with SAEs of fewer steps."""
    return BuiltConfig(sae=SAETrainConfig(d_sae=256, k=8, steps=60, batch_size=512, lr=1e-3))


@dataclass
class PaperConfig:
    """List the tables and figures of the paper, or make one of them."""

    action: Literal["list", "run"] = "list"
    """list: names, titles, and what each needs. run: make one. Also the first plain argument."""
    item: str | None = None
    """Which item to make; also the second plain argument."""
    out: str | None = None
    """Folder for result.json, table.md, the picture, and the answers behind them."""
    small: bool = False
    """The nano model on a small synthetic world, or a few bundled dialogues, in minutes. False: the full form."""
    evaluate: str | None = None
    """Full form: config file of `remind evaluate`. Its states, model, corpus, judge and sizes are used; conditions and
    out are the item's. `{seed}` in states, model or corpus stands for each of the seeds."""
    systems: list[str] = field(default_factory=list)
    """Other systems as NAME=PATH: a finished run of `remind evaluate` (the folder of one condition) on the same
    questions, or JSON lines {question_id, answer, explanation?} with an answer to each of them, null where it failed.
    Or, without a name, the folder of a run of `remind run-memory` with answers: all of its systems. table3: the one run
    of `remind evaluate` whose answers are sampled, in place of answers that are asked for."""
    labels: str | None = None
    """table3: the label sheet with its column label filled in (1 or 0, yes or no, true or false)."""
    judges: list[EndpointConfig] = field(default_factory=list)
    """table3: further judges beside that of the config, e.g. --judges '[{model: NAME, base_url: URL}]'; they rule on
    the sampled answers alone."""
    benchmark: list[str] = field(default_factory=list)
    """table2: files of the benchmark, with dialogues and questions."""
    format: str | None = None
    """table2: their format, or the mapping file (.yaml) they are read by; None: recognised from the content."""
    runs: list[str] = field(default_factory=list)
    """fig14: run folders of `remind train-pra`."""
    train: list[str] = field(default_factory=list)
    """fig4_trained: config files of `remind train-pra`, the last one that names a field decides; states and out are the
    item's, the model is the one that every row starts from."""
    launcher: str | None = None
    """fig4_trained, full form: config file of accelerate, such as configs/accelerate/fsdp2_bf16_2gpu.yaml, under which
    every row is trained."""
    rows: list[str] = field(default_factory=list)
    """fig4_trained: the rows to make; none: all."""
    steps: PositiveInt = 60
    """fig4_trained, small form: steps that every row is trained."""
    cost: str | None = None
    """fig12_table8: config file of `python -m experiments.cost`."""
    question: str | None = None
    """fig6: id of the question; None: the first test question that the two systems answer differently."""
    alphas: tuple[NonNegativeFloat, ...] = (2.0, 6.0, 10.0)
    """fig5: values of α (Eq. 3)."""
    betas: tuple[NonNegativeFloat, ...] = (0.0, 4.0, 8.0)
    """fig5: values of β (Eq. 4), in the unit that the states were grounded with."""
    budgets: tuple[PositiveInt, ...] | None = None
    """fig11: tokens that the marked turns may hold. None: 200 to 6,000, as in the paper; small form: 12 to 200."""
    history: bool = False
    """fig11: mark the whole dialogue, too, a forward of all of it for each question; the small form always does."""
    per_dimension: PositiveInt = 30
    """table3: answers to label of each dimension."""
    seeds: tuple[Seed, ...] = (0,)
    """Small form: a world for each. Full form: what `{seed}` stands for. table3 samples by the
    first; it, fig12_table8 and fig6 ask the questions of the first alone."""
    world: WorldConfig = field(default_factory=lambda: WorldConfig(train=0, dev=0, test=2))
    """Small form: the dialogues; its seed is not read."""
    built: BuiltConfig = field(default_factory=_built)
    """Small form: SAEs, retrieval and grounding of the world's states."""
    resamples: Resamples = 1000
    """Resamples behind each interval."""
    cache: str = "~/.cache/remind"
    """Folder for the small form's worlds; safe to delete."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        for name in ("alphas", "betas", "budgets", "seeds"):
            values = getattr(self, name)
            if values is not None:
                setattr(self, name, tuple(values))
                if not values or len(set(values)) < len(values):
                    raise ConfigError(f"{name} must be distinct, and at least one")
