"""What memory systems take and give: a system opens banks, a bank stores sessions and retrieves memories for a query.

A system is one file with a `System`, its options, and a `Bank`, what is stored of a session and how it is ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from remind.core.errors import ConfigError
from remind.data.dialogue import Format, Question
from remind.states import prompts
from remind.states.pyramid import LETTERS, one_line
from remind.text.thoughts import without_thoughts
from sae.ranges import check_ranges

if TYPE_CHECKING:
    from remind.llm.request import ChatModel, Reply, Stage
    from remind.models.encoder import SentenceEncoder

TEXT: Mapping[str, Any] = {"type": "string"}
TEXTS: Mapping[str, Any] = {"type": "array", "items": TEXT}
#: Stages of chat models that belong to a question; the others belong to ingest.
QUESTION_STAGES = ("strategy", "time_range", "read", "profile", "answer")


@dataclass(frozen=True, slots=True)
class Memory:
    """A retrieved memory, as shown to a reader.

    Attributes:
        id: unique in its bank.
        text: what the reader sees of it.
        kind: "turn", "round", "session", "fact", "topic", ...
        sources: ids of the turns it was made from, in the order of the dialogue; None if the system does not know.
        time: of the first of them, as in `Turn`.
        score: it was ranked by; higher is better, the scale depends on the system.
        tokens: of the text, in the vocabulary of the run's encoder.
        position: of its first source among the turns of the dialogue; None if the system does not know.
    """

    id: str
    text: str
    kind: str
    sources: tuple[str, ...] | None
    time: str | None
    score: float
    tokens: int
    position: int | None = None

    @property
    def dated(self) -> str:
        """The text behind its time."""
        return f"[{one_line(self.time)}] {self.text}" if self.time else self.text


@dataclass(frozen=True, slots=True)
class Draft:
    """A memory to be stored.

    Attributes:
        kind: as in `Memory`.
        sources: ids of stored turns; None: cannot be told.
        text: None: the turns' own words, which are not stored twice.
        keys: texts it is found by. None as a key: the memory's own text.
        time: None: that of the first source.
        note: the system's own, as JSON.
    """

    kind: str
    sources: tuple[str, ...] | None
    text: str | None = None
    keys: tuple[str | None, ...] = (None,)
    time: str | None = None
    note: Any = None


@dataclass(frozen=True, slots=True)
class Query:
    """A question as a system sees it, without answers, evidence and split; of its dimension it tells whether images are
    its evidence."""

    text: str
    id: str = ""
    time: str | None = None
    format: Format = "direct"
    options: tuple[str, ...] = ()
    visual: bool = False

    @staticmethod
    def of(question: Question) -> Query:
        """The question without its gold."""
        # LongMemEval's ids tell which questions have no answer
        name = question.id.removesuffix("_abs")
        return Query(question.text, name, question.time, question.format, question.options, question.visual)

    def question(self, dialogue: str = "") -> Question:
        """As a question of the dialogue without gold."""
        return Question(self.id, dialogue, self.text, self.format, self.options, time=self.time)

    @property
    def asked(self) -> str:
        """The question with its time and options, a line each."""
        lines = [f"Asked on: {one_line(self.time)}"] if self.time else []
        options = (f"{letter}. {one_line(text)}" for letter, text in zip(LETTERS, self.options, strict=False))
        return "\n".join([*lines, one_line(self.text), *options])


@dataclass(frozen=True)
class Retrieval:
    """What a bank returns for a query.

    Attributes:
        query: the query.
        memories: best first.
        trace: details for inspection, as JSON; depends on the system.
    """

    query: Query
    memories: tuple[Memory, ...]
    trace: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Services:
    """What all systems of a run share.

    Attributes:
        encoder: turns texts into vectors and counts tokens.
        chat: the chat model for (system, dialogue, stage); None for stages without an endpoint.
        client: for (system, dialogue, stage) what a package's client of OpenAI's protocol takes for its HTTP client.
        max_failed: share of a bank's requests that may be lost before the dialogue is given up.
    """

    encoder: SentenceEncoder
    chat: Callable[[str, str, Stage], ChatModel | None] | None = None
    client: Callable[[str, str, Stage], Any] | None = None
    max_failed: float = 0.1


@dataclass(frozen=True)
class System:
    """Base of memory systems: a dataclass whose fields are the options. Its banks are of the class that says so:
    `class MyBank(Bank, of=MySystem)`.

    Attributes:
        name: as the user calls it.
        rules: where the authors' prompts are published, whose rules ours follow in other words.
        provenance: how exactly sources are known; None: they are not.
    """

    banks: ClassVar[Any]
    rules: ClassVar[str] = ""
    provenance: ClassVar[str | None] = "turn"
    name: str

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)

    @property
    def templates(self) -> tuple[str, ...]:
        """Names of its prompts."""
        return ()

    @property
    def not_as_published(self) -> tuple[str, ...]:
        """How it differs from the publication."""
        return ()

    def about(self) -> dict[str, Any]:
        """Options, package, hashes of prompts, and under `degraded` differences from the publication. Systems with
        equal values can open each other's banks."""
        hashes = {name: prompts.fingerprint(name) for name in self.templates}
        told = {"rules": self.rules, "provenance": self.provenance, "degraded": [*self.not_as_published]}
        return {"system": type(self).__name__, **asdict(self), "package": None, "prompt_hashes": hashes, **told}

    def open(self, folder: str | Path, dialogue_id: str, services: Services) -> Any:
        """The bank of a dialogue in the folder, made if absent.

        Raises:
            DataError: the folder holds the bank of another dialogue, system or encoder, a damaged one, or other files.
            ConfigError: another process has it open.
        """
        return self.banks(folder, dialogue_id, self, services)


def words(reply: Reply) -> str:
    """A reply in prose, without the thought before it."""
    return without_thoughts(reply.text).strip()


def texts(value: Any) -> list[str]:
    """The strings of a list, each on one line and once."""
    lines = (one_line(item) for item in (value if isinstance(value, list) else []) if isinstance(item, str))
    return list(dict.fromkeys(line for line in lines if line))
