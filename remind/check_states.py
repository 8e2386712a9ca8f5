"""Is there anything to distil? log p of gold answers under each state, before training (`remind check-states`).

PRA draws a model's answers from x0 towards those that it gives under a higher state. It can teach what that state adds
to the gold answer's probability, and of this no more than what the same text about another question does not add.
`train-pra` measures it on a few dev questions before it begins.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import ConfigError, DataError
from remind.train_pra.config import CheckStatesConfig, TrainConfig

if TYPE_CHECKING:
    from remind.alignment.trainer import PRATrainer
    from remind.models.backbone import Backbone
    from remind.models.images import Pictures
    from remind.states.records import StateRecord

#: x2 with the summary of another question.
OTHER = "other"
#: Of `train-pra`: under a minute with a model of 135 M parameters on two cores.
_QUESTIONS = 12


def check_states(cfg: CheckStatesConfig) -> dict[str, Any]:
    """Print what each level adds to the gold answers' probability, with a warning where it is nothing.

    Raises:
        DataError: states of x0 alone, or without gold answers in the split.
    """
    from remind.models.backbone import load_backbone

    chosen = questions_of(cfg.states, cfg.split, cfg.questions)
    if not chosen:
        raise DataError(f"no question of split {cfg.split} has a gold answer to measure by", cfg.states)
    if chosen[0].levels == ("x0",):
        raise DataError("there is x0 alone, and nothing that could teach it; build the states with levels", cfg.states)
    found = measure(load_backbone(cfg.model, cfg.dtype, cfg.device), chosen)
    print(told(found, cfg.split))
    warn_of(found, max(chosen[0].levels))
    return found


def questions_of(folder: str | Path, split: str, most: int) -> list[StateRecord]:
    """At most so many questions of a split with a gold answer, spread evenly."""
    from remind.data.dialogue import spread
    from remind.states.dataset import iterate_states

    return spread([record for record in iterate_states(folder, split) if record.target and record.answers], most)


def measure(
    backbone: Backbone, records: Sequence[StateRecord], levels: Sequence[str] = (), shown: Pictures | None = None
) -> dict[str, Any]:
    """log p of the gold answers by level, in nats a token, and what each adds to x0.

    Questions that are too long for the model in any state are left out.

    Args:
        levels: besides x0; none: all that there are.
        shown: shows images as pixels.

    Returns:
        `questions`; `too_long`, those left out; `unsupported`, those of which x0 holds no gold evidence;
        `log_probability` by level, with `OTHER` where at least two questions have summaries; `gain` over x0 by level,
        and `own`: x2 less `OTHER`; means with 95 % intervals by dialogue.

    Raises:
        DataError: a level that was not built, or no question that the model can take.
    """
    from remind.alignment.examples import example_of
    from remind.core.progress import track
    from remind.evaluation.likelihood import log_probabilities
    from remind.evaluation.statistics import bootstrap, several

    read = ["x0", *(levels or records[0].levels[1:])]
    for name in read:
        records[0].level(name)
    asked = [[(record, name) for name in read] for record in records]
    if "x2" in read and (control := with_other_summaries(records)):
        asked = [[*states, (other, "x2")] for states, other in zip(asked, control, strict=True)]
        read.append(OTHER)
    tokenizer, most = backbone.tokenizer, backbone.max_length
    fit = [all(example_of(tokenizer, one, shown).longest <= most for one, _ in states) for states in asked]
    if not any(fit):
        raise DataError(f"every question is longer than the {most} tokens that {backbone.name} takes")
    records, asked = list(compress(records, fit)), list(compress(asked, fit))
    rows = [log_probabilities(backbone, states, shown) for states in track(asked, "check states", len(asked))]
    values = {name: [row[place] for row in rows] for place, name in enumerate(read)}
    dialogues = several([record.dialogue_id for record in records])

    def less(one: str, other: str) -> Any:
        return bootstrap([a - b for a, b in zip(values[one], values[other], strict=True)], clusters=dialogues)

    return {
        "questions": len(records),
        "too_long": fit.count(False),
        "unsupported": sum(not (record.images_found if record.visual else record.evidence_found) for record in records),
        "log_probability": {name: bootstrap(own, clusters=dialogues) for name, own in values.items()},
        "gain": {name: less(name, "x0") for name in values if name != "x0"},
        "own": less("x2", OTHER) if OTHER in values else None,
    }


def others(n: int) -> list[int]:
    """For each of n questions the place of another one: half the list away, so mostly of another dialogue."""
    if n < 2:
        raise ConfigError("a single question has no other one to take the summary from; use more questions")
    return [(place + n // 2) % n for place in range(n)]


def with_other_summaries(records: Sequence[StateRecord]) -> list[StateRecord]:
    """The records with the summary of another question in x2, or as it is without one; none where no two have one."""
    from remind.states.records import summary_of

    try:
        summaries = [summary_of(record) for record in records]
    except DataError:
        return []
    having, changed = [place for place, summary in enumerate(summaries) if summary], list(records)
    if len(having) < 2:
        return []
    for place, other in zip(having, others(len(having)), strict=True):
        x2 = records[place].x2
        start, end = x2.text[: x2.strategy_end], x2.text[x2.strategy_end :]
        # a summary has lines of its own
        text = start + end.replace(f"\n{summaries[place]}\n", f"\n{summaries[having[other]]}\n", 1)
        changed[place] = replace(records[place], x2=replace(x2, text=text))
    return changed


def told(found: dict[str, Any], split: str) -> str:
    """What was measured, in one line."""
    names = {OTHER: "x2 with another question's summary"}
    gains = [f"{names.get(name, name)} {_nats(gain)}" for name, gain in found["gain"].items()]
    notes = {"without evidence in x0": found["unsupported"], "more too long": found["too_long"]}
    bare = ", ".join(f"{count} {what}" for what, count in notes.items() if count)
    control = "" if found["own"] or "x2" not in found["gain"] else "; no control: no two summaries can be exchanged"
    return (
        f"log p of the gold answer, nats a token, {found['questions']} {split} questions{bare and f' ({bare})'}: "
        f"x0 {found['log_probability']['x0']['value']:.3f}; to this adds {', '.join(gains)}{control}"
    )


def _nats(estimate: Any) -> str:
    return f"{estimate['value']:+.3f} [{estimate['low']:+.3f}, {estimate['high']:+.3f}]"


def warn_of(found: dict[str, Any], teacher: str) -> None:
    """Say on stderr what to do where the teacher's level is not shown to be better than x0, or than the control."""
    # the interval of a single question has no width
    if found["questions"] < 2 or found["gain"][teacher]["low"] <= 0:
        print(
            f"warning: {teacher} is not shown to make the gold answers more probable than x0, so that PRA may have "
            "nothing to teach: quote the evidence, let a more capable model write the summaries (llm.summary), or "
            "measure on more questions (remind check-states)",
            file=sys.stderr,
        )
    elif teacher == "x2" and found["own"] and found["own"]["low"] <= 0:
        print(
            f"warning: another question's summary does as well ({_nats(found['own'])}), so that PRA would teach a form "
            "of answer and no evidence: see what the summaries say, or measure on more questions (remind check-states)",
            file=sys.stderr,
        )


