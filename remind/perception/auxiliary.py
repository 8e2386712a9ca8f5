"""The auxiliary LLM: what chat models are asked for cues, kinds, strategies, summaries and verdicts, how their replies
are read, and the offline stand-in that replaces what fails."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from remind.core.errors import ModelError
from remind.core.files import sha256_json
from remind.core.progress import ProgressBar
from remind.data.dialogue import DIMENSIONS, Dialogue, Question
from remind.llm.client import Chats
from remind.llm.endpoints import LLMConfig
from remind.llm.ledger import Ledger, table
from remind.llm.request import ChatModel, Reply, Request, Schema, Stage, Texts, code_for, fenced, from_template
from remind.llm.structured import TRUTH, NotValid, object_schema
from remind.states import prompts
from remind.states.pyramid import (
    ANCHOR_KINDS,
    LETTERS,
    AttentionalState,
    FactualState,
    Segment,
    Strategy,
    blind,
    blind_state,
    one_line,
    render,
)
from remind.states.records import FACTUAL
from remind.text import words
from remind.text.letters import letters_in
from remind.text.thoughts import without_thoughts
from remind.text.words import Guide, guide, kind_of, target_speakers
from remind.text.words import OfflineLLM as OfflineLLM
from remind.text.words import Verdict as Verdict

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder

S = TypeVar("S")
T = TypeVar("T")

VERSION = 2
#: Requests of a stage before its share of failures can end work that is under way.
_EARLY_CHECK = 100
#: The template each stage asks with.
TEMPLATES: dict[Stage, str] = {stage: f"ask_{stage.rstrip('s')}" for stage in ("cues", "strategy", "summary", "judge")}
#: Room for a reply, in tokens; a bound and not an aim, since models that think first need some of it.
ROOM: dict[Stage, int] = {"cues": 512, "strategy": 1024, "summary": 2048, "judge": 512}
#: Length asked of a cue, in words; about what the text encoder still reads whole.
CUE_WORDS = 60
#: Anchors of a kind, reasoning steps, and findings on a question without options, at most.
MOST = 6
_MAX_CHARACTERS = 400

_MARKUP = re.compile(r"\[ATTENTION[^\]\n]*\]|</?(?:answer|explanation)>|```\w*$", re.IGNORECASE | re.MULTILINE)


_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT, "maxItems": MOST}
_STRATEGY = object_schema(
    target_speaker=_TEXTS,
    related_entities=_TEXTS,
    behavioural_focus=_TEXTS,
    temporal_scope=_TEXTS,
    reasoning={**_TEXTS, "minItems": 1},
)
#: Stands for a dimension where a question has none.
_FACTS = Guide(
    FACTUAL, "stated facts: who did, has, likes or plans what, and when", (), frozenset(), frozenset(), False
)
VERDICT_SCHEMA: Mapping[str, Any] = object_schema(verdict={"type": "boolean"})


def plain(text: str) -> str:
    """A model's reply on one line, without its thoughts, fences, our markers and our answer tags."""
    return one_line(_MARKUP.sub(" ", without_thoughts(text)))


def cue_request(dialogue: Dialogue, segment: Segment, dimension: str | None) -> Request:
    """One segment as the prompt of a state shows it, to be summed up in the light of the dimension (Section 4.2)."""
    shown = render(FactualState(dialogue, Question("", dialogue.id, ""), (segment,), Strategy(())))
    first, last = dialogue.turns[segment.start].id, dialogue.turns[segment.end].id
    ask = _FACTS if dimension is None else guide(dimension)
    about: dict[str, Any] = {"demand": ask.demand, "reasoning": ask.reasoning, "visual": ask.visual}
    sample, excerpt = f"{dialogue.id} {first}..{last} {dimension or FACTUAL}", shown.text[slice(*shown.dialogue)]
    return _request("cues", sample, None, {"excerpt": excerpt}, words=CUE_WORDS, **about)


def read_cue(_: Segment, reply: Reply) -> str:
    """κ_n on one line, at most twice as long as asked for. Raises NotValid where nothing is left."""
    words = plain(reply.text).split()
    if not words or not reply.finished:
        raise NotValid("the cue was cut off" if words else "the cue is empty")
    return " ".join(words[: 2 * CUE_WORDS])


