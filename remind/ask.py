"""A question of one's own about one dialogue, answered as a trained model is used: from x0 alone.

`remind answer --model FOLDER --input chat.jsonl --ask "..."`, and `remind.answer(model, dialogue, question)`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from remind.core.errors import ConfigError, DataError, ModelError, shown
from remind.evaluation.config import EvaluateConfig
from remind.llm.endpoints import LLMConfig
from remind.perception import PerceptionConfig
from sae.ranges import PositiveInt, check_ranges

if TYPE_CHECKING:
    from remind.data.dialogue import Dialogue, Question, Turn


#: Characters from which words are taken for a quote where they are part of others.
_LONG = 12
#: What a quote may begin or end with besides.
_EDGES = " \t.,;:!?…。！？、\"'“”‘’«»()[]-–—*•"


@dataclass
class AnswerConfig:
    """Answer questions of your own about a dialogue from x0, which needs no SAE and no summary."""

    model: str
    """Model that answers: nano, smollm2, or a Hugging Face folder or id, such as an exported checkpoint. With answers
    server: a name."""
    input: str
    """File or folder with the dialogue."""
    ask: list[str] = field(default_factory=list)
    """The questions: --ask "Who …?" --ask "When …?". Without any they are read from standard input, a line each."""
    dialogue: str | None = None
    """Id of the dialogue, if the input has several."""
    format: str | None = None
    """Format of the input, or a mapping file (.yaml) for other JSON formats; None: recognised from the content."""
    answers: Literal["local", "server"] = "local"
    """local: the model answers here. server: the endpoint llm.answer does."""
    max_new_tokens: PositiveInt = 512
    """Room for answer and explanation."""
    images: Literal["captions", "pixels"] | None = None
    """How prompts show images, as in `remind evaluate`; None: as the model was trained."""
    image_tokens: PositiveInt | None = None
    """At most about so many tokens for an image shown as pixels. None: as the model was trained, else 256."""
    image_root: str | None = None
    """Folder that the image files must lie in, links followed."""
    perception: PerceptionConfig = field(default_factory=PerceptionConfig)
    """Segments, cues, retrieval (Section 4.2), as in build-states."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Chat models that write cues and strategies, and the endpoint answer; without, offline rules write."""
    cache: str | None = "~/.cache/remind"
    """Folder for indexes of dialogues, by what they are made from; safe to delete."""
    device: str = "cpu"
    """Where the model runs, e.g. cpu or cuda:0."""
    dtype: str = "float32"
    """Precision of the model: float32, bfloat16, float16 or auto."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


@dataclass(frozen=True)
class Answer:
    """An answer, and what it was given from.

    Attributes:
        text: of the answer; for a question with options its letters and words, as the model wrote them.
        letters: of the options it names.
        explanation: its lines of evidence, as the model wrote them.
        turns: ids of the turns that x0 shows, in the order of the dialogue.
        cited: ids of those of them that the explanation quotes, or whose images it names.
        prompt: x0.
        output: all that the model wrote.
    """

    text: str
    letters: frozenset[str]
    explanation: tuple[str, ...]
    turns: tuple[str, ...]
    cited: tuple[str, ...]
    prompt: str
    output: str


class Answering:
    """A model that is asked about dialogues; a dialogue that is asked about again is not read again.

    Args:
        model: in place of the one that cfg names: a Hugging Face model, or an `Answerer`.
        processing_class: tokenizer or processor of a Hugging Face model.

    Raises:
        ModelError: a model that cannot be loaded, or does not generate. ConfigError: no endpoint to ask.
    """

    def __init__(self, cfg: AnswerConfig, model: Any = None, processing_class: Any = None) -> None:
        from pathlib import Path

        from remind.build.config import BuildStatesConfig
        from remind.build.states import with_cap
        from remind.evaluation.answerers import LocalAnswers, answerer_of
        from remind.evaluation.run import Models, with_images
        from remind.evaluation.team import Team
        from remind.perception import Perception
        from remind.perception.auxiliary import open_llm

        names = ("model", "answers", "max_new_tokens", "images", "image_tokens", "image_root", "llm", "device", "dtype")
        asked = with_images(EvaluateConfig("", out="", batch_size=1, **{name: getattr(cfg, name) for name in names}))
        models = Models(asked, Team(), answerer=answerer_of(model, processing_class, asked))
        self.answerer, perception = models.answerer, cfg.perception
        if isinstance(self.answerer, LocalAnswers):
            build = BuildStatesConfig("", None, levels=("x0",), perception=perception)
            perception = with_cap(build, self.answerer.backbone).perception
        cache = None if cfg.cache is None else Path(cfg.cache).expanduser() / "index"
        self._perception = Perception(perception, models.encoder, open_llm(cfg.llm, models.encoder), cache)

    def answer(self, dialogue: Dialogue, question: str | Question) -> Answer:
        """See `answer`."""
        from remind.data.dialogue import Question
        from remind.evaluation.parse import parse_answer
        from remind.models.generate import Generation
        from remind.models.images import content_of, places_of
        from remind.states.pyramid import line_of, one_line, render
        from remind.states.records import pictures_of

        if isinstance(question, str):
            question = Question(f"{dialogue.id}-ask1", dialogue.id, question.strip())
        [state] = self._perception.perceive(dialogue, [question], abstention=True)
        rendered, found = render(state), list[Generation]()
        pictures = self.answerer.pictures
        places = () if pictures is None else places_of(rendered, pictures_of(state.turns), question.id, "x0")
        content = content_of(rendered.text, places)
        self.answerer.answer([content], [question.id], [False], lambda _, output: found.append(output))
        if found[0].failure:
            raise ModelError(f"{self.answerer.about['name']}: {found[0].message or found[0].failure}")
        parsed = parse_answer(found[0].text, question.format, question.options, question.visual)
        lines = [line for one in parsed.evidence if (line := one.casefold().strip(_EDGES))]

        def cites(turn: Turn) -> bool:
            said, text = (words.casefold().strip(_EDGES) for words in (line_of(turn), one_line(turn.text)))
            return any(image.index in parsed.images for image in turn.images) or any(
                # few words are a part of much
                line in (said, text)
                or (line in said and len(line) >= _LONG)
                or line.endswith(said)
                or (text in line and len(text) >= _LONG)
                for line in lines
                if text
            )

        return Answer(
            parsed.answer,
            parsed.letters,
            parsed.evidence,
            tuple(turn.id for turn in state.turns),
            tuple(turn.id for turn in state.turns if cites(turn)),
            rendered.text,
            found[0].text,
        )


def answer(
    model: Any, dialogue: Dialogue, question: str | Question, processing_class: Any = None, **settings: Any
) -> Answer:
    """Answer a question about a dialogue from x0 (Section 4.2), as a model is used after alignment.

    ```python
    found = remind.answer("runs/model", remind.read("chat.jsonl").dialogues[0], "What does Ana drink?")
    ```

    Args:
        model: a name, folder (with adapters or without) or hub id; a Hugging Face model; any `Answerer`.
        question: its words, or a `Question`, which may have options. Its gold, if any, is not looked at.
        processing_class: tokenizer or processor of a Hugging Face model.
        settings: fields of `AnswerConfig`. To ask more than once, keep an `Answering`.

    Raises:
        ModelError: a model that cannot be loaded, or fails. DataError: a question without text.
        ConfigError: an unknown setting.
    """
    known = set(AnswerConfig.__dataclass_fields__) - {"model", "input", "ask", "dialogue", "format"}
    if unknown := sorted(set(settings) - known):
        raise ConfigError(f"answer has no setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    named = isinstance(model, str) or hasattr(model, "__fspath__")
    cfg = AnswerConfig(str(model) if named else "none", "", **settings)
    return Answering(cfg, None if named else model, processing_class).answer(dialogue, question)


def answer_and_show(cfg: AnswerConfig) -> None:
    """Answer questions, each with the turns that it was given and those that it cites.

    Raises:
        DataError: several dialogues and none chosen, or none of that id.
    """
    from remind.data.readers import read

    corpus = read(cfg.input, cfg.format)
    if cfg.dialogue is None and len(corpus.dialogues) > 1:
        ids = ", ".join(shown(one.id) for one in corpus.dialogues[:10])
        raise DataError(f"{len(corpus.dialogues)} dialogues; choose one with --dialogue: {ids}", cfg.input)
    dialogue = corpus.dialogues[0] if cfg.dialogue is None else corpus.dialogue(cfg.dialogue)
    model = Answering(cfg)
    for text in cfg.ask or _typed():
        print(shown_answer(model.answer(dialogue, text), dialogue, text), flush=True)


def _typed() -> Iterator[str]:
    """Lines of standard input that say something."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def shown_answer(found: Answer, dialogue: Dialogue, question: str) -> str:
    """An answer as text."""
    from remind.states.pyramid import turn_text

    lines = [f"question: {question.strip()}", f"x0 shows {len(found.turns)} of {len(dialogue.turns)} turns:"]
    for name in found.turns:
        turn = dialogue.turn(name)
        when = turn.time or dialogue.session_of[name].time
        mark = "*" if name in found.cited else " "
        lines.append(f"{mark} {name}{f' ({when})' if when else ''}  " + turn_text(turn).replace("\n", " | "))
    lines.append(f"answer: {found.text}")
    if found.explanation:
        lines += ["explanation:", *(f"  {line}" for line in found.explanation)]
    cited = ", ".join(found.cited) or "no turn that x0 shows"
    return "\n".join([*lines, f"cites (*): {cited}"])
