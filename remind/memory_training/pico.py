"""The policy `pico`: a Qwen3 of 4 layers that knows the words of the memory world, and its grammar.

It replies in commands, `ADD t3 UPDATE m2 t5 <end>`, where t is a turn and m an entry that the prompt shows. They
compile to the JSON that any policy replies with, texts copied from the turns, so that all rules for replies hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch

from remind.core.errors import ModelError
from remind.llm.request import Request
from remind.memory.membuilder import MemBuilderSystem, request
from remind.memory.operations import BANKS, Entry, Occasion, Operation, Role, State, fold, propose
from remind.memory_training.episodes import Episode, Examined, Lesson, Prompt
from remind.memory_training.rewards import ROLES, SALIMORY, task_reward
from remind.models.backbone import Backbone
from remind.models.chat import chat_ids, end_token_id, tokenize
from remind.models.generate import continue_rows, decoding
from remind.testbed.memory_world import FORMS, Ask, Expert, Life, Meeting, read, vocabulary

PAD, END = "<pad>", "<end>"
MAX_TURNS, SHOWN = 10, 4
#: Entries that SaliMory's utilizer is shown.
LISTED = 12
#: Command by its number of turns and entries, in the order they follow it.
COMMANDS = {"ADD": "t", "UPDATE": "mt", "MERGE": "mm", "SKIP": "t"}
#: Tokens of a reply, at most.
REPLY = 24


def words() -> list[str]:
    """The vocabulary: a token is a word."""
    places = [*(f"m{n + 1}" for n in range(SHOWN)), *(f"t{n + 1}" for n in range(MAX_TURNS))]
    membuilder = [PAD, END, "<ops>", *(f"<{role}>" for role in ROLES), *COMMANDS, *places, *vocabulary()]
    salimory = [*(f"<{role}>" for role in SALIMORY), "YES", "NO", "DELETE", *map(str.upper, BANKS), *FORMS]
    return [*membuilder, *salimory, *(f"m{n + 1}" for n in range(SHOWN, LISTED))]


def tokenizer() -> Any:
    """Of pico; splits at white space."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words())}, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=END, unk_token=PAD)


def make_pico(seed: int, layers: int = 4, hidden_size: int = 96) -> tuple[Any, Any]:
    """Pico with random weights, and its tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    vocabulary = tokenizer()
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=vocabulary.pad_token_id,
        eos_token_id=vocabulary.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config), vocabulary


class View(NamedTuple):
    """What a role is shown.

    Attributes:
        texts: of m1, m2, ...: entries near to the session, or lines of the core block.
        entries: the same as entries; of core the whole block alone.
    """

    role: Role
    meeting: Meeting
    texts: tuple[str, ...]
    entries: tuple[Entry, ...]

    def prompt(self) -> str:
        """As words of the vocabulary. Numbers stand behind what they number: a causal model then knows it there."""
        shown = [f"{_undated(text)} m{n}" for n, text in enumerate(self.texts, start=1)]
        turns = [f"{turn.text} t{n}" for n, turn in enumerate(self.meeting.turns, start=1)]
        return " ".join([f"<{self.role}>", *shown, *turns, "<ops>"])

    def request(self) -> Request:
        """As `remind run-memory` asks a chat model."""
        return request(self.role, "", self.meeting.session, self.entries)

    def occasion(self, dialogue: str) -> Occasion:
        """Where its operations are proposed."""
        meeting = self.meeting
        turns = tuple(f"{meeting.id}:{n}" for n in range(1, len(meeting.turns) + 1))
        return Occasion(dialogue, meeting.id, meeting.day.isoformat(), turns)

    def as_json(self, reply: str) -> str:
        """Commands as a chat model replies them."""
        return compile_reply(self, reply)

    def from_json(self, text: str) -> str:
        """A chat model's reply, which `remember` takes as it is; the grammar's commands are no JSON."""
        return text.replace(END, "?")


def view(role: Role, meeting: Meeting, state: State, most: int = SHOWN) -> View:
    """The role's store beside a session: of core the last lines, else the entries that share most words with it."""
    if role == "core":
        block = state.block
        return View(role, meeting, tuple(block.text.split("\n")[-most:]) if block else (), (block,) if block else ())
    keys = {turn.key for turn in meeting.turns if turn.key}
    entries = state.current(role)
    near = sorted(range(len(entries)), key=lambda n: (-len(keys & {*entries[n].text.split()}), -n))[:most]
    chosen = tuple(entries[n] for n in sorted(near))
    return View(role, meeting, tuple(one.text for one in chosen), chosen)


