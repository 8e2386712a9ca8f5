"""What a chat model is asked for cues, strategies, summaries and verdicts, and how its replies are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remind.data.dialogue import DIMENSIONS, Dialogue, Question
from remind.llm.request import ChatModel, Reply, Request, Stage, code_for, fenced, from_template
from remind.llm.structured import object_schema, without_thought
from remind.states.auxiliary import blind, blind_state
from remind.states.pyramid import LETTERS, AttentionalState, FactualState, Segment, Strategy, one_line, render
from remind.states.records import FACTUAL
from remind.text.words import check_dimension, guide, kind_of, target_speakers

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

_MARKUP = re.compile(r"\[ATTENTION[^\]\n]*\]|</?(?:answer|explanation)>", re.IGNORECASE)
_SECTIONS = re.compile(r"^\W*(understanding|evidence|conclusion)\b[^:\n]*:\W*", re.IGNORECASE | re.MULTILINE)
_FINDING = re.compile(r"^\W*([A-Z])\W*[.):-]\s*(.+)$", re.MULTILINE)
_VERDICT = re.compile(r"[\"']?verdict[\"']?\s*[:=]\s*[\"']?(true|false|yes|no)\b", re.IGNORECASE)
_VERDICTS = {"yes": True, "true": True, "correct": True, "no": False, "false": False, "incorrect": False}


# lengths are cut here and not by the schema: a reply that is only too long is no reason to pay for another
_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
STRATEGY_SCHEMA: Mapping[str, Any] = object_schema(
    target_speaker=_TEXTS,
    related_entities=_TEXTS,
    behavioural_focus=_TEXTS,
    temporal_scope=_TEXTS,
    reasoning={**_TEXTS, "minItems": 1},
)
KIND_SCHEMA: Mapping[str, Any] = object_schema(kind={"type": "string", "enum": [*DIMENSIONS, FACTUAL]})
VERDICT_SCHEMA: Mapping[str, Any] = object_schema(verdict={"type": "boolean"})


class Unusable(ValueError):
    """A reply that is not what was asked for; its message says why."""


@dataclass(frozen=True)
class Verdict:
    """The judge's verdict on one case.

    Attributes:
        value: whether the prediction means the same as a reference; None: there is no verdict, for or against.
        failure: why there is none: as in `Reply`, or "neither" where the reply is neither verdict.
        message: the same in a line.
    """

    value: bool | None
    failure: str | None = None
    message: str = ""


def plain(text: str) -> str:
    """A model's reply on one line, without a leading thought, our markers and our answer tags."""
    return one_line(_MARKUP.sub(" ", without_thought(text)))


def cue_request(dialogue: Dialogue, segment: Segment, dimension: str | None) -> Request:
    """One segment as the prompt of a state shows it, to be summed up in the light of the dimension (Section 4.2)."""
    check_dimension(dimension)
    ask = guide(dimension) if dimension is not None else None
    shown = render(FactualState(dialogue, Question("", dialogue.id, ""), (segment,), Strategy(())))
    text = shown.text[slice(*shown.dialogue)]
    code = code_for([text])
    return _request(
        "cues",
        dialogue.id,
        None,
        code=code,
        demand=ask.demand if ask else "stated facts: who did, has, likes or plans what, and when",
        reasoning=ask.reasoning if ask else (),
        visual=bool(ask and ask.visual),
        words=CUE_WORDS,
        excerpt=fenced("excerpt", text, code),
    )


def read_cue(reply: Reply) -> str:
    """κ_n on one line, at most twice as long as asked for. Raises Unusable where nothing is left."""
    words = plain(reply.text).split()
    if not words:
        raise Unusable("the cue is empty")
    return " ".join(words[: 2 * CUE_WORDS])


def kind_request(question: Question) -> Request:
    """What the question asks of a reader, by its text and options; asked of the model that writes strategies."""
    text, options = question_lines(question)
    code = code_for([text, options])
    return from_template(
        "strategy",
        "ask_kind",
        question.id,
        KIND_SCHEMA,
        ROOM["strategy"],
        code=code,
        kinds=[(name, guide(name).demand) for name in DIMENSIONS] + [(FACTUAL, "facts that are stated somewhere")],
        factual=FACTUAL,
        question=fenced("question", text, code),
        options=fenced("options", options, code) if options else "",
    )


