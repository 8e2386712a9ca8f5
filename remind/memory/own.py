"""REMIND's own retrieval as a memory system: turns ranked as for x0; with SAEs, those that x1 marks come first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from torch import Tensor

from remind.build.config import BuildStatesConfig
from remind.build.states import with_cap
from remind.core.errors import ModelError
from remind.data.dialogue import Dialogue, Question, Session
from remind.grounding import GroundingConfig
from remind.grounding.ground import Grounder, load_saes
from remind.llm.request import Stage
from remind.memory.bank import Bank
from remind.memory.base import Draft, Query, System
from remind.models.backbone import Backbone, load_backbone, size_of
from remind.perception import Perception, PerceptionConfig
from remind.perception.auxiliary import TEMPLATES, ChatLLM, OfflineLLM
from remind.perception.perceive import DialogueIndex, by_falling, relevance, told, turn_scores
from remind.states.pyramid import turn_lines
from sae import SAEError, TopKSAE
from sae.published import file_hashes


@dataclass(frozen=True, kw_only=True)
class RemindSystem(System):
    """Turns in the order in which x0 takes them (Section 4.2), however many are asked for.

    `method cue` (Eq. 1) ranks segments by their cues, and the turns of a segment by their own cosine with the question;
    `hybrid` ranks turns. `top_share`, `max_context_tokens` and `whole_tokens` bound x0, not the ranking: k and budget
    do that here, and a budget counts the turns alone, no headings. A query names no dimension: with `kind gold` all are
    taken for plain factual questions.

    Attributes:
        perception: segments, cues and retrieval.
    """

    perception: PerceptionConfig = field(default_factory=PerceptionConfig)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What chat models are asked for; the endpoint of strategies infers kinds of questions, too."""
        if self.perception.retrieve.method == "hybrid":
            return ()
        return ("cues", "strategy") if self.perception.kind == "infer" else ("cues",)

    @property
    def templates(self) -> tuple[str, ...]:
        return tuple(TEMPLATES[stage] for stage in self.stages)

    @property
    def not_as_published(self) -> tuple[str, ...]:
        return tuple(f"{stage}: by rule where no endpoint is named, not by an LLM" for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class GroundedSystem(RemindSystem):
    """The turns that x1 marks in x0 (Section 4.3) by falling salience (Eq. 5), then all others as `RemindSystem`.

    Salience and relevance have no common scale, so the score of a memory is the number of memories from it to the last.

    Attributes:
        sae: folder of SAEs, from `remind train-sae`.
        grounding: guidance, resonance, selection.
        backbone: model whose hidden states the SAEs read.
        device, dtype: of the backbone.
    """

    sae: str
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    backbone: str = "minilm"
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def stages(self) -> tuple[Stage, ...]:
        return ("strategy",) if self.perception.retrieve.method == "hybrid" else ("cues", "strategy")

    @cached_property
    def models(self) -> tuple[Backbone, dict[int, TopKSAE], dict[int, Tensor]]:
        """Backbone, SAEs and their idf by layer, loaded once for all banks.

        Raises:
            ModelError: no such backbone, or no folder of SAEs.
        """
        saes, idf = load_saes(self.sae)
        return load_backbone(self.backbone, dtype=self.dtype, device=self.device), saes, idf

    @cached_property
    def bounded(self) -> PerceptionConfig:
        """`perception`, x0 bounded to what a backbone that reads all of it at once takes, as `remind build-states`."""
        build = BuildStatesConfig("", "", perception=self.perception, grounding=self.grounding)
        return with_cap(build, size_of(self.backbone)).perception

    def about(self) -> dict[str, Any]:
        """As `System.about`. Raises ModelError where the folder holds no SAEs."""
        try:
            hashes = file_hashes(self.sae)
        except SAEError as error:
            raise ModelError(str(error)) from None
        elsewhere = ("codes_folder", "image_root")
        grounding = {name: value for name, value in asdict(self.grounding).items() if name not in elsewhere}
        return {**super().about(), "sae": None, "device": None, "grounding": grounding, "saes": hashes}


class RemindBank(Bank, of=RemindSystem):
    """Stores turns; segments, cues and vectors are made of the whole dialogue by `finish`, or when first asked for."""

    system: RemindSystem

    @cached_property
    def llm(self) -> ChatLLM | OfflineLLM:
        """Writes cues and strategies."""
        models = {stage: model for stage in self.system.stages if (model := self.chat(stage)) is not None}
        stand_in = OfflineLLM(self.encoder)
        return ChatLLM(models, stand_in) if models else stand_in

    @property
    def settings(self) -> PerceptionConfig:
        return self.system.perception

    def remember(self, session: Session) -> None:
        self.__dict__.pop("built", None)
        drafts = [Draft("turn", (turn.id,), keys=()) for turn in session.turns]
        self.put_all(drafts, [turn_lines(turn) for turn in session.turns], encoded=False)

    def complete(self) -> None:
        """Index the dialogue; cues that depend on the question's kind follow later."""
        if self.store.count() and "cues" in self.system.stages and self.settings.kind == "gold":
            self._index().cues(None)
        if isinstance(self.llm, ChatLLM):
            self.llm.check(self.services.max_failed)

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterable[tuple[int, float]]:
        if not self.store.count():
            return ()
        question = self._told(query, trace)
        numbers = self.store.numbers()
        return ((numbers[position], score) for position, score in self._ranked(question))

    def _ranked(self, question: Question) -> Iterator[tuple[int, float]]:
        """Positions of all turns with their scores, best first (ties: earlier first)."""
        index, config = self._index(), self.settings.retrieve
        vector = self.encoder.encode([question.text])[0]
        if config.method == "hybrid":
            scores = turn_scores(index, question.text, vector)
            yield from ((position, float(scores[position])) for position in by_falling(scores))
            return
        scores = relevance(vector, index.cues(question.dimension).vectors)
        for number in by_falling(scores):
            start, end = index.segments[number].start, index.segments[number].end
            order = by_falling(relevance(vector, index.vectors[start : end + 1]))
            yield from ((start + place, float(scores[number])) for place in order)

    def _told(self, query: Query, trace: dict[str, Any]) -> Question:
        """The query as perception takes it."""
        (question,) = told(self.llm, [query.question(self.dialogue_id)], self.settings.kind)
        trace["dimension"] = question.dimension
        return question

    @cached_property
    def built(self) -> tuple[Dialogue, Perception]:
        """The dialogue as it is stored now, and what indexes it."""
        dialogue = Dialogue(self.dialogue_id, tuple(self.store.sessions()))
        return dialogue, Perception(self.settings, self.encoder, self.llm)

    def _index(self) -> DialogueIndex:
        dialogue, perception = self.built
        return perception.index(dialogue)


class GroundedBank(RemindBank, of=GroundedSystem):
    """A `RemindBank` that grounds each question in its x0."""

    system: GroundedSystem

    @property
    def settings(self) -> PerceptionConfig:
        return self.system.bounded

    @cached_property
    def grounder(self) -> Grounder:
        """Raises ModelError where SAEs and backbone do not fit together."""
        backbone, saes, idf = self.system.models
        return Grounder(backbone, saes, idf, self.system.grounding, self.encoder)

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterable[tuple[int, float]]:
        if not self.store.count():
            return ()
        question = self._told(query, trace)
        dialogue, perception = self.built
        (factual,) = perception.perceive(dialogue, [query.question(self.dialogue_id)])
        state, positions = self.grounder.ground(factual), factual.positions
        inside = [n for start, end in state.blocks for n in range(start, end + 1)]
        # by position in the dialogue, falling (ties: earlier first)
        salience = {positions[n]: state.salience[n] for n in sorted(inside, key=lambda n: -state.salience[n])}
        turns = dialogue.turns
        trace["strategy"] = asdict(factual.strategy)
        # a turn without tokens has none, and JSON no infinity
        trace["marked"] = {turns[p].id: None if value == float("-inf") else value for p, value in salience.items()}
        others = (position for position, _ in self._ranked(question) if position not in salience)
        numbers = self.store.numbers()
        return ((numbers[p], float(len(numbers) - place)) for place, p in enumerate(chain(salience, others)))
