"""What a chat model is asked for cues, strategies and summaries, and how its replies are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from remind.data.dialogue import Dialogue, Question
from remind.llm.fence import code_for, fenced
from remind.llm.request import Message, Reply, Request, Stage
from remind.states import prompts
from remind.states.auxiliary import blind, blind_state
from remind.states.pyramid import LETTERS, AttentionalState, FactualState, Segment, Strategy, one_line, render
from remind.text.strategy import check_dimension, guide, kind_of, target_speakers

#: Room for a reply, in tokens; a bound and not an aim, since models that think first need some of it.
ROOM: dict[Stage, int] = {"cues": 512, "strategy": 1024, "summary": 2048, "judge": 512}
#: Length asked of a cue, in words; about what the text encoder still reads whole.
CUE_WORDS = 60
#: Anchors of a kind, reasoning steps, and findings on a question without options, at most.
MOST = 6
_LONG = 400

_THOUGHT = re.compile(r"\A\s*<think>.*?(?:</think>|\Z)", re.DOTALL)
_MARKUP = re.compile(r"\[ATTENTION[^\]\n]*\]|</?(?:answer|explanation)>", re.IGNORECASE)
_SECTIONS = re.compile(r"^\W*(understanding|evidence|conclusion)\b[^:\n]*:\W*", re.IGNORECASE | re.MULTILINE)
_FINDING = re.compile(r"^\W*([A-Z])\W*[.):-]\s*(.+)$", re.MULTILINE)

# lengths are cut here and not by the schema: a reply that is only too long is no reason to pay for another
_LINES = {"type": "array", "items": {"type": "string"}}
STRATEGY_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "target_speaker": _LINES,
        "related_entities": _LINES,
        "behavioural_focus": _LINES,
        "temporal_scope": _LINES,
        "reasoning": {**_LINES, "minItems": 1},
    },
    "required": ["target_speaker", "related_entities", "behavioural_focus", "temporal_scope", "reasoning"],
    "additionalProperties": False,
}


class Unusable(ValueError):
    """A reply that is not what was asked for; its message says why."""


def without_thought(text: str) -> str:
    """A model's words without what it thought before them; nothing where the thought was cut off."""
    return _THOUGHT.sub("", text)


def plain(text: str) -> str:
    """A model's words on one line, without a leading thought, our markers and our answer tags."""
    return one_line(_MARKUP.sub(" ", without_thought(text)))


def request(stage: Stage, template: str, sample: str, schema: Mapping[str, Any] | None, **values: Any) -> Request:
    """The request that a filled template makes: its system block, then its user block."""
    parts = prompts.blocks(template, **values)
    messages = (Message("system", parts["system"]), Message("user", parts["user"]))
    return Request(messages, stage, sample, prompts.prompt_id(template), ROOM[stage], schema=schema)


