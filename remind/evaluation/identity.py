"""What decides answers and scores, so that a run can be resumed, and compared, only with what it is comparable to."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from remind.core.errors import DataError
from remind.core.files import input_hashes, sha256_file, sha256_json
from remind.evaluation.config import CONDITIONS, EvaluateConfig
from remind.states import prompts
from remind.states.dataset import States


def states_hash(states: States) -> str:
    """Hash over every part and the manifest of a states folder; of a dataset its fingerprints."""
    if not isinstance(states, str | Path):
        parts = states if isinstance(states, Mapping) else {"": states}
        return sha256_json({str(name): part._fingerprint for name, part in parts.items()})
    folder = Path(states)
    files = [*sorted(folder.glob("*.parquet")), folder / "manifest.json"]
    return sha256_json({file.name: sha256_file(file) for file in files})


def corpus_hashes(paths: Sequence[str | Path], manifest: Mapping[str, Any], states: str) -> dict[str, str]:
    """SHA-256 of the dialogue files by name, which must be among those the states were built from.

    Raises:
        DataError: a file that is not.
    """
    hashes = input_hashes(paths)
    built_from: Mapping[str, str] = manifest.get("inputs", {})
    for name, digest in hashes.items():
        # files of one name in several folders are told apart by what they hold
        if digest not in built_from.values():
            what = "has changed since the states were built" if name in built_from else "is not an input of the states"
            raise DataError(f"{name} {what}; name the files that the states were built from", states)
    return hashes


def answer_identity(cfg: EvaluateConfig, name: str, states: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that decides the outputs of a condition.

    Args:
        states: hash of the states folder.
        known: model, and where they are needed pictures, corpus and llm; what is missing here is left out.
    """
    identity: dict[str, Any] = {
        "states": states,
        "level": name,
        "split": cfg.split,
        "limit": cfg.limit,
        "max_new_tokens": cfg.max_new_tokens,
        "answers": cfg.answers,
        "device": cfg.device,
        "dtype": cfg.dtype,
    }
    if cfg.answers == "server" and (endpoint := cfg.llm.answer or cfg.llm.default) is not None:
        identity["endpoint"] = {key: asdict(endpoint)[key] for key in ("temperature", "max_tokens", "extra_body")}
    if cfg.answers == "vllm":
        identity["max_model_len"] = cfg.vllm.max_model_len
    wanted = ["model", "pictures"]
    if name in CONDITIONS and CONDITIONS[name].corpus:
        identity["prompts"] = {name: prompts.fingerprint(name) for name in prompts.RENDERED}
        wanted.append("corpus")
    source = name.removesuffix("_strategy")
    if source in ("full_context", "rag"):
        keys = ("full_tokens", "keep") if source == "full_context" else ("chunk_tokens", "rag_tokens")
        identity["context"] = {key: asdict(cfg.context)[key] for key in keys} | {"encoder": cfg.encoder}
    if name == "altered":
        wanted.append("llm")
    if name not in CONDITIONS:
        wanted.append("corpus")
    return identity | {key: known[key] for key in wanted if key in known}


def score_identity(cfg: EvaluateConfig, answers: Mapping[str, Any], judge: str) -> dict[str, Any]:
    """Everything that decides the scores: what decides the outputs, and how they are scored."""
    # other judges have no prompt of ours; what they are is in their names
    prompt = prompts.fingerprint("ask_judge") if judge.startswith("chat-") else None
    scoring = {"judge_prompt": prompt, "encoder": cfg.encoder, "bootstrap": cfg.bootstrap, "seed": cfg.seed}
    return {**answers, "judge": judge, **scoring}


def machine(device: str) -> str:
    """The machine in words."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return f"{platform.machine()}, {torch.cuda.get_device_name(torch.device(device))}"
    return f"{platform.machine()}, {platform.system()}, {torch.get_num_threads()} threads"
