"""What decides the states, as hashes: of a whole build, and of each dialogue's part of it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from remind.core.cache import Cache
from remind.core.files import sha256_file, sha256_json
from remind.data.dialogue import Dialogue, Question
from remind.grounding import GroundingConfig
from remind.models.images import file_hash
from remind.pipeline.config import BuildStatesConfig
from remind.states import prompts

#: Fields that say where files are and how the work is distributed; they do not change the result.
_ELSEWHERE = ("input", "out", "cache", "overwrite", "workers", "shard", "keep_codes")
#: Packages whose code has a part in states: a change of it makes new ones.
_CODE = (
    "remind/data/dialogue.py",
    "remind/grounding",
    "remind/llm",
    "remind/models",
    "remind/perception",
    "remind/pipeline",
    "remind/reflect.py",
    "remind/states",
    "remind/text",
    "sae",
)


def versions() -> dict[str, str]:
    names = ("torch", "transformers", "sentence-transformers", "remind-toolkit")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def settings_of(cfg: BuildStatesConfig) -> dict[str, Any]:
    """The settings that have a part in the states; the manifest lists them."""
    return {key: value for key, value in asdict(cfg).items() if key not in _ELSEWHERE}


def build_identity(cfg: BuildStatesConfig, llm: str, saes: Path) -> dict[str, Any]:
    """All that decides the states besides dialogues, questions and splits.

    Args:
        llm: name of the auxiliary LLM. saes: folder of the SAEs.
    """
    # the LLM is identified by its name, however it was reached; limit, ask and abstention by each dialogue's key
    settings = {
        k: v
        for k, v in settings_of(cfg).items()
        if k not in ("llm", "max_failed", "split", "limit", "ask", "format", "abstention")
    }
    del settings["sae"], settings["sae_data"]
    elsewhere = ("codes_folder", "cached_dialogues", "image_root")
    grounding = {k: v for k, v in settings["grounding"].items() if k not in elsewhere}
    return {
        **settings,
        "grounding": grounding,
        "device": cfg.device.partition(":")[0],
        "backbone": model_hash(cfg.backbone, Cache(cfg.cache)),
        "saes": sae_hashes(saes),
        "llm": llm,
        "prompts": prompt_hashes(llm),
        "code": code_hash(),
        "versions": versions(),
    }


def prompt_hashes(llm: str) -> dict[str, str]:
    """Of the prompt templates that the states are made with, by name.

    Args:
        llm: name of the auxiliary LLM; only a chat model is asked anything.
    """
    return prompts.fingerprints(*prompts.RENDERED, *(prompts.ASKED if llm.startswith("chat-") else ()))


def sae_hashes(folder: Path) -> dict[str, str]:
    """Of everything an SAE's codes depend on, by layer: weights, configuration, idf."""
    from sae.topk import sae_files

    return {str(file.relative_to(folder)): sha256_file(file) for file in sae_files(folder)}


def dialogue_key(
    identity: str,
    dialogue: Dialogue,
    questions: Sequence[Question],
    splits: Mapping[str, str],
    abstention: bool,
    pictures: Sequence[str] = (),
) -> str:
    """Hash that names a dialogue's states.

    Args:
        identity: hash of `build_identity`.
        abstention: as in `FactualState`.
        pictures: `picture_hashes`.
    """
    rows = [[asdict(question), splits[question.id]] for question in questions]
    return sha256_json([identity, dialogue_hash(dialogue), list(pictures), rows, abstention])


def picture_hashes(grounding: GroundingConfig, dialogue: Dialogue) -> list[str]:
    """SHA-256 of the image files of a dialogue, where grounding shows them as pixels; else none.

    Raises:
        ImagePathError: one is missing, or is outside of the root.
    """
    if grounding.images != "pixels":
        return []
    return [
        file_hash(image.path, grounding.image_root, "grounding.", dialogue.id)
        for image in dialogue.images
        if image.path is not None
    ]


def dialogue_hash(dialogue: Dialogue) -> str:
    """Of all that a dialogue holds."""
    return sha256_json(asdict(dialogue))


def code_hash() -> str:
    """Of this toolkit's code that has a part in states; templates are not code, see `prompt_hashes`."""
    root = Path(__file__).parent.parent.parent
    files = [
        file
        for part in _CODE
        for file in ([root / part] if (root / part).is_file() else sorted((root / part).rglob("*")))
        if file.suffix in (".py", ".yaml")
    ]
    return sha256_json({str(file.relative_to(root)): sha256_file(file) for file in files})


def model_hash(name: str, cache: Cache) -> str:
    """Hash of a model's files, whatever it is called. Those of large files are cached by size and time of change.

    Raises:
        ModelError: no such model.
    """
    from remind.models.backbone import model_folder

    folder = model_folder(name)
    if folder is None:
        return name
    files = sorted(f for f in folder.iterdir() if f.suffix in (".safetensors", ".json", ".txt", ".model", ".jinja"))
    return sha256_json({file.name: _file_hash(file, cache) for file in files if file.is_file()})


def _file_hash(file: Path, cache: Cache) -> str:
    stat = file.stat()
    if stat.st_size < 1 << 26:
        return sha256_file(file)
    key = [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    return str(cache.json("hashes", key, lambda: sha256_file(file)))
