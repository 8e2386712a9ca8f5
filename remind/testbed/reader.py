"""A simulated strong LLM for the synthetic world: it reads prompts as text, and knows what words mean.

It knows the lexicon, as a language model knows its language, and that a remark with the flag word does not count. Of a
dialogue it knows what the request shows and nothing else: no gold answer, no trait, no evidence. It writes strategies
and summaries, either as a chat model of this process or behind an OpenAI-compatible server on this machine.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, make_server

from remind.llm.request import ChatModel, Reply, Request, completion
from remind.llm.structured import read_value
from remind.testbed.world import BOUNDARY, fill, lexicon, statements
from remind.text.words import guide
from sae.ranges import Seed, Share

TEMPORAL = "temporal_dynamics"
_FENCED = re.compile(r"^<<<(\w+) (\w+)\n(.*?)\n\1 \2>>>$", re.MULTILINE | re.DOTALL)


@dataclass
class ReaderConfig:
    """How often the simulated LLM errs."""

    errors: Share = 0.0
    """Share of the summaries that name another value than the one it read."""
    overlooked: Share = 0.0
    """Share of the lines outside of marked blocks that it does not take in, all lines where nothing is marked."""
    seed: Seed = 0
    """Which ones; the same request always gets the same reply."""


class Remark(NamedTuple):
    """Something the speaker in question said or showed that speaks for a value.

    Attributes:
        value: of temporal dynamics keen or averse.
        flagged: it begins with the flag word.
        marked: it stands in a marked block.
    """

    session: int
    cue: str
    value: str
    flagged: bool
    marked: bool


class Turn(NamedTuple):
    """One turn as a prompt shows it."""

    session: int
    speaker: str
    text: str
    caption: str
    marked: bool


@dataclass(frozen=True)
class Asked:
    """What a question is after, found out from its wording; topic "" where it has none."""

    dimension: str
    speaker: str
    topic: str

    @property
    def words(self) -> dict[str, Any]:
        """The entry of its dimension in the lexicon."""
        words: dict[str, Any] = lexicon()["dimensions"][self.dimension]
        return words


def understand(question: str) -> Asked:
    """What a question of the world asks for. Raises ValueError where not exactly one wording fits."""
    fits = [(dimension, match.groupdict()) for dimension, form in asks() if (match := form.fullmatch(question))]
    if len(fits) != 1:
        raise ValueError(f"{len(fits)} wordings fit {question!r}")
    dimension, slots = fits[0]
    return Asked(dimension, slots["S"], slots.get("topic", ""))


@cache
def asks() -> list[tuple[str, re.Pattern[str]]]:
    """Every wording of a question: the dimension, and what finds it."""
    forms = []
    for dimension, words in lexicon()["dimensions"].items():
        for text in words["ask"]:
            form = re.escape(text).replace(r"\{S\}", r"(?P<S>\w+)").replace(r"\{topic\}", r"(?P<topic>\w+)")
            forms.append((dimension, re.compile(form)))
    return forms


def turns_of(conversation: str) -> list[Turn]:
    """The turns of a rendered dialogue section. Raises ValueError for a line that no state of the world has."""
    turns: list[Turn] = []
    session, marked = 0, False
    for line in conversation.splitlines():
        if match := re.fullmatch(r"\[Session (\d+)\]", line):
            session = int(match[1])
        elif re.fullmatch(r"\[ATTENTION[^\]]*\]", line):
            marked = not marked
        elif match := re.fullmatch(r"\[Image #\d+ Caption\] (.*)", line):
            turns[-1] = turns[-1]._replace(caption=match[1])
        elif match := re.fullmatch(r"(\w+): (.*)", line):
            turns.append(Turn(session, match[1], match[2], "", marked))
        elif line != "[…]":
            raise ValueError(f"the line {line!r} cannot be read")
    return turns


def remarks(asked: Asked, turns: Iterable[Turn]) -> list[Remark]:
    """What the speaker asked about said or showed to the point, in time order."""
    words, (values, cues) = asked.words, _cues(asked.dimension)
    result = []
    before = ""
    for turn in turns:
        source, texts = turn.caption if "texts" in words else turn.text, [turn.text]
        if asked.dimension == BOUNDARY:
            # the cue stands in what somebody else asked just before
            source, texts = before if bare(turn.text) in words["dodges"] else "", [before, turn.text]
        before = turn.text
        if turn.speaker != asked.speaker or (asked.topic and not re.search(rf"\b{asked.topic}\b", source)):
            continue
        flagged = any(text.startswith(f"{lexicon()['flag']}, ") for text in texts)
        result += [Remark(turn.session, cue, values[cue], flagged, turn.marked) for cue in cues.findall(source)]
    return result


@cache
def _cues(dimension: str) -> tuple[dict[str, str], re.Pattern[str]]:
    words = lexicon()["dimensions"][dimension]
    if dimension == TEMPORAL:
        values = {cue: stance for stance in ("keen", "averse") for cue in words[stance]}
    else:
        values = {cue: value for value, entry in words["values"].items() for cue in entry["cues"]}
    return values, re.compile(rf"\b({'|'.join(map(re.escape, values))})\b")


def bare(text: str) -> str:
    """What is said after the word a remark may begin with."""
    for lead in (*lexicon()["leads"], lexicon()["flag"]):
        if text.startswith(f"{lead}, "):
            return text[len(lead) + 2 :]
    return text


def decide(asked: Asked, heard: Sequence[Remark], rng: random.Random) -> str:
    """The value that most remarks speak for, of several by chance; of a course the first tells the start, the last the
    end. There must be a remark."""
    if asked.dimension != TEMPORAL:
        counts = Counter(remark.value for remark in heard)
        return rng.choice([value for value in asked.words["values"] if counts[value] == max(counts.values())])
    course = [heard[0].value, heard[-1].value]
    return next(value for value, entry in asked.words["values"].items() if entry["phases"] == course)


class Reader(ChatModel):
    """Writes strategies and summaries from the text of the requests."""

    def __init__(self, config: ReaderConfig | None = None) -> None:
        self.config = config or ReaderConfig()

    @property
    def name(self) -> str:
        """Changes with the settings."""
        return f"world-reader-{self.config.errors:g}-{self.config.overlooked:g}-{self.config.seed}"

    def complete(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        """A reply for each request; a question that is not of the world is one that the server refuses."""
        replies = []
        for number, request in enumerate(requests):
            try:
                text = self.reply(str(request.messages[-1].text))
                value = None if request.schema is None else read_value(text, request.schema)
                replies.append(Reply(text, value))
            except ValueError as error:
                replies.append(Reply("", failure="refused", message=str(error)))
            if on_reply is not None:
                on_reply(number, replies[-1])
        return replies

    def reply(self, message: str) -> str:
        """What is answered to the user's message of a request for a strategy or a summary, as JSON.

        Raises:
            ValueError: it is neither, or not of the world.
        """
        parts = {match[1]: match[3] for match in _FENCED.finditer(message)}
        if "question" not in parts:
            raise ValueError("there is no question in the request")
        asked = understand(parts["question"].splitlines()[0].removeprefix("Question: "))
        options = re.findall(r"^[A-D]\. (.*)$", parts.get("options", ""), re.MULTILINE)
        if "conversation" in parts:
            # without the code of the fence, which changes with the words
            rng = random.Random(f"remind-reader:{self.config.seed}:{parts['conversation']}:{parts['question']}")
            return json.dumps(self._summary(asked, options, turns_of(parts["conversation"]), rng))
        return json.dumps(strategy(asked))

    def _summary(
        self, asked: Asked, options: Sequence[str], turns: Sequence[Turn], rng: random.Random
    ) -> dict[str, Any]:
        config = self.config
        read = [turn for turn in turns if turn.marked or rng.random() >= config.overlooked]
        heard = [remark for remark in remarks(asked, read) if not remark.flagged]
        # the marked turns first; the others count where those say nothing
        heard = [remark for remark in heard if remark.marked] or heard
        value = decide(asked, heard, rng) if heard else None
        if value is not None and rng.random() < config.errors:
            value = rng.choice([other for other in asked.words["values"] if other != value])
        return compose(asked, options, value, [remark.cue for remark in heard], rng)


def strategy(asked: Asked) -> dict[str, list[str]]:
    """A strategy from the question alone: whom and what it is about, and what such a thing could be."""
    values = [entry["label"][0] for entry in asked.words["values"].values()]
    return {
        "target_speaker": [asked.speaker],
        "related_entities": [asked.topic] if asked.topic else [],
        "behavioural_focus": values,
        "temporal_scope": [],
        "reasoning": list(guide(asked.dimension).reasoning),
    }


def compose(
    asked: Asked, options: Sequence[str], value: str | None, cues: Sequence[str], rng: random.Random
) -> dict[str, Any]:
    """A summary (understanding, evidence, conclusion) of a value and the cue words it was read from.

    Args:
        value: None: nothing in the dialogue tells.
    """
    findings = ", ".join(dict.fromkeys(cues)) or "nothing"
    if options:
        fits = statements(asked.dimension)
        evidence = []
        for letter, option in zip("ABCD", options, strict=False):
            of = fits.get(option) or {v for v, entry in asked.words["values"].items() if option in entry["label"]}
            speaks = value is not None and value in of
            evidence.append({"option": letter, "finding": findings if speaks else "nothing"})
    else:
        evidence = [{"finding": findings}]
    conclusion = "no one can tell"
    if value is not None:
        gist = rng.choice(asked.words["values"][value]["gist"])
        conclusion = fill(rng.choice(asked.words["gist"]), S=asked.speaker, topic=asked.topic, gist=gist)
    return {"understanding": asked.speaker, "evidence": evidence, "conclusion": conclusion}


@contextmanager
def served(config: ReaderConfig | None = None) -> Iterator[str]:
    """The reader behind an OpenAI-compatible server of this process. Gives its address."""
    reader = Reader(config)

    def respond(environ: Mapping[str, Any], start: Callable[..., Any]) -> list[bytes]:
        body = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        try:
            message = {"role": "assistant", "content": reader.reply(body["messages"][-1]["content"])}
            content, status = completion("reader", message, "stop", 0, 0), "200 OK"
        except ValueError as refusal:
            content, status = {"error": {"message": str(refusal)}}, "400 Bad Request"
        start(status, [("Content-Type", "application/json")])
        return [json.dumps(content).encode()]

    with make_server("127.0.0.1", 0, respond, handler_class=_Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


class _Quiet(WSGIRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Nothing: requests are no news."""