def _undated(text: str) -> str:
    return " ".join(part.partition(": ")[2] for part in text.split(" | "))


def compile_reply(view: View, reply: str) -> str:
    """Commands as the JSON of `propose`; what is no sequence of commands comes back as it is.

    Core takes a single operation: several ADD become one APPEND, and none at all an APPEND of nothing.
    """
    tokens = reply.split()
    commands: list[tuple[str, list[int]]] = []
    if not tokens or tokens.pop() != END:
        return reply
    while tokens:
        kinds = COMMANDS.get(name := tokens.pop(0))
        if kinds is None or len(tokens) < len(kinds):
            return reply
        places, tokens = tokens[: len(kinds)], tokens[len(kinds) :]
        if not all(re.fullmatch(rf"{kind}[0-9]{{1,2}}", place) for kind, place in zip(kinds, places, strict=True)):
            return reply
        commands.append((name, [int(place[1:]) for place in places]))
    ops = _core(view, commands) if view.role == "core" else [_operation(view, *one) for one in commands]
    return json.dumps({"ops": ops})


def _line(view: View, turn: int) -> str:
    """A turn as it is remembered; a turn that there is not is told by its number, and rejected for its source."""
    turns = view.meeting.turns
    return f"{view.meeting.day.isoformat()}: {turns[turn - 1].text if turn <= len(turns) else turn}"


def _core(view: View, commands: Sequence[tuple[str, list[int]]]) -> list[dict[str, Any]]:
    if all(name == "ADD" for name, _ in commands):
        turns = [places[0] for _, places in commands]
        return [{"op": "APPEND", "content": "\n".join(_line(view, turn) for turn in turns), "sources": turns}]
    ops: list[dict[str, Any]] = []
    for name, places in commands:
        old = view.texts[places[0] - 1] if places[0] <= len(view.texts) else ""
        replaced = {"op": "REPLACE", "old_text": old, "new_text": _line(view, places[-1]), "sources": places[-1:]}
        ops.append(replaced if name == "UPDATE" else {"op": name})
    return ops


def _operation(view: View, name: str, places: Sequence[int]) -> dict[str, Any]:
    if name == "MERGE":
        texts = [view.texts[place - 1] for place in places if place <= len(view.texts)]
        return {"op": name, "olds": list(places), "new_memory": " | ".join(texts)}
    told = {"sources": [places[-1]]}
    if name == "UPDATE":
        return {"op": name, "old": places[0], "new_memory": _line(view, places[1]), **told}
    return {"op": name, "memory" if name == "ADD" else "reason": _line(view, places[0]), **told}


def remember(state: State, dialogue: str, replies: Sequence[tuple[Any, str]]) -> tuple[State, list[list[Operation]]]:
    """The memory after the replies of all roles, which have seen the same state, each with what it was shown.

    A role with a rejected operation changes nothing; its operations are reported all the same.

    Returns:
        The state, and the operations of each role.
    """
    proposed, first, applied = [], state.seq + 1, []
    for shown, reply in replies:
        found = propose(shown.role, shown.as_json(reply), shown.occasion(dialogue), shown.entries, first)
        first += len(found)
        proposed.append(found)
        if all(one.status == "applied" for one in found):
            applied += found
    return fold(applied, state), proposed


# the expert's replies


def expert_reply(view: View, expert: Expert, random: Random) -> str:
    """What an expert replies as a role: new facts are added, told anew where the old one is shown."""
    commands: list[str] = []
    for number, turn in enumerate(view.meeting.turns, start=1):
        if expert.keeps(turn, random) != view.role:
            continue
        old = [n for n, text in enumerate(view.texts, start=1) if f"my {turn.key} is" in text]
        single = view.role != "core" or not commands
        if " now " in turn.text and old and single:
            commands.append(f"UPDATE m{old[-1]} t{number}")
        elif view.role != "core" or not any("UPDATE" in one for one in commands):
            commands.append(f"ADD t{number}")
    return " ".join([*commands, END])


def correct(state: State, asks: Sequence[Ask]) -> list[bool]:
    """Which questions are answered right from a memory."""
    return [ask.answer == one.answer for ask, one in zip(asks, read(state, asks), strict=True)]


