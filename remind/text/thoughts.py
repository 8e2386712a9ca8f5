"""What reasoning models write before they answer, where a server leaves it in the reply."""

from __future__ import annotations

import re

#: Opening and closing tags: Qwen, DeepSeek and others, Gemini, Seed, Magistral, Kimi, Command A, OpenThinker, MedGemma.
_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<unused94>", "<unused95>"),
)
#: Tokens that tell thoughts from answers, which some tokenizers count as special; the last are of harmony (gpt-oss).
MARKS = {tag for tags in _TAGS for tag in tags} | {f"<|{name}|>" for name in ("start", "channel", "message", "end")}
#: The final channel of a harmony reply (gpt-oss), with its special tokens or with what is left where they are dropped.
_FINAL = re.compile(
    r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>|\Aanalysis.*assistantfinal", re.DOTALL
)
#: What ends a message of harmony.
_MESSAGE_END = re.compile(r"<\|(?:end|return|call|start)\|>.*", re.DOTALL)
#: Special tokens at the end that a server should have left out.
_END_TOKENS = re.compile(r"(?:(?:<\|[\w ]+\|>|</s>|<end_of_turn>|<eos>)\s*)+\Z")


def without_thoughts(text: str) -> str:
    """A model's reply without its thoughts, and without special tokens at its end.

    A closing tag without an opening one ends a thought that the chat template opened. Empty where a thought was opened
    and never closed: what follows is no answer.
    """
    text = _END_TOKENS.sub("", text)
    if "<|channel|>" in text or _FINAL.search(text):
        *_, final = "", *_FINAL.split(text)[1:]
        text = _MESSAGE_END.sub("", final)
    for opening, closing in ([re.escape(tag) for tag in tags] for tags in _TAGS):
        # one after the answer
        text = re.sub(rf"(?is){opening}(?:(?!{opening}).)*?{closing}\s*\Z", "", text)
        *_, text = re.split(f"(?i){closing}", text)
        if re.search(f"(?i){opening}", text):
            return ""
    return text