def kind_request(question: Question) -> Request:
    """What the question asks of a reader, by its text and options; asked of the model that writes strategies."""
    kinds = [(name, guide(name).demand) for name in DIMENSIONS] + [(FACTUAL, "facts that are stated somewhere")]
    schema, data = object_schema(kind={"enum": [*DIMENSIONS, FACTUAL]}), question_lines(question)
    return _request("strategy", question.id, schema, data, "ask_kind", kinds=kinds, factual=FACTUAL)


def read_kind(_: Question, reply: Reply) -> str | None:
    """A dimension, or None for a factual question."""
    return None if reply.value["kind"] == FACTUAL else str(reply.value["kind"])


def strategy_request(dialogue: Dialogue, question: Question) -> Request:
    """The question, its options and the speakers' names: neither gold nor dialogue (Section 4.2)."""
    question = blind(question)
    ask = guide(kind_of(question))
    about: dict[str, Any] = {"demand": ask.demand, "reasoning": ask.reasoning, "visual": question.visual}
    data = {"speakers": "\n".join(map(one_line, dialogue.speakers)), **question_lines(question)}
    return _request("strategy", question.id, _STRATEGY, data, most=MOST, format=question.format, **about)


def read_strategy(dialogue: Dialogue, _: Question, reply: Reply) -> Strategy:
    """S_str, without target speakers who do not speak in the dialogue. Raises NotValid."""
    lines = {}
    for kind, texts in reply.value.items():
        said = (plain(text)[:_MAX_CHARACTERS].strip() for text in texts)
        lines[kind] = list(dict.fromkeys(text for text in said if text))[:MOST]
    speakers: list[str] = []
    for name in lines["target_speaker"]:
        speakers += [s for s in dialogue.speakers if s.casefold() == name.casefold()] or target_speakers(dialogue, name)
    if not lines["reasoning"]:
        raise NotValid("the strategy has no reasoning step")
    anchors = (tuple(lines[name]) for name in ("related_entities", "behavioural_focus", "temporal_scope"))
    return Strategy(tuple(lines["reasoning"]), tuple(dict.fromkeys(speakers)), *anchors)


def summary_request(state: AttentionalState) -> Request:
    """The question with x1: dialogue with marked blocks, and strategy (Section 4.4). No gold."""
    state = blind_state(state)
    question, plan = state.factual.question, state.factual.strategy
    anchors = ((head, "; ".join(map(one_line, getattr(plan, kind)))) for head, kind in ANCHOR_KINDS.items())
    steps = [f"Step {n}: {one_line(step)}" for n, step in enumerate(plan.reasoning, start=1)]
    strategy = "\n".join([*(f"{head}: {values}" for head, values in anchors if values), *steps])
    bare, asked = render(state.factual), question_lines(question)
    code = code_for([bare.text[slice(*bare.dialogue)], strategy, *asked.values()])
    # a marker line that no turn can forge: it carries the fence's code
    marker = f"[ATTENTION {code}]" if state.blocks else ""
    shown = render(replace(state, marker=marker))
    # understanding, a finding for each option (or on its own), conclusion (Table 11)
    finding = object_schema(**({"option": _TEXT} if question.options else {}), finding=_TEXT)
    evidence = {"type": "array", "items": finding, "minItems": 1, "maxItems": len(LETTERS)}
    return _request(
        "summary",
        question.id,
        object_schema(understanding=_TEXT, evidence=evidence, conclusion=_TEXT),
        code=code,
        marker=marker,
        demand=guide(kind_of(question)).demand,
        format=question.format,
        visual=question.visual,
        letters=", ".join(LETTERS[: len(question.options)]),
        most=MOST,
        conversation=fenced("conversation", shown.text[slice(*shown.dialogue)], code),
        strategy=fenced("guide", strategy, code) if strategy else "",
        **{name: fenced(name, text, code) if text else "" for name, text in asked.items()},
    )


