"""A world on disk: its dialogues and questions, the trait behind each question, and the states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError
from remind.core.files import atomic_folder, write_rows
from remind.data.readers.refmem import write_refmem
from remind.testbed.labels import LabelConfig
from remind.testbed.ladder import LadderConfig, write_states
from remind.testbed.world import World, WorldConfig, make_world

WORLD, TRUTH, STATES = "world.jsonl", "truth.jsonl", "states"


@dataclass
class MakeWorldConfig:
    """Write a synthetic world with known answers, and how much its states and its training labels get wrong."""

    out: str
    """Folder for world.jsonl, truth.jsonl and states. Must not exist unless overwrite is set."""
    world: WorldConfig = field(default_factory=WorldConfig)
    """The dialogues and their questions. world.jsonl and truth.jsonl depend on nothing else."""
    ladder: LadderConfig = field(default_factory=LadderConfig)
    """What x0, x1 and x2 show."""
    labels: LabelConfig = field(default_factory=LabelConfig)
    """Labels of the training questions in the states; world.jsonl keeps the right ones."""
    overwrite: bool = False
    """Replace out where it is a world made earlier."""


def write_world(cfg: MakeWorldConfig) -> World:
    """Make a world and write it: RefMem-Bench JSONL, the truth per question, and a states folder. Whole or not at all.

    Raises:
        ConfigError: `out` exists and overwrite is off, or holds something else than a world.
    """
    out = Path(cfg.out)
    if out.exists() and not cfg.overwrite:
        raise ConfigError(f"{out} exists; choose another out or set overwrite")
    if out.exists() and not (out / TRUTH).is_file():
        raise ConfigError(f"{out} is not a world made earlier (it has no {TRUTH}); choose another out")
    world = make_world(cfg.world)
    with atomic_folder(out) as folder:
        write_refmem(world.corpus, folder / WORLD)
        write_rows(folder / TRUTH, truths(world))
        write_states(world, folder / STATES, cfg.ladder, cfg.labels)
    print(f"{len(world.dialogues)} dialogues with {len(world.questions)} questions, and their states: {out}")
    return world


def truths(world: World) -> Iterator[dict[str, Any]]:
    """The trait behind each question, in order: speaker, dimension, topic (or None), value, and turn ids.

    `evidence` and `contrary` are the turns of all remarks that belong to the question, in time order.
    """
    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    for item in world.questions:
        question, trait = item.question, item.trait
        remarks = zip(item.remarks, item.is_evidence, strict=True)
        contrary = [turn for turns, is_evidence in remarks if not is_evidence for turn in turns]
        yield {
            "question": question.id,
            "dialogue": question.dialogue_id,
            "split": question.split,
            "speaker": trait.speaker,
            "dimension": trait.dimension,
            "topic": trait.topic,
            "value": trait.value,
            "evidence": list(question.evidence),
            "contrary": sorted(contrary, key=dialogues[question.dialogue_id].positions.__getitem__),
        }
