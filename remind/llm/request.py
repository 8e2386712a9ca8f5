"""What is asked of a chat model and what comes back, the same for a server, a local model and a cached reply."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import isqrt
from typing import TYPE_CHECKING, Any, Literal, Protocol

from remind.core.files import sha256_file
from remind.states import prompts

if TYPE_CHECKING:
    from remind.models.chat import Content

#: What a request is made for; costs are counted by it. A stage that `LLMConfig` does not name is of a memory system;
#: these share an endpoint.
Stage = str
Role = Literal["system", "user", "assistant"]
#: too_long: no room in the model's context. server: no usable reply after all tries. refused: the server or the model
#: will not (wrong key, unknown model, bad request, filter). invalid: not what was asked for.
ReplyFailure = Literal["too_long", "server", "refused", "invalid"]
#: A JSON schema; None: the reply is free text.
Schema = Mapping[str, Any] | None
#: Texts of others by name.
Texts = Mapping[str, str] | None
#: A character that JSON spells in two halves, however often its backslash is escaped, or one half of it.
_HALVES = re.compile(r"(\\+ud[89ab][0-9a-f]{2}\\+ud[c-f][0-9a-f]{2})|\\+ud[89a-f][0-9a-f]{2}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat: its text, or its parts, of which an image is `{"type": "image", "image": path,
    "max_pixels": …}`, as qwen-vl-utils has it."""

    role: Role
    text: Content

    @property
    def key(self) -> Any:
        """What the message says, images by the hash of their files."""
        if isinstance(self.text, str):
            return self.text
        return [{**part, "image": sha256_file(part["image"])} if "image" in part else part for part in self.text]

    @property
    def sent(self) -> str | list[dict[str, Any]]:
        """The message as servers take it, images as JPEG in base64. Raises ImagePathError."""
        if isinstance(self.text, str):
            # a lone surrogate in a dialogue cannot be sent
            return self.text.encode("utf-8", "replace").decode()
        from remind.models.images import thumbnail

        return [
            {"type": "image_url", "image_url": {"url": thumbnail(part["image"], isqrt(part["max_pixels"]))}}
            if "image" in part
            else {"type": "text", "text": part["text"].encode("utf-8", "replace").decode()}
            for part in self.text
        ]


@dataclass(frozen=True)
class Request:
    """One call.

    Attributes:
        messages: the chat so far; the last is the user's.
        stage: what it is for.
        sample: question or dialogue id that its costs are added to. Not part of the cache key.
        prompt_id: name and hash of the template the text was made from. Not part of the cache key.
        max_tokens: room for the reply.
        temperature: 0: greedy.
        schema: JSON schema the reply must match; None: free text.
        body: a request of OpenAI's protocol that is sent as it is but for the endpoint's own fields, in place of
            messages; the reply's text is then the whole reply as JSON.
        system, dialogue: the memory system that asks, and of which dialogue. Not part of the cache key.
    """

    messages: tuple[Message, ...]
    stage: Stage
    sample: str = ""
    prompt_id: str = ""
    max_tokens: int = 512
    temperature: float = 0.0
    schema: Schema = None
    body: Mapping[str, Any] | None = None
    system: str = ""
    dialogue: str = ""

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The messages as servers take them."""
        return [{"role": message.role, "content": message.sent} for message in self.messages]


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        text: the model's words, `whole_characters`; "" on failure, but for an invalid reply, whose words are kept.
        value: the parsed JSON where a schema was given and met.
        prompt_tokens, completion_tokens: as the server counts them; 0 and 0 where it does not.
        finished: whether the model ended by itself.
        seconds: from the first try to the end, waiting for a free place not counted; of a cached reply, as then.
        calls: 1 where it was asked for at all, however often it was tried.
        cached: whether it was paid for before.
        key: of the request in the cache of replies.
        failure, message: why there is no usable reply, in a word and in a line without keys.
    """

    text: str
    value: Any = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finished: bool = True
    seconds: float = 0.0
    calls: int = 0
    cached: bool = False
    key: str = field(default="", compare=False)
    failure: ReplyFailure | None = None
    message: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("text", "message"):
            object.__setattr__(self, name, whole_characters(getattr(self, name)))


def completion(
    model: str, message: Mapping[str, Any], reason: str, prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    """A chat completion with one choice, as a server sends it."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": dict(message), "finish_reason": reason}],
        "usage": {**usage, "total_tokens": prompt_tokens + completion_tokens},
    }


def whole_characters(text: str) -> str:
    """A text with "?" for each half of a character (a lone surrogate), which JSON can spell and no file can hold."""
    return _HALVES.sub(lambda match: match[1] or "?", text.encode("utf-8", "replace").decode())


def folded(chat: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages of a request without a system's turn: what it says stands before what the user says first."""
    front = "\n\n".join(one["content"] for one in chat if one["role"] == "system")
    rest = [one for one in chat if one["role"] != "system"]
    if not front:
        return rest
    first = rest.pop(0) if rest and rest[0]["role"] == "user" else {"role": "user", "content": ""}
    said = first["content"]
    content = f"{front}\n\n{said}".rstrip() if isinstance(said, str) else [{"type": "text", "text": front}, *said]
    return [{**first, "content": content}, *rest]


def from_template(
    stage: Stage, template: str, sample: str, schema: Schema, max_tokens: int, data: Texts = None, /, **values: Any
) -> Request:
    """The request that a filled template makes: its system block, then its user block.

    Args:
        data: texts of others, `fenced` under their names with the `code` that the template tells.
    """
    if data is not None:
        values["code"] = code = code_for(data.values())
        values |= {name: fenced(name, text, code) if text else "" for name, text in data.items()}
    parts = prompts.blocks(template, **values)
    messages = (Message("system", parts["system"]), Message("user", parts["user"]))
    return Request(messages, stage, sample, prompts.prompt_id(template), max_tokens, schema=schema)


#: Called with the place of each request and its reply, as it comes.
Put = Callable[[int, Reply], None]


class ChatModel(Protocol):
    """A model that chats: behind a server, on this machine, or made up in a test."""

    @property
    def name(self) -> str:
        """Identifies endpoint and model, without any key."""
        ...

    def complete(self, requests: Sequence[Request], on_reply: Put | None = None) -> list[Reply]:
        """A reply for each request, in order; failures are replies, nothing is raised for a single request.

        Args:
            on_reply: called with index and reply as soon as each is there, from one thread at a time.

        Raises:
            ModelError: the endpoint as a whole cannot be used: no key in the environment, no such host, or the first
                requests all fail alike.
        """
        ...


def code_for(texts: Iterable[str]) -> str:
    """Eight hex digits that occur in none of the texts; the same for the same texts, so that a prompt repeats."""
    texts = list(texts)
    # as ASCII: a lone surrogate, which JSON input may hold, has no UTF-8
    codes = (hashlib.sha256(json.dumps([attempt, texts]).encode()).hexdigest()[:8] for attempt in count())
    return next(code for code in codes if not any(code in text for text in texts))


def fenced(name: str, text: str, code: str) -> str:
    """The text as data, between an opening and a closing line that carry the code, so that no text can close them."""
    return f"<<<{name} {code}\n{text.strip()}\n{name} {code}>>>"
