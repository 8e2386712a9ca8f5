"""Servers on bad days, and what real servers and models send: what is read, what is asked again, what ends a run."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chat_samples import ask, chat
from fault_proxy import Proxy, completion, error
from transformers import AddedToken

from remind.core.errors import ModelError
from remind.evaluation.parse import parse_answer
from remind.llm.client import OpenAIChat, ReplyCache
from remind.llm.endpoints import EndpointConfig
from remind.llm.request import Message, Reply, Request
from remind.llm.structured import NotValid, object_schema, read_value
from remind.models.generate import text_of
from remind.models.nano import nano_tokenizer
from remind.text.thoughts import without_thoughts

pytestmark = pytest.mark.usefixtures("quick")
SCHEMA = object_schema(n={"type": "integer"})


def test_a_third_of_the_tries_is_spoiled_and_no_reply_lost_or_paid_for_twice(tmp_path: Path) -> None:
    requests = [ask(f"word {number}") for number in range(60)]
    with Proxy(share=0.3, seed=1) as proxy:
        model = chat(proxy.url, ReplyCache(tmp_path / "c.sqlite"), timeout=2, retries=12)
        replies = model.complete(requests)
    assert [reply.text for reply in replies] == [f"you said: word {number}" for number in range(60)]
    assert set(proxy.faults) == {"rate", "broken", "slow", "cut", "malformed"}
    assert proxy.hits == 60 + proxy.faults.total()
    assert set(proxy.paid.values()) == {1}


def test_a_reply_that_never_ends_is_given_up() -> None:
    """Each piece comes within the limit on a read."""

    def drip(_: Any) -> Any:
        return 200, {}, (time.sleep(0.05) or b" " for _ in range(400))  # type: ignore[func-returns-value]

    started = time.monotonic()
    with Proxy(answer=drip) as proxy:
        [reply] = chat(proxy.url, timeout=0.5, retries=1).complete([ask("hello")])
    assert (reply.failure, proxy.hits) == ("server", 2)
    assert time.monotonic() - started < 5


def test_no_server_ends_the_whole_call() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    with pytest.raises(ModelError, match=r"127\.0\.0\.1.*is the server running\?"):
        chat(url, retries=1).complete([ask(str(n)) for n in range(20)])


def test_concurrency_holds_over_threads_and_a_callback_that_fails_ends_the_call() -> None:
    with Proxy(delay=0.1) as proxy:
        model = chat(proxy.url, concurrency=3)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda k: model.complete([ask(f"{k} {n}") for n in range(6)]), range(3)))
        assert (proxy.hits, proxy.most_busy) == (18, 3)

        def fail(index: int, reply: Reply) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            model.complete([ask(str(n)) for n in range(100)], fail)
        assert proxy.hits < 40


def test_what_is_sent() -> None:
    messages = (Message("system", "be brief"), Message("user", "hé \U0001f600"))
    fields: dict[str, Any] = {"extra_body": {"seed": 3, "temperature": None}, "thought_tokens": 900}
    with Proxy(answer=lambda _: (200, {}, completion('{"n": 1}'))) as proxy:
        chat(proxy.url, model="the/model", **fields).complete([Request(messages, "cues", max_tokens=7, schema=SCHEMA)])
    sent = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé \U0001f600"}]
    form = {"type": "json_schema", "json_schema": {"name": "cues", "schema": SCHEMA, "strict": True}}
    rest = {"max_tokens": 907, "seed": 3, "response_format": form}
    assert proxy.bodies[0] == {"model": "the/model", "messages": sent, **rest}


def test_the_server_gets_the_key_and_no_other_header_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ambient = {"OPENAI_ORG_ID": "org-PRIVATE", "OPENAI_CUSTOM_HEADERS": "X-Own: PRIVATE\nAuthorization: Bearer PRIVATE"}
    for name, value in {**ambient, "MY_KEY": "secret-0123456789"}.items():
        monkeypatch.setenv(name, value)
    with Proxy() as proxy:
        chat(proxy.url, key_env="MY_KEY").complete([ask("good")])
        # plain http is no server of OpenAI's
        monkeypatch.setenv("OPENAI_API_KEY", "sk-PRIVATE")
        chat(proxy.url).complete([ask("good")])
    assert proxy.heads[0]["authorization"] == "Bearer secret-0123456789"
    assert "PRIVATE" not in str(proxy.heads)


def test_keys_that_are_missing_or_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ModelError, match="OPENAI_API_KEY"):
        OpenAIChat(EndpointConfig("m"))
    monkeypatch.setenv("OPENAI_API_KEY", '"sk-cut"')
    with pytest.raises(ModelError, match=r"holds a character no key has; is it cut or quoted wrongly\?$"):
        OpenAIChat(EndpointConfig("m"))


def test_a_redirect_is_not_followed() -> None:
    """The prompt would go to a host that nobody named."""
    with Proxy() as other:
        target = {"Location": f"{other.url}/chat/completions?sig=PRIVATE"}
        with Proxy(answer=lambda _: (307, target, b"")) as named:
            [reply] = chat(named.url).complete([ask("hello")])
    assert (reply.failure, named.hits, other.hits) == ("refused", 1, 0)
    assert "PRIVATE" not in reply.message


THOUGHT = 'Maybe <answer>A</answer> or {"verdict": true}.'
FINAL = "<|channel|>final<|message|>"
MORE = "<|end|><|start|>assistant"
FORMS = (
    "{}",
    f"<think>\n{THOUGHT}\n</think>\n\n{{}}",
    f"{THOUGHT}\n</think>\n\n{{}}",
    f"<think>a <think> b {THOUGHT}</think>{{}}",
    f"{{}}\n<think>{THOUGHT}</think><|im_end|>",
    f"[THINK]{THOUGHT}[/THINK]{{}}</s>",
    f"<|channel|>analysis<|message|>{THOUGHT}{MORE}{FINAL}{{}}<|return|>",
    f"<|channel|>analysis<|message|>{THOUGHT}{MORE}<|channel|>final <|constrain|>json<|message|>{{}}",
    f"analysis{THOUGHT}assistantfinal{{}}",
    "{}<|im_end|>\n<|endoftext|>",
)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_a_model_thinks_is_read_as_what_it_says(form: str) -> None:
    said = form.replace("{}", "<answer>B</answer><explanation>[1]</explanation>")
    parsed = parse_answer(said, "single", ("a", "b"), visual=True)
    assert (parsed.letters, parsed.images, parsed.problems) == ({"B"}, {1}, ())
    assert read_value(form.replace("{}", '{"n": 3}'), SCHEMA) == {"n": 3}


def test_a_whole_reply_is_given_out_without_thoughts() -> None:
    """Packages read replies by rules of their own."""
    with Proxy(answer=lambda _: (200, {}, completion(f"<think>{THOUGHT}</think>B"))) as proxy:
        [whole] = chat(proxy.url).complete([ask("", body={"messages": ask("x").chat})])
    assert json.loads(whole.text)["choices"][0]["message"]["content"].strip() == "B"


def test_marks_of_thoughts_are_seen_where_a_tokenizer_counts_them_as_special() -> None:
    tokenizer = nano_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in ("[THINK]", "[/THINK]", "<x>")])
    text = text_of(tokenizer, tokenizer("[THINK]Maybe A.[/THINK]B<x>", add_special_tokens=False)["input_ids"])
    assert without_thoughts(text) == "B"


def body(message: Any = None, reason: Any = "stop", **fields: Any) -> bytes:
    """A completion with one choice, or what the fields say."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "x", **(message or {})}, "finish_reason": reason}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}, **fields}).encode()


