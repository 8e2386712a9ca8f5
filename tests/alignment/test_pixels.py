"""Training on states with images as pixels: the tokens, the tensors behind them, the loss, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationMixin, Qwen3VLForConditionalGeneration, TrainerCallback

from remind import PRAConfig, PRATrainer
from remind.alignment.config import LoraConfig, Objective
from remind.alignment.examples import Example, Examples, examples_of
from remind.alignment.step import AlignmentModel, collate, plan, run
from remind.alignment.targets import StudentAnswers
from remind.core.errors import ConfigError, ImagePathError
from remind.data.readers import read
from remind.models.backbone import Backbone, load_backbone
from remind.models.images import Pictures
from remind.states.dataset import read_states
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import StateRecord, record_of
from remind.train_pra.config import DataConfig, ExportConfig
from remind.train_pra.export import export
from remind.train_pra.run import train

PIXELS: dict[str, Any] = {"images": "pixels", "image_tokens": 64, "unlabelled": "skip"}


def draw(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (96, 64)) -> Path:
    Image.new("RGB", size, colour).save(path)
    return path


def records_of(folder: Path) -> list[StateRecord]:
    """Three training questions and one of dev; those of context c0 and c3 have images, c0 one without a file too."""
    draw(folder / "red.png", (200, 20, 30))
    draw(folder / "blue.png", (10, 20, 220), (64, 128))
    red, blue = {"path": "red.png", "caption": "a red bike"}, {"path": "blue.png"}
    remote = {"path": "https://example.org/x.jpg", "caption": "a far hill"}
    shown = {"c0": ([red, remote], [blue]), "c3": ([], [red])}
    lines: list[dict[str, Any]] = []
    for name in ("c0", "c1", "c2", "c3"):
        first, third = shown.get(name, ([], []))
        turns = [
            {"id": "t0", "speaker": "Ana", "text": f"I am {name}, look <|image_pad|>", "images": first},
            {"id": "t1", "speaker": "Ben", "text": "Nice. Is it new?"},
            {"id": "t2", "speaker": "Ana", "text": "Yes.", "images": third},
        ]
        lines.append({"type": "context", "id": name, "sessions": [{"id": "s", "turns": turns}]})
        lines.append(
            {"type": "question", "id": f"q-{name}", "context_id": name, "question": "What is new?", "format": "direct",
             "answers": ["the bike"], "evidence": ["t0"]}
        )  # fmt: skip
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = read(file)
    dialogues = {dialogue.id: dialogue for dialogue in corpus.dialogues}
    records = []
    for question in corpus.questions:
        factual = FactualState(dialogues[question.dialogue_id], question, (Segment(0, 2),), Strategy(("Look.",)))
        state = ReflectiveState(AttentionalState(factual, ((2, 2),)), "They speak of a bike.")
        records.append(record_of(state, "dev" if question.dialogue_id == "c3" else "train"))
    return records


@pytest.fixture
def pictured(tmp_path: Path, make_states: Any) -> Path:
    (tmp_path / "data").mkdir()
    return make_states(tmp_path / "states", records_of(tmp_path / "data"))


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return load_backbone("nano-untrained")


def load(states: Path, nano: Backbone, **settings: Any) -> list[Example]:
    """The training questions of a folder; as captions unless settings say otherwise."""
    tokens, root = settings.get("image_tokens", 64), settings.get("image_root")
    shown = Pictures(nano, tokens, root) if settings.get("images") == "pixels" else None
    return examples_of(nano.tokenizer, read_states(states, "train"), shown)


def trainer_of(out: Path, states: Path, callbacks: Sequence[Any] = (), lora: Any = None, **settings: Any) -> Any:
    told = {**PIXELS, "batch_size": 3, "max_steps": 1, "warmup_steps": 0, "learning_rate": 1e-2, "disable_tqdm": True}
    args = PRAConfig(str(out), **{**told, **settings})
    rows = [read_states(states, split) for split in ("train", "dev")]
    return PRATrainer("nano-untrained", args, *rows, callbacks=callbacks, peft_config=lora)


def hard(nano: Backbone, examples: Sequence[Example]) -> Tensor:
    module = AlignmentModel(nano.model.eval(), Objective())
    return run(module, collate([(example, 1.0) for example in examples]), plan(Objective()), None)["hard0"]


def test_images_stand_where_their_captions_stood(pictured: Path, nano: Backbone) -> None:
    record = read_states(pictured, "train")[0]
    example = load(pictured, nano, **PIXELS)[0]
    # 96 x 64 and 64 x 128 pixels, 32 x 32 to a token
    red, blue = "<|image_pad|>" * 6, "<|image_pad|>" * 8
    for prompt, level in zip(example.prompts, (record.x0, record.x1, record.x2), strict=True):
        block = "<|vision_start|>{}<|vision_end|>"
        text = level.text.replace("#0 Caption] a red bike", f"#0 Caption] {block.format(red)}")
        text = text.replace("#2 Caption] (no caption)", f"#2 Caption] {block.format(blue)}")
        assert "#1 Caption] a far hill" in text
        expected = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert nano.tokenizer.decode(prompt) == expected
        # what Ana wrote is text
        assert prompt.tolist().count(nano.model.config.image_token_id) == 14
    assert example.pixels()["image_grid_thw"].tolist() == [[1, 4, 6], [1, 8, 4]]
    small = load(pictured, nano, images="pixels", image_tokens=4)[0]
    assert 2 <= small.prompts[0].tolist().count(nano.model.config.image_token_id) <= 8


def test_the_loss_is_that_of_the_model_itself(pictured: Path, nano: Backbone, tmp_path: Path) -> None:
    """Against the model's own forward and the image processor's own pixels."""
    example = load(pictured, nano, **PIXELS)[0]
    images = [Image.open(tmp_path / "data" / name) for name in ("red.png", "blue.png")]
    pixels = nano.processor.image_processor(images=images, return_tensors="pt")
    ids = torch.cat([example.prompts[0], example.answer]).long()[None]
    extra = {"mm_token_type_ids": (ids == nano.model.config.image_token_id).int(), **pixels}
    with torch.no_grad():
        logits = nano.model(input_ids=ids, **extra).logits[0, len(example.prompts[0]) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, example.answer.long())
    torch.testing.assert_close(hard(nano, [example])[0].float(), expected, rtol=1e-5, atol=1e-5)


def test_only_pixels_see_a_changed_image(pictured: Path, nano: Backbone, tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {"captions": {}, "pixels": PIXELS}
    before = {name: load(pictured, nano, **settings) for name, settings in kinds.items()}
    losses = {name: hard(nano, items) for name, items in before.items()}
    draw(tmp_path / "data" / "red.png", (20, 200, 30))
    after = {name: load(pictured, nano, **settings) for name, settings in kinds.items()}
    changed = {name: hard(nano, items) for name, items in after.items()}
    assert torch.equal(losses["captions"], changed["captions"])
    assert losses["pixels"][0] != changed["pixels"][0]
    assert torch.equal(losses["pixels"][1:], changed["pixels"][1:])
    # the tokens are the same, so what is computed once and the check on resumption must know of the files
    for name, same in (("captions", True), ("pixels", False)):
        one, other = before[name], after[name]
        assert all(torch.equal(a.prompts[0], b.prompts[0]) for a, b in zip(one, other, strict=True))
        assert (Examples(one).fingerprint() == Examples(other).fingerprint()) == same
        assert ([item.content((0, 1)) for item in one] == [item.content((0, 1)) for item in other]) == same
    # an image of another size gets other tokens
    draw(tmp_path / "data" / "red.png", (20, 200, 30), (96, 96))
    assert len(load(pictured, nano, **PIXELS)[0].prompts[0]) == len(before["pixels"][0].prompts[0]) + 3


@pytest.mark.parametrize("damage", ["missing", "no image", "a line"])
def test_an_image_that_cannot_be_used_is_named(pictured: Path, nano: Backbone, tmp_path: Path, damage: str) -> None:
    file = tmp_path / "data" / "red.png"
    if damage == "missing":
        file.unlink()
    elif damage == "no image":
        file.write_text("not a picture")
    else:
        draw(file, (1, 2, 3), (3000, 1))
    with pytest.raises(ImagePathError, match=r"1 of 2 images cannot be used; set images captions") as caught:
        load(pictured, nano, **PIXELS)
    assert str(caught.value).startswith(f"{file.resolve()} [q-c0]: ")
    assert "\n" not in str(caught.value)
    assert len(load(pictured, nano)) == 3


def processed(example: Example) -> Any:
    """The image processor's own pixels."""
    images = [Image.open(path) for path, _ in example.images]
    return load_backbone("nano-untrained").processor.image_processor(images=images, return_tensors="pt")


