"""Where each kind of request goes: address, model, limits and prices, as configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Annotated, Any
from urllib.parse import urlsplit

from remind.core.errors import ConfigError
from remind.core.files import sha256_json
from remind.llm.request import Stage
from sae.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, check_ranges

OPENAI = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
#: As base_url: the model runs in this process.
LOCAL = "local"


@dataclass
class EndpointConfig:
    """A model and where it runs."""

    model: str = ""
    """Name of the model on the server; for a local model: nano, smollm2, or a Hugging Face folder or id."""
    base_url: str = OPENAI
    """Address of an OpenAI-compatible server, to which /chat/completions is added; local: run the model here."""
    name: str | None = None
    """Used instead of base_url in cache keys and reports, so that the server may move; None: base_url."""
    key_env: str | None = OPENAI_KEY
    """Environment variable that holds the key. Plain http:// servers get no key unless another variable is named."""
    timeout: Annotated[float, Range(gt=0, le=10**6)] = 120.0
    """Time limit in seconds of the wait for a reply, and of the reply from its first byte to its last."""
    retries: Annotated[int, Range(ge=0, le=1000)] = 6
    """Retries after 429, 5xx, time-outs, broken connections and broken replies. Delays grow up to 8 s, or follow
    Retry-After."""
    concurrency: Annotated[int, Range(ge=1, le=10_000)] = 8
    """Concurrent requests; for a local model: prompts per forward pass."""
    max_tokens: PositiveInt | None = None
    """Maximum length of a reply in tokens; None: as the request asks."""
    thought_tokens: NonNegativeInt = 0
    """Tokens for what the model thinks before it replies, on top of the length of each reply."""
    temperature: NonNegativeFloat | None = None
    """Temperature; None: as the request asks, mostly 0."""
    price_prompt: NonNegativeFloat = 0.0
    """USD per million prompt tokens."""
    price_completion: NonNegativeFloat = 0.0
    """USD per million completion tokens."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, e.g. {seed: 1}. They replace fields of the same name; null leaves one out. Of
    them a local model takes chat_template_kwargs, e.g. {enable_thinking: false}. No place for keys: configurations are
    printed and saved."""
    device: str = "cpu"
    """Where a local model runs, e.g. cpu or cuda:0."""
    dtype: str = "float32"
    """Precision of a local model: float32, bfloat16, float16 or auto."""

    def check(self) -> None:
        """Raise ConfigError for no model, a value out of range, and an address or a name of a variable that is none."""
        check_ranges(self, ConfigError)
        if self.key_env is not None and not self.key_env.isidentifier():
            raise ConfigError("key_env must be the name of an environment variable, not the key (it is not shown here)")
        # keys hide in addresses, and addresses are printed
        if not self.local and not re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./~%-]*)?", self.base_url, re.IGNORECASE):
            what = f"{LOCAL} or an address such as http://127.0.0.1:8000/v1, without user, password, query and fragment"
            raise ConfigError(f"base_url must be {what}: keys come from the environment")
        if not self.model:
            raise ConfigError("no model is named; set the endpoint's model")

    @property
    def local(self) -> bool:
        """Whether the model runs in this process."""
        return self.base_url == LOCAL

    @property
    def title(self) -> str:
        """Model and endpoint, for reports and cache keys; holds no key."""
        return f"{self.model}@{self.name or self.base_url.rstrip('/')}"

    @property
    def identity(self) -> str:
        """`title`, and a hash of the settings that shape replies where any is not the usual one."""
        settings = [self.max_tokens, self.temperature, True, self.extra_body, *filter(None, [self.thought_tokens])]
        return self.title if settings == [None, None, True, {}] else f"{self.title} {sha256_json(settings)[:8]}"

    @property
    def needs_key(self) -> bool:
        """Whether a key must be in the environment. Servers on plain http are local ones, which mostly need none."""
        named = self.key_env not in (None, OPENAI_KEY)
        return not self.local and (named or (self.key_env is not None and urlsplit(self.base_url).scheme == "https"))

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """USD for this many tokens."""
        return (prompt_tokens * self.price_prompt + completion_tokens * self.price_completion) / 1e6


@dataclass
class LLMConfig:
    """Endpoints of the auxiliary LLM by what they are asked for, and what they share."""

    default: EndpointConfig | None = None
    """Endpoint of all stages without one of their own; None: offline rules write and judge."""
    cues: EndpointConfig | None = None
    """Endpoint for segment cues (Section 4.2)."""
    strategy: EndpointConfig | None = None
    """Endpoint for strategies (Section 4.2)."""
    summary: EndpointConfig | None = None
    """Endpoint for reflective summaries (Section 4.4)."""
    judge: EndpointConfig | None = None
    """Endpoint for verdicts on direct answers."""
    answer: EndpointConfig | None = None
    """Endpoint that answers the questions."""
    questions: EndpointConfig | None = None
    """Endpoint that writes questions for a new benchmark (`remind build-refmem`)."""
    explain: EndpointConfig | None = None
    """Endpoint that names features of SAEs, and scores the names (`remind feature-pages`)."""
    memory: EndpointConfig | None = None
    """Endpoint for memory systems."""
    cache: str | None = "~/.cache/remind/llm.sqlite"
    """SQLite file that caches replies; None: no cache."""
    dry_run: str | None = None
    """File for the prompts that would be sent (JSONL); nothing is sent, and tokens and costs are estimated."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        # here and not in the endpoints: the parser prints a whole optional group when one of its values is refused
        for one in fields(self):
            if isinstance(endpoint := getattr(self, one.name), EndpointConfig):
                endpoint.check()

    def endpoint(self, stage: Stage) -> EndpointConfig | None:
        """The endpoint for a stage; None: the offline stand-in."""
        own: EndpointConfig | None = getattr(self, stage, self.memory)
        return own or self.default
