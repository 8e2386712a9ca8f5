"""The arms that are compared: where each starts, which questions and states it sees, and what it minimises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: By variant of the states (see `experiments.chain.variants`) what is asked besides x0: levels that no other one has.
PROBES = {
    "built": ("x1", "x2"),
    "gold": ("x1", "x2"),
    "random": ("x1", "x2"),
    "none": ("x2",),
    "other": ("x2",),
    "null": ("x2",),
}
VARIANTS = tuple(PROBES)
#: Arms that answer from these; the others are told by x0 alone.
PROBED = ("untrained", "sft")
Labels = Literal["gold", "none", "decoded", "on_policy"]


@dataclass(frozen=True)
class Arm:
    """One of the methods that are compared.

    Attributes:
        start: the arm whose model it starts from; None: the untrained model.
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
    "pra_random": _pra("PRA without labels, random marks", "random"),
    "pra_none": _pra("PRA without labels, no marks", "none"),
    "pra_other": _pra("control: summary of another question", "other"),
    "pra_on_policy": _pra("PRA without labels, at its own answers", labels="on_policy"),
    "pra_on_policy_other": _pra("the same, summary of another question", "other", "on_policy"),
    "pra_null": _pra("control: random marks, summary of another question", "null"),
}
#: What every trained arm is compared with, where it was run.
RIVALS = ("sft", "sft_longer", "pra_other", "pra_on_policy_other", "pra_null")
