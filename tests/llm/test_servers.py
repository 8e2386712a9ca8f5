"""What real servers and models send, by the table: what is read, what is asked again, what ends a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_samples import ask, chat
from fault_proxy import Proxy, completion, error
from transformers import AddedToken

from remind.core.errors import ModelError
from remind.evaluation.parse import parse_answer
from remind.llm.cache import ReplyCache
from remind.llm.request import Message, Request
from remind.llm.structured import object_schema, read_value
from remind.models.generate import text_of
from remind.models.nano import nano_tokenizer
from remind.text.thoughts import without_thoughts

pytestmark = pytest.mark.usefixtures("quick")
THOUGHT = 'Maybe <answer>A</answer> or {"verdict": true}.'
FINAL = "<|channel|>final<|message|>"
MORE = "<|end|><|start|>assistant"
FORMS = (
    "{}",
    f"<think>\n{THOUGHT}\n</think>\n\n{{}}",
    f"<Thinking>{THOUGHT}</thinking>{{}}",
    f"{THOUGHT}\n</think>\n\n{{}}",
    f"<think>a <think> b {THOUGHT}</think>{{}}",
    f"{{}}\n<think>{THOUGHT}</think><|im_end|>",
    f"[THINK]{THOUGHT}[/THINK]{{}}</s>",
    f"<seed:think>{THOUGHT}</seed:think>{{}}",
    f"◁think▷{THOUGHT}◁/think▷{{}}",
    f"<|channel|>analysis<|message|>{THOUGHT}{MORE}{FINAL}{{}}<|return|>",
    f"<|channel|>analysis<|message|>{THOUGHT}{MORE}<|channel|>final <|constrain|>json<|message|>{{}}",
    f"analysis{THOUGHT}assistantfinal{{}}",
    "{}<|im_end|>\n<|endoftext|>",
)
SCHEMA = object_schema(n={"type": "integer"})


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


@pytest.mark.parametrize("opening", ["<think>", " [THINK] ", "<seed:think>", "<|channel|>analysis<|message|>"])
def test_a_thought_that_never_ends_is_no_answer(opening: str) -> None:
    assert not parse_answer(opening + THOUGHT, "single", ("a", "b")).readable


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
    (200, body({"content": None}), 3, "server", "empty"),
    (200, body({"content": "partial"}, "error"), 3, "server", "finish_reason error"),
    (200, body(choices=[{"error": UP, "message": {"content": "x"}}]), 3, "server", "HTTP 502: overloaded"),
    (200, json.dumps({"error": UP, "user_id": "u"}).encode(), 3, "server", "HTTP 502: overloaded"),
    (200, b'{"error": "Unexpected endpoint or method."}', 1, "refused", "Unexpected endpoint or method."),
    (200, b'{"error": true, "detail": "Not Found \\ud800"}', 1, "refused", "Not Found ?"),
    (200, b"\n<!doctype html><html>Welcome</html>", 1, "refused", "a web page"),
    (200, body(THINKS, "length"), 1, "invalid", "a thought alone (finish_reason length); give it thought_tokens"),
    (200, body({"content": f"{THOUGHT}</think>"}), 3, "server", "a thought alone"),
    (200, body({"content": "", "refusal": "I can't help with that."}), 1, "refused", "I can't help with that."),
    (200, body({"content": "Once"}, "content_filter"), 1, "refused", "finish_reason content_filter"),
    (200, body(CALL, "tool_calls"), 1, "refused", "calls a tool"),
    (500, b"<html>internal error</html>", 3, "server", "HTTP 500"),
    (401, b'{"error": {"message": "Incorrect API key: sk-abcd****wxyz"}}', 1, "refused", "refuses the key"),
    (400, b'{"message": "max_tokens is too large: at most 16384 completion tokens"}', 1, "refused", "too large"),
    (400, b'{"detail": "This model\'s maximum context length is 4096 tokens."}', 1, "too_long", "HTTP 400: This"),
    # by their codes, whatever the words
    (400, b'{"error": {"message": "too much", "code": "context_length_exceeded"}}', 1, "too_long", "too much"),
    (500, b'{"error": {"message": "", "type": "exceed_context_size_error"}}', 3, "too_long", "HTTP 500"),
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


@pytest.mark.parametrize("message", [lambda n: "context length exceeded", lambda n: "word " + "x" * n])
def test_prompts_that_are_too_long_and_unlike_failures_end_nothing(message: Callable[[int], str]) -> None:
    with Proxy(answer=lambda sent: error(400, message(int(sent["messages"][0]["content"])))) as proxy:
        assert len(chat(proxy.url).complete([ask(str(n)) for n in range(10)])) == 10


@pytest.mark.parametrize(
    ("refused", "status", "message"),
    [
        ("response_format", 400, "'response_format.type' must be text"),
        ("system", 400, "System role not supported"),
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