def lessons(life: Life, expert: Expert, seed: int = 0, most: int = SHOWN) -> Iterator[Lesson]:
    """The sessions of a dialogue in order; `most` as of `view`."""
    state = State()
    for number, meeting in enumerate(life.meetings):
        views = tuple(view(role, meeting, state, most) for role in ROLES)  # type: ignore[arg-type]
        # one judgement of each turn, whatever the role
        replies = tuple(expert_reply(one, expert, Random(f"expert {seed} {life.id} {number}")) for one in views)
        pairs = list(zip(views, replies, strict=True))
        yield Lesson(life.id, state, views, replies, pairs, len(meeting.rewarded), partial(examined, meeting))
        state, _ = remember(state, life.id, pairs)


def examined(meeting: Meeting, states: Sequence[State]) -> list[Examined]:
    """What memories are worth after a session, by the reader of the memory world."""
    found = []
    for state in states:
        readings, held_out = read(state, meeting.rewarded), correct(state, meeting.held_out)
        right = [ask.answer == one.answer for ask, one in zip(meeting.rewarded, readings, strict=True)]
        retrieved = tuple(store for one in readings for store in one.retrieved)
        found.append(Examined(task_reward(right), task_reward(held_out) if held_out else None, retrieved))
    return found


# how a policy is asked and replies: pico in its commands, others in the chats and the JSON of `remind run-memory`


class Commands:
    """The language of pico.

    What a role is shown says it in words (`prompt`) and as a chat (`request`), and turns replies in commands into JSON
    (`as_json`) and back into what a rollout takes (`from_json`).

    Attributes:
        limits: entries that a role is shown: those of MemBuilder and the booster, the utilizer.
        room: tokens of a reply, at most.
    """

    limits, room = (SHOWN, LISTED), REPLY

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def prompt(self, shown: Any) -> list[int]:
        """Token ids that are completed by a reply."""
        return list(self.tokenizer(shown.prompt())["input_ids"])

    def target(self, shown: Any, reply: str) -> list[int]:
        """Token ids of an expert's reply, which is given in commands."""
        return list(self.tokenizer(reply)["input_ids"])

    def reply(self, shown: Any, ids: Sequence[int]) -> str:
        """What a policy replied, as rollouts take it."""
        return str(self.tokenizer.decode(ids))

    def length(self, text: str) -> int:
        """Of a text in tokens of the policy."""
        return len(text.split())


class Chat(Commands):
    """The language of instruction models: the requests and replies of `remind run-memory`, in their chat template.

    As there, a role of MemBuilder is shown 20 entries; booster and utilizer are shown 99, of 200.
    """

    limits, room = (MemBuilderSystem.shown, 99), 1024

    def prompt(self, shown: Any) -> list[int]:
        return chat_ids(self.tokenizer, shown.request().chat)

    def target(self, shown: Any, reply: str) -> list[int]:
        return [*tokenize(self.tokenizer, shown.as_json(reply)).ids, end_token_id(self.tokenizer)]

    def reply(self, shown: Any, ids: Sequence[int]) -> str:
        return shown.from_json(self.tokenizer.decode(ids, skip_special_tokens=True))

    def length(self, text: str) -> int:
        return len(tokenize(self.tokenizer, text).ids)


def speech_of(tokenizer: Any) -> Commands:
    """The language of a policy, by its tokenizer. ModelError where it is not pico's and has no chat template."""
    if {END, "<ops>"} <= tokenizer.get_vocab().keys():
        return Commands(tokenizer)
    if not tokenizer.chat_template:
        name = tokenizer.name_or_path or "the model"
        raise ModelError(f"{name}: its tokenizer has no chat template; name an instruction-tuned model")
    return Chat(tokenizer)


def spoken(inner: Generator[list[Any], list[str], Any], speech: Commands) -> Episode:
    """A rollout that yields what roles are shown and takes replies as text, in tokens."""
    asked = next(inner)
    while True:
        replies = yield [Prompt(one.role, speech.prompt(one)) for one in asked]
        try:
            asked = inner.send([speech.reply(one, ids) for one, ids in zip(asked, replies, strict=True)])
        except StopIteration as end:
            return end.value


def sampling(policy: Backbone, room: int, temperature: float = 0.0) -> Any:
    """Settings of `complete`: of at most `room` tokens, the likeliest ones at temperature 0."""
    settings = decoding(policy, room, temperature)
    # the one that replies of the expert end with
    settings.eos_token_id = [end_token_id(policy.tokenizer)]
    return settings


def complete(model: Any, prompts: Sequence[Sequence[int]], settings: Any) -> list[list[int]]:
    """Token ids that a policy completes prompts with, the end token included where it came."""
    return [[*new, *settings.eos_token_id] if ended else new for new, ended in continue_rows(model, prompts, settings)]
