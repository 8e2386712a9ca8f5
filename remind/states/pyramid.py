"""The Cognitive Pyramid: the three states of one question, and how each is rendered to a prompt (Sections 4.2-4.4).

Section order is fixed, because the levels share long prefixes and training can then compute them once:
instructions, dialogue, strategy, marker reminder (x1, x2), summary (x2), question, options.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from remind.core.errors import DataError
from remind.data.dialogue import NO_INFORMATION, Dialogue, Question, Turn
from remind.states import prompts

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LEVELS = ("x0", "x1", "x2")
#: m* of Section 4.3 as plain text. It has a line of its own; a dialogue line begins with a speaker or `[Image #`.
MARKER = "[ATTENTION]"

#: Head of each line of anchors in a prompt, and the field of `Strategy` that it shows.
ANCHOR_KINDS = {
    "Target speaker": "speakers",
    "Related entities": "entities",
    "Behavioural focus": "focus",
    "Temporal scope": "scope",
}


Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous turns of one session: positions `start` to `end` (inclusive) in `Dialogue.turns`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Strategy:
    """S_str of Section 4.2: reasoning cues (generic instructions) and anchors (explicit, answer-critical).

    Attributes:
        reasoning: C_reason, one instruction each.
        speakers, entities, focus, scope: E_anchor by kind: target speaker, related entities, behavioural focus,
            temporal scope (Table 11).
    """

    reasoning: tuple[str, ...]
    speakers: tuple[str, ...] = ()
    entities: tuple[str, ...] = ()
    focus: tuple[str, ...] = ()
    scope: tuple[str, ...] = ()

    @property
    def anchors(self) -> tuple[str, ...]:
        return self.speakers + self.entities + self.focus + self.scope


def segments_of(dialogue: Dialogue, positions: Iterable[int]) -> tuple[Segment, ...]:
    """Ascending positions joined into segments; none crosses a session."""
    joined: list[list[int]] = []
    turns, sessions = dialogue.turns, dialogue.session_of
    for position in positions:
        after = joined and joined[-1][1] == position - 1
        if after and sessions[turns[position - 1].id] is sessions[turns[position].id]:
            joined[-1][1] = position
        else:
            joined.append([position, position])
    return tuple(Segment(start, end) for start, end in joined)


@dataclass(frozen=True)
class FactualState:
    """x0 = [C_ret, S_str]: retrieved segments in time order, and the strategy.

    Attributes:
        abstention: whether the prompt of a direct question says what to answer if the conversation has no answer;
            the same for all questions of a benchmark, since it would give away the unanswerable ones.
        told: the question as seen by perception if its kind was inferred: without gold, with the inferred dimension.
        capped: whether the limit of retrieval excluded some segments.
        positions: in `Dialogue.turns`, of the retrieved turns, ascending. turns: the retrieved turns themselves.
        runs: for each retrieved turn the number of its run: consecutive turns of one session. Between two runs there is
            a gap that broadcast, windows and blocks do not cross.

    Raises:
        DataError: segments that are empty, overlap, are out of order or leave the dialogue.
    """

    dialogue: Dialogue
    question: Question
    segments: tuple[Segment, ...]
    strategy: Strategy
    abstention: bool = True
    told: Question | None = None
    capped: bool = False
    positions: tuple[int, ...] = field(init=False, repr=False, compare=False)
    turns: tuple[Turn, ...] = field(init=False, repr=False, compare=False)
    runs: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        last = -1
        for segment in self.segments:
            if not last < segment.start <= segment.end < len(self.dialogue.turns):
                raise DataError("segments overlap, are out of order or leave the dialogue", record=self.question.id)
            last = segment.end
        positions = tuple(p for segment in self.segments for p in range(segment.start, segment.end + 1))
        joined = segments_of(self.dialogue, positions)
        self.__dict__.update(
            positions=positions,
            turns=tuple(self.dialogue.turns[position] for position in positions),
            runs=tuple(number for number, run in enumerate(joined) for _ in range(run.start, run.end + 1)),
        )


@dataclass(frozen=True)
class AttentionalState:
    """x1 = [C_anchor, S_str]: x0 with a marker before and after each block.

    Attributes:
        blocks: inclusive ranges over the retrieved turns (indices into `FactualState.turns`), ascending, disjoint,
            each inside one run.
        salience: s_turn of Eq. 5 for each retrieved turn, where grounding computed it.
    """

    factual: FactualState
    blocks: tuple[Span, ...]
    salience: tuple[float, ...] = ()
    marker: str = MARKER


@dataclass(frozen=True)
class ReflectiveState:
    """x2 = [x1, G_ref]: x1 with the reflective summary. For training only."""

    attentional: AttentionalState
    summary: str


State = FactualState | AttentionalState | ReflectiveState


def blind(question: Question) -> Question:
    """The question without answers, evidence, gold images, split and category (a category tells the unanswerable)."""
    return replace(question, answers=(), evidence=(), images=(), category=None, split=None)


def blind_state(state: AttentionalState) -> AttentionalState:
    """x1 of the question as given to the LLM."""
    factual = state.factual
    return replace(state, factual=replace(factual, question=factual.told or blind(factual.question)))


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """Position of a turn in a prompt, in characters, ends exclusive.

    Attributes:
        start, end: the whole turn with its line ends.
        speaker: the speaker marker (`Name:`), P_k of Eq. 4.
        text: what was said; empty span for a turn of images only.
        captions: the text of each caption line.
    """

    turn_id: str
    start: int
    end: int
    speaker: Span
    text: Span
    captions: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Rendered:
    """A prompt and the positions of its parts (character spans)."""

    text: str
    dialogue: Span
    turns: tuple[TurnSpan, ...]
    reasoning: tuple[Span, ...]
    anchors: tuple[Span, ...]
    markers: tuple[Span, ...] = ()

    @property
    def strategy_end(self) -> int:
        """Where the last line of the strategy ends; the end of the dialogue where there is none."""
        last = max((end for _, end in (*self.reasoning, *self.anchors)), default=self.dialogue[1])
        return self.text.index("\n", last - 1) + 1

    @property
    def abstention(self) -> bool:
        """Whether it says what to answer where the conversation does not tell; only those of direct questions may."""
        return NO_INFORMATION in self.text[: self.dialogue[0]]


@dataclass
class _Writer:
    parts: list[str] = field(default_factory=list)
    length: int = 0

    def put(self, text: str) -> Span:
        start = self.length
        self.parts.append(text)
        self.length += len(text)
        return (start, self.length)


#: A tag that answers are parsed by, in the text of a turn.
_SAID_TAG = re.compile(r"<(?=\s*(?:/\s*)?(?:answer|explanation)\s*>)", re.IGNORECASE)


def one_line(text: str) -> str:
    """Text on a single line, so that a turn can be quoted as one evidence line.

    Answer and explanation tags in the text get another bracket, so that quoting them does not end an answer.
    """
    line = " ".join(text.split())
    return _SAID_TAG.sub("‹", line) if "<" in line else line


def line_of(turn: Turn) -> str:
    """The turn as the prompt shows it and as evidence quotes it: `Speaker: text`."""
    return f"{one_line(turn.speaker)}: {one_line(turn.text)}".rstrip()


def turn_text(turn: Turn) -> str:
    """What retrieval reads of a turn: `Speaker: text`, then its captions, one line each."""
    return "\n".join([line_of(turn), *(one_line(image.caption) for image in turn.images if image.caption)])


def turn_lines(turn: Turn) -> str:
    """A turn as a state's dialogue shows it: its line, and a line `[Image #N Caption] ...` for each image."""
    captions = (f"[Image #{one.index} Caption] {one_line(one.caption or '') or '(no caption)'}" for one in turn.images)
    return "\n".join([line_of(turn), *captions])


