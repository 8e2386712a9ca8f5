"""What a chat model is asked for cues, kinds, strategies, summaries and verdicts, and how its replies are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from remind.data.dialogue import DIMENSIONS, Dialogue, Question
from remind.llm.request import Reply, Request, Stage, code_for, fenced, from_template
from remind.llm.structured import TRUTH, NotValid
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
from remind.text.thoughts import without_thoughts
from remind.text.words import Verdict as Verdict
from remind.text.words import guide, kind_of, target_speakers

#: The template each stage asks with.
TEMPLATES: dict[Stage, str] = {
    "cues": "ask_cue",
    "strategy": "ask_strategy",
    "summary": "ask_summary",
    "judge": "ask_judge",
}
#: Room for a reply, in tokens; a bound and not an aim, since models that think first need some of it.
ROOM: dict[Stage, int] = {"cues": 512, "strategy": 1024, "summary": 2048, "judge": 512}
#: Length asked of a cue, in words; about what the text encoder still reads whole.
CUE_WORDS = 60
#: Anchors of a kind, reasoning steps, and findings on a question without options, at most.
MOST = 6
_MAX_CHARACTERS = 400

_MARKUP = re.compile(r"\[ATTENTION[^\]\n]*\]|</?(?:answer|explanation)>|```\w*$", re.IGNORECASE | re.MULTILINE)


class Form(BaseModel):
    """The fields of a reply; their JSON schema is what servers are sent."""

    model_config = ConfigDict(extra="forbid")


Texts = Annotated[list[str], Field(max_length=MOST)]
F = TypeVar("F", bound=Form)


class StrategyForm(Form):
    target_speaker: Texts
    related_entities: Texts
    behavioural_focus: Texts
    temporal_scope: Texts
    reasoning: Annotated[list[str], Field(min_length=1, max_length=MOST)]


class KindForm(Form):
    kind: Annotated[str, Field(json_schema_extra={"enum": [*DIMENSIONS, FACTUAL]})]


class Finding(Form):
    finding: str


class OptionFinding(Form):
    option: str
    finding: str


class SummaryForm(Form, Generic[F]):
    """G_ref: understanding, a finding for each option (or on its own), conclusion (Table 11)."""

    understanding: str
    evidence: Annotated[list[F], Field(min_length=1, max_length=len(LETTERS))]
    conclusion: str


class VerdictForm(Form):
    verdict: bool


VERDICT_SCHEMA: Mapping[str, Any] = VerdictForm.model_json_schema()


def plain(text: str) -> str:
    """A model's reply on one line, without its thoughts, fences, our markers and our answer tags."""
    return one_line(_MARKUP.sub(" ", without_thoughts(text)))


def cue_request(dialogue: Dialogue, segment: Segment, dimension: str | None) -> Request:
    """One segment as the prompt of a state shows it, to be summed up in the light of the dimension (Section 4.2)."""
    shown = render(FactualState(dialogue, Question("", dialogue.id, ""), (segment,), Strategy(())))
    first, last = dialogue.turns[segment.start].id, dialogue.turns[segment.end].id
    about: dict[str, Any] = {"demand": "stated facts: who did, has, likes or plans what, and when"}
    about |= {"reasoning": (), "visual": False}
    if dimension is not None:
        ask = guide(dimension)
        about = {"demand": ask.demand, "reasoning": ask.reasoning, "visual": ask.visual}
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
    schema, about = KindForm.model_json_schema(), {"kinds": kinds, "factual": FACTUAL}
    return from_template("strategy", "ask_kind", question.id, schema, ROOM["strategy"], _shown(question), **about)


def read_kind(_: Question, reply: Reply) -> str | None:
    """A dimension, or None for a factual question."""
    return None if reply.value["kind"] == FACTUAL else str(reply.value["kind"])


def strategy_request(dialogue: Dialogue, question: Question) -> Request:
    """The question, its options and the speakers' names: neither gold nor dialogue (Section 4.2)."""
    question = blind(question)
    ask = guide(kind_of(question))
    about = {"demand": ask.demand, "reasoning": ask.reasoning, "format": question.format, "visual": question.visual}
    data = {"speakers": "\n".join(map(one_line, dialogue.speakers)), **_shown(question)}
    return _request("strategy", question.id, StrategyForm.model_json_schema(), data, most=MOST, **about)


def read_strategy(dialogue: Dialogue, _: Question, reply: Reply) -> Strategy:
    """S_str, without target speakers who do not speak in the dialogue. Raises NotValid."""
    lines = {name: _lines(texts) for name, texts in reply.value.items()}
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
    bare, asked = render(state.factual), _shown(question)
    code = code_for([bare.text[slice(*bare.dialogue)], strategy, *asked.values()])
    # a marker line that no turn can forge: it carries the fence's code
    marker = f"[ATTENTION {code}]" if state.blocks else ""
    shown = render(replace(state, marker=marker))
    return _request(
        "summary",
        question.id,
        (SummaryForm[OptionFinding] if question.options else SummaryForm[Finding]).model_json_schema(),
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
            findings.setdefault(item.get("option", str(number)).strip(" .()").upper(), text)
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
    stage: Stage, sample: str, schema: Mapping[str, Any] | None, data: Mapping[str, str] | None = None, /, **values: Any
) -> Request:
    return from_template(stage, TEMPLATES[stage], sample, schema, ROOM[stage], data, **values)


def question_lines(question: Question) -> tuple[str, str]:
    """The question as a state shows it, and its options a line each."""
    when = f"Asked on: {one_line(question.time)}\n" if question.time else ""
    options = [f"{letter}. {one_line(text)}" for letter, text in zip(LETTERS, question.options, strict=False)]
    return f"{when}{one_line(question.text)}", "\n".join(options)


def _shown(question: Question) -> dict[str, str]:
    return dict(zip(("question", "options"), question_lines(question), strict=True))


def _lines(items: Sequence[str]) -> list[str]:
    """The texts, each on one line, once, at most `MOST`."""
    texts = (plain(item)[:_MAX_CHARACTERS].strip() for item in items)
    return list(dict.fromkeys(text for text in texts if text))[:MOST]
