"""How a policy is asked and replies: pico in its commands, others in the chats and the JSON of `remind run-memory`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from remind.core.errors import ModelError
from remind.memory.membuilder import MemBuilderSystem
from remind.memory_training.episodes import Episode, Prompt
from remind.memory_training.pico import END, LISTED, REPLY, SHOWN
from remind.models.backbone import Backbone
from remind.models.chat import chat_ids, end_token_id, tokenize
from remind.models.generate import continue_rows, decoding


class Commands:
    """The language of pico.

    What a role is shown says it in words (`prompt`) and as a chat (`request`), and turns replies in commands into JSON
    (`as_json`) and back into what a rollout takes (`from_json`).

    Attributes:
        limits: entries that a role is shown: those of MemBuilder and the booster, the utilizer.
        room: tokens of a reply, at most.
    """

    limits, room = (SHOWN, LISTED), REPLY

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def prompt(self, shown: Any) -> list[int]:
        """Token ids that are completed by a reply."""
        return list(self.tokenizer(shown.prompt())["input_ids"])

    def target(self, shown: Any, reply: str) -> list[int]:
        """Token ids of an expert's reply, which is given in commands."""
        return list(self.tokenizer(reply)["input_ids"])

    def reply(self, shown: Any, ids: Sequence[int]) -> str:
        """What a policy replied, as rollouts take it."""
        return str(self.tokenizer.decode(ids))

    def length(self, text: str) -> int:
        """Of a text in tokens of the policy."""
        return len(text.split())


class Chat(Commands):
    """The language of instruction models: the requests and replies of `remind run-memory`, in their chat template.

    As there, a role of MemBuilder is shown 20 entries; booster and utilizer are shown 99, of 200.
    """

    limits, room = (MemBuilderSystem.shown, 99), 1024

    def prompt(self, shown: Any) -> list[int]:
        return chat_ids(self.tokenizer, shown.request().chat)

    def target(self, shown: Any, reply: str) -> list[int]:
        return [*tokenize(self.tokenizer, shown.as_json(reply)).ids, end_token_id(self.tokenizer)]

    def reply(self, shown: Any, ids: Sequence[int]) -> str:
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


def sampling(policy: Backbone, room: int, temperature: float = 0.0) -> Any:
    """Settings of `complete`: of at most `room` tokens, the likeliest ones at temperature 0."""
    settings = decoding(policy, room, temperature)
    # the one that replies of the expert end with
    settings.eos_token_id = [end_token_id(policy.tokenizer)]
    return settings


def complete(model: Any, prompts: Sequence[Sequence[int]], settings: Any) -> list[list[int]]:
    """Token ids that a policy completes prompts with, the end token included where it came."""
    return [[*new, *settings.eos_token_id] if ended else new for new, ended in continue_rows(model, prompts, settings)]