def unnumbered(text: str) -> str:
    """What a memory is found by: its text without the numbers of images."""
    return re.sub(r"\[Image #\d+ Caption\] (?:\(no caption\))?", "", text)


def _put_dialogue(
    out: _Writer, state: FactualState, blocks: Sequence[Span], marker: str
) -> tuple[list[TurnSpan], list[Span]]:
    opens, closes = {start for start, _ in blocks}, {end for _, end in blocks}
    spans: list[TurnSpan] = []
    markers: list[Span] = []
    ordinal = {session.id: number for number, session in enumerate(state.dialogue.sessions, start=1)}
    session_id: str | None = None
    for index, turn in enumerate(state.turns):
        if index == 0 or state.runs[index] != state.runs[index - 1]:
            session = state.dialogue.session_of[turn.id]
            if session.id != session_id:
                when = f", {one_line(session.time)}" if session.time else ""
                out.put(f"[Session {ordinal[session.id]}{when}]\n")
                session_id = session.id
            else:
                out.put("[…]\n")
        if index in opens:
            markers.append(out.put(f"{marker}\n"))
        speaker = out.put(f"{one_line(turn.speaker)}:")
        said = one_line(turn.text)
        if said:
            out.put(" ")
        text = out.put(said)
        out.put("\n")
        captions = []
        for image in turn.images:
            out.put(f"[Image #{image.index} Caption] ")
            captions.append(out.put(one_line(image.caption or "") or "(no caption)"))
            out.put("\n")
        spans.append(TurnSpan(turn.id, speaker[0], out.length, speaker, text, tuple(captions)))
        if index in closes:
            markers.append(out.put(f"{marker}\n"))
    return spans, markers


