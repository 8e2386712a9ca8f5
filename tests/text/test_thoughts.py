"""Thoughts are no part of a reply, in whatever form a model writes them."""

from __future__ import annotations

import pytest

from remind.evaluation.parse import parse_answer
from remind.llm.auxiliary import VERDICT_SCHEMA, plain
from remind.llm.structured import NotValid, read_value
from remind.text.thoughts import without_thoughts

THOUGHT = 'Maybe <answer>A</answer> or {"verdict": true}.'
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    "reply",
    [
        "{}",
        f"<think>\n{THOUGHT}\n</think>\n\n{{}}",
        f"<THINK>{THOUGHT}</THINK>{{}}<think></think>"[:-15],
        f"{THOUGHT}\n</think>\n\n{{}}",
        f"<think>a <think> b {THOUGHT}</think>{{}}",
        f"[THINK]{THOUGHT}[/THINK]{{}}",
        f"<seed:think>{THOUGHT}</seed:think>{{}}",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant{FINAL}{{}}<|return|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>{}",
        f"analysis{THOUGHT}assistantfinal{{}}",
        "{}<|im_end|>\n<|endoftext|>",
    ],
)
def test_what_is_said_is_what_follows_the_thought(reply: str) -> None:
    for said in ("<answer>B</answer>", '{"verdict": false}', "Just words."):
        text = without_thoughts(reply.replace("{}", said))
        assert text.strip() == said
        assert without_thoughts(text) == text
    assert parse_answer(reply.replace("{}", "<answer>B</answer>"), "single", ("a", "b")).letters == {"B"}
    assert read_value(reply.replace("{}", '{"verdict": false}'), VERDICT_SCHEMA) == {"verdict": False}
    assert plain(reply.replace("{}", "Just words.")) == "Just words."


@pytest.mark.parametrize(
    "reply",
    [f"<think>{THOUGHT}", f" [THINK] {THOUGHT}", f"<seed:think>{THOUGHT}", f"<|channel|>analysis<|message|>{THOUGHT}"],
)
def test_a_thought_that_never_ends_is_no_answer(reply: str) -> None:
    assert without_thoughts(reply) == ""
    assert not parse_answer(reply, "single", ("a", "b")).readable
    with pytest.raises(NotValid):
        read_value(reply, {"type": "object"})
