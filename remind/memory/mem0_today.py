"""The package mem0ai as it is today (2.x): one call for each batch of turns, which only ever adds memories.

It is no longer what Chhikara et al. (2025) describe and what Table 1 of the REMIND paper has; that is
`remind.memory.mem0`.
"""

from __future__ import annotations

import logging
import os
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from remind.core import optional
from remind.core.errors import ConfigError
from remind.data.dialogue import Session, Turn
from remind.memory.asking import Fault
from remind.memory.packages import MODEL, NO_KEY, PackageBank, PackageSystem
from remind.memory.store import Draft
from remind.states.pyramid import turn_text
from sae.ranges import Share

if TYPE_CHECKING:
    from remind.llm.request import Stage

#: A bank holds one dialogue, and in it the package one user.
_USER = "dialogue"
#: Of what the package stores with a memory: what has a column of its own here, changes with the clock, or is its text.
_ELSEWHERE = ("data", "turns", "user_id", "created_at", "updated_at", "text_lemmatized")
_DATE = (
    "The conversation took place on {date}. Take that for the Observation Date and the Current Date in place of those"
    " given above: resolve 'today', 'last week' and the like by it."
)


@dataclass(frozen=True)
class Mem0TodaySystem(PackageSystem):
    """Memories that the package mem0ai extracts from batches of turns, found by cosine.

    A memory's sources are the turns of the batch that it was extracted from.
    """

    not_as_published = ("BM25 and entity boosts are off: the package would download models for them",)
    name: str = "mem0_today"
    threshold: Share = 0.1
    """Lowest score of a memory that is found; the package has 0.1."""
    observation_date: Fault = "fixed"
    """What the model takes for the day of the conversation. upstream: the day of ingestion. fixed: the session's."""

    def about(self) -> dict[str, Any]:
        """As `MemorySystem.about`. Raises ModelError where the package is missing, ConfigError for another version."""
        _package()
        return self.described("mem0ai", import_module("mem0.configs.prompts").ADDITIVE_EXTRACTION_PROMPT)


class Mem0TodayBank(PackageBank, of=Mem0TodaySystem):
    system: Mem0TodaySystem
    logger = "mem0"

    def load(self, stage: Stage) -> Any:
        memory = self._empty(stage)
        for entry in self.store.journal()[-1:]:
            for scope, *said in entry["messages"]:
                memory.db.save_messages([dict(zip(("role", "content", "name"), said, strict=True))], scope)
        if numbers := self.store.numbers():
            payloads = [self._payload(number) for number in numbers]
            vectors = self.store.vectors(self.store.rows(numbers)).tolist()
            memory.vector_store.insert(vectors, payloads, [str(uuid.UUID(int=number)) for number in numbers])
        return memory

    def take_in(self, package: Any, session: Session, turns: Sequence[Turn]) -> Iterable[str]:
        first, date = self.said_first(), turns[0].time or session.time
        messages = [
            {"role": "user" if turn.speaker == first else "assistant", "content": turn_text(turn)} for turn in turns
        ]
        prompt = _DATE.format(date=date) if date and self.system.observation_date == "fixed" else None
        told = {"turns": [turn.id for turn in turns]}
        events = package.add(messages, user_id=_USER, metadata=told, prompt=prompt)["results"]
        payloads = [package.vector_store.get(vector_id=event["id"]).payload for event in events]
        for payload in payloads:
            text = payload["data"]
            note = {name: value for name, value in payload.items() if name not in _ELSEWHERE}
            # the package encodes a text on one line
            vectors = self.encoder.encode_apart([text.replace("\n", " ")])
            draft = Draft("fact", tuple(payload["turns"]), text, note=note)
            self.store.add(draft, self.encoder.count_tokens(text), vectors)
        return ()

    def keep(self, package: Any) -> None:
        said = "SELECT session_scope, role, content, name FROM messages ORDER BY created_at, rowid"
        self.store.log({"messages": package.db.connection.execute(said).fetchall()})

    def search(self, package: Any, text: str, top: int) -> Iterator[tuple[int, float]]:
        found = package.search(text, top_k=top, filters={"user_id": _USER}, threshold=self.system.threshold)
        for row in found["results"]:
            yield uuid.UUID(row["id"]).int, row["score"]

    def _payload(self, number: int) -> dict[str, Any]:
        """What the package stores with a memory, as far as it reads it."""
        memory = self.store.memory(number)
        return {**self.store.note(number), "data": memory.text, "turns": list(memory.sources or ()), "user_id": _USER}

    def _empty(self, stage: Stage) -> Any:
        client, url, dimension = self.client(stage), self.url(stage), self.encoder.dimension
        package, qdrant = _package(), import_module("qdrant_client")
        store = {"client": qdrant.QdrantClient(":memory:"), "embedding_model_dims": dimension}
        # the provider openai would send everything to OpenRouter where the environment has a key for it
        chat = {"provider": "vllm", "config": {"vllm_base_url": url, "api_key": NO_KEY, "model": MODEL}}
        embedder = {"provider": "openai", "config": {"openai_base_url": url, "api_key": NO_KEY, "model": MODEL}}
        with warnings.catch_warnings():
            # of indexes, which a store in memory does not have
            warnings.simplefilter("ignore")
            memory = package.Memory.from_config(
                {
                    "vector_store": {"provider": "qdrant", "config": store},
                    "llm": chat,
                    "embedder": embedder,
                    "history_db_path": ":memory:",
                }
            )
        memory.llm.client = memory.embedding_model.client = client
        # fastembed, where it is installed, would download its model
        memory.vector_store._bm25_encoder = False
        return memory


def _package() -> Any:
    """The package, imported with telemetry off. Raises ModelError and ConfigError as `Mem0TodaySystem.about`."""
    with TemporaryDirectory() as folder, _environment(MEM0_TELEMETRY="False", MEM0_DIR=folder):
        # a file of settings that only telemetry uses is written there
        package = optional("mem0", "mem0_today")
    version = metadata.version("mem0ai")
    if not version.startswith("2."):
        raise ConfigError(f"mem0_today needs mem0ai 2.2 or newer, not {version}: pip install 'remind-toolkit[mem0]'")
    if import_module("mem0.memory.telemetry").MEM0_TELEMETRY:
        raise ConfigError("mem0 was imported with its telemetry on; set MEM0_TELEMETRY=False before that")
    # spaCy, where it is installed, would download its model
    models: Any = import_module("mem0.utils.spacy_models")
    models._load_failed_full = models._load_failed_lemma = True
    # which says that it has no BM25
    logging.getLogger("mem0.vector_stores.qdrant").setLevel(logging.ERROR)
    return package


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
