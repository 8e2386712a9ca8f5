"""What memory systems ask of chat models: counted by system, dialogue and stage, answered once, paid for once.

Our own systems are given a chat model (`Meter.chat`), foreign packages an address on this machine in place of OpenAI's
(`Meter.url`). Both ways requests go to the same endpoints, through the same cache of replies.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from remind.core import optional
from remind.core.errors import ConfigError, DataError, RemindError
from remind.core.files import write_text
from remind.llm import bodies
from remind.llm.client import Chats
from remind.llm.endpoints import LLMConfig
from remind.llm.ledger import Ledger, table
from remind.llm.request import ChatModel, Message, Reply, Request, Stage

#: Tokens for a reply where a package names no limit.
ROOM = 1024
#: Ids that packages make up at random (UUID version 4).
_RANDOM = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


class Meter:
    """The chat models of a run, and what they are asked.

    `with Meter(...) as meter:` ends what serves packages. Threads may share its models and addresses.

    Args:
        llm: endpoints by stage, and the cache of replies.
        costs: JSON lines, a record a call, which a run that is resumed goes on with; None: those of this process alone.

    Attributes:
        ledger: what was asked and what it cost, by earlier processes, too.

    Raises:
        DataError: the file of costs cannot be used.
    """

    def __init__(self, llm: LLMConfig, costs: str | Path | None = None) -> None:
        self.llm, self.ledger, self._chats = llm, Ledger(), Chats(llm)
        self._costs = None if costs is None else Path(costs)
        #: Models, what they are asked for, and whether they run in this process, by the number in an address.
        self._served: list[tuple[ChatModel, Stage, bool]] = []
        self._server: Any = None
        if self._costs is not None and self._costs.is_file():
            try:
                # the last line ends where a process was killed
                lines = self._costs.read_text("utf-8").rpartition("\n")[0].splitlines()
                self.ledger.merge({**json.loads(line), "cached": True} for line in lines)
                write_text(self._costs, "".join(f"{line}\n" for line in lines))
            except ValueError as error:
                raise DataError(f"is not a record of costs: {error}", self._costs) from None

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join()
            self._server = None

    def chat(self, system: str, dialogue: str, stage: Stage) -> ChatModel | None:
        """The chat model of a stage, counted under system and dialogue; None: no endpoint is named for it.

        Raises:
            ConfigError, ModelError, DataError: as `Chats.stage`.
        """
        model = self._chats.stage(_asked(stage))
        place = {"system": system, "dialogue": dialogue, "stage": stage}
        return None if model is None else _Counted(self, model, place)

    def url(self, system: str, dialogue: str, stage: Stage) -> str:
        """The address that a client of OpenAI's protocol takes as base_url. It serves chat/completions, whatever key
        and model a client names.

        Raises:
            ConfigError: no endpoint is named for the stage.
            ModelError: starlette or uvicorn is missing; or as `Chats.stage`.
        """
        model, endpoint = self.chat(system, dialogue, stage), self.llm.endpoint(_asked(stage))
        if model is None or endpoint is None:
            raise ConfigError(f"{system} needs a chat model ({stage}); no endpoint is named")
        if self._server is None:
            uvicorn = optional("uvicorn", system)
            config = uvicorn.Config(self._app(), port=0, log_config=None, log_level="critical", lifespan="off")
            listening = config.bind_socket()
            # clients may come before it is ready
            listening.listen()
            self._port, self._server = listening.getsockname()[1], uvicorn.Server(config)
            self._thread = threading.Thread(target=self._server.run, args=([listening],), name="meter", daemon=True)
            self._thread.start()
        self._served.append((model, stage, endpoint.local))
        return f"http://127.0.0.1:{self._port}/{len(self._served) - 1}/v1"

    def table(self) -> str:
        """What was asked and what it cost as lines of text, one per stage."""
        lines, dry = table(self.ledger.summary()), self._chats.dry
        return lines if dry is None else f"{lines}\na dry run: nothing was asked; USD at most; prompts: {dry.path}"

    def count(self) -> None:
        """Take what the chat models have counted into ledger and file."""
        rows = self._chats.ledger.take()
        self.ledger.merge(rows)
        if self._costs is not None and rows:
            with self._costs.open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(row)}\n" for row in rows))

    def _app(self) -> Any:
        applications, concurrency, responses, routing = (
            import_module(f"starlette.{name}") for name in ("applications", "concurrency", "responses", "routing")
        )

        async def chat(received: Any) -> Any:
            # a page in a browser can reach this port, but neither by this name nor with this type
            heads = [received.headers.get(name) for name in ("host", "content-type")]
            if heads != [f"127.0.0.1:{self._port}", "application/json"]:
                return responses.Response(status_code=403)
            model, stage, local = self._served[received.path_params["place"]]
            status, said = await concurrency.run_in_threadpool(_answer, model, stage, local, await received.json())
            return responses.Response(said, status, media_type="application/json")

        place = "/{place:int}/v1/chat/completions"
        return applications.Starlette(routes=[routing.Route(place, chat, methods=["POST"])])


def _answer(model: ChatModel, stage: Stage, local: bool, body: Mapping[str, Any]) -> tuple[int, str]:
    """Status and JSON of the reply to a package's request.

    Requests that differ in ids made up at random are the same to the cache: a model is shown ids by their order.
    """
    text = json.dumps(body)
    found = enumerate(dict.fromkeys(_RANDOM.findall(text)))
    ids = {one: f"{number:08x}-0000-4000-8000-000000000000" for number, one in found}
    body = json.loads(_RANDOM.sub(lambda match: ids[match[0]], text))
    room = body.get("max_completion_tokens") or body.get("max_tokens") or ROOM
    request = Request((), stage, max_tokens=room, body=body)
    if local := local and not body.get("tools"):
        said = tuple(Message(one["role"], one["content"]) for one in body["messages"])
        request = replace(request, messages=said, body=None)
    try:
        (reply,) = model.complete([request])
    except RemindError as error:
        return 502, json.dumps(bodies.error(str(error), "server_error"))
    if reply.failure is not None:
        return 502 if reply.failure == "server" else 400, json.dumps(bodies.error(reply.message))
    whole = reply.text
    if local:
        told, counts = {"role": "assistant", "content": whole}, (reply.prompt_tokens, reply.completion_tokens)
        whole = json.dumps(bodies.completion(model.name, told, "stop" if reply.finished else "length", *counts))
    for own, shown in ids.items():
        whole = whole.replace(shown, own)
    return 200, whole


def _asked(stage: Stage) -> Stage:
    """A stage that has an endpoint of its own: reading is done by that of answers."""
    return "answer" if stage in ("read", "note") else stage


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
        try:
            return self._model.complete([replace(one, **self._place) for one in requests], on_reply)
        finally:
            self._meter.count()
