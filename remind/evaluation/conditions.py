"""What the model is shown of a question under each condition. The order of a prompt's sections is always the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from remind.core.errors import DataError
from remind.data.dialogue import NO_INFORMATION, Corpus, Dialogue, Question
from remind.evaluation.config import CONDITIONS
from remind.models.chat import Content
from remind.models.images import Place, content_of, places_of
from remind.perception.perceive import told
from remind.reflect import summarise
from remind.states.dataset import States, check_split, iterate_states
from remind.states.pyramid import (
    LETTERS,
    LEVELS,
    AttentionalState,
    FactualState,
    ReflectiveState,
    Rendered,
    Span,
    Strategy,
    blind,
    render,
    segments_of,
)
from remind.states.rebuild import abstention_of, attentional_of, positions_of, strategy_end
from remind.states.records import ABSENT, Picture, StateRecord, pictures_of
from remind.text.answers import declines

if TYPE_CHECKING:
    from remind.evaluation.contexts import Contexts
    from remind.llm.auxiliary import AuxiliaryLLM


@dataclass(frozen=True)
class Prompt:
    """What is put to the model for one question.

    Attributes:
        text: the user message; "" where no model is asked.
        evidence, images: the gold evidence (turn ids, image indices) that it shows.
        cut_turns: turns of the dialogue that were cut away to fit the cap; full_context only.
        reply: the fixed answer of a control, in place of a model's.
        left_out: why the question takes no part in the condition.
        pictures: where images are shown as pixels.
    """

    text: str
    evidence: tuple[str, ...] = ()
    images: tuple[int, ...] = ()
    cut_turns: int = 0
    reply: str | None = None
    left_out: str | None = None
    pictures: tuple[Place, ...] = ()

    @property
    def content(self) -> Content:
        """The user message, with its images."""
        return content_of(self.text, self.pictures)


class Prompter:
    """Makes the prompts of every condition.

    Args:
        corpus: the dialogues that the states were built from; needed by the conditions marked so in `CONDITIONS`.
        contexts: chooses turns; needed by full_context and rag.
        llm: writes the summary of the altered order.
        kind: what the states were tailored to, as in `PerceptionConfig`.
        pixels: show images that have a file as pixels.
    """

    def __init__(
        self,
        corpus: Corpus | None = None,
        contexts: Contexts | None = None,
        llm: AuxiliaryLLM | None = None,
        kind: str = "gold",
        pixels: bool = False,
    ) -> None:
        self.corpus, self.contexts, self.llm = corpus, contexts, llm
        self.kind, self.pixels = kind, pixels
        self._questions = {} if corpus is None else {question.id: question for question in corpus.questions}

    def prompts(self, name: str, records: Sequence[StateRecord]) -> list[Prompt]:
        """The prompts of questions about one dialogue, under a condition that asks a model.

        Raises:
            DataError: the dialogue files are not those of the states.
        """
        if name in LEVELS:
            return [self._prompt(r, r.level(name), r.level(name).text, name) for r in records]
        if name == "evidence":
            return [self._prompt(r, r.x0, _with_dialogue(r, _dialogue(r.x0)), name) for r in records]
        if name == "no_context":
            return [Prompt(_with_dialogue(record, "")) for record in records]
        if name == "altered":
            return self._altered(records)
        return [self._chosen(name, record, *self._source(record)) for record in records]

    def _prompt(self, record: StateRecord, rendered: Rendered, text: str, name: str) -> Prompt:
        """A prompt that shows what x0 does. Its dialogue stands where that of `rendered` does."""
        places = self._places(record, rendered, record.pictures, name)
        return Prompt(text, record.evidence_found, record.images_found, pictures=places)

    def _places(
        self, record: StateRecord, rendered: Rendered, pictures: Sequence[Picture], name: str
    ) -> tuple[Place, ...]:
        return places_of(rendered, pictures, record.question_id, name) if self.pixels else ()

    def _source(self, record: StateRecord) -> tuple[Dialogue, Question]:
        question = self._questions.get(record.question_id)
        if self.corpus is None or question is None or question.dialogue_id != record.dialogue_id:
            raise DataError("the question is not in the dialogue files", record=record.question_id)
        return self.corpus.dialogue(record.dialogue_id), question

    def _chosen(self, name: str, record: StateRecord, dialogue: Dialogue, question: Question) -> Prompt:
        """x0's prompt with other turns: oracle and the conditions named so keep the strategy."""
        source = name.removesuffix("_strategy")
        if name == "oracle":
            positions = _gold(dialogue, question)
            if not positions:
                return Prompt("", left_out="no gold evidence")
        elif source == "rag":
            assert self.contexts is not None
            positions = self.contexts.rag(dialogue, question, positions_of(record, dialogue))
        else:
            assert self.contexts is not None
            positions = self.contexts.full(dialogue)
        segments, abstention = segments_of(dialogue, positions), abstention_of(record.x0)
        state = FactualState(dialogue, blind(question), segments, Strategy(()), abstention)
        rendered = render(state)
        if rendered.text[: rendered.dialogue[0]] != record.x0.text[: record.x0.dialogue[0]]:
            message = "its states were built with other prompt templates, so conditions would not be comparable"
            raise DataError(f"{message}; build them again", record=record.question_id)
        ids, images = {turn.id for turn in state.turns}, {image.index for turn in state.turns for image in turn.images}
        return Prompt(
            _with_dialogue(record, _dialogue(rendered), strategy=name == "oracle" or source != name),
            tuple(turn_id for turn_id in record.evidence if turn_id in ids),
            tuple(index for index in record.images if index in images),
            len(dialogue.turns) - len(positions) if source == "full_context" else 0,
            pictures=self._places(record, rendered, pictures_of(state.turns), name),
        )

    def _altered(self, records: Sequence[StateRecord]) -> list[Prompt]:
        assert self.llm is not None
        marked = [attentional_of(record, *self._source(record)) for record in records]
        # every turn marked is no turn singled out: the summary is one of x0
        known = told(self.llm, [state.factual.question for state in marked], self.kind)
        unguided = [
            AttentionalState(replace(state.factual, told=question), _runs(state.factual))
            for state, question in zip(marked, known, strict=True)
        ]
        summaries = [state.summary for state in summarise(self.llm, unguided)]
        altered = [render(ReflectiveState(state, summary)) for state, summary in zip(marked, summaries, strict=True)]
        return [
            self._prompt(record, rendered, rendered.text, "altered")
            for record, rendered in zip(records, altered, strict=True)
        ]


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
    end = x0.dialogue[1] if strategy else strategy_end(x0)
    return x0.text[: x0.dialogue[0]] + dialogue + x0.text[end:]


