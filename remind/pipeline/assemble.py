"""The states of dialogues in the cache, and the states folder they are copied to."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from remind.core.cache import Cache
from remind.core.errors import ConfigError, DataError, FormatError
from remind.core.files import (
    atomic_path,
    none_empty,
    put_folder,
    sha256_file,
    sha256_json,
)
from remind.core.processes import locked
from remind.llm.auxiliary import ChatLLM
from remind.pipeline.config import BuildStatesConfig
from remind.pipeline.identity import prompt_hashes, settings_of, versions
from remind.pipeline.outline import Outline
from remind.pipeline.record import Tally
from remind.states.parquet import StateRecord, part_name, read_manifest, write_manifest, write_records

_log = logging.getLogger(__name__)


class Parts:
    """Cached states of dialogues: a Parquet file each and, written after it, a JSON entry with its hash and account."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._cache = folder, Cache(folder)

    def put(self, key: str, records: Sequence[StateRecord], account: dict[str, Any]) -> None:
        """Keep a dialogue's states.

        Args:
            account: JSON that belongs to them.
        """
        path = self._path(key)
        write_records(path, records)
        self._cache.write_json("states", key, {"sha256": sha256_file(path), "account": account})

    def account(self, key: str) -> dict[str, Any] | None:
        """The account of states that are here and whole, else None."""
        entry, path = self._cache.read_json("states", key), self._path(key)
        if entry is None:
            return None
        if not path.is_file() or sha256_file(path) != entry["sha256"]:
            _log.warning("%s: its content has changed since it was written; it is built again", path)
            return None
        return dict(entry["account"])

    def copy(self, key: str, target: Path) -> None:
        """The states as a file. Raises DataError where they are not what was put here."""
        entry, path = self._cache.read_json("states", key), self._path(key)
        with atomic_path(target) as temporary:
            shutil.copyfile(path, temporary)
            if entry is None or sha256_file(temporary) != entry["sha256"]:
                raise DataError("has changed since it was built; start again", path)

    def _path(self, key: str) -> Path:
        return self._cache.path("states", key, ".parquet")


def is_built(out: Path, stamp: str) -> bool:
    """Whether the folder holds the states of the build with that stamp, whole."""
    try:
        manifest = read_manifest(out)
    except (DataError, FormatError):
        return False
    parts = manifest.get("parts")
    if manifest.get("build") != stamp or not isinstance(parts, dict):
        return False
    return all((out / name).is_file() and sha256_file(out / name) == digest for name, digest in parts.items())


def check_built(out: Path, stamp: str) -> None:
    """Raises ConfigError unless the folder holds the states of the build with that stamp."""
    if not is_built(out, stamp):
        raise ConfigError(f"{out} exists, built from other input or settings; choose another out or set overwrite")


def assemble(out: Path, parts: Parts, keys: Sequence[str], manifest: Mapping[str, Any], overwrite: bool) -> None:
    """Copy the parts to a new folder, write its manifest last, and give it its name.

    What a killed process left half-made is cleared away. Nothing is done where another process was first.

    Raises:
        ConfigError: another process has meanwhile put states built from other input or settings there.
        OSError: no room, no right to write. DataError: a part that has changed since it was built.
    """
    with locked(parts.folder / "states" / f"{sha256_json(str(out.resolve()))[:16]}.lock"):
        if not overwrite and out.exists():
            check_built(out, manifest["build"])
            return
        partial = out.with_name(f"{out.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with none_empty(out.parent):
            try:
                partial.mkdir(parents=True)
                for number, key in enumerate(keys):
                    parts.copy(key, partial / part_name(number))
                write_manifest(partial, dict(manifest))
                put_folder(partial, out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


def manifest_of(
    cfg: BuildStatesConfig,
    stamp: str,
    inputs: Mapping[str, str],
    corpus: Outline,
    tally: Tally,
    llm: ChatLLM | str,
    saes: Path,
) -> dict[str, Any]:
    """The manifest of a build; equal for equal builds, however the work was distributed."""
    config = settings_of(cfg)
    name, report = (llm, None) if isinstance(llm, str) else (llm.name, llm.report())
    # the LLM is identified by its name, however it was reached
    settings = {k: v for k, v in config.items() if k not in ("llm", "max_failed")}
    return {
        "build": stamp,
        "inputs": dict(inputs),
        "config": {"input": cfg.input, **config},
        "config_hash": sha256_json(settings if report is None else {**settings, "llm": name}),
        "prompts": prompt_hashes(name),
        "llm": name,
        "llm_report": report,
        "abstention": corpus.abstention,
        "kind": cfg.perception.kind,
        "kinds": {name: {"n": n, "as_gold": tally.kinds_as_gold[name]} for name, n in sorted(tally.kinds.items())},
        "grounding_tokenizer": cfg.backbone,
        "sae": {file.parent.name: sha256_file(file) for file in sorted(saes.glob("layer_*/sae_weights.safetensors"))},
        "counts": {
            **{name: getattr(tally, name) for name in tally.COUNTS},
            "evidence_references": corpus.references,
            "evidence_dangling": len(corpus.dangling),
        },
        "overlap": None if corpus.overlap is None else asdict(corpus.overlap),
        "evidence_recall": tally.recall(),
        "dangling": [asdict(item) for item in corpus.dangling],
        "versions": versions(),
    }


def summary_of(tally: Tally, corpus: Outline, cap: int | None = None) -> str:
    """The counts and the evidence recall of a build as text.

    Args:
        cap: `max_context_tokens`.
    """
    cut = f"the cap of {cap} tokens left out segments of {tally.capped} questions that top_share would keep"
    kinds = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in tally.kinds.most_common())
    splits = ", ".join(f"{tally.splits[name]} {name}" for name in ("train", "dev", "test") if tally.splits[name])
    lines = [
        f"{tally.questions} questions over {tally.dialogues} dialogues ({splits})",
        f"{tally.without_answer} questions have no gold answer",
        f"{tally.without_marks} questions have no marked turn: their x1 is x0",
        *([] if cap is None else [cut]),
        *([f"kinds inferred: {kinds}; {tally.kinds_as_gold.total()} are those of the benchmark"] if kinds else []),
        f"{len(corpus.dangling)} of {corpus.references} evidence references name no turn and are left out",
        *(f"  {item.question_id}: {item.reference!r}" for item in corpus.dangling[:5]),
    ]
    if len(corpus.dangling) > 5:
        lines.append("  … the rest is listed in manifest.json")
    if corpus.overlap is not None:
        lines.append(f"overlap: {corpus.overlap}")
    if table := tally.recall():
        lines.append(f"{'evidence recall':<34}{'n':>6}{'x0':>8}{'marked':>8}")
        lines += [f"{key:<34}{row['n']:>6}{row['x0']:>8.3f}{row['marked']:>8.3f}" for key, row in table.items()]
    return "\n".join(lines)
