"""What decides the states of a build, as one hash."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from remind.build.config import BuildStatesConfig
from remind.core.files import input_hashes, sha256_file, sha256_json
from remind.data.dialogue import Corpus, Dialogue
from remind.data.readers import mapping_files
from remind.grounding import GroundingConfig
from remind.models.images import file_hash
from remind.states import prompts
from remind.states.dataset import FORMAT_VERSION

#: Of the states that a build makes of the same input: raised when they change.
_VERSION = 1
#: Fields that say where files are and how the work is distributed; they do not change the result.
_ELSEWHERE = ("input", "out", "cache", "overwrite", "workers", "shard", "keep_codes")
#: Of a large file so many pieces of so many bytes are hashed, evenly spread.
_PIECES, _PIECE = 64, 1 << 16


def versions() -> dict[str, str]:
    names = ("torch", "transformers", "sentence-transformers", "remind-toolkit")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def settings_of(cfg: BuildStatesConfig) -> dict[str, Any]:
    """The settings that have a part in the states; the manifest lists them."""
    return {key: value for key, value in asdict(cfg).items() if key not in _ELSEWHERE}


def content_of(cfg: BuildStatesConfig, corpus: Corpus | None) -> dict[str, str]:
    """Hashes of the input files and of the mapping file they are read by; of a corpus in memory its own."""
    if corpus is not None:
        parts = ([asdict(item) for item in items] for items in (corpus.dialogues, corpus.questions))
        return {"corpus": sha256_json(list(parts))}
    return input_hashes([*cfg.inputs, *mapping_files(cfg.format)])


def build_stamp(
    cfg: BuildStatesConfig, inputs: Mapping[str, str], llm: str, saes: Mapping[str, str], dialogues: Iterator[Dialogue]
) -> str:
    """Hash of all that decides the finished folder.

    Args:
        inputs: `content_of`. llm: name of the auxiliary LLM, however it is reached. saes: `sae_hashes`.
        dialogues: read only where grounding shows images as pixels.
    """
    settings = {key: value for key, value in settings_of(cfg).items() if key not in ("llm", "sae", "sae_data")}
    elsewhere = ("codes_folder", "cached_dialogues", "image_root")
    settings["grounding"] = {k: v for k, v in settings["grounding"].items() if k not in elsewhere}
    settings["device"] = cfg.device.partition(":")[0]
    pixels = cfg.grounding.images == "pixels"
    pictures = [picture_hashes(cfg.grounding, dialogue) for dialogue in dialogues] if pixels else []
    about = [_VERSION, FORMAT_VERSION, settings, inputs, model_hash(cfg.backbone), llm, saes, prompt_hashes(llm)]
    return sha256_json([*about, pictures, versions()])


def prompt_hashes(llm: str) -> dict[str, str]:
    """Of the prompt templates that the states are made with, by name; only a chat model is asked anything."""
    return prompts.fingerprints(*prompts.RENDERED, *(prompts.ASKED if llm.startswith("chat-") else ()))


def sae_hashes(folder: Path) -> dict[str, str]:
    """Of everything an SAE's codes depend on, by layer: weights, configuration, idf."""
    from sae.topk import sae_files

    return {str(file.relative_to(folder)): sha256_file(file) for file in sae_files(folder)}


def picture_hashes(grounding: GroundingConfig, dialogue: Dialogue) -> list[str]:
    """SHA-256 of the image files of a dialogue. Raises ImagePathError where one is missing or outside of the root."""
    paths = (image.path for image in dialogue.images if image.path is not None)
    return [file_hash(path, grounding.image_root, "grounding.", dialogue.id) for path in paths]


def model_hash(name: str) -> str:
    """Hash of a model's files, whatever it is called; of a file of weights a sample counts.

    Raises:
        ModelError: no such model.
    """
    from remind.models.backbone import model_folder

    folder = model_folder(name)
    if folder is None:
        return name
    kinds = (".safetensors", ".json", ".txt", ".model", ".jinja")
    files = sorted(file for file in folder.iterdir() if file.suffix in kinds and file.is_file())
    return sha256_json({file.name: _sample_hash(file) for file in files})


def _sample_hash(path: Path) -> str:
    size = path.stat().st_size
    if size <= _PIECES * _PIECE:
        return sha256_file(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(_PIECES):
            file.seek((size - _PIECE) * number // (_PIECES - 1))
            digest.update(file.read(_PIECE))
    return digest.hexdigest()
