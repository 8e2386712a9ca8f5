"""The package mem0ai as it is today (2.x): one call for each batch of turns, which only ever adds memories.

It is no longer what Chhikara et al. (2025) describe and what Table 1 of the REMIND paper has; that is
`remind.memory.mem0`.
"""

from __future__ import annotations

import logging
import os
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from itertools import takewhile
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from remind.core import optional
from remind.core.errors import ConfigError
from remind.data.dialogue import Session, Turn
from remind.memory.base import Draft, Query, turn_lines
from remind.memory.packages import MODEL, NO_KEY, URL, PackageBank, PackageSystem
from sae.ranges import Share

#: A bank holds one dialogue, and in it the package one user.
_USER = "dialogue"
#: Of what the package stores with a memory: what has a column of its own here, changes with the clock, or is its text.
_ELSEWHERE = ("data", "turns", "user_id", "created_at", "updated_at", "text_lemmatized")
#: Messages that the package shows again with the next batch.
_LAST = 10


@dataclass(frozen=True)
class Mem0TodaySystem(PackageSystem):
    """Memories that the package mem0ai extracts from batches of turns, found by cosine.

    A memory's sources are the turns of the batch that it was extracted from. The package takes the day of ingestion for
    that of the conversation; it is told the session's.
    """

    not_as_published = ("BM25 and entity boosts are off: the package would download models for them",)
    name: str = "mem0_today"
    threshold: Share = 0.1
    """Lowest score of a memory that is found; the package has 0.1."""

    def about(self) -> dict[str, Any]:
        """As `System.about`. Raises ModelError where the package is missing, ConfigError for another version."""
        _package()
        return self.described("mem0ai", import_module("mem0.configs.prompts").ADDITIVE_EXTRACTION_PROMPT)


class Mem0TodayBank(PackageBank, of=Mem0TodaySystem):
    system: Mem0TodaySystem
    logger = "mem0"

    def load(self) -> Any:
        package, qdrant, http = _package(), import_module("qdrant_client"), self.client()
        client, given = qdrant.QdrantClient(":memory:"), {"api_key": NO_KEY, "model": MODEL}
        parts = {
            "vector_store": ("qdrant", {"client": client, "embedding_model_dims": self.encoder.dimension}),
            # the provider openai would send everything to OpenRouter where the environment has a key for it
            "llm": ("vllm", {"vllm_base_url": URL, **given}),
            "embedder": ("openai", {"openai_base_url": URL, **given}),
        }
        config: dict[str, Any] = {name: {"provider": kind, "config": own} for name, (kind, own) in parts.items()}
        with warnings.catch_warnings():
            # of indexes, which a store in memory does not have
            warnings.simplefilter("ignore")
            memory = package.Memory.from_config({**config, "history_db_path": ":memory:"})
        # retries are made behind the meter
        memory.llm.client = memory.llm.client.with_options(max_retries=0, http_client=http)
        # a text is encoded on one line
        memory.embedding_model = SimpleNamespace(
            embed=lambda text, _=None: self._embed([text])[0], embed_batch=lambda texts, _=None: self._embed(texts)
        )
        # fastembed, where it is installed, would download its model
        memory.vector_store._bm25_encoder = False
        scope = import_module("mem0.memory.main")._build_session_scope({"user_id": _USER})
        *earlier, _ = self.store.sessions()
        for turn in [turn for session in earlier for turn in session.turns][-_LAST:]:
            memory.db.save_messages([self._message(turn)], scope)
        if numbers := self.store.numbers():
            ids = [str(uuid.UUID(int=number)) for number in numbers]
            memory.vector_store.insert(self.store.vectors(numbers).tolist(), list(map(self._payload, numbers)), ids)
        return memory

    def take_in(self, package: Any, session: Session, turns: Sequence[Turn]) -> None:
        main, prompt = import_module("mem0.memory.main"), "generate_additive_extraction_prompt"
        day, told = turns[0].time or session.time or "unknown", {"turns": [turn.id for turn in turns]}
        dated = partial(getattr(main, prompt), current_date=day, timestamp=day)
        with patch.object(main, prompt, dated):
            events = package.add(list(map(self._message, turns)), user_id=_USER, metadata=told)["results"]
        for payload in [package.vector_store.get(vector_id=event["id"]).payload for event in events]:
            text = payload["data"]
            note = {name: value for name, value in payload.items() if name not in _ELSEWHERE}
            self.put(Draft("fact", tuple(payload["turns"]), text, (_on_one_line(text),), note=note))

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float]]:
        found = self.store.rank(_on_one_line(query.text.strip()), "dense")
        return takewhile(lambda one: one[1] >= self.system.threshold, found)

    def _embed(self, texts: Sequence[str]) -> list[list[float]]:
        return self.encoder.encode_apart(list(map(_on_one_line, texts))).tolist()  # type: ignore[no-any-return]

    def _message(self, turn: Turn) -> dict[str, str]:
        return {"role": "user" if self.is_user(turn) else "assistant", "content": turn_lines(turn)}

    def _payload(self, number: int) -> dict[str, Any]:
        """What the package stores with a memory, as far as it reads it."""
        memory = self.store.memory(number)
        return {**self.store.note(number), "data": memory.text, "turns": list(memory.sources or ()), "user_id": _USER}


def _on_one_line(text: str) -> str:
    return text.replace("\n", " ")


def _package() -> Any:
    """The package, imported with telemetry off. Raises ModelError and ConfigError as `Mem0TodaySystem.about`."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, MEM0_TELEMETRY="False", MEM0_DIR=folder):
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