def train(cfg: TrainConfig) -> Path:
    """`remind train-pra`: `remind.train_pra.run.train`, after the check."""
    from remind.train_pra.run import train as run

    return run(cfg, before=before_training)


def before_training(cfg: TrainConfig, trainer: PRATrainer) -> dict[str, Any] | None:
    """The check of a run's teacher on dev questions; None where there is none, or nothing to measure by."""
    taught = [edge.teacher for edge in trainer.objective.active if edge.teacher > 0]
    if not taught or trainer.args.sharded:
        return None
    from remind.alignment.examples import example_of

    most, tokenizer = trainer.args.max_length or trainer.backbone.max_length, trainer.backbone.tokenizer
    chosen = questions_of(cfg.states, cfg.data.eval_split, _QUESTIONS)
    # training leaves out the others, too
    chosen = [one for one in chosen if example_of(tokenizer, one, trainer.shown).longest <= most]
    levels = [f"x{level}" for level in sorted(set(taught))]
    if not chosen or not set(levels) <= set(chosen[0].levels):
        why = "has a gold answer and fits the model" if not chosen else f"has {levels[-1]}"
        print(f"no question of split {cfg.data.eval_split} {why}: what PRA can teach is not measured", file=sys.stderr)
        return None
    trainer.model.eval()
    try:
        with trainer.accelerator.autocast():
            found = measure(trainer.backbone, chosen, levels, trainer.shown)
    except DataError as error:
        print(f"what PRA can teach is not measured: {error}", file=sys.stderr)
        return None
    print(told(found, cfg.data.eval_split), file=sys.stderr)
    warn_of(found, levels[-1])
    return found