def greedy(model: Any, example: Example, level: int, most: int) -> list[int]:
    """An answer by whole forwards without padding, cache or `generate`."""
    pixels = processed(example)
    new: list[int] = []
    while len(new) < most:
        ids = torch.tensor([[*example.prompts[level].tolist(), *new]])
        kinds = (ids == model.config.image_token_id).int()
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **pixels).logits
        new.append(int(logits[0, -1].argmax()))
    return new


def test_the_model_answers_from_the_pixels_it_is_trained_on(
    pictured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch with questions that have no image; what is kept of an answer is not used for another image."""
    given: list[Tensor] = []
    generate, at = GenerationMixin.generate, StudentAnswers.at
    own: dict[str, list[int]] = {}

    def spy(self: Any, **inputs: Any) -> Any:
        given.append(inputs["pixel_values"])
        return generate(self, **inputs)

    def noted(*arguments: Any) -> Any:
        own.update(at(*arguments))
        return own

    monkeypatch.setattr(GenerationMixin, "generate", spy)
    monkeypatch.setattr(StudentAnswers, "at", noted)
    told = {"unlabelled": "x2", "max_decoded": 4, "decode_batch": 3, "cache": str(tmp_path / "cache")}
    tokenizer, model = load_backbone("nano-untrained").tokenizer, load_backbone("nano-untrained").model
    for targets, level in (("decoded", 2), ("on_policy", 0)):
        trainer = trainer_of(tmp_path / targets, pictured, targets=targets, **told)
        example = trainer.train_dataset.items[0]
        trainer.train()
        assert len(given) == 1  # the three questions are one batch
        torch.testing.assert_close(given.pop(), processed(example)["pixel_values"])
        answer = own["q-c0"] if targets == "on_policy" else example.answer
        expected = greedy(model, example, level, 4)
        assert tokenizer.decode(answer, skip_special_tokens=True) == tokenizer.decode(
            expected, skip_special_tokens=True
        )
    trainer_of(tmp_path / "again", pictured, targets="decoded", **told)
    assert not given
    draw(tmp_path / "data" / "red.png", (20, 200, 30))
    example = trainer_of(tmp_path / "other", pictured, targets="decoded", **told).train_dataset.items[0]
    torch.testing.assert_close(given.pop(), processed(example)["pixel_values"])


def test_an_image_that_goes_missing_later_is_named(pictured: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "r", pictured)
    (tmp_path / "data" / "blue.png").unlink()
    with pytest.raises(ImagePathError, match=r"blue\.png \[q-c0\]: no such image"):
        trainer.train()


class Tower(TrainerCallback):
    """The gradients of the vision tower."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        named = {n: p for n, p in model.named_parameters() if "visual" in n and p.requires_grad}
        self.seen = {n.split("visual.")[1].split("default.")[-1]: p.grad.clone() for n, p in named.items()}


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, alpha=4)], ids=["full", "lora"])
def test_a_trained_tower_is_in_the_checkpoint_and_in_the_export(
    lora: LoraConfig | None, pictured: Path, tmp_path: Path, runs: Any
) -> None:
    tower, (data, base) = Tower(), (DataConfig(**PIXELS, train_vision=True), load_backbone("nano-untrained").model)
    first = {name: p.detach().clone() for name, p in base.model.visual.named_parameters()}
    out = train(runs.config(pictured, tmp_path / "r", data=data, lora=lora, batch_size=3, max_steps=2), tower)
    assert tower.seen.keys() == first.keys()
    # the tower's deepest layers may be left out of a small model; the first one is not
    assert float(tower.seen["patch_embed.proj.weight"].norm()) > 0
    saved = load_file(out / "checkpoint-2" / ("model.safetensors" if lora is None else "adapter_model.safetensors"))
    stored = {name.split("visual.")[1].split("default.")[-1]: p for name, p in saved.items() if "visual." in name}
    assert stored.keys() == first.keys()
    moved = {name for name, value in stored.items() if not torch.equal(value, first[name])}
    assert moved == {name for name, gradient in tower.seen.items() if bool(gradient.any())}
    folder = export(ExportConfig(run=str(out), out=str(tmp_path / "x")))
    opened: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    for name, parameter in opened.model.visual.named_parameters():
        assert torch.equal(parameter, stored[name]), name
    with pytest.raises(ConfigError, match="trained more than adapters"):
        export(ExportConfig(run=str(out), out=str(tmp_path / "y"), adapter_only=True))


def test_what_pixels_cannot_do_is_refused(
    pictured: Path, tmp_path: Path, nano: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="minilm takes no images"):
        Pictures(load_backbone("minilm"), 64)
    with pytest.raises(ConfigError, match=r"^train_vision: [^\n]*images pixels[^\n]*$"):
        trainer_of(tmp_path / "r", pictured, images="captions", train_vision=True)
    # no process of several may wait for one without images
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    trainer_of(tmp_path / "r", pictured)
    both = r"^images pixels: 2 of 4 examples [^\n]*$"
    with pytest.raises(ConfigError, match=both):
        trainer_of(tmp_path / "r", pictured, train_vision=True)
    monkeypatch.setattr(PRAConfig, "sharded", True)
    with pytest.raises(ConfigError, match=both):
        trainer_of(tmp_path / "r", pictured)
    # nor one that shares a prefix for one that cannot
    shown = [record for record in read_states(pictured, "train") if record.pictures]
    args = PRAConfig(str(tmp_path / "r"), **PIXELS, batch_size=2, eval_strategy="no")
    with pytest.raises(ConfigError, match=r"^images pixels: 0 of 1 [^\n]* prefix_sharing false: [^\n]*$"):
        PRATrainer("nano-untrained", args, shown)
