"""What systems that write with a chat model share: the model of a stage, prompts with fenced data, tolerant reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from remind.core.errors import ConfigError
from remind.llm.request import Reply, Request, code_for, fenced, from_template
from remind.memory.systems import System
from remind.states import prompts
from remind.states.pyramid import LETTERS, one_line
from remind.text.thoughts import without_thoughts

if TYPE_CHECKING:
    from remind.llm.request import Stage
    from remind.memory.base import Bank, Memory, Query

TEXT: Mapping[str, Any] = {"type": "string"}
TEXTS: Mapping[str, Any] = {"type": "array", "items": TEXT}


@dataclass(frozen=True)
class Written(System):
    """Base of the systems that a chat model writes for: what is common to `MemorySystem.about`. Options are fields.

    Attributes:
        templates: of the prompts.
        rules: where the authors' prompts are published, whose rules ours follow in other words.
        provenance: how exactly sources are known; None: they are not.
        not_as_published: how it differs from the publication.
    """

    templates: ClassVar[tuple[str, ...]]
    rules: ClassVar[str] = ""
    provenance: ClassVar[str | None] = "turn"
    not_as_published: ClassVar[tuple[str, ...]] = ()

    def about(self) -> dict[str, Any]:
        """As `MemorySystem.about`."""
        made_of = {name: prompts.fingerprint(name) for name in self.templates}
        about = {**super().about(), "package": None, "prompt_hashes": made_of, "provenance": self.provenance}
        return {**about, "rules": self.rules, "degraded": [*self.not_as_published]}


def send(bank: Bank, request: Request) -> Reply:
    """The reply of the model that the run names for the request's stage.

    Raises:
        ConfigError: it names none.
    """
    model = bank.chat(request.stage)
    if model is None:
        raise needs_endpoint(bank.system.name, request.stage)
    return model.complete([request])[0]


def needs_endpoint(system: str, stage: Stage) -> ConfigError:
    """The error for a run that names no model for what a system asks."""
    return ConfigError(f"{system} needs a chat model ({stage}); name one: --llm.default.base_url URL")


def ask(
    bank: Bank,
    lost: list[str],
    stage: Stage,
    template: str,
    data: Mapping[str, str],
    room: int,
    schema: Mapping[str, Any] | None = None,
    **values: Any,
) -> Reply:
    """Send a filled template (`filled`). Raises ConfigError where no model is named.

    Args:
        lost: gets a line on a reply that did not come or cannot be read.
    """
    reply = send(bank, filled(bank.dialogue_id, stage, template, data, room, schema, **values))
    if reply.failure is not None:
        lost.append(failed(template, reply))
    return reply


def filled(
    dialogue: str,
    stage: Stage,
    template: str,
    data: Mapping[str, str],
    room: int,
    schema: Mapping[str, Any] | None = None,
    **values: Any,
) -> Request:
    """The request of a filled template.

    Args:
        dialogue: id of the dialogue that its costs are added to.
        stage: what for.
        template: name of a template with the blocks system and user.
        data: what others wrote, by the name it has in the template; fenced there, "" where there is none.
        room: tokens of the reply.
        schema: of the reply, where it is to be JSON.
        values: the template's other values; none of them what others wrote.
    """
    code = code_for(data.values())
    shown = {name: fenced(name, text, code) if text else "" for name, text in data.items()}
    return from_template(stage, template, dialogue, schema, room, code=code, **shown, **values)


def failed(what: str, reply: Reply) -> str:
    """A line on a reply that did not come or cannot be read."""
    return f"{what}: {reply.failure}: {reply.message}"


def words(reply: Reply) -> str:
    """A reply in prose, without the thought before it."""
    return without_thoughts(reply.text).strip()


def mapping(reply: Reply) -> Mapping[str, Any]:
    """A reply's JSON object; an empty one where it is none."""
    return reply.value if isinstance(reply.value, Mapping) else {}


def texts(value: Any) -> list[str]:
    """The strings of a list, each on one line and once."""
    items = value if isinstance(value, list) else []
    lines = (one_line(item) for item in items if isinstance(item, str))
    return list(dict.fromkeys(line for line in lines if line))


def dated(memory: Memory) -> str:
    """A memory's text behind its time."""
    return f"[{one_line(memory.time)}] {memory.text}" if memory.time else memory.text


def asked(query: Query) -> str:
    """A question with its time and options, a line each."""
    lines = [f"Asked on: {one_line(query.time)}"] if query.time else []
    options = (f"{letter}. {one_line(text)}" for letter, text in zip(LETTERS, query.options, strict=False))
    return "\n".join([*lines, one_line(query.text), *options])
