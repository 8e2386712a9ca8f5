"""Pre-training: the shipped tokenizer byte for byte; lessons are the prompts a model gets, runs repeat to the bit."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.pretrain import run as pretraining
from experiments.pretrain.heads import AuxiliaryHeads
from experiments.pretrain.lessons import lessons_of
from experiments.pretrain.run import PretrainConfig, pretrain
from experiments.pretrain.tokenizer import train_tokenizer, training_texts, wordings
from remind.core.errors import ConfigError
from remind.models.backbone import load_backbone
from remind.models.nano import nano_folder, nano_model, nano_tokenizer

TOKENIZER = nano_tokenizer()


def test_the_focus_term_is_the_attention_of_the_first_head() -> None:
    """Against the model's own eager attention weights."""
    lessons = list(lessons_of(TOKENIZER, "apart", "single", 8, 3))[:8]
    model = nano_model(seed=3).double()
    model.set_attn_implementation("eager")
    decoder = model.model.language_model
    heads = AuxiliaryHeads(TOKENIZER, decoder, 128).double()
    width = max(len(x.prompt) + len(x.answer) - 1 for x in lessons)
    ids = torch.full((len(lessons), width), TOKENIZER.pad_token_id)
    for row, x in enumerate(lessons):
        ids[row, : len(x.prompt) + len(x.answer) - 1] = torch.cat([x.prompt, x.answer[:-1]])
    weights: list[torch.Tensor] = []
    attention = decoder.layers[2].self_attn
    attention.register_forward_hook(lambda _, __, output: weights.append(output[1]))
    with torch.no_grad():
        decoder(input_ids=ids, position_ids=torch.arange(width).expand(3, *ids.shape), use_cache=False)
        _, focus, _, _ = heads(lessons)
    expected = []
    for row, x in enumerate(lessons):
        if len(x.focus):
            places = [len(x.prompt), *(place for place, _ in x.options)]
            expected += [-float(weights[0][row, 0, place, x.focus.long()].sum().log()) for place in places]
    assert float(focus) == pytest.approx(sum(expected) / len(expected), abs=1e-6)


@pytest.mark.slow
def test_equal_settings_give_equal_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what an untrained model answers is of no interest; tests of the shipped checkpoint measure it on all dialogues
    name, world = next(iter(pretraining.MEASURED.items()))
    monkeypatch.setattr(pretraining, "MEASURED", {name: replace(world, test=1)})
    digests = []
    sizes = {"steps": 3, "batch": 4, "lessons": 16, "threads": 1, "layers": 2, "hidden_size": 64}
    for name in "ab":
        folder = pretrain(PretrainConfig(out=str(tmp_path / name), **sizes))  # type: ignore[arg-type]
        digests.append(hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())
        assert load_backbone(folder).kind == "vlm"
    assert digests[0] == digests[1]
    with pytest.raises(ConfigError, match="exists"):
        pretrain(PretrainConfig(out=str(tmp_path / "a"), steps=1))


def test_training_the_tokenizer_again_gives_the_shipped_bytes() -> None:
    shipped = (nano_folder() / "tokenizer.json").read_text(encoding="utf-8")
    assert train_tokenizer(training_texts(), wordings()) + "\n" == shipped