def _runs(state: FactualState) -> tuple[Span, ...]:
    """Every run of turns as one block."""
    blocks: list[Span] = []
    for index, run in enumerate(state.runs):
        if blocks and state.runs[blocks[-1][0]] == run:
            blocks[-1] = (blocks[-1][0], index)
        else:
            blocks.append((index, index))
    return tuple(blocks)


def most_frequent(records: Iterable[StateRecord]) -> dict[str, str]:
    """The most frequent gold answer by format (ties: the one met first), as written between answer tags."""
    seen: dict[str, Counter[str]] = {}
    for record in records:
        if record.answers:
            multi = record.format == "multi"
            answer = f"[{','.join(sorted(record.answers))}]" if multi else record.answers[0]
            seen.setdefault(record.format, Counter())[answer] += 1
    return {format: counter.most_common(1)[0][0] for format, counter in seen.items()}


def control(name: str, record: StateRecord, frequent: Mapping[str, str]) -> Prompt:
    """The fixed answer of a control.

    always_a has none for direct questions, most_frequent none for formats without a training answer: they are left
    out. abstain says that the dialogue does not tell, by the option that says so, else by choosing no option.

    Args:
        frequent: what `most_frequent` says of the training split.
    """
    multi = record.format == "multi"
    if name == "always_a":
        if record.format == "direct":
            return Prompt("", left_out="no options")
        answer = "[A]" if multi else "A"
    elif name == "most_frequent":
        if record.format not in frequent:
            return Prompt("", left_out="no training answer of its format")
        answer = frequent[record.format]
    elif record.format == "direct":
        answer = NO_INFORMATION
    else:
        options = zip(LETTERS, record.options, strict=False)
        letter = next((letter for letter, option in options if declines(option)), "")
        answer = f"[{letter}]" if multi or not letter else letter
    return Prompt("", reply=f"<answer>{answer}</answer><explanation></explanation>")


class Questions(NamedTuple):
    """The questions of a split.

    Attributes:
        records: without the rendered levels, which are large.
        prompts: by condition, one for each record.
    """

    records: list[StateRecord]
    prompts: Mapping[str, list[Prompt]]

    def shown(self) -> Iterator[tuple[str, list[str]]]:
        """Question ids and the image files that their prompts show, condition by condition."""
        for prompts in self.prompts.values():
            for record, prompt in zip(self.records, prompts, strict=True):
                yield record.question_id, [place.path for place in prompt.pictures]


def load_questions(
    states: States, split: str, names: Sequence[str], prompter: Prompter | None = None, limit: int | None = None
) -> Questions:
    """The questions of a split, and what each condition shows of them.

    Args:
        states: folder, or dataset.
        names: conditions; none: no prompts are made.
        prompter: makes the prompts; None: one that knows the states alone.
        limit: at most this many questions, spread evenly over the split.

    Raises:
        FormatError: not a states folder.
        DataError: no questions in the split, a question whose options and answers do not fit its format, a question
            id twice, gold evidence that train and test share, or dialogue files that are not those of the states.
    """
    prompter = prompter or Prompter()
    counts = check_split(states)
    total = counts[split]
    if not total:
        where = states if isinstance(states, str | Path) else None
        raise DataError(f"no states of split {split!r} (there are: {', '.join(sorted(counts)) or 'none'})", where)
    chosen = spread(total, limit)
    asking = [name for name in names if CONDITIONS[name].asks]
    records: list[StateRecord] = []
    prompts: dict[str, list[Prompt]] = {name: [] for name in names}
    taken = (record for number, record in enumerate(iterate_states(states, split)) if number in chosen)
    # dialogue by dialogue, so that no more than one has its texts in memory
    for _, group in groupby(taken, key=lambda record: record.dialogue_id):
        part = list(group)
        for name in asking:
            prompts[name] += prompter.prompts(name, part)
        records += [replace(record, x0=ABSENT, x1=ABSENT, x2=ABSENT) for record in part]
    controls = [name for name in names if name not in asking]
    frequent = most_frequent(iterate_states(states, "train")) if controls and counts["train"] else {}
    for name in controls:
        prompts[name] = [control(name, record, frequent) for record in records]
    return Questions(records, prompts)


def spread(total: int, limit: int | None) -> Container[int]:
    """Numbers of `limit` questions of `total`, evenly apart; all where there is no limit, or there are no more."""
    return range(total) if limit is None or limit >= total else {n * total // limit for n in range(limit)}
