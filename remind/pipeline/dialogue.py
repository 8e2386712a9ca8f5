"""All stages of one dialogue, each kept by the hash of what it is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from remind.core.files import sha256_json
from remind.core.processes import give_back_memory
from remind.core.progress import listening, part, shares
from remind.grounding import Grounder
from remind.grounding.load import load_saes
from remind.llm.auxiliary import ChatLLM, open_llm
from remind.models.backbone import load_backbone
from remind.models.encoder import SentenceEncoder
from remind.perception import Perception
from remind.pipeline.config import BuildStatesConfig
from remind.pipeline.effort import STAGES, effort
from remind.pipeline.identity import code_hash, dialogue_hash, dialogue_key
from remind.pipeline.kept_llm import KeptLLM
from remind.pipeline.outline import Task
from remind.pipeline.record import Tally, record_of
from remind.pipeline.shelf import Kept, Parts
from remind.reflect import summarise_all
from remind.states.auxiliary import AuxiliaryLLM
from remind.states.pyramid import AttentionalState, FactualState, render


class Workshop:
    """Builds dialogues one after the other. Models are loaded by the first dialogue that needs them.

    Args:
        identity: `build_identity` of the build. saes: folder of the SAEs.
        device: of this process.
        step: told how many units of `effort` are done since it was told last, and of what stage.
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
        self._grounding = sha256_json([identity[key] for key in ("grounding", "backbone", "saes", "dtype", "device")])
        self.parts = Parts(cache / "states")
        self._kept = Kept(cache / "stages" / code_hash()[:16])
        self._cache = cache
        self._opened: tuple[Perception, AuxiliaryLLM, ChatLLM | None] | None = None
        self._grounder: Grounder | None = None
        self._seconds = dict.fromkeys(STAGES, 0.0)
        #: Where each stage lies in the work on a dialogue, from 0 to 1.
        self._places: dict[str, tuple[float, float]] = {}
        self._stage = STAGES[0]

    def build(self, task: Task) -> None:
        """Build a dialogue's states and put them on the shelf.

        Raises:
            DataError, ModelError: as the stages do; nothing is put on the shelf then.
        """
        self._seconds = dict.fromkeys(STAGES, 0.0)
        whole = effort(task.dialogue, task.questions)
        ends = shares(list(whole.values()))
        self._places = dict(zip(whole, zip([0.0, *ends], ends, strict=False), strict=True))
        told = 0.0

        def hear(share: float) -> None:
            nonlocal told
            done = share * sum(whole.values())
            # what a stage does twice is told once
            self.step(max(0.0, done - told), self._stage)
            told = max(told, done)

        with listening(hear):
            self._build(task)

    def _build(self, task: Task) -> None:
        perception, llm, chat = self._open()
        # what was encoded before must not show in the last bits of what is encoded now
        perception.encoder.forget()
        states = self._perceive(perception, task)
        grounded = self._ground(states)
        with self._timed("summaries"):
            made = summarise_all(llm, grounded)
        with self._timed("states"):
            records = [record_of(state, task.splits[state.attentional.factual.question.id]) for state in made]
            tally = Tally()
            tally.dialogues = 1
            for record in records:
                tally.add(record)
        report = None if chat is None else chat.take()
        account = {"tally": tally.dump(), "report": report, "seconds": self._seconds}
        self.parts.put(self.key(task), records, account)
        give_back_memory()

    def key(self, task: Task) -> str:
        return dialogue_key(self.identity, task.dialogue, task.questions, task.splits)

    def _open(self) -> tuple[Perception, AuxiliaryLLM, ChatLLM | None]:
        if self._opened is None:
            encoder = SentenceEncoder(device=self.device)
            llm = open_llm(self.cfg.llm, encoder)
            chat = llm if isinstance(llm, ChatLLM) else None
            kept = llm if chat is not None else KeptLLM(llm, self._kept)
            self._opened = Perception(self.cfg.perception, encoder, kept, self._cache / "index"), kept, chat
        return self._opened

    def _perceive(self, perception: Perception, task: Task) -> list[FactualState]:
        with self._timed("segments"):
            index = perception.index(task.dialogue)
        with self._timed("cues"):
            dimensions = list(dict.fromkeys(question.dimension for question in task.questions))
            for number, dimension in enumerate(dimensions):
                with part(number / len(dimensions), (number + 1) / len(dimensions)):
                    index.cues(dimension)
        with self._timed("retrieval"):
            return perception.perceive_all(task.dialogue, task.questions)

    def _ground(self, states: Sequence[FactualState]) -> list[AttentionalState]:
        asked = [[state.question.text, render(state).text] for state in states]
        key = sha256_json([self._grounding, dialogue_hash(states[0].dialogue), asked])
        found = self._kept.get("grounding", key)
        if found is None:
            with self._timed("codes"):
                grounder = self._open_grounder()
                if not grounder.joint:
                    grounder.windowed.dialogue_codes(states[0].dialogue)
            made = []
            with self._timed("grounding"):
                for number, state in enumerate(states):
                    with part(number / len(states), (number + 1) / len(states)):
                        made.append(grounder.ground(state))
            self._kept.put("grounding", key, [[list(map(list, s.blocks)), list(s.salience)] for s in made])
            return made
        return [
            AttentionalState(state, tuple((start, end) for start, end in blocks), tuple(salience))
            for state, (blocks, salience) in zip(states, found, strict=True)
        ]

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
