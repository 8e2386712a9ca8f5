"""What the model is shown of a question under each condition: context providers, which turns fit a cap on tokens, and
the prompts made of them. The order of a prompt's sections is always the same."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from remind.core.errors import DataError
from remind.core.files import sha256_json
from remind.data.dialogue import NO_INFORMATION, Corpus, Dialogue, Question, Turn, spread
from remind.evaluation.config import CONDITIONS
from remind.models.generate import Generation
from remind.models.images import Place, places_of
from remind.perception.perceive import prompt_costs, told
from remind.reflect import summarise
from remind.states import pyramid
from remind.states.dataset import States, check_split, iterate_states
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Rendered, Strategy, blind, render
from remind.states.records import ABSENT, StateRecord, attentional_of, pictures_of, positions_of, record_of
from remind.text.words import declines

if TYPE_CHECKING:
    from remind.evaluation.config import ContextConfig
    from remind.models.encoder import SentenceEncoder
    from remind.perception.auxiliary import AuxiliaryLLM


@dataclass(frozen=True)
class Context:
    """What a provider gives for a question.

    Attributes:
        text: stands in the prompt where x0 has the retrieved dialogue.
        sources: ids of the turns it shows or was made of; None: not known, so that no evidence recall can be told.
        output: the answer, of a system that gives one itself; no model is asked then.
    """

    text: str
    sources: tuple[str, ...] | None = None
    output: Generation | None = None


def provide(provider: Any, questions: Sequence[Question], dialogue: Dialogue) -> list[Context]:
    """A provider's contexts of questions about a dialogue, which it sees without gold.

    A provider has `context(question, dialogue) -> Context`; or `contexts(questions, dialogue) -> list[Context]`, for
    all questions about a dialogue at once. It may have a `name`; and `measures`, if it is given the gold as well, since
    it records what of it was found.

    Raises:
        DataError: what it gives is no context.
    """
    asked = [blind(question) for question in questions]
    if hasattr(provider, "contexts"):
        found = provider.contexts(questions if getattr(provider, "measures", False) else asked, dialogue)
    else:
        found = [provider.context(question, dialogue) for question in asked]
    for question, context in zip(questions, found, strict=True):
        if not (isinstance(context, Context) and isinstance(context.text, str)):
            what = f"{type(context).__name__}, not a Context with text"
            raise DataError(f"context provider {provider_name(provider)} gave {what}", record=question.id)
    return list(found)


def provider_name(provider: Any) -> str:
    """Its own name, else that of its class."""
    return str(getattr(provider, "name", type(provider).__name__))


class Contexts:
    """Choices of turns of a dialogue, as ascending positions in `Dialogue.turns`. Tokens are of the encoder.

    Args:
        encoder: counts tokens; its cosine ranks chunks.
        config: caps.
    """

    def __init__(self, encoder: SentenceEncoder, config: ContextConfig, dialogue: Dialogue) -> None:
        self.encoder, self.config, self.dialogue = encoder, config, dialogue
        self._costs = prompt_costs(dialogue, encoder)

    @cached_property
    def full(self) -> list[int]:
        """Every turn, or as many of the newest as fit `full_tokens` together; at least one."""
        turns = range(len(self.dialogue.turns))
        parts = [turns[-count:] for count in range(1, len(turns) + 1)]
        return list(parts[max(0, bisect_right(parts, self.config.full_tokens, key=self._costs.of) - 1)])

    def rag(self, question: Question, shown: Sequence[int]) -> list[int]:
        """The chunks with the highest cosine to the question (ties: earlier first) up to the first that does not fit.

        Args:
            shown: positions that x0 shows; what they cost is the cap.
        """
        cosines = self._vectors @ self.encoder.encode([question.text])[0]
        chosen: list[int] = []
        for number in torch.argsort(cosines, descending=True, stable=True).tolist():
            wider = sorted([*chosen, *self._chunks[number]])
            if chosen and self._costs.of(wider) > self._costs.of(shown):
                break
            chosen = wider
        return chosen

    @cached_property
    def _chunks(self) -> list[range]:
        """Whole turns of one session, up to a number of tokens."""
        chunks, spent, session_of = list[range](), 0, self._costs.session_of
        for position, tokens in enumerate(self._costs.turns):
            joins = bool(chunks) and session_of[chunks[-1].start] == session_of[position]
            if joins and spent + tokens <= self.config.chunk_tokens:
                chunks[-1], spent = range(chunks[-1].start, position + 1), spent + tokens
            else:
                chunks.append(range(position, position + 1))
                spent = tokens
        return chunks

    @cached_property
    def _vectors(self) -> Tensor:
        turns = self.dialogue.turns
        return self.encoder.encode(["\n".join(pyramid.turn_text(turns[p]) for p in chunk) for chunk in self._chunks])


class Stream(NamedTuple):
    """Questions that are read as they are asked.

    Attributes:
        asked: reads them, each time from the first.
        key: what identifies those that have no states.
        total: their number.
    """

    asked: Callable[[], Iterator[Asked]]
    key: str
    total: int


class Asked(NamedTuple):
    """Questions about one dialogue.

    Attributes:
        records: with their rendered levels, as far as they have any.
        dialogue, questions: of the dialogue files; None, and none, where there are none.
    """

    records: list[StateRecord]
    dialogue: Dialogue | None = None
    questions: Sequence[Question] = ()


@dataclass(frozen=True)
class Prompt:
    """What is put to the model for one question.

    Attributes:
        text: the user message; "" where no model is asked.
        evidence, images: the gold evidence (turn ids, image indices) that it shows; None: not known.
        cut_turns: turns of the dialogue that were cut away to fit the cap; full_context only.
        output: the fixed answer of a control, or of a system that answers itself, in place of a model's.
        left_out: why the question takes no part in the condition.
        pictures: where images are shown as pixels.
    """

    text: str
    evidence: tuple[str, ...] | None = ()
    images: tuple[int, ...] | None = ()
    cut_turns: int = 0
    output: Generation | None = None
    left_out: str | None = None
    pictures: tuple[Place, ...] = ()

    @property
    def asks(self) -> bool:
        """Whether a model is asked."""
        return self.output is None and self.left_out is None


@dataclass(frozen=True)
class Prompter:
    """Makes the prompts of every condition.

    Args:
        contexts: chooses turns of a dialogue; needed by full_context and rag.
        llm: writes the summary of the altered order.
        kind: what the states were tailored to, as in `PerceptionConfig`.
        pixels: show images that have a file as pixels.
        providers: context providers by the name of their condition.
        frequent: what `most_frequent` says of the training split.
    """

    contexts: Callable[[Dialogue], Contexts] | None = None
    llm: AuxiliaryLLM | None = None
    kind: str = "gold"
    pixels: bool = False
    providers: Mapping[str, Any] = field(default_factory=dict)
    frequent: Mapping[str, str] = field(default_factory=dict)

    def prompts(self, name: str, asked: Asked) -> list[Prompt]:
        """The prompts of questions about one dialogue, under a condition or of a provider.

        Raises:
            DataError: the dialogue files are not those of the states, or a provider that gives no context.
        """
        records, dialogue, questions = asked
        if name in self.providers:
            assert dialogue is not None
            found = provide(self.providers[name], questions, dialogue)
            return [self._provided(record, dialogue, one) for record, one in zip(records, found, strict=True)]
        if not CONDITIONS[name].asks:
            return [control(name, record, self.frequent) for record in records]
        if name in pyramid.LEVELS:
            return [self._prompt(r, r.level(name), r.level(name).text, name) for r in records]
        if name == "evidence":
            return [self._prompt(r, r.level("x0"), _with_dialogue(r, _dialogue(r.x0)), name) for r in records]
        if name == "no_context":
            return [Prompt(_with_dialogue(record, "")) for record in records]
        assert dialogue is not None
        if name == "altered":
            return self._altered(records, dialogue, questions)
        contexts = None if self.contexts is None else self.contexts(dialogue)
        return [self._chosen(name, *pair, dialogue, contexts) for pair in zip(records, questions, strict=True)]

    def _prompt(self, record: StateRecord, rendered: Rendered, text: str, name: str) -> Prompt:
        """A prompt that shows what x0 does. Its dialogue stands where that of `rendered` does."""
        places = places_of(rendered, record.pictures, record.question_id, name) if self.pixels else ()
        return Prompt(text, record.evidence_found, record.images_found, pictures=places)

    def _provided(self, record: StateRecord, dialogue: Dialogue, context: Context) -> Prompt:
        """x0's prompt with a provider's text, and without the strategy."""
        known = context.sources is not None
        evidence, images = _gold_of(record, map(dialogue.turn, context.sources or ())) if known else (None, None)
        lines = context.text if not context.text or context.text.endswith("\n") else f"{context.text}\n"
        return Prompt(_with_dialogue(record, lines), evidence, images, output=context.output)

    def _chosen(
        self, name: str, record: StateRecord, question: Question, dialogue: Dialogue, contexts: Contexts | None
    ) -> Prompt:
        """x0's prompt with other turns: oracle and the conditions named so keep the strategy."""
        source = name.removesuffix("_strategy")
        if name == "oracle":
            positions = _gold(dialogue, question)
            if not positions:
                return Prompt("", left_out="no gold evidence")
        else:
            assert contexts is not None
            rag = source == "rag"
            positions = contexts.rag(question, positions_of(record, dialogue)) if rag else contexts.full
        segments, abstention = pyramid.segments_of(dialogue, positions), record.x0.abstention
        state = FactualState(dialogue, blind(question), segments, Strategy(()), abstention)
        rendered = render(state)
        if rendered.text[: rendered.dialogue[0]] != record.x0.text[: record.x0.dialogue[0]]:
            message = "its states were built with other prompt templates, so conditions would not be comparable"
            raise DataError(f"{message}; build them again", record=record.question_id)
        return Prompt(
            _with_dialogue(record, _dialogue(rendered), strategy=name == "oracle" or source != name),
            *_gold_of(record, state.turns),
            len(dialogue.turns) - len(positions) if source == "full_context" else 0,
            pictures=places_of(rendered, pictures_of(state.turns), record.question_id, name) if self.pixels else (),
        )

    def _altered(
        self, records: Sequence[StateRecord], dialogue: Dialogue, questions: Sequence[Question]
    ) -> list[Prompt]:
        assert self.llm is not None
        marked = [attentional_of(r, dialogue, one) for r, one in zip(records, questions, strict=True)]
        # every turn marked is no turn singled out: the summary is one of x0
        known = told(self.llm, [state.factual.question for state in marked], self.kind)
        unguided = [
            AttentionalState(replace(state.factual, told=question), _runs(state.factual))
            for state, question in zip(marked, known, strict=True)
        ]
        summaries = [state.summary for state in summarise(self.llm, unguided)]
        altered = [render(ReflectiveState(state, summary)) for state, summary in zip(marked, summaries, strict=True)]
        return [self._prompt(r, one, one.text, "altered") for r, one in zip(records, altered, strict=True)]


