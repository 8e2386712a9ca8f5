"""The measurement over a split: states and a model in, result.json, questions.jsonl and a plot out."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.faithfulness.config import FaithfulnessConfig
from experiments.faithfulness.logprob import check_length, target_ids
from experiments.faithfulness.measure import Ablation, Question, Row, measure, question_of
from experiments.faithfulness.report import plot, summarise, table
from remind.build.plan import versions
from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.files import atomic_folder, sha256_file, write_json, write_rows
from remind.core.progress import track
from remind.data.dialogue import spread
from remind.evaluation.answerers import model_hash
from remind.evaluation.run import states_hash
from remind.grounding.codes import SparseEncoder
from remind.grounding.config import grounding_config
from remind.grounding.ground import load_saes
from remind.models.backbone import Backbone, load_backbone
from remind.states.dataset import MANIFEST, StateRecord, iterate_states, question_splits, read_manifest
from remind.viewing.turns import prompt_of
from sae import SAEError
from sae.probe.encoder import check_coders

NOTE = "text states: images stand as their captions"
#: Settings of the states' grounding that guidance depends on.
_GUIDANCE = ("alpha", "anchor_idf", "idf", "sink_ratio")
REASONS = {
    "no_target": "without a gold answer",
    "no_marks": "without marked turns",
    "few_unmarked": "with fewer unmarked than marked tokens",
    "too_long": "too long for the model",
}


def faithfulness(cfg: FaithfulnessConfig) -> dict[str, Any]:
    """Measure, summarise, write; see `FaithfulnessConfig`.

    Returns:
        What result.json holds: `summarise`'s estimates, counts, hashes, configuration, versions.

    Raises:
        ConfigError: `out` exists and overwrite is off.
        DataError, FormatError: states that cannot be used, none in the split, none that can be measured, or, unless
            on_long is "skip", one that is too long for the model.
        ModelError: a model that is not causal, or SAEs that do not fit it.
    """
    out = Path(cfg.out)
    if out.exists() and not cfg.overwrite:
        raise ConfigError(f"{out} exists; choose another out or set overwrite")
    manifest = read_manifest(cfg.states)
    records = load_records(cfg.states, cfg.split, cfg.limit)
    backbone = load_backbone(cfg.model, dtype=cfg.dtype, device=cfg.device)
    if not backbone.causal:
        raise ModelError(f"{cfg.model} is an encoder; a causal model is needed to answer")
    ablation = _ablation(cfg, backbone, manifest) if cfg.sae else None

    rows: list[Row] = []
    left_out: dict[str, list[str]] = defaultdict(list)
    for record in track(records, "faithfulness", len(records)):
        question = question_of(backbone.tokenizer, record, backbone.max_length)
        if isinstance(question, Question):
            rows.append(measure(backbone, question, cfg, ablation))
        elif question == "too_long" and cfg.on_long == "error":
            prompt, target = (
                prompt_of(backbone.tokenizer, record.x0),
                target_ids(backbone.tokenizer, record.target or ""),
            )
            check_length(backbone, len(prompt.ids), len(target), record.question_id)
        else:
            left_out[question].append(record.question_id)
    if not rows:
        reasons = ", ".join(f"{len(ids)} {REASONS[reason]}" for reason, ids in left_out.items())
        raise DataError(f"none of {len(records)} questions can be measured: {reasons}", cfg.states)
    result = {
        "format": "remind-faithfulness",
        "config": asdict(cfg),
        "counts": {
            "questions": len(records),
            "measured": len(rows),
            "dialogues": len({row["dialogue_id"] for row in rows}),
            "left_out": {reason: len(ids) for reason, ids in left_out.items()},
        },
        "left_out": dict(left_out),
        "note": NOTE,
        **summarise(rows, cfg.bootstrap, cfg.seed),
        "hashes": {
            "states": states_hash(cfg.states),
            "inputs": manifest.get("inputs", {}),
            "model": model_hash(backbone),
            "sae": {
                file.parent.name: sha256_file(file)
                for file in (sorted(Path(cfg.sae).glob("layer_*/sae_weights.safetensors")) if cfg.sae else ())
            },
        },
        "versions": versions(),
    }
    with atomic_folder(out) as folder:
        write_rows(folder / "questions.jsonl", rows)
        plot(result, folder / "faithfulness.png")
        write_json(folder / "result.json", result)
    return result


def faithfulness_and_show(cfg: FaithfulnessConfig) -> None:
    """`faithfulness`, then the table and where the files are."""
    result = faithfulness(cfg)
    counts, logprob = result["counts"], result["logprob"]["per_token"]
    left_out = ", ".join(f"{number} {REASONS[reason]}" for reason, number in counts["left_out"].items())
    print(f"{counts['measured']} questions of {counts['dialogues']} dialogues ({NOTE})")
    if left_out:
        print(f"left out: {left_out}")
    print(f"log-probability per target token under x0: {logprob['value']:.4f} nats\n")
    print(table(result))
    print(f"result: {Path(cfg.out) / 'result.json'}")


def load_records(states: str | Path, split: str, limit: int | None = None) -> list[StateRecord]:
    """Records of a split, or `limit` of them spread evenly; only these are held in memory.

    Raises:
        FormatError: not a states folder.
        DataError: no questions in the split.
    """
    counts = Counter(question_splits(states).values())
    if not counts[split]:
        raise DataError(f"no states of split {split!r} (there are: {', '.join(sorted(counts)) or 'none'})", states)
    wanted = {*spread(range(counts[split]), limit)}
    return [record for number, record in enumerate(iterate_states(states, split)) if number in wanted]


def _ablation(cfg: FaithfulnessConfig, backbone: Backbone, manifest: dict[str, Any]) -> Ablation:
    """SAEs on the model's device, and the guidance's settings as the states were built with them."""
    assert cfg.sae is not None
    guide = load_backbone(cfg.backbone, dtype=cfg.dtype, device=cfg.device) if cfg.backbone else backbone
    saes, idf = load_saes(cfg.sae, cfg.device)
    for model in (backbone, guide):
        try:
            check_coders(model.model, saes)
        except SAEError as error:
            raise ModelError(f"{model.name}: {error}; train SAEs on this model") from None
    used = manifest.get("config", {}).get("grounding", {})
    config = grounding_config({name: used[name] for name in _GUIDANCE if name in used}, Path(cfg.states) / MANIFEST)
    return Ablation(saes, SparseEncoder(guide, saes, config.sink_ratio, config.batch_size), idf, config)