def read_kind(reply: Reply) -> str | None:
    """A dimension, or None for a factual question. Raises Unusable for anything else."""
    value = reply.value.get("kind") if isinstance(reply.value, Mapping) else None
    if value not in (*DIMENSIONS, FACTUAL):
        raise Unusable("the reply names no kind of question")
    return None if value == FACTUAL else str(value)


def strategy_request(dialogue: Dialogue, question: Question) -> Request:
    """The question, its options and the speakers' names: neither gold nor dialogue (Section 4.2)."""
    question = blind(question)
    speakers = "\n".join(one_line(speaker) for speaker in dialogue.speakers)
    text, options = question_lines(question)
    code = code_for([speakers, text, options])
    ask = guide(kind_of(question))
    return _request(
        "strategy",
        question.id,
        STRATEGY_SCHEMA,
        code=code,
        demand=ask.demand,
        reasoning=ask.reasoning,
        format=question.format,
        visual=question.visual,
        most=MOST,
        speakers=fenced("speakers", speakers, code),
        question=fenced("question", text, code),
        options=fenced("options", options, code) if options else "",
    )


def read_strategy(dialogue: Dialogue, reply: Reply) -> tuple[Strategy, list[str]]:
    """S_str, and the target speakers it named who do not speak in the dialogue and are left out. Raises Unusable."""
    value = reply.value
    if not isinstance(value, Mapping):
        raise Unusable("the strategy is not a JSON object")
    speakers: list[str] = []
    unknown = []
    for name in _lines(value, "target_speaker"):
        same = [s for s in dialogue.speakers if s.casefold() == name.casefold()] or target_speakers(dialogue, name)
        speakers += same
        if not same:
            unknown.append(name)
    reasoning = _lines(value, "reasoning")
    if not reasoning:
        raise Unusable("the strategy has no reasoning step")
    anchors = (tuple(_lines(value, key)) for key in ("related_entities", "behavioural_focus", "temporal_scope"))
    return Strategy(tuple(reasoning), tuple(dict.fromkeys(speakers)), *anchors), unknown


def summary_schema(question: Question) -> dict[str, Any]:
    """What G_ref consists of: understanding, a finding for each option (or on its own), conclusion (Table 11)."""
    option = {"option": {"type": "string", "enum": list(LETTERS[: len(question.options)])}} if question.options else {}
    findings = {"type": "array", "minItems": 1, "items": object_schema(**option, finding=_TEXT)}
    return object_schema(understanding=_TEXT, evidence=findings, conclusion=_TEXT)


def summary_request(state: AttentionalState) -> Request:
    """The question with x1: dialogue with marked blocks, and strategy (Section 4.4). No gold."""
    state = blind_state(state)
    question, strategy = state.factual.question, _strategy_lines(state.factual.strategy)
    text, options = question_lines(question)
    bare = render(state.factual)
    code = code_for([bare.text[slice(*bare.dialogue)], strategy, text, options])
    # a marker line that no turn can forge: it carries the fence's code
    marker = f"[ATTENTION {code}]" if state.blocks else ""
    shown = render(replace(state, marker=marker))
    return _request(
        "summary",
        question.id,
        summary_schema(question),
        code=code,
        marker=marker,
        demand=guide(kind_of(question)).demand,
        format=question.format,
        visual=question.visual,
        letters=", ".join(LETTERS[: len(question.options)]),
        most=MOST,
        conversation=fenced("conversation", shown.text[slice(*shown.dialogue)], code),
        strategy=fenced("guide", strategy, code) if strategy else "",
        question=fenced("question", text, code),
        options=fenced("options", options, code) if options else "",
    )


def read_summary(question: Question, reply: Reply) -> str:
    """G_ref in three parts, in the layout the offline stand-in has: from the JSON, or from sections under their names.

    Raises:
        Unusable: a part is missing, or none of the question's options has a finding.
    """
    value = reply.value if isinstance(reply.value, Mapping) else _sections(reply.text)
    understanding, conclusion = (plain(str(value.get(key) or "")) for key in ("understanding", "conclusion"))
    evidence = value.get("evidence")
    findings: dict[str, str] = {}
    for number, item in enumerate(evidence if isinstance(evidence, list) else []):
        if not isinstance(item, Mapping):
            continue
        key = str(item.get("option") or "").strip().upper() if question.options else str(number)
        if text := plain(str(item.get("finding") or "")):
            findings.setdefault(key, text)
    letters = LETTERS[: len(question.options)]
    usable = any(letter in findings for letter in letters) if question.options else bool(findings)
    for name, part in (("understanding", understanding), ("conclusion", conclusion), ("evidence", usable)):
        if not part:
            raise Unusable(f"the summary has no {name}")
    if question.options:
        lines = ["Evidence by option:"]
        for letter, option in zip(letters, question.options, strict=False):
            lines.append(f"{letter}. {one_line(option)} - {findings.get(letter, 'nothing was said to it')}")
    else:
        lines = ["Evidence:", *(f"- {text}" for text in list(findings.values())[:MOST])]
    return "\n".join([f"Understanding: {understanding}", *lines, f"Conclusion: {conclusion}"])