def _gold_of(record: StateRecord, turns: Iterable[Turn]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The gold evidence, turn ids and image indices, that some turns hold."""
    shown = list(turns)
    ids, images = {turn.id for turn in shown}, {image.index for turn in shown for image in turn.images}
    return tuple(one for one in record.evidence if one in ids), tuple(one for one in record.images if one in images)


def _gold(dialogue: Dialogue, question: Question) -> list[int]:
    """Positions of the gold evidence turns and of those with a gold image."""
    images = set(question.images)
    with_image = (p for p, turn in enumerate(dialogue.turns) if images & {image.index for image in turn.images})
    return sorted({*(dialogue.positions[turn_id] for turn_id in question.evidence), *with_image})


def _dialogue(rendered: Rendered) -> str:
    return rendered.text[slice(*rendered.dialogue)]


def _with_dialogue(record: StateRecord, dialogue: str, strategy: bool = False) -> str:
    """x0's text with another dialogue section, with or without the strategy."""
    x0 = record.x0
    end = x0.dialogue[1] if strategy else x0.strategy_end
    return x0.text[: x0.dialogue[0]] + dialogue + x0.text[end:]


def _runs(state: FactualState) -> tuple[pyramid.Span, ...]:
    """Every run of turns as one block."""
    runs = [[place for place, _ in run] for _, run in groupby(enumerate(state.runs), key=lambda pair: pair[1])]
    return tuple((run[0], run[-1]) for run in runs)


def most_frequent(records: Iterable[StateRecord]) -> dict[str, str]:
    """The most frequent gold answer by format (ties: the one met first); letters of a set with commas."""
    seen: dict[str, Counter[str]] = {}
    for record in records:
        if record.answers:
            answer = ",".join(sorted(record.answers)) if record.format == "multi" else record.answers[0]
            seen.setdefault(record.format, Counter())[answer] += 1
    return {format: counter.most_common(1)[0][0] for format, counter in seen.items()}


def control(name: str, record: StateRecord, frequent: Mapping[str, str]) -> Prompt:
    """The fixed answer of a control.

    always_a has none for direct questions, most_frequent none for formats without a training answer: they are left
    out. abstain says that the dialogue does not tell, by the option that says so, else by choosing no option.

    Args:
        frequent: what `most_frequent` says of the training split.
    """
    direct = record.format == "direct"
    if name == "always_a":
        answer, why = None if direct else "A", "no options"
    elif name == "most_frequent":
        answer, why = frequent.get(record.format), "no training answer of its format"
    else:
        options = zip(pyramid.LETTERS, record.options, strict=False)
        answer, why = next((letter for letter, one in options if declines(one)), NO_INFORMATION if direct else ""), ""
    if answer is None:
        return Prompt("", left_out=why)
    if record.format == "multi" or not answer:
        answer = f"[{answer}]"
    reply = f"<answer>{answer}</answer><explanation></explanation>"
    return Prompt("", output=Generation(reply, 0, finished=True))


def stream_of(corpus: Corpus, split: str, limit: int | None = None) -> Stream:
    """The questions of dialogues without states, those of no split as well."""
    every = [question for _, own in corpus.by_dialogue() for question in own if question.split in (None, split)]
    chosen = spread(every, limit)

    def asked() -> Iterator[Asked]:
        for name, part in groupby(chosen, key=lambda question: question.dialogue_id):
            yield asked_of(corpus.dialogue(name), list(part), split)

    return Stream(asked, sha256_json([asdict(question) for question in corpus.questions]), len(chosen))


def questions_of(states: States, split: str, limit: int | None = None, corpus: Corpus | None = None) -> Stream:
    """The questions of a split of states, dialogue by dialogue.

    Args:
        limit: at most this many questions, spread evenly over the split.
        corpus: the dialogues that the states were built from.

    Raises:
        FormatError: not a states folder.
        DataError: no questions in the split, or gold evidence that train and test share; and as it is read a question
            whose options and answers do not fit its format, a question id twice, or dialogue files that are not those
            of the states.
    """
    counts = check_split(states)
    if not counts[split]:
        where = states if isinstance(states, str | Path) else None
        raise DataError(f"no questions of split {split!r} (there are: {', '.join(sorted(counts)) or 'none'})", where)
    chosen = {*spread(range(counts[split]), limit)}
    known = {} if corpus is None else {question.id: question for question in corpus.questions}

    def asked() -> Iterator[Asked]:
        taken = (record for place, record in enumerate(iterate_states(states, split)) if place in chosen)
        for name, group in groupby(taken, key=lambda record: record.dialogue_id):
            records = list(group)
            if corpus is None:
                yield Asked(records)
                continue
            for record in records:
                if record.question_id not in known or known[record.question_id].dialogue_id != name:
                    raise DataError("the question is not in the dialogue files", record=record.question_id)
            yield Asked(records, corpus.dialogue(name), [known[record.question_id] for record in records])

    return Stream(asked, "", len(chosen))


def asked_of(dialogue: Dialogue, questions: Sequence[Question], split: str = "test") -> Asked:
    """Questions that have no states: their prompts show nothing of the dialogue but what a condition adds."""
    states = [FactualState(dialogue, question, (), Strategy(())) for question in questions]
    return Asked([record_of(state, split) for state in states], dialogue, questions)


def bare(record: StateRecord) -> StateRecord:
    """Without the rendered levels, which are large."""
    return replace(record, x0=ABSENT, x1=ABSENT, x2=ABSENT)
