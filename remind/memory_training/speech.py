"""How a policy is asked and replies: pico in its commands, others in the chats and the JSON of `remind run-memory`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

from remind.core.errors import ModelError
from remind.llm.request import Request
from remind.memory.membuilder import MemBuilderSystem
from remind.memory_training.episodes import Episode, Prompt
from remind.memory_training.pico import END, LISTED, REPLY, SHOWN
from remind.models.chat import chat_ids, end_token_id, tokenize


class Shown(Protocol):
    """What a role is shown, and its replies in both languages."""

    def prompt(self) -> str:
        """As words of pico's vocabulary."""

    def request(self) -> Request:
        """As a chat."""

    def as_json(self, reply: str) -> str:
        """Commands as JSON."""

    def from_json(self, text: str) -> str:
        """JSON as what a rollout takes."""


def word_count(text: str) -> int:
    """Tokens of pico."""
    return len(text.split())


class Commands:
    """The language of pico.

    Attributes:
        limits: entries that a role is shown: those of MemBuilder and the booster, the utilizer.
        room: tokens of a reply, at most.
    """

    limits, room = (SHOWN, LISTED), REPLY

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def prompt(self, shown: Shown) -> list[int]:
        """Token ids that are completed by a reply."""
        return self._ids(shown.prompt())

    def target(self, shown: Shown, reply: str) -> list[int]:
        """Token ids of an expert's reply, which is given in commands."""
        return self._ids(reply)

    def reply(self, shown: Shown, ids: Sequence[int]) -> str:
        """What a policy replied, as rollouts take it."""
        return str(self.tokenizer.decode(ids))

    def length(self, text: str) -> int:
        """Of a text in tokens of the policy."""
        return word_count(text)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids


class Chat(Commands):
    """The language of instruction models: the requests and replies of `remind run-memory`, in their chat template.

    As there, a role of MemBuilder is shown 20 entries; booster and utilizer are shown 99, of 200.
    """

    limits, room = (MemBuilderSystem.shown, 99), 1024

    def prompt(self, shown: Shown) -> list[int]:
        return chat_ids(self.tokenizer, shown.request().chat)

    def target(self, shown: Shown, reply: str) -> list[int]:
        return [*tokenize(self.tokenizer, shown.as_json(reply)).ids, end_token_id(self.tokenizer)]

    def reply(self, shown: Shown, ids: Sequence[int]) -> str:
        return shown.from_json(self.tokenizer.decode(ids, skip_special_tokens=True))

    def length(self, text: str) -> int:
        return len(tokenize(self.tokenizer, text).ids)


def speech_of(tokenizer: Any) -> Commands:
    """The language of a policy, by its tokenizer. ModelError where it is not pico's and has no chat template."""
    if {END, "<ops>"} <= tokenizer.get_vocab().keys():
        return Commands(tokenizer)
    if not tokenizer.chat_template:
        name = tokenizer.name_or_path or "the model"
        raise ModelError(f"{name}: its tokenizer has no chat template; name an instruction-tuned model")
    return Chat(tokenizer)


def spoken(inner: Generator[list[Any], list[str], Any], speech: Commands) -> Episode:
    """A rollout that yields what roles are shown and takes replies as text, in tokens."""
    asked = next(inner)
    while True:
        replies = yield [Prompt(one.role, speech.prompt(one)) for one in asked]
        try:
            asked = inner.send([speech.reply(one, ids) for one, ids in zip(asked, replies, strict=True)])
        except StopIteration as end:
            return end.value
