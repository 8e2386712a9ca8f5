"""The auxiliary LLM on top of chat models, one for each stage; the offline stand-in replaces what fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from remind.core.errors import ModelError
from remind.core.files import sha256_json
from remind.core.progress import ProgressBar
from remind.data.dialogue import Dialogue, Question
from remind.llm import asking
from remind.llm.asking import ROOM, TEMPLATES
from remind.llm.client import Chats
from remind.llm.endpoints import LLMConfig
from remind.llm.ledger import Ledger, table
from remind.llm.offline import OfflineLLM
from remind.llm.request import ChatModel, Reply, Request, Stage
from remind.states import prompts
from remind.states.auxiliary import AuxiliaryLLM, Failure, Verdict, blind, blind_state
from remind.states.pyramid import AttentionalState, Segment, Strategy
from remind.text.words import data

if TYPE_CHECKING:
    from remind.llm.dry import DryRun
    from remind.models.encoder import SentenceEncoder

S = TypeVar("S")
T = TypeVar("T")

VERSION = 2
#: Requests of a stage before its share of failures can end work that is under way.
_EARLY_CHECK = 100


class ChatLLM(AuxiliaryLLM):
    """An `AuxiliaryLLM` that asks chat models.

    The requests of a dialogue go out together. Where a reply fails or is not what was asked for, the offline stand-in
    writes that one cue, strategy or summary, and the failure is recorded (`failures`, `report`). There is no stand-in
    for a judge: its failure is no verdict. An endpoint that as a whole cannot be used raises ModelError.

    Args:
        models: a model for each stage; a stage without one is the stand-in's by choice, which is no failure.
        stand_in: writes in their place; None: one that compares by shared words.
        ledger: the costs of the models, for the report.
        dry: the dry run that the models belong to, if they do.

    Attributes:
        asked: number of requests by stage.
    """

    def __init__(
        self,
        models: Mapping[Stage, ChatModel],
        stand_in: OfflineLLM | None = None,
        ledger: Ledger | None = None,
        dry: DryRun | None = None,
    ) -> None:
        self.models = {stage: models[stage] for stage in TEMPLATES if stage in models}
        self.stand_in = stand_in or OfflineLLM()
        self.ledger, self.dry = ledger or Ledger(), dry
        self.failures: list[Failure] = []
        self.asked: Counter[Stage] = Counter()

    @property
    def name(self) -> str:
        """Changes with the models, the templates, the word lists and the stand-in; holds no key."""
        stages = {
            stage: [model.name, prompts.prompt_id(TEMPLATES[stage]), ROOM[stage]]
            for stage, model in self.models.items()
        }
        # a judge follows neither guides nor stand-in
        rest = None if set(stages) == {"judge"} else [self.stand_in.name, data("guides")]
        models = " ".join(f"{stage}={model.name}" for stage, model in self.models.items())
        return f"chat-{VERSION}-{sha256_json([VERSION, stages, rest])[:12]} {models}".rstrip()

    def kinds(self, questions: Sequence[Question]) -> list[str | None]:
        """The dimension each question is taken for, asked for together of the model that writes strategies."""
        return self._ask(
            "strategy", questions, asking.kind_request, lambda _, one: asking.read_kind(one), self.stand_in.kinds
        )

    def cues(self, dialogue: Dialogue, segments: Sequence[Segment], dimension: str | None) -> list[str]:
        """κ_n for each segment, asked for together. Raises DataError for an unknown dimension."""
        return self._ask(
            "cues",
            segments,
            lambda segment: asking.cue_request(dialogue, segment, dimension),
            lambda _, reply: asking.read_cue(reply),
            lambda left: self.stand_in.cues(dialogue, left, dimension),
        )

    def strategies(self, dialogue: Dialogue, questions: Sequence[Question]) -> list[Strategy]:
        """S_str of each question, asked for together. A target speaker who is not in the dialogue is left out.

        Raises:
            DataError: an unknown dimension.
        """
        return self._ask(
            "strategy",
            questions,
            lambda question: asking.strategy_request(dialogue, question),
            lambda _, reply: asking.read_strategy(dialogue, reply),
            lambda left: self.stand_in.strategies(dialogue, list(map(blind, left))),
        )

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        """G_ref of each state, asked for together: understanding, evidence by option, conclusion."""
        return self._ask(
            "summary",
            states,
            asking.summary_request,
            lambda state, reply: asking.read_summary(state.factual.question, reply),
            lambda left: self.stand_in.summaries(list(map(blind_state, left))),
        )

    def verdicts(
        self, cases: Sequence[tuple[str, Sequence[str], str]], samples: Sequence[str] | None = None
    ) -> list[Verdict]:
        """J(ŷ, y) of each (question, references, prediction), asked for together."""
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
        """For a manifest: by stage the model, the prompt, how many requests were made and failed; then every failure.

        Cues that a dialogue's index holds from an earlier build are in that build's manifest.
        """
        failed = Counter(failure.stage for failure in self.failures)
        stages = {
            stage: {
                "model": model.name,
                "prompt": prompts.prompt_id(TEMPLATES[stage]),
                "asked": self.asked[stage],
                "failed": failed[stage],
            }
            for stage, model in self.models.items()
        }
        failures = [asdict(failure) for failure in self.failures]
        return {"stages": stages, "stand_in": self.stand_in.name, "failures": failures, "costs": self.ledger.summary()}

    def report_text(self) -> str:
        """The report for a person: costs by stage, and how much the stand-in wrote."""
        failed = Counter((failure.stage, failure.failure) for failure in self.failures)
        lines = [
            f"{n} of {self.asked[stage]} {stage}: {why}; the offline stand-in wrote them"
            for (stage, why), n in failed.items()
        ]
        return "\n".join([table(self.ledger.summary()), *lines])

    def take(self) -> dict[str, Any]:
        """What was asked, what failed and what it cost, as JSON for `merge`; all counts start again."""
        failures = [asdict(failure) for failure in self.failures]
        taken = {"asked": dict(self.asked), "failures": failures, "costs": self.ledger.take()}
        self.asked.clear()
        self.failures.clear()
        return taken

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
        requests = list(map(make, items))
        written: dict[int, T] = {}
        for n, reply in enumerate(self._replies(stage, requests)):
            try:
                if reply.failure is not None:
                    raise asking.Unusable(reply.message)
                written[n] = read(items[n], reply)
            except asking.Unusable as error:
                self.failures.append(Failure(stage, requests[n].sample, reply.failure or "unusable", str(error)))
        missing = [n for n in range(len(items)) if n not in written]
        written.update(zip(missing, stand_in([items[n] for n in missing]) if missing else [], strict=True))
        return [written[n] for n in range(len(items))]

    def _replies(self, stage: Stage, requests: Sequence[Request]) -> list[Reply]:
        self.asked[stage] += len(requests)
        with ProgressBar(stage, len(requests)) as bar:
            return self.models[stage].complete(requests, lambda *_: bar.step())


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
    chats = Chats(cfg)
    models = {stage: model for stage in stages if (model := chats.stage(stage)) is not None}
    return ChatLLM(models, stand_in, chats.ledger, chats.dry) if models else stand_in