def judge_request(question: str, references: Sequence[str], prediction: str, sample: str = "") -> Request:
    """Whether the prediction is equivalent to any of the references (Eq. 9, Figure 10). All are fenced as data."""
    question, prediction = one_line(question), one_line(prediction)
    gold = "\n".join(f"{number}. {one_line(text)}" for number, text in enumerate(references, start=1))
    code = code_for([question, gold, prediction])
    return _request(
        "judge",
        sample,
        VERDICT_SCHEMA,
        code=code,
        question=fenced("question", question, code),
        references=fenced("references", gold, code),
        prediction=fenced("prediction", prediction, code),
    )


def verdicts(
    model: ChatModel, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
) -> list[Verdict]:
    """A verdict per request, in order; what is no verdict is a failure and not a rejection."""
    return [_verdict(reply) for reply in model.complete(requests, on_reply)]


def read_verdict(text: str) -> bool | None:
    """The verdict of a reply: its JSON field, or a bare yes or no. None for neither, or for both."""
    text = without_thought(text).strip()
    named = {_VERDICTS[word.lower()] for word in _VERDICT.findall(text)}
    if named:
        return named.pop() if len(named) == 1 else None
    return _VERDICTS.get(text.strip("\"'`*_.! \n").lower())


def _verdict(reply: Reply) -> Verdict:
    if reply.failure not in (None, "invalid"):
        return Verdict(None, reply.failure, reply.message)
    value = reply.value.get("verdict") if isinstance(reply.value, Mapping) else None
    value = value if isinstance(value, bool) else read_verdict(reply.text)
    return Verdict(None, "neither", "the judge's reply is neither verdict") if value is None else Verdict(value)


def _request(stage: Stage, sample: str, schema: Mapping[str, Any] | None, **values: Any) -> Request:
    return from_template(stage, TEMPLATES[stage], sample, schema, ROOM[stage], **values)


def question_lines(question: Question) -> tuple[str, str]:
    """The question as a state shows it, and its options a line each."""
    when = f"Asked on: {one_line(question.time)}\n" if question.time else ""
    options = [f"{letter}. {one_line(text)}" for letter, text in zip(LETTERS, question.options, strict=False)]
    return f"{when}{one_line(question.text)}", "\n".join(options)


def _strategy_lines(strategy: Strategy) -> str:
    names = ("Target speaker", "Related entities", "Behavioural focus", "Temporal scope")
    values = (strategy.speakers, strategy.entities, strategy.focus, strategy.scope)
    kinds = dict(zip(names, values, strict=True))
    anchors = [f"{name}: {'; '.join(map(one_line, values))}" for name, values in kinds.items() if values]
    return "\n".join([*anchors, *(f"Step {n}: {one_line(step)}" for n, step in enumerate(strategy.reasoning, start=1))])


def _lines(value: Mapping[str, Any], key: str) -> list[str]:
    """The strings under the key, each on one line, once, at most `MOST`."""
    items = value.get(key)
    strings = [item for item in items if isinstance(item, str)] if isinstance(items, list) else []
    texts = (plain(item)[:_MAX_CHARACTERS].strip() for item in strings)
    return list(dict.fromkeys(text for text in texts if text))[:MOST]


def _sections(text: str) -> dict[str, Any]:
    """A reply in prose under the three names, as models that write no JSON give it."""
    pieces = _SECTIONS.split(without_thought(text))
    parts: dict[str, Any] = {}
    for name, body in zip(pieces[1::2], pieces[2::2], strict=True):
        parts.setdefault(name.lower(), body)
    evidence = parts.get("evidence", "")
    lettered = [{"option": letter, "finding": finding} for letter, finding in _FINDING.findall(evidence)]
    bullets: Sequence[str] = [line.lstrip("-*• \t") for line in evidence.splitlines()]
    parts["evidence"] = lettered or [{"finding": line} for line in bullets if line.strip()]
    return parts
