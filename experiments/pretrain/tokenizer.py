"""Builds the tokenizer of the nano backbone: a byte-level BPE in which wordings of prompts and world are one token.

`python -m experiments.pretrain.tokenizer FILE` writes it anew; the shipped one was made so.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from remind.core.files import write_text
from remind.data.dialogue import DIMENSIONS, FORMATS, NO_INFORMATION
from remind.data.sample import corpus_path, sample_path
from remind.models.nano import SPECIAL_TOKENS, nano_folder
from remind.states import prompts
from remind.states.pyramid import MARKER
from remind.testbed.world import lexicon
from remind.text.words import guide

#: Most tokens of the byte-level BPE: bytes and what is merged from them.
BPE_TOKENS = 3065
#: Where words, numbers, punctuation and line ends part before merging, as in Qwen's tokenizers: one digit, one token.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Tokens between the letters of an answer and after a speaker, and only there.
SEPARATORS = (",", ": ")


def train_tokenizer(texts: Iterable[str], words: Sequence[str]) -> str:
    """Train the byte-level BPE on `texts`; equal arguments give equal bytes.

    Args:
        words: strings that become one token each wherever they stand (`wordings`), so that a prompt of the synthetic
            world is about a hundred tokens long. All other text is bytes and merges.

    Returns:
        The content of a `tokenizer.json` with at most `VOCAB_SIZE` tokens, the special ones last. No normalisation, so
        that decoding gives back any text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_TOKENS,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    for word in (*words, *SEPARATORS):
        vocabulary.setdefault(to_bytes.pre_tokenize_str(word)[0][0], len(vocabulary))
    # a piece that is a token as it stands is not put together from merges
    content["model"]["ignore_merges"] = True
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": f"{pattern(words)}|{SPLIT}"}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer.to_str(pretty=False)


def training_texts() -> Iterator[str]:
    """Instructions in English, and every line of the bundled dialogues and questions as a prompt shows it."""
    yield (nano_folder() / "instructions.txt").read_text(encoding="utf-8")
    for path in (*sorted(sample_path().glob("*.jsonl")), *sorted(corpus_path().glob("*.jsonl"))):
        for row in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(row)
            for session in record.get("sessions", ()):
                for turn in session["turns"]:
                    yield f"{turn['speaker']}: {turn['text']}\n"
                    yield from (f"[Image #0 Caption] {image['caption']}\n" for image in turn["images"])
            if record["type"] == "question":
                yield f"Question: {record['question']}\n"
                yield from (f"{letter}. {text}\n" for letter, text in zip("ABCD", record["options"], strict=False))
                yield from (f"<answer>{text}</answer><explanation>" for text in record["answers"])


def wordings() -> list[str]:
    """Every string that is one token, each once: fixed lines of rendered prompts, and words of the world."""
    return list(dict.fromkeys(text for text in (*_prompt_wordings(), *_world_wordings()) if text))


def _prompt_wordings() -> Iterator[str]:
    for visual in (False, True):
        for kind in FORMATS:
            values = {"format": kind, "visual": visual, "letters": "ABCD", "no_information": NO_INFORMATION}
            yield prompts.render("answer", **values).strip()
    yield "\n\nConversation\n"
    yield f"\nGuide to the question\n{prompts.render('strategy').strip()}\n"
    yield f"\n{prompts.render('reminder', marker=MARKER).strip()}\n"
    yield f"\nReflection\n{prompts.render('summary').strip()}\n"
    yield from ("Target speaker: ", "Related entities: ", "\n", "\nQuestion: ", "Options:\n", "[…]\n", f"{MARKER}\n")
    yield from (f"[Session {number}]\n" for number in range(1, 10))
    yield from ("[Image #", " Caption] ", "<answer>", "<answer>[")
    yield from ("]</answer><explanation></explanation>", "</answer><explanation></explanation>")
    yield from (f"{letter}. " for letter in "ABCD")
    for dimension in DIMENSIONS:
        for number, cue in enumerate(guide(dimension).reasoning, start=1):
            yield f"Step {number}: {cue}\n"


def _world_wordings() -> Iterator[str]:
    words = lexicon()
    yield from (*words["names"], *words["fillers"])
    yield from (f"{lead}, " for lead in (*words["leads"], words["flag"]))
    for dimension in words["dimensions"].values():
        for kind in ("ask", "gist", "frames"):
            for text in dimension[kind]:
                yield from re.split(r"\{\w+\}", text)
        for kind in ("topics", "keen", "averse", "texts", "scenes", "dodges", "frank", "fits"):
            yield from dimension.get(kind, ())
        for entry in dimension["values"].values():
            for kind in ("label", "gist", "cues", "fits"):
                yield from entry.get(kind, ())


def pattern(texts: Sequence[str]) -> str:
    """A regular expression that finds any of them, the longest first, never inside a word.

    Built as a tree, since it is tried at every character: one look at what stands there leaves one branch at most.
    """
    inside = [text for text in texts if text[0].isalpha()]
    other = [text for text in texts if not text[0].isalpha()]
    alternatives = [rf"(?<!\p{{L}}){_tree(inside)}"] if inside else []
    alternatives += [_tree(other)] if other else []
    # the separators: after a speaker of the world, and between the letters of an answer
    names = "|".join(lexicon()["names"])
    return "|".join([*alternatives, rf": (?<=(?:{names}): )", r",(?<=[A-D],)(?=[A-D])"])


def _tree(texts: Iterable[str]) -> str:
    """Any of them: by the first character, then by the next."""
    branches: dict[str, list[str]] = {}
    for text in texts:
        branches.setdefault(text[0], []).append(text)
    patterns = [_branch(branches[first]) for first in sorted(branches)]
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"


def _branch(texts: Sequence[str]) -> str:
    """Any of these, which begin alike, the longest first; after one that ends with a letter no other letter follows."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(min(texts), max(texts), strict=False))
    start = "".join(character for character, _ in alike)
    longer = [text[len(start) :] for text in texts if text != start]
    literal = re.escape(start).replace("\\\n", r"\n")
    if len(longer) == len(texts):
        return literal + _tree(longer)
    end = r"(?!\p{L})" if start[-1].isalpha() else ""
    return f"{literal}(?:{_tree(longer)}|{end})" if longer else literal + end


if __name__ == "__main__":
    write_text(sys.argv[1], train_tokenizer(training_texts(), wordings()) + "\n")
    print(sys.argv[1])