def cue_request(dialogue: Dialogue, segment: Segment, dimension: str | None) -> Request:
    """One segment as the prompt of a state shows it, to be told in the light of the dimension (Section 4.2).

    Raises:
        DataError: an unknown dimension.
    """
    check_dimension(dimension)
    ask = guide(dimension) if dimension is not None else None
    shown = render(FactualState(dialogue, Question("", dialogue.id, ""), (segment,), Strategy(())))
    text = shown.text[slice(*shown.dialogue)]
    code = code_for([text])
    return request(
        "cues",
        "ask_cue",
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


def strategy_request(dialogue: Dialogue, question: Question) -> Request:
    """The question, its options and the speakers' names: neither gold nor dialogue (Section 4.2)."""
    question = blind(question)
    speakers = "\n".join(one_line(speaker) for speaker in dialogue.speakers)
    asked, options = _asked(question)
    code = code_for([speakers, asked, options])
    ask = guide(kind_of(question))
    return request(
        "strategy",
        "ask_strategy",
        question.id,
        STRATEGY_SCHEMA,
        code=code,
        demand=ask.demand,
        reasoning=ask.reasoning,
        format=question.format,
        visual=question.visual,
        most=MOST,
        speakers=fenced("speakers", speakers, code),
        question=fenced("question", asked, code),
        options=fenced("options", options, code) if options else "",
    )


def read_strategy(dialogue: Dialogue, reply: Reply) -> tuple[Strategy, list[str]]:
    """S_str, and the target speakers it named who do not speak in the dialogue and are left out.

    Raises:
        Unusable: the reply is not the JSON asked for, or has no reasoning step.
    """
    value = reply.value
    if not isinstance(value, Mapping):
        raise Unusable("the strategy is not a JSON object")
    speakers: list[str] = []
    strangers = []
    for name in _lines(value, "target_speaker"):
        known = [s for s in dialogue.speakers if s.casefold() == name.casefold()] or target_speakers(dialogue, name)
        speakers += known
        if not known:
            strangers.append(name)
    reasoning = _lines(value, "reasoning")
    if not reasoning:
        raise Unusable("the strategy has no reasoning step")
    strategy = Strategy(
        tuple(reasoning),
        tuple(dict.fromkeys(speakers)),
        tuple(_lines(value, "related_entities")),
        tuple(_lines(value, "behavioural_focus")),
        tuple(_lines(value, "temporal_scope")),
    )
    return strategy, strangers


def summary_schema(question: Question) -> dict[str, Any]:
    """What G_ref consists of: understanding, a finding for each option (or on its own), conclusion (Table 11)."""
    text = {"type": "string"}
    finding: dict[str, Any] = {"finding": text}
    if question.options:
        finding = {"option": {"type": "string", "enum": list(LETTERS[: len(question.options)])}, **finding}
    item = {"type": "object", "properties": finding, "required": list(finding), "additionalProperties": False}
    properties = {
        "understanding": text,
        "evidence": {"type": "array", "minItems": 1, "items": item},
        "conclusion": text,
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def summary_request(state: AttentionalState) -> Request:
    """The question with x1: dialogue with marked blocks, and strategy (Section 4.4). No gold."""
    state = blind_state(state)
    question, strategy = state.factual.question, _guide_lines(state.factual.strategy)
    asked, options = _asked(question)
    bare = render(state.factual)
    code = code_for([bare.text[slice(*bare.dialogue)], strategy, asked, options])
    # a marker line that no turn can forge: it carries the fence's code
    marker = f"[ATTENTION {code}]" if state.blocks else ""
    shown = render(replace(state, marker=marker))
    return request(
        "summary",
        "ask_summary",
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
        question=fenced("question", asked, code),
        options=fenced("options", options, code) if options else "",
    )


def read_summary(question: Question, reply: Reply) -> str:
    """G_ref in three parts, in the layout the offline stand-in has: from the JSON, or from sections under their names.

    Raises:
        Unusable: a part is missing, or no option of the question is spoken to.
    """
    value = reply.value if isinstance(reply.value, Mapping) else _sections(reply.text)
    understanding, conclusion = (plain(str(value.get(key) or "")) for key in ("understanding", "conclusion"))
    evidence = value.get("evidence")
    items = [item for item in evidence if isinstance(item, Mapping)] if isinstance(evidence, list) else []
    found: dict[str, str] = {}
    for number, item in enumerate(items):
        key = str(item.get("option") or "").strip().upper() if question.options else str(number)
        if text := plain(str(item.get("finding") or "")):
            found.setdefault(key, text)
    letters = LETTERS[: len(question.options)]
    known = [letter for letter in letters if letter in found] if question.options else list(found)
    if not (understanding and conclusion and known):
        missing = "understanding" if not understanding else "conclusion" if not conclusion else "evidence"
        raise Unusable(f"the summary has no {missing}")
    if question.options:
        shown = zip(letters, question.options, strict=False)
        lines = [f"{key}. {one_line(option)} - {found.get(key, 'nothing was said to it')}" for key, option in shown]
        lines.insert(0, "Evidence by option:")
    else:
        lines = ["Evidence:", *(f"- {found[key]}" for key in known[:MOST])]
    return "\n".join([f"Understanding: {understanding}", *lines, f"Conclusion: {conclusion}"])


def _asked(question: Question) -> tuple[str, str]:
    """The question as a state shows it, and its options a line each."""
    when = f"Asked on: {one_line(question.time)}\n" if question.time else ""
    options = [f"{letter}. {one_line(text)}" for letter, text in zip(LETTERS, question.options, strict=False)]
    return f"{when}{one_line(question.text)}", "\n".join(options)


def _guide_lines(strategy: Strategy) -> str:
    kinds = {
        "Target speaker": strategy.speakers,
        "Related entities": strategy.entities,
        "Behavioural focus": strategy.focus,
        "Temporal scope": strategy.scope,
    }
    anchors = [f"{name}: {'; '.join(map(one_line, values))}" for name, values in kinds.items() if values]
    return "\n".join([*anchors, *(f"Step {n}: {one_line(step)}" for n, step in enumerate(strategy.reasoning, start=1))])


def _lines(value: Mapping[str, Any], key: str) -> list[str]:
    """The strings under the key, each on one line, once, at most `MOST`."""
    given = value.get(key)
    texts = [plain(item)[:_LONG].strip() for item in given if isinstance(item, str)] if isinstance(given, list) else []
    return list(dict.fromkeys(text for text in texts if text))[:MOST]


def _sections(text: str) -> dict[str, Any]:
    """A reply in prose under the three names, as models without a gift for JSON write it."""
    pieces = _SECTIONS.split(without_thought(text))
    parts: dict[str, Any] = {}
    for name, body in zip(pieces[1::2], pieces[2::2], strict=True):
        parts.setdefault(name.lower(), body)
    evidence = parts.get("evidence", "")
    lettered = [{"option": letter, "finding": said} for letter, said in _FINDING.findall(evidence)]
    loose: Sequence[str] = [line.lstrip("-*• \t") for line in evidence.splitlines()]
    parts["evidence"] = lettered or [{"finding": line} for line in loose if line.strip()]
    return parts
