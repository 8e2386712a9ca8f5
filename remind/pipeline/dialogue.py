"""All stages of one dialogue, each cached by the hash of its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from remind.core.cache import Cache
from remind.core.files import sha256_json
from remind.core.processes import give_back_memory
from remind.core.progress import listening, part, shares
from remind.data.dialogue import Dialogue, Question
from remind.grounding import Grounder
from remind.grounding.load import load_saes
from remind.llm.auxiliary import ChatLLM, open_llm
from remind.models.encoder import SentenceEncoder
from remind.models.load import load_backbone
from remind.perception import Perception
from remind.pipeline.assemble import Parts
from remind.pipeline.config import BuildStatesConfig
from remind.pipeline.identity import code_hash, dialogue_hash, dialogue_key, picture_hashes
from remind.pipeline.outline import STAGES, Task, effort
from remind.pipeline.record import Tally, record_of
from remind.reflect import summarise_all
from remind.states.auxiliary import AuxiliaryLLM, Verdict, blind
from remind.states.pyramid import AttentionalState, FactualState, Segment, Strategy, render


class DialogueBuilder:
    """Builds dialogues one after the other. Models are loaded by the first dialogue that needs them.

    Args:
        identity: `build_identity` of the build. saes: folder of the SAEs.
        device: of this process.
        step: called with the units of `effort` done since the last call, and the stage.
    """

    def __init__(
        self,
        cfg: BuildStatesConfig,
        identity: dict[str, Any],
        saes: Path,
        device: str,
        step: Callable[[float, str], None] = lambda units, stage: None,
    ) -> None:
        self.cfg, self.saes, self.device, self.step = cfg, saes, device, step
        cache = Path(cfg.cache).expanduser()
        self.identity = sha256_json(identity)
        decides = ("grounding", "backbone", "saes", "prompts", "dtype", "device")
        self._grounding = sha256_json([identity[key] for key in decides])
        self.parts = Parts(cache)
        self._stages = Cache(cache / "stages" / code_hash()[:16])
        self._cache = cache
        self._opened: tuple[Perception, AuxiliaryLLM, ChatLLM | None] | None = None
        self._grounder: Grounder | None = None
        self._seconds = dict.fromkeys(STAGES, 0.0)
        #: Where each stage lies in the work on a dialogue, from 0 to 1.
        self._places: dict[str, tuple[float, float]] = {}
        self._stage = STAGES[0]

    def build(self, task: Task) -> None:
        """Build a dialogue's states and put them into the cache.

        Raises:
            DataError, ModelError: as the stages do; nothing is cached then.
        """
        self._seconds = dict.fromkeys(STAGES, 0.0)
        costs = effort(task.dialogue, task.questions)
        ends = shares(list(costs.values()))
        self._places = dict(zip(costs, zip([0.0, *ends], ends, strict=False), strict=True))
        reported = 0.0

        def report(share: float) -> None:
            nonlocal reported
            done = share * sum(costs.values())
            # work that a stage does twice counts once
            self.step(max(0.0, done - reported), self._stage)
            reported = max(reported, done)

        with listening(report):
            self._build(task)

    def _build(self, task: Task) -> None:
        perception, llm, chat = self._open()
        # what was encoded before must not show in the last bits of what is encoded now
        perception.encoder.forget()
        states = self._perceive(perception, task)
        grounded = self._ground(states)
        with self._timed("summaries"):
            reflective = summarise_all(llm, grounded)
        with self._timed("states"):
            records = [record_of(state, task.splits[state.attentional.factual.question.id]) for state in reflective]
            tally = Tally()
            tally.dialogues, tally.capped = 1, sum(state.capped for state in states)
            for record in records:
                tally.add(record)
        report = None if chat is None else chat.take()
        account = {"tally": tally.dump(), "report": report, "seconds": self._seconds}
        self.parts.put(self.key(task), records, account)
        give_back_memory()

    def key(self, task: Task) -> str:
        pictures = picture_hashes(self.cfg.grounding, task.dialogue)
        return dialogue_key(self.identity, task.dialogue, task.questions, task.splits, task.abstention, pictures)

    def _open(self) -> tuple[Perception, AuxiliaryLLM, ChatLLM | None]:
        if self._opened is None:
            encoder = SentenceEncoder(device=self.device)
            llm = open_llm(self.cfg.llm, encoder)
            chat = llm if isinstance(llm, ChatLLM) else None
            # chat models have a cache of replies of their own
            cached = CachedLLM(llm, self._stages) if chat is None else chat
            self._opened = Perception(self.cfg.perception, encoder, cached, self._cache / "index"), cached, chat
        return self._opened

    def _perceive(self, perception: Perception, task: Task) -> list[FactualState]:
        with self._timed("segments"):
            index = perception.index(task.dialogue)
        with self._timed("cues"):
            told = perception.told(task.questions)
            dimensions = list(dict.fromkeys(question.dimension for question in told))
            for number, dimension in enumerate(dimensions):
                with part(number / len(dimensions), (number + 1) / len(dimensions)):
                    index.cues(dimension)
        with self._timed("retrieval"):
            return perception.perceive_all(task.dialogue, task.questions, task.abstention, told)

    def _ground(self, states: Sequence[FactualState]) -> list[AttentionalState]:
        prompts = [[state.question.text, render(state).text] for state in states]
        dialogue = states[0].dialogue
        key = [self._grounding, dialogue_hash(dialogue), picture_hashes(self.cfg.grounding, dialogue), prompts]
        rows = self._stages.json("grounding", key, lambda: self._grounded(states))
        return [
            AttentionalState(state, tuple((start, end) for start, end in blocks), tuple(salience))
            for state, (blocks, salience) in zip(states, rows, strict=True)
        ]

    def _grounded(self, states: Sequence[FactualState]) -> list[Any]:
        """Blocks and salience of each state, as JSON."""
        with self._timed("codes"):
            grounder = self._open_grounder()
            if not grounder.joint:
                grounder.windowed.dialogue_codes(states[0].dialogue)
        rows = []
        with self._timed("grounding"):
            for number, state in enumerate(states):
                with part(number / len(states), (number + 1) / len(states)):
                    grounded = grounder.ground(state)
                rows.append([[list(block) for block in grounded.blocks], list(grounded.salience)])
        return rows

    def _open_grounder(self) -> Grounder:
        if self._grounder is None:
            saes, idf = load_saes(self.saes)
            backbone = load_backbone(self.cfg.backbone, dtype=self.cfg.dtype, device=self.device)
            config = self.cfg.grounding
            if config.codes_folder is None and self.cfg.keep_codes:
                config = replace(config, codes_folder=str(self._cache / "codes"))
            perception, *_ = self._open()
            self._grounder = Grounder(backbone, saes, idf, config, perception.encoder)
        return self._grounder

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = perf_counter()
        self._stage = stage
        self.step(0.0, stage)
        with part(*self._places[stage]):
            yield
        self._seconds[stage] += perf_counter() - began


class CachedLLM(AuxiliaryLLM):
    """Caches strategies and summaries of the offline stand-in. Cues are passed through: a dialogue's index has them."""

    def __init__(self, llm: AuxiliaryLLM, cache: Cache) -> None:
        self.llm, self.cache = llm, cache

    @property
    def name(self) -> str:
        return self.llm.name

    def kinds(self, questions: Sequence[Question]) -> list[str | None]:
        return self.llm.kinds(questions)

    def cues(self, dialogue: Dialogue, segments: Sequence[Segment], dimension: str | None) -> list[str]:
        return self.llm.cues(dialogue, segments, dimension)

    def strategies(self, dialogue: Dialogue, questions: Sequence[Question]) -> list[Strategy]:
        key = [self.name, dialogue_hash(dialogue), [asdict(blind(question)) for question in questions]]
        rows = self.cache.json("strategies", key, lambda: [asdict(s) for s in self.llm.strategies(dialogue, questions)])
        return [Strategy(**{name: tuple(items) for name, items in row.items()}) for row in rows]

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        """G_ref of each state; the stand-in reads the whole dialogue for the rarity of its words."""
        dialogues = {id(state.factual.dialogue): dialogue_hash(state.factual.dialogue) for state in states}
        inputs = [[render(s).text, s.salience, asdict(blind(s.factual.question))] for s in states]
        key = [self.name, list(dialogues.values()), inputs]
        return list(self.cache.json("summaries", key, lambda: self.llm.summaries(states)))

    def verdicts(
        self, cases: Sequence[tuple[str, Sequence[str], str]], samples: Sequence[str] | None = None
    ) -> list[Verdict]:
        return self.llm.verdicts(cases, samples)
