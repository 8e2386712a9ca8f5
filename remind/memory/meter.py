"""What memory systems ask of chat models: counted by system, dialogue and stage, answered once, paid for once.

Our own systems are given a chat model (`Meter.chat`), foreign packages an HTTP client that answers in place of OpenAI's
servers (`Meter.client`). Both ways requests go to the same endpoints, through the same cache of replies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError, DataError, RemindError
from remind.core.files import write_text
from remind.core.progress import ProgressBar
from remind.llm.client import Chats
from remind.llm.endpoints import LLMConfig
from remind.llm.ledger import Ledger, table
from remind.llm.request import ChatModel, Reply, Request, Stage

#: Tokens for a reply where a package names no limit.
ROOM = 1024
#: Ids that packages make up at random (UUID version 4).
_RANDOM = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


class Meter:
    """The chat models of a run, and what they are asked. Threads may share its models and clients.

    Args:
        llm: endpoints by stage, and the cache of replies.
        own: the same of single systems, by name.
        costs: JSON lines, a record a call, which a run that is resumed goes on with; None: those of this process alone.

    Attributes:
        ledger: what was asked and what it cost, by earlier processes, too.

    Raises:
        DataError: the file of costs cannot be used.
    """

    def __init__(
        self, llm: LLMConfig, costs: str | Path | None = None, own: Mapping[str, LLMConfig] | None = None
    ) -> None:
        self.ledger, self._chats = Ledger(), {"": Chats(llm), **{name: Chats(one) for name, one in (own or {}).items()}}
        self._costs = None if costs is None else Path(costs)
        self._bar: ProgressBar | None = None
        self._replies = 0
        if self._costs is not None and self._costs.is_file():
            try:
                # the last line ends where a process was killed
                lines = self._costs.read_text("utf-8").rpartition("\n")[0].splitlines()
                self.ledger.merge({**json.loads(line), "cached": True} for line in lines)
                write_text(self._costs, "".join(f"{line}\n" for line in lines))
            except ValueError as error:
                raise DataError(f"is not a record of costs: {error}", self._costs) from None

    @contextmanager
    def bar(self, description: str, total: int) -> Iterator[ProgressBar]:
        """A progress bar that also counts the replies of chat models, which come while no step ends."""
        with ProgressBar(description, total) as self._bar:
            self._replies = 0
            try:
                yield self._bar
            finally:
                self._bar = None

    def replied(self) -> None:
        """Count a reply on the bar."""
        self._replies += 1
        if self._bar is not None:
            self._bar.step(0, f"{self._replies} request{'s' * (self._replies > 1)}")

    def chat(self, system: str, dialogue: str, stage: Stage) -> ChatModel | None:
        """The chat model of a stage, counted under system and dialogue; None: no endpoint is named for it.

        Raises:
            ConfigError, ModelError, DataError: as `Chats.stage`.
        """
        # reading is done by the endpoint of answers
        model = (self._chats.get(system) or self._chats[""]).stage("answer" if stage == "read" else stage)
        place = {"system": system, "dialogue": dialogue, "stage": stage}
        return None if model is None else _Counted(self, model, place)

    def client(self, system: str, dialogue: str, stage: Stage) -> Any:
        """What clients of OpenAI's protocol take as their HTTP client: it connects to nothing, and answers requests for
        chat completions by the chat model of a stage, whatever address, key and model they name.

        Raises:
            ConfigError: no endpoint is named for the stage.
            ModelError: as `Chats.stage`.
        """
        if (model := self.chat(system, dialogue, stage)) is None:
            raise ConfigError(f"{system} needs a chat model ({stage}); name one: --llm.default.base_url URL")
        import openai

        # the library that this version of openai sends by
        http = import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])

        def answered(request: Any) -> Any:
            status, said = _answer(model, stage, json.loads(request.content))
            return http.Response(status, headers={"content-type": "application/json"}, content=said.encode())

        return openai.DefaultHttpxClient(transport=http.MockTransport(answered), trust_env=False)

    def table(self) -> str:
        """What was asked and what it cost as lines of text, one per stage."""
        lines, dry = table(self.ledger.summary()), self._chats[""].dry
        return lines if dry is None else f"{lines}\na dry run: nothing was asked; USD at most; prompts: {dry.path}"

    def count(self) -> None:
        """Take what the chat models have counted into ledger and file."""
        rows = [row for chats in self._chats.values() for row in chats.ledger.take()]
        self.ledger.merge(rows)
        if self._costs is not None and rows:
            with self._costs.open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(row)}\n" for row in rows))


def _answer(model: ChatModel, stage: Stage, body: Mapping[str, Any]) -> tuple[int, str]:
    """Status and JSON of the reply to a package's request.

    Requests that differ in ids made up at random are the same to the cache: a model is shown ids by their order.
    """
    text = json.dumps(body)
    found = enumerate(dict.fromkeys(_RANDOM.findall(text)))
    ids = {one: f"{number:08x}-0000-4000-8000-000000000000" for number, one in found}
    body = json.loads(_RANDOM.sub(lambda match: ids[match[0]], text))
    room = body.get("max_completion_tokens") or body.get("max_tokens") or ROOM
    try:
        (reply,) = model.complete([Request((), stage, max_tokens=room, body=body)])
    except RemindError as error:
        return 502, json.dumps({"error": {"message": str(error), "type": "server_error"}})
    if reply.failure is not None:
        return 502 if reply.failure == "server" else 400, json.dumps({"error": {"message": reply.message}})
    whole = reply.text
    for own, shown in ids.items():
        whole = whole.replace(shown, own)
    return 200, whole


class _Counted(ChatModel):
    """A chat model whose requests are counted by a meter."""

    def __init__(self, meter: Meter, model: ChatModel, place: Mapping[str, Any]) -> None:
        self._meter, self._model, self._place = meter, model, place

    @property
    def name(self) -> str:
        """Identifies endpoint and model, without any key."""
        return self._model.name

    def complete(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        """As `ChatModel`; what stage a request names is of no matter."""

        def replied(place: int, reply: Reply) -> None:
            self._meter.replied()
            if on_reply is not None:
                on_reply(place, reply)

        try:
            return self._model.complete([replace(one, **self._place) for one in requests], replied)
        finally:
            self._meter.count()
