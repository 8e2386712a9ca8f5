"""The auxiliary LLM: chat models, one for each stage, and the offline stand-in that replaces what fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from remind.core.errors import ModelError
from remind.core.files import sha256_json
from remind.core.progress import ProgressBar
from remind.data.dialogue import Dialogue, Question
from remind.llm import asking
from remind.llm.asking import ROOM, TEMPLATES, Verdict
from remind.llm.client import Chats
from remind.llm.endpoints import LLMConfig
from remind.llm.ledger import Ledger, table
from remind.llm.request import ChatModel, Reply, Request, Stage
from remind.llm.structured import NotValid
from remind.states import prompts
from remind.states.pyramid import AttentionalState, Segment, Strategy
from remind.text import words
from remind.text.words import OfflineLLM as OfflineLLM

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder

S = TypeVar("S")
T = TypeVar("T")

VERSION = 2
#: Requests of a stage before its share of failures can end work that is under way.
_EARLY_CHECK = 100


@dataclass(frozen=True)
class Failure:
    """What could not be had from a model.

    Attributes:
        stage: cues, strategy, summary, judge or explain.
        sample: the question, the segment, or the feature.
        failure: as in `remind.llm.request.Reply`, or "unusable" (not what was asked for), "neither" (no verdict).
        message: the same in a line.
    """

    stage: Stage
    sample: str
    failure: str
    message: str = ""


class ChatLLM:
    """The auxiliary LLM on chat models.

    The requests of a dialogue go out together. Where a reply fails or is not what was asked for, the offline stand-in
    writes that one cue, strategy or summary, and the failure is recorded (`failures`, `report`). There is no stand-in
    for a judge: its failure is no verdict. An endpoint that as a whole cannot be used raises ModelError.

    Args:
        models: a model for each stage; a stage without one is the stand-in's by choice, which is no failure.
        stand_in: writes in their place; None: one that compares by shared words.
        chats: whose models they are, for the costs.

    Attributes:
        asked: number of requests by stage.
    """

    def __init__(
        self, models: Mapping[Stage, ChatModel], stand_in: OfflineLLM | None = None, chats: Chats | None = None
    ) -> None:
        self.models = {stage: models[stage] for stage in TEMPLATES if stage in models}
        self.stand_in = stand_in or OfflineLLM()
        self.ledger, self.dry = (Ledger(), None) if chats is None else (chats.ledger, chats.dry)
        self.failures: list[Failure] = []
        self.asked: Counter[Stage] = Counter()

    @property
    def name(self) -> str:
        """Changes with the models, the templates, the word lists and the stand-in; holds no key."""
        asked = {stage: [prompts.prompt_id(TEMPLATES[stage]), ROOM[stage]] for stage in self.models}
        stages = {stage: [model.name, *asked[stage]] for stage, model in self.models.items()}
        # a judge follows neither guides nor stand-in
        rest = None if set(stages) == {"judge"} else [self.stand_in.name, words.data("guides")]
        models = " ".join(f"{stage}={model.name}" for stage, model in self.models.items())
        return f"chat-{VERSION}-{sha256_json([VERSION, stages, rest])[:12]} {models}".rstrip()

    def kinds(self, questions: Sequence[Question]) -> list[str | None]:
        """As `OfflineLLM.kinds`, asked for together of the model that writes strategies."""
        return self._ask("strategy", questions, asking.kind_request, asking.read_kind, self.stand_in.kinds)

    def cues(self, dialogue: Dialogue, segments: Sequence[Segment], dimension: str | None) -> list[str]:
        """κ_n for each segment, asked for together. Raises DataError for an unknown dimension."""
        make = partial(asking.cue_request, dialogue, dimension=dimension)
        stand_in = partial(self.stand_in.cues, dialogue, dimension=dimension)
        return self._ask("cues", segments, make, asking.read_cue, stand_in)

    def strategies(self, dialogue: Dialogue, questions: Sequence[Question]) -> list[Strategy]:
        """S_str of each question, asked for together. A target speaker who is not in the dialogue is left out.

        Raises:
            DataError: an unknown dimension.
        """
        make, read = partial(asking.strategy_request, dialogue), partial(asking.read_strategy, dialogue)
        return self._ask("strategy", questions, make, read, partial(self.stand_in.strategies, dialogue))

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        """G_ref of each state, asked for together: understanding, evidence by option, conclusion."""
        return self._ask("summary", states, asking.summary_request, asking.read_summary, self.stand_in.summaries)

    def verdicts(
        self, cases: Sequence[tuple[str, Sequence[str], str]], samples: Sequence[str] | None = None
    ) -> list[Verdict]:
        """As `OfflineLLM.verdicts`, asked for together."""
        if "judge" not in self.models:
            return self.stand_in.verdicts(cases)
        samples = samples or [""] * len(cases)
        requests = [asking.judge_request(*case, sample) for case, sample in zip(cases, samples, strict=True)]
        verdicts = [asking.verdict_in(reply) for reply in self._replies("judge", requests)]
        for sample, verdict in zip(samples, verdicts, strict=True):
            if verdict.failure is not None:
                self.failures.append(Failure("judge", sample, verdict.failure, verdict.message))
        return verdicts

    def check(self, most: float, done: bool = True) -> None:
        """Raise ModelError where more than the share `most` of a stage's requests failed.

        Args:
            done: whether all was asked; otherwise stages with few requests so far are let pass.
        """
        for stage, asked in self.asked.items():
            failed = [failure for failure in self.failures if failure.stage == stage]
            if len(failed) > most * asked and (done or asked >= _EARLY_CHECK):
                raise ModelError(
                    f"{len(failed)} of {asked} requests for {stage} to {self.models[stage].name} failed, more than "
                    f"max_failed {most:g}; the last: {failed[-1].message or failed[-1].failure}. What came is cached "
                    "where llm.cache is set: run it again"
                )

    def report(self) -> dict[str, Any]:
        """For a manifest: by stage the prompt and how many requests were made and failed; then every failure.

        Cues that a dialogue's index holds from an earlier build are in that build's manifest.
        """
        failed = Counter(failure.stage for failure in self.failures)
        about = ((stage, prompts.prompt_id(TEMPLATES[stage])) for stage in self.models)
        stages = {stage: {"prompt": one, "asked": self.asked[stage], "failed": failed[stage]} for stage, one in about}
        failures = [asdict(failure) for failure in self.failures]
        return {"stages": stages, "stand_in": self.stand_in.name, "failures": failures, "costs": self.ledger.summary()}

    def report_text(self) -> str:
        """The report for a person: costs by stage, and how much the stand-in wrote."""
        failed = Counter((failure.stage, failure.failure) for failure in self.failures)
        lines = [f"{n} of {self.asked[stage]} {stage}: {why}; written offline" for (stage, why), n in failed.items()]
        return "\n".join([table(self.ledger.summary()), *lines])

    def take(self) -> dict[str, Any]:
        """What was asked, what failed and what it cost, as JSON for `merge`; all counts start again."""
        failures, asked = [asdict(failure) for failure in self.failures], dict(self.asked)
        self.asked.clear()
        self.failures.clear()
        return {"asked": asked, "failures": failures, "costs": self.ledger.take()}

    def merge(self, taken: Mapping[str, Any]) -> None:
        """Add what another one was asked, so that check and report cover both."""
        self.asked.update(taken["asked"])
        self.failures += [Failure(**failure) for failure in taken["failures"]]
        self.ledger.merge(taken["costs"])

    def _ask(
        self,
        stage: Stage,
        items: Sequence[S],
        make: Callable[[S], Request],
        read: Callable[[S, Reply], T],
        stand_in: Callable[[list[S]], list[T]],
    ) -> list[T]:
        """Ask for all items at once and read each reply; the stand-in writes what is missing."""
        if stage not in self.models or not items:
            return stand_in(list(items))
        requests = [make(item) for item in items]
        written: list[T] = []
        for item, request, reply in zip(items, requests, self._replies(stage, requests), strict=True):
            try:
                if reply.failure is not None:
                    raise NotValid(reply.message)
                written.append(read(item, reply))
            except NotValid as error:
                self.failures.append(Failure(stage, request.sample, reply.failure or "unusable", str(error)))
                written += stand_in([item])
        return written

    def _replies(self, stage: Stage, requests: Sequence[Request]) -> list[Reply]:
        self.asked[stage] += len(requests)
        with ProgressBar(stage, len(requests)) as bar:
            return self.models[stage].complete(requests, lambda *_: bar.step())


#: Whoever writes cues, strategies and summaries, and judges; one's own class has these methods and is deterministic, or
#: caches, so that a rebuild changes nothing.
AuxiliaryLLM = OfflineLLM | ChatLLM


def open_llm(
    cfg: LLMConfig, encoder: SentenceEncoder | None = None, stages: Sequence[Stage] = ("cues", "strategy", "summary")
) -> OfflineLLM | ChatLLM:
    """The auxiliary LLM for these stages: chat models where the configuration has endpoints, else the stand-in.

    Args:
        encoder: of the stand-in.

    Raises:
        ConfigError, ModelError, DataError: an endpoint that cannot be opened (see `remind.llm.client.Chats`).
    """
    stand_in = OfflineLLM(encoder)
    if cfg.dry_run is None and not any((cfg.default, cfg.cues, cfg.strategy, cfg.summary)):
        return stand_in
    chats = Chats(cfg)
    models = {stage: model for stage in stages if (model := chats.stage(stage)) is not None}
    return ChatLLM(models, stand_in, chats) if models else stand_in