def read_summary(state: AttentionalState, reply: Reply) -> str:
    """G_ref in three parts, in the layout the offline stand-in has.

    Raises:
        NotValid: a part is missing, or none of the question's options has a finding.
    """
    question, value = state.factual.question, reply.value
    understanding, conclusion = plain(value["understanding"]), plain(value["conclusion"])
    findings: dict[str, str] = {}
    for number, item in enumerate(value["evidence"]):
        if text := plain(item["finding"]):
            label = re.sub(r"^\W*option\b[\s:#]*", "", item.get("option", ""), flags=re.IGNORECASE)
            for name in letters_in(label, question.options) if question.options else (str(number),):
                findings.setdefault(name, text)
    letters = LETTERS[: len(question.options)]
    usable = any(letter in findings for letter in letters) if question.options else bool(findings)
    for name, part in (("understanding", understanding), ("conclusion", conclusion), ("evidence", usable)):
        if not part:
            raise NotValid(f"the summary has no {name}")
    if question.options:
        lines = ["Evidence by option:"]
        for letter, option in zip(letters, question.options, strict=False):
            lines.append(f"{letter}. {one_line(option)} - {findings.get(letter, 'nothing was said to it')}")
    else:
        lines = ["Evidence:", *(f"- {text}" for text in list(findings.values())[:MOST])]
    return "\n".join([f"Understanding: {understanding}", *lines, f"Conclusion: {conclusion}"])


def judge_request(question: str, references: Sequence[str], prediction: str, sample: str = "") -> Request:
    """Whether the prediction is equivalent to any of the references (Eq. 9, Figure 10). All are fenced as data."""
    gold = "\n".join(f"{number}. {one_line(text)}" for number, text in enumerate(references, start=1))
    data = {"question": one_line(question), "references": gold, "prediction": one_line(prediction)}
    return _request("judge", sample, VERDICT_SCHEMA, data)


def verdict_in(reply: Reply) -> Verdict:
    """The verdict in a reply, or a bare yes or no; what is no verdict is a failure and not a rejection."""
    if reply.failure not in (None, "invalid"):
        return Verdict(None, reply.failure, reply.message)
    bare = without_thoughts(reply.text).strip("\"'`*_.! \n").lower()
    value = TRUTH.get(bare) if reply.value is None else reply.value["verdict"]
    if value is None:
        return Verdict(None, "neither", reply.message or "the reply is neither verdict")
    return Verdict(value)


def _request(
    stage: Stage, sample: str, schema: Schema, data: Texts = None, template: str = "", /, **values: Any
) -> Request:
    return from_template(stage, template or TEMPLATES[stage], sample, schema, ROOM[stage], data, **values)


def question_lines(question: Question) -> dict[str, str]:
    """`question` as a state shows it, and its `options` a line each."""
    when = f"Asked on: {one_line(question.time)}\n" if question.time else ""
    options = [f"{letter}. {one_line(text)}" for letter, text in zip(LETTERS, question.options, strict=False)]
    return {"question": f"{when}{one_line(question.text)}", "options": "\n".join(options)}


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
        return self._ask("strategy", questions, kind_request, read_kind, self.stand_in.kinds)

    def cues(self, dialogue: Dialogue, segments: Sequence[Segment], dimension: str | None) -> list[str]:
        """κ_n for each segment, asked for together. Raises DataError for an unknown dimension."""
        make = partial(cue_request, dialogue, dimension=dimension)
        stand_in = partial(self.stand_in.cues, dialogue, dimension=dimension)
        return self._ask("cues", segments, make, read_cue, stand_in)

    def strategies(self, dialogue: Dialogue, questions: Sequence[Question]) -> list[Strategy]:
        """S_str of each question, asked for together. A target speaker who is not in the dialogue is left out.

        Raises:
            DataError: an unknown dimension.
        """
        make, read = partial(strategy_request, dialogue), partial(read_strategy, dialogue)
        return self._ask("strategy", questions, make, read, partial(self.stand_in.strategies, dialogue))

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        """G_ref of each state, asked for together: understanding, evidence by option, conclusion."""
        return self._ask("summary", states, summary_request, read_summary, self.stand_in.summaries)

    def verdicts(
        self, cases: Sequence[tuple[str, Sequence[str], str]], samples: Sequence[str] | None = None
    ) -> list[Verdict]:
        """As `OfflineLLM.verdicts`, asked for together."""
        if "judge" not in self.models:
            return self.stand_in.verdicts(cases)
        samples = samples or [""] * len(cases)
        requests = [judge_request(*case, sample) for case, sample in zip(cases, samples, strict=True)]
        verdicts = [verdict_in(reply) for reply in self._replies("judge", requests)]
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
    if not any(map(cfg.endpoint, stages)):
        return OfflineLLM(encoder)
    stand_in, chats = OfflineLLM(encoder), Chats(cfg)
    models = {stage: model for stage in stages if (model := chats.stage(stage)) is not None}
    return ChatLLM(models, stand_in, chats)
