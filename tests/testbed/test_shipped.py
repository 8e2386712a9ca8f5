"""The bundled sample is the one that was checked; the nano checkpoint is the one its provenance speaks of."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from experiments.pretrain.run import MEASURED, SECOND_RUN, PretrainConfig, measure
from remind.data.sample import corpus_path, sample_path
from remind.models.backbone import load_backbone
from remind.models.nano import nano_folder, nano_tokenizer

#: Every answer in the bundled sample was worked out anew from turns and captions alone, and its evidence, options and
#: letters were counted. A new version needs that done again.
CHECKED = "c72715958ea7c67e83ae45ad46b3d2ec688a6da8396df1aed9333fc90c2ad8f9"


def test_the_bundled_sample_is_the_one_that_was_checked() -> None:
    paths = [path for folder in (sample_path(), corpus_path()) for path in sorted(folder.glob("*.jsonl"))]
    assert hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest() == CHECKED


@pytest.fixture(scope="module")
def provenance() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((nano_folder() / "provenance.json").read_text(encoding="utf-8"))
    return found


def test_files_are_the_recorded_ones(provenance: dict[str, Any]) -> None:
    for name, expected in provenance["sha256"].items():
        assert hashlib.sha256((nano_folder() / name).read_bytes()).hexdigest() == expected, name
    assert set(provenance["sha256"]) == {"model.safetensors", "tokenizer.json"}
    assert (nano_folder() / "model.safetensors").stat().st_size <= 12 * 2**20
    assert provenance["license"] == "Apache-2.0"


def test_the_recorded_settings_are_those_of_the_two_runs(provenance: dict[str, Any]) -> None:
    """The defaults, and then what experiments/pretrain/run.py says it was gone on with."""
    first = provenance["start"]
    for about, expected in ((first, PretrainConfig()), (provenance, PretrainConfig(**SECOND_RUN))):
        recorded = {name: value for name, value in about["config"].items() if name not in ("out", "overwrite", "start")}
        assert PretrainConfig(**recorded) == expected


def test_it_opens_as_plain_hugging_face() -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(nano_folder(), use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(nano_folder())
    assert model.config.text_config.vocab_size >= len(tokenizer)
    text = "Ana: kidding, it was dawn once more\n"
    assert tokenizer(text)["input_ids"] == nano_tokenizer()(text)["input_ids"]
    assert tokenizer.chat_template.rstrip() == nano_tokenizer().chat_template
    named = load_backbone("nano")
    for name, value in model.state_dict().items():
        assert value.equal(named.model.state_dict()[name]), name


def test_accuracy_rises_with_the_level(provenance: dict[str, Any]) -> None:
    """Disjoint 95 % intervals for short answers and single choice, not backwards for multiple choice."""
    flag = provenance["accuracy"]["flag"]
    for kind in ("direct", "single"):
        x0, x1, x2 = (flag[kind][level] for level in ("x0", "x1", "x2"))
        assert x0["high"] < x1["low"], kind
        assert x1["high"] < x2["low"], kind
    multi = [flag["multi"][level]["value"] for level in ("x0", "x1", "x2")]
    assert multi == sorted(multi)


@pytest.mark.slow
def test_scores_are_the_recorded_ones(provenance: dict[str, Any]) -> None:
    """Measured anew, over all questions of the smaller world; a greedy tie may fall otherwise on another CPU."""
    found = measure(nano_folder(), ["plain"])
    assert found.keys() < MEASURED.keys()
    for world, formats in found.items():
        for kind, levels in formats.items():
            for level, score in levels.items():
                recorded = provenance["accuracy"][world][kind][level]
                assert score["n"] == recorded["n"] > 150
                assert score["value"] == pytest.approx(recorded["value"], abs=0.01), (world, kind, level)