THINKS = {"content": None, "reasoning_content": "long"}
CALL = {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
UP = {"code": 502, "message": "overloaded"}
#: Status and body, how often they are asked for with two retries, and what becomes of them.
BAD = (
    (200, body({"content": 3}), 3, "server", "not a chat completion"),
    (202, b'{"status": "pending"}', 3, "server", "not a chat completion"),
    (200, body({"content": "partial"}, "error"), 3, "server", "finish_reason error"),
    (200, body(choices=[{"error": UP, "message": {"content": "x"}}]), 3, "server", "HTTP 502: overloaded"),
    (200, json.dumps({"error": UP, "user_id": "u"}).encode(), 3, "server", "HTTP 502: overloaded"),
    (200, b'{"error": {"message": "slow down", "code": "rate_limit_exceeded"}}', 3, "server", "slow down"),
    (200, b'{"error": "Unexpected endpoint or method."}', 1, "refused", "Unexpected endpoint or method."),
    (200, b"\n<!doctype html><html>Welcome</html>", 1, "refused", "a web page"),
    (200, body(THINKS, "length"), 1, "invalid", "a thought alone (finish_reason length); give it thought_tokens"),
    (200, body({"content": "", "refusal": "I can't help with that."}), 1, "refused", "I can't help with that."),
    (200, body({"content": "Once"}, "content_filter"), 1, "refused", "finish_reason content_filter"),
    (200, body(CALL, "tool_calls"), 1, "refused", "calls a tool"),
    (401, b'{"error": {"message": "Incorrect API key: sk-abcd****wxyz"}}', 1, "refused", "refuses the key"),
    (400, b'{"detail": "This model\'s maximum context length is 4096 tokens."}', 1, "too_long", "HTTP 400: This"),
    # by their codes, whatever the words
    (400, b'{"error": {"message": "too much", "code": "context_length_exceeded"}}', 1, "too_long", "too much"),
)


@pytest.mark.parametrize(("status", "content", "tries", "failure", "reason"), BAD)
def test_broken_replies_are_asked_again_or_told_and_never_cached(
    status: int, content: bytes, tries: int, failure: str, reason: str, tmp_path: Path
) -> None:
    answers = {"good": (200, {}, completion("well")), "bad": (status, {}, content)}
    with Proxy(answer=lambda sent: answers[sent["messages"][0]["content"]]) as proxy:
        model = chat(proxy.url, ReplyCache(tmp_path / "c.sqlite"), retries=2, concurrency=1)
        well, bad = model.complete([ask("good"), ask("bad")])
        assert (well.text, bad.failure, bad.cached, proxy.hits) == ("well", failure, False, 1 + tries)
        assert reason in bad.message
        assert not any(word in bad.message for word in ("\n", "sk-abcd", "<html"))
        # it may pass
        answers["bad"] = answers["good"]
        assert model.complete([ask("bad")])[0].text == "well"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (error(404, "no model m (request id 00#)"), "HTTP 404: no model m"),
        ((200, {}, b'{"error": "Unexpected endpoint."}'), r"Unexpected endpoint\.; most servers are at base_url/v1"),
        ((200, {}, body({"refusal": "No."})), "the model refuses: No"),
    ],
)
def test_first_requests_that_all_fail_alike_end_the_run(answer: Any, reason: str) -> None:
    status, heads, content = answer

    def numbered(sent: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        return status, heads, content.replace(b"#", sent["messages"][0]["content"].encode())

    with Proxy(answer=numbered) as proxy, pytest.raises(ModelError, match=f"first 5 .* failed alike: {reason}"):
        chat(proxy.url.removesuffix("/v1"), concurrency=2).complete([ask(str(n)) for n in range(1000)])
    # those under way when the fifth came back, on a busy machine some more
    assert proxy.hits <= 20


@pytest.mark.parametrize("message", ["context length exceeded", "word x"])
def test_prompts_that_are_too_long_and_unlike_failures_end_nothing(message: str) -> None:
    with Proxy(answer=lambda sent: error(400, message + "x" * int(sent["messages"][0]["content"]))) as proxy:
        assert len(chat(proxy.url).complete([ask(str(n)) for n in range(10)])) == 10


@pytest.mark.parametrize(
    ("refused", "status", "message"),
    [
        ("response_format", 400, "'response_format.type' must be text"),
        ("system", 400, "Unsupported value: 'messages[0].role' does not support 'system' with this model."),
        ("system", 500, "Jinja Exception: Conversation roles must alternate user/assistant"),
        ("max_tokens", 400, "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."),
    ],
)
def test_what_a_server_does_not_take_is_put_in_another_way(refused: str, status: int, message: str) -> None:
    def answer(sent: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if refused in sent or refused in [one["role"] for one in sent["messages"]]:
            return error(status, message)
        return 200, {}, completion('{"N": "3", "why": "so"}')

    messages = Message("system", "Be brief."), Message("user", "How many?")
    requests = [Request(messages, "judge", max_tokens=room, schema=SCHEMA) for room in range(1, 5)]
    with Proxy(answer=answer) as proxy:
        replies = chat(proxy.url, concurrency=1, retries=0).complete(requests)
    assert ([reply.value for reply in replies], proxy.hits) == ([{"n": 3}] * 4, 5)
    last = proxy.bodies[-1]
    assert last.get("max_tokens", last.get("max_completion_tokens")) == 4
    assert "\n\n".join(one["content"] for one in last["messages"]) == "Be brief.\n\nHow many?"


def test_a_server_that_cuts_prompts_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["word " * 400, *(f"{n} " + "word " * 5000 for n in range(3))]

    def answer(sent: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        return 200, {}, completion("well", min(2050, len(sent["messages"][0]["content"]) // 4))

    with Proxy(answer=answer) as proxy:
        model = chat(proxy.url, ReplyCache(tmp_path / "c.sqlite"))
        for _ in range(2):
            assert [reply.text for reply in model.complete([ask(text) for text in texts])] == ["well"] * 4
    assert capsys.readouterr().err.count("has read 2,050 tokens of a prompt of 25,002 characters") == 1
    # the server may be given more room: what it said to a part of a prompt is not kept
    assert proxy.hits == 1 + 3 + 3


TEXT = {"type": "string"}
FACTS = object_schema(facts={"type": "array", "items": TEXT, "maxItems": 3})
EVENTS = object_schema(
    memory={"type": "array", "items": object_schema(event={"enum": ["ADD", "NONE"]}, n={"type": "integer"})}
)
GRADE = object_schema(score={"anyOf": [{"type": "number", "maximum": 1}, {"type": "null"}]}, fine={"type": "boolean"})


def test_a_reply_that_was_cut_off_is_never_taken() -> None:
    with pytest.raises(NotValid, match="cut off"):
        read_value('{"facts": []}', FACTS, finished=False)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (FACTS, 'Here:\n```json\n{"facts": []}\n```\nDone.', {"facts": []}),
        (FACTS, '{"b": 2} then {"facts": ["a"]} then {"facts": ["b"]}', {"facts": ["a"]}),
        (FACTS, '{"facts": ["a"], "language": "en"}', {"facts": ["a"]}),
        (FACTS, '["a", "b"]', {"facts": ["a", "b"]}),
        (FACTS, '{"facts": [{"fact": "a", "category": "x"}]}', {"facts": ["a"]}),
        (FACTS, '{"facts": ["a", "b", "c", "d"]}', {"facts": ["a", "b", "c"]}),
        (EVENTS, '{"memory": {"Event": "add", "n": "3", "why": "new"}}', {"memory": [{"event": "ADD", "n": 3}]}),
        (GRADE, '{"score": "0.5", "fine": "Yes"}', {"score": 0.5, "fine": True}),
        (FACTS, '{"facts": [3]}', {"facts": ["3"]}),
        (GRADE, '{"score": 2, "fine": false}', None),
    ],
)
def test_forms_are_read_with_tolerance(schema: Any, text: str, value: Any) -> None:
    if value is None:
        with pytest.raises(NotValid):
            read_value(text, schema)
    else:
        assert read_value(text, schema) == value
