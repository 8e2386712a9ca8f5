"""States of a world through the front door: dialogue files, SAEs, retrieval, grounding, and the reader's summaries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from remind.core.errors import ConfigError
from remind.data.dialogue import Corpus
from remind.data.readers.refmem import write_refmem
from remind.grounding.config import WEIGHTS, FusionConfig, GroundingConfig
from remind.perception.config import PerceptionConfig, RetrieveConfig
from remind.testbed.reader import Reader, ReaderConfig, served
from remind.testbed.world import World, WorldConfig, make_world
from sae.config import SAETrainConfig
from sae.ranges import NonNegativeInt, PositiveInt, check_ranges

if TYPE_CHECKING:
    from remind.states.records import StateRecord

#: Where the marks of x1 come from. built: as the pipeline grounds. random: as many turns, drawn. none: no marks.
#: untrained: as built, with SAEs of random weights. gold: the evidence that x0 holds.
Marks = Literal["built", "random", "none", "untrained", "gold"]


def _grounding() -> GroundingConfig:
    """Fused salience, with weights fitted to ten training dialogues of another seed; a budget as narrow as x0 is short.

    As fitted, but for the length, which is less 1 so that what is ranked is about evidence per token.
    """
    others = dict.fromkeys((*WEIGHTS, "sigma"), 0.0) | {"sigma": 3.0}
    fitted = {"summed": 0.3, "dense": 1.2, "bm25": 0.87, "speaker": 2.7, "length": -1.2}
    fuse = FusionConfig(**(others | fitted))
    return GroundingConfig(anchor_codes="question", window=0, idf="dialogue", budget_share=0.25, fuse=fuse)


@dataclass
class BuiltConfig:
    """How a world's states are built from its dialogue files."""

    layers: tuple[NonNegativeInt, ...] = (2, 3)
    """Layers of the backbone that get an SAE."""
    sae: SAETrainConfig = field(
        default_factory=lambda: SAETrainConfig(d_sae=256, k=8, steps=400, batch_size=512, lr=1e-3)
    )
    """Training of the SAEs."""
    talk: PositiveInt = 12
    """Dialogues that they are trained on, of a world without the rule."""
    perception: PerceptionConfig = field(
        default_factory=lambda: PerceptionConfig(retrieve=RetrieveConfig(method="hybrid"))
    )
    """Segments, cues, retrieval (Section 4.2)."""
    grounding: GroundingConfig = field(default_factory=_grounding)
    """Guidance, resonance, selection (Section 4.3)."""
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    """The simulated LLM that writes strategies and summaries."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


def train_saes(cfg: BuiltConfig, model: str, out: Path, trained: bool = True) -> Path:
    """SAEs on dialogues that share nothing with any world's questions; they are made once.

    Args:
        trained: False: as they are before training, random directions (a null control).
    """
    from remind.core.run_folder import REPORT
    from remind.train_sae import TrainSAEConfig, train_sae

    if (out / REPORT).is_file():
        return out
    talk = make_world(WorldConfig(train=cfg.talk, dev=0, test=0, rule="none", by_template=False, seed=90_000))
    path = out.with_name(f"{out.name}-talk.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_refmem(talk.corpus, path)
    trainer = cfg.sae if trained else replace(cfg.sae, steps=1, lr=1e-12)
    layers: list[int | str] = list(cfg.layers)
    return train_sae(
        TrainSAEConfig(backbone=model, layers=layers, data=str(path), out=str(out), trainer=trainer, resume=True)
    )


def build_world(
    cfg: BuiltConfig, world: World, model: str, saes: Path, out: Path, cache: Path, workers: int = 1
) -> Path:
    """Write the world's dialogue files and build their states.

    The files hold no answer and no evidence of training questions. Those of dev and test stand in them to measure by,
    and no stage of building sees them.

    Returns:
        The states folder.
    """
    from remind.build import BuildStatesConfig, build
    from remind.llm.endpoints import EndpointConfig, LLMConfig

    questions = tuple(
        replace(question, answers=(), evidence=(), images=()) if question.split == "train" else question
        for question in world.corpus.questions
    )
    path = out.with_name(f"{out.name}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_refmem(Corpus(world.dialogues, questions), path)
    with served(cfg.reader) as address:
        # the same reader has the same name, while its address changes; its replies cost nothing and are not kept
        endpoint = EndpointConfig(model="reader", base_url=address, name=Reader(cfg.reader).name, key_env=None)
        return build(
            BuildStatesConfig(
                input=str(path),
                out=str(out),
                # nothing is unanswerable in a world, but nano was trained on prompts that allow for it
                abstention=True,
                backbone=model,
                sae=str(saes),
                perception=cfg.perception,
                grounding=cfg.grounding,
                llm=LLMConfig(strategy=endpoint, summary=endpoint, cache=None),
                cache=str(cache),
                workers=workers,
                overwrite=True,
            )
        )


def marked(records: Sequence[StateRecord], world: World, marks: Marks, reader: ReaderConfig) -> list[StateRecord]:
    """The records with other marks, and with the summaries that the reader writes under those.

    Evidence and answers are the world's own again, for training questions too.
    """
    from remind.perception.auxiliary import ChatLLM
    from remind.reflect import summarise
    from remind.states.pyramid import AttentionalState
    from remind.states.records import attentional_of, record_of
    from remind.testbed.ladder import mark_blocks, target

    dialogues = {dialogue.id: dialogue for dialogue in world.dialogues}
    questions = {item.question.id: item.question for item in world.questions}
    states = []
    for record in records:
        question = questions[record.question_id]
        state = attentional_of(record, dialogues[record.dialogue_id], question)
        ids = [turn.id for turn in state.factual.turns]
        chosen = {ids[index] for start, end in state.blocks for index in range(start, end + 1)}
        drawn = random.Random(f"remind-random-marks:{question.id}").sample(ids, len(chosen))
        other: dict[Marks, set[str]] = {"random": set(drawn), "gold": set(ids) & set(question.evidence), "none": set()}
        if marks in other:
            state = AttentionalState(state.factual, mark_blocks(state.factual, other[marks]))
        states.append(state)
    llm = ChatLLM({"summary": Reader(reader)})
    return [
        replace(record_of(state, record.split), target=target(questions[record.question_id]))
        for state, record in zip(summarise(llm, states), records, strict=True)
    ]
