"""What an endpoint refuses, since it would write a key down or tell it; and what it lets through."""

from __future__ import annotations

from typing import Any

import pytest

from remind.core.errors import ConfigError
from remind.llm.endpoints import EndpointConfig, LLMConfig, holds_key

KEY = "sk-secret-0123456789abcdef"
KEYS = [
    "key", "api_key", "API-Key", "apiKey", "x-api-key", "x_api_key", "openai_api_key", "OPENAI_API_KEY",
    "Ocp-Apim-Subscription-Key", "keys", "aws_access_key_id", "private_key", "token", "access_token", "accessToken",
    "auth_token", "hf_token", "HF-TOKEN", "hftoken", "session_token", "refresh_tokens", "token_value", "secret",
    "client_secret", "aws_secret_access_key", "password", "passwd", "pwd", "pass", "passphrase", "authorization",
    "Proxy-Authorization", "authentication", "auth", "oauth", "x_auth", "bearer", "bearer_token", "jwt",
    "credential", "credentials", "cookie", "cookies", "Set-Cookie", "headers", "extra_headers", "default_headers",
]  # fmt: skip
#: Of OpenAI, vLLM, SGLang, llama.cpp, TabbyAPI and Claude: those that read as if they could, and a few others.
FIELDS = [
    "max_tokens", "max_completion_tokens", "max_new_tokens", "min_tokens", "stop_token_ids", "skip_special_tokens",
    "add_special_tokens", "key_frames", "spaces_between_special_tokens", "truncate_prompt_tokens",
    "allowed_token_ids", "return_tokens_as_token_ids", "return_token_ids", "thinking_token_budget", "budget_tokens",
    "extra_key", "prompt_cache_key", "bos_token", "eos_token", "eos_token_id", "pad_token", "image_token",
    "ban_eos_token", "add_bos_token", "token_healing", "custom_token_bans", "suppress_tokens", "prompt_token_ids",
    "author", "keyword", "tokenizer", "seed", "temperature", "metadata", "tools", "prompt",
]  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_names_that_could_hold_a_key_are_refused_wherever_they_stand(name: str) -> None:
    for body in (
        {name: KEY},
        {"seed": 1, "further": {"one": [{name: KEY}]}},
        {"list": [[{"a": 1}, {name: {"b": KEY}}]]},
    ):
        with pytest.raises(ConfigError, match="extra_body must hold no") as refused:
            LLMConfig(default=EndpointConfig("m", extra_body=body))
        assert name in str(refused.value)
        assert KEY not in str(refused.value)


def test_what_servers_are_told_of_generation_is_let_through() -> None:
    assert [name for name in FIELDS if holds_key(name)] == []
    EndpointConfig("m", extra_body={name: {"deeper": [{name: 1}]} for name in FIELDS}).check()


def test_a_schema_may_describe_any_property() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"token": {"type": "string"}, "key": True}}
    EndpointConfig("m", extra_body={"guided_json": schema}).check()
    for odd in ({"properties": {"token": KEY}}, {"properties": {"properties": {"token": {"a": KEY}}}}):
        with pytest.raises(ConfigError, match="token"):
            EndpointConfig("m", extra_body={"guided_json": odd}).check()


@pytest.mark.parametrize(
    "url",
    [
        *(f"user:{KEY}@h/v1", f"//user:{KEY}@h/v1", f"mailto:{KEY}@h", KEY, f"https:/{KEY}", f"ftp://{KEY}/v1"),
        *(f"https://user:{KEY}@h/v1", f"https://h/v1?k={KEY}", f"https://h/v1#{KEY}", f"http://[{KEY}/v1"),
    ],
)
def test_an_address_that_is_refused_is_not_told(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url") as refused:
        EndpointConfig("m", base_url=url).check()
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("fields", [{"key_env": KEY}, {"base_url": "http://h:99999/v1"}])
def test_a_value_that_cannot_be_used_is_named_but_no_key(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))) as refused:
        EndpointConfig("m", **fields).check()
    assert KEY not in str(refused.value)


def test_https_needs_a_key_however_it_is_written() -> None:
    for scheme in ("https", "HTTPS"):
        assert EndpointConfig("m", base_url=f"{scheme}://h/v1").needs_key
    assert not EndpointConfig("m", base_url="HTTP://h/v1").needs_key