def _put_strategy(out: _Writer, strategy: Strategy) -> tuple[list[Span], list[Span]]:
    reasoning: list[Span] = []
    anchors: list[Span] = []
    if strategy == Strategy(()):
        return reasoning, anchors
    out.put(f"\nGuide to the question\n{prompts.render('strategy').strip()}\n")
    for name, kind in ANCHOR_KINDS.items():
        values = getattr(strategy, kind)
        for number, value in enumerate(values):
            out.put(f"{name}: " if number == 0 else "; ")
            anchors.append(out.put(one_line(value)))
        if values:
            out.put("\n")
    for number, cue in enumerate(strategy.reasoning, start=1):
        out.put(f"Step {number}: ")
        reasoning.append(out.put(one_line(cue)))
        out.put("\n")
    return reasoning, anchors


def frame(question: Question, abstention: bool) -> tuple[str, str]:
    """The start of every state (how to answer, head of the dialogue) and its end (the question with its options)."""
    told = NO_INFORMATION if abstention else ""
    letters = LETTERS[: len(question.options)]
    rules = prompts.render(
        "answer", format=question.format, visual=question.visual, letters=letters, no_information=told
    )
    when = [f"Asked on: {one_line(question.time)}"] if question.time else []
    options = [f"{letter}. {one_line(one)}" for letter, one in zip(letters, question.options, strict=False)]
    lines = [*when, f"Question: {one_line(question.text)}", *(["Options:", *options] if options else [])]
    return f"{rules.strip()}\n\nConversation\n", "\n" + "".join(f"{line}\n" for line in lines)


def render(state: State) -> Rendered:
    """The prompt of a state, as the user message of a chat (the chat template comes with the tokenizer).

    x1's dialogue section without the marker lines is byte-identical to x0's; x1 and x2 agree up to the summary. An x1
    without blocks has no marker and no reminder: it is x0. An x2 with an empty summary is x1.
    """
    marked = state.attentional if isinstance(state, ReflectiveState) else state
    factual = marked.factual if isinstance(marked, AttentionalState) else marked
    blocks, marker = (marked.blocks, marked.marker) if isinstance(marked, AttentionalState) else ((), MARKER)
    opening, closing = frame(factual.question, factual.abstention)

    out = _Writer()
    out.put(opening)
    dialogue_start = out.length
    turns, markers = _put_dialogue(out, factual, blocks, marker)
    dialogue = (dialogue_start, out.length)
    reasoning, anchors = _put_strategy(out, factual.strategy)
    if blocks:
        out.put(f"\n{prompts.render('reminder', marker=marker).strip()}\n")
    if isinstance(state, ReflectiveState) and state.summary:
        out.put(f"\nReflection\n{prompts.render('summary').strip()}\n{state.summary.strip()}\n")
    out.put(closing)
    return Rendered("".join(out.parts), dialogue, tuple(turns), tuple(reasoning), tuple(anchors), tuple(markers))


def shown_images(rendered: Rendered, turn: TurnSpan) -> list[int]:
    """Indices of the images whose captions a turn of the prompt shows, by the headers before their spans."""
    text = rendered.text
    # the header is the last one before the caption, whatever the turn itself says
    headers = [text[text.rindex("[Image #", turn.start, start) : start] for start, _ in turn.captions]
    return [int(header.removeprefix("[Image #").split(" ", 1)[0]) for header in headers]


def marker_places(text: str) -> list[tuple[int, int]]:
    """Positions of the markers of a rendered state: on lines of their own, and in the reminder.

    A marker within the text of a turn comes after the speaker's name and does not count.
    """
    reminder = prompts.render("reminder", marker=MARKER).strip()
    lines = re.finditer(rf"^(?:{re.escape(MARKER)}|{re.escape(reminder)})$", text, re.MULTILINE)
    return [match.span() for line in lines for match in re.compile(re.escape(MARKER)).finditer(text, *line.span())]


def render_answer(question: Question) -> str | None:
    """The gold answer as written between the answer tags; the first acceptable one; None if no gold is known."""
    if not question.answers:
        return None
    if question.format == "multi":
        return f"[{','.join(sorted(question.answers))}]"
    return one_line(question.answers[0])


def render_target(state: FactualState) -> str | None:
    """y* without its end token: `<answer>…</answer><explanation>evidence</explanation>`; None if no gold is known.

    The evidence is the gold evidence that x0 holds, in time order: lines, or image indices for a visual question.
    """
    question = state.question
    answer = render_answer(question)
    if answer is None:
        return None
    if question.visual:
        held = {image.index for turn in state.turns for image in turn.images}
        explanation = f"[{', '.join(map(str, sorted(held & set(question.images))))}]"
    else:
        explanation = "\n".join(line_of(turn) for turn in state.turns if turn.id in question.evidence)
    return f"<answer>{answer}</answer><explanation>{explanation}</explanation>"
