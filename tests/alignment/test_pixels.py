"""Training on states with images as pixels: the tokens, the tensors behind them, the loss, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import GenerationMixin

from remind.alignment.cache import Cache
from remind.alignment.config import DataConfig, Objective
from remind.alignment.data import Data, check_mixture, load_data
from remind.alignment.model import trainable
from remind.alignment.setup import set_up
from remind.alignment.step import AlignmentModel, collate, plan, run
from remind.alignment.tokens import Example
from remind.alignment.trainer import Trainer, train
from remind.core.errors import ConfigError, DataError, ImagePathError
from remind.data.readers import read
from remind.models.backbone import Backbone
from remind.models.chat import prompt_ids
from remind.models.load import load_backbone
from remind.models.pictures import Pictures
from remind.pipeline import record_of
from remind.states.parquet import StateRecord, read_states, write_manifest, write_part
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy

_DATA = DataConfig(images="pixels", image_tokens=64, unlabelled="skip")


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


def load(states: Path, nano: Backbone, config: DataConfig = _DATA, cache: Cache | None = None) -> Data:
    shown = Pictures(nano, config.image_tokens, config.image_root, "data.") if config.images == "pixels" else None
    return load_data(states, nano.tokenizer, config, nano.max_length, cache=cache, shown=shown)


def hard(nano: Backbone, examples: Sequence[Example]) -> Tensor:
    module = AlignmentModel(nano.model.eval(), Objective())
    return run(module, collate(examples, [1.0] * len(examples)), plan(Objective()), None)["hard0"]


def test_states_name_the_files_and_older_ones_still_open(pictured: Path, tmp_path: Path) -> None:
    first, second, *_ = read_states(pictured, "train")
    data = (tmp_path / "data").resolve()
    assert [tuple(one) for one in first.pictures] == [("t0", 0, f"{data}/red.png"), ("t2", 0, f"{data}/blue.png")]
    assert second.pictures == ()
    old = tmp_path / "old"
    write_part(old, 0, [first, second])
    part = old / "part-00000.parquet"
    pq.write_table(pq.read_table(part).drop_columns(["pictures", "kind"]), part)
    write_manifest(old, {"format_version": 1})
    assert read_states(old) == [replace(first, pictures=()), second]
    write_part(old, 0, [first, second])
    pq.write_table(pq.read_table(part).drop_columns(["kind"]), part)
    write_manifest(old, {"format_version": 2})
    assert read_states(old) == [first, second]


def test_captions_are_as_before(pictured: Path, nano: Backbone) -> None:
    """Tokens of the rendered text itself, whether files are known or not."""
    records = read_states(pictured, "train")
    for example, record in zip(load(pictured, nano, DataConfig()).train.items, records, strict=True):
        assert not example.images
        levels = (record.x0, record.x1, record.x2)
        assert [p.tolist() for p in example.prompts] == [prompt_ids(nano.tokenizer, level.text) for level in levels]
    shown = load(pictured, nano).train.items
    plain = load(pictured, nano, DataConfig()).train.items
    assert [len(one.images) for one in shown] == [2, 0, 0]
    for one, other in zip(shown[1:], plain[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.prompts, other.prompts, strict=True))


def test_images_stand_where_their_captions_stood(pictured: Path, nano: Backbone) -> None:
    record = read_states(pictured, "train")[0]
    data = load(pictured, nano)
    example = data.train.items[0]
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
    assert data.about["images"] == {"shown": 3, "files": 2, "most_tokens": 64}
    small = load(pictured, nano, replace(_DATA, image_tokens=4)).train.items[0]
    assert 2 <= small.prompts[0].tolist().count(nano.model.config.image_token_id) <= 8


def test_the_loss_is_that_of_the_model_itself(pictured: Path, nano: Backbone, tmp_path: Path) -> None:
    """Against the model's own forward and the image processor's own pixels."""
    example = load(pictured, nano).train.items[0]
    images = [Image.open(tmp_path / "data" / name) for name in ("red.png", "blue.png")]
    pixels = nano.processor.image_processor(images=images, return_tensors="pt")
    ids = torch.cat([example.prompts[0], example.answer]).long()[None]
    extra = {"mm_token_type_ids": (ids == nano.model.config.image_token_id).int(), **pixels}
    with torch.no_grad():
        logits = nano.model(input_ids=ids, **extra).logits[0, len(example.prompts[0]) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, example.answer.long())
    torch.testing.assert_close(hard(nano, [example])[0].float(), expected, rtol=1e-5, atol=1e-5)


def test_only_pixels_see_a_changed_image(pictured: Path, nano: Backbone, tmp_path: Path) -> None:
    caption = DataConfig(unlabelled="skip")
    cache = Cache(tmp_path / "cache")
    before = {config.images: load(pictured, nano, config, cache) for config in (_DATA, caption)}
    for config in (_DATA, caption):
        again, plain = load(pictured, nano, config, cache), load(pictured, nano, config)
        assert before[config.images].about == again.about == plain.about
        assert [len(one.images) for one in again.train.items] == [len(one.images) for one in plain.train.items]
    losses = {name: hard(nano, data.train.items) for name, data in before.items()}
    draw(tmp_path / "data" / "red.png", (20, 200, 30))
    after = {config.images: load(pictured, nano, config, cache) for config in (_DATA, caption)}
    changed = {name: hard(nano, data.train.items) for name, data in after.items()}
    assert torch.equal(losses["captions"], changed["captions"])
    assert losses["pixels"][0] != changed["pixels"][0]
    assert torch.equal(losses["pixels"][1:], changed["pixels"][1:])
    # the tokens are the same, so what is computed once and the check on resumption must know of the files
    for name, same in (("captions", True), ("pixels", False)):
        one, other = before[name].train, after[name].train
        assert all(torch.equal(a.prompts[0], b.prompts[0]) for a, b in zip(one.items, other.items, strict=True))
        assert (one.fingerprint() == other.fingerprint()) == same
        contents = ([item.content((0, 1)) for item in examples.items] for examples in (one, other))
        assert (next(contents) == next(contents)) == same
    # an image of another size gets other tokens in spite of the cache
    draw(tmp_path / "data" / "red.png", (20, 200, 30), (96, 96))
    assert len(load(pictured, nano, _DATA, cache).train.items[0].prompts[0]) == len(one.items[0].prompts[0]) + 3


def gradients(examples: Sequence[Example], groups: Sequence[Sequence[int]], step: str, sharing: bool) -> list[Tensor]:
    objective = Objective(chunk=3)
    model = trainable(load_backbone("nano-untrained", "float64").model, None, vision=True)
    module = AlignmentModel(model, objective)
    for group in groups:
        batch = collate([examples[place] for place in group], [1 / len(examples)] * len(group))
        run(module, batch, plan(objective, step, sharing), lambda loss: loss.backward())  # type: ignore[arg-type]
    return [p.grad for p in module.parameters() if p.grad is not None]


def test_sequential_is_joint_is_shared_whatever_the_mixture(pictured: Path, nano: Backbone) -> None:
    """Images and text in one batch; an image batch and then text batches; text first."""
    examples = load(pictured, nano).train.items
    expected = gradients(examples, [(0, 1, 2)], "joint", False)
    for groups, step, sharing in (
        ([(0, 1, 2)], "sequential", False),
        ([(0, 1, 2)], "sequential", True),
        ([(0,), (1, 2)], "sequential", False),
        ([(1, 2), (0,)], "joint", True),
    ):
        found = gradients(examples, groups, step, sharing)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("damage", ["missing", "no image", "a line"])
def test_an_image_that_cannot_be_used_is_named(pictured: Path, nano: Backbone, tmp_path: Path, damage: str) -> None:
    file = tmp_path / "data" / "red.png"
    if damage == "missing":
        file.unlink()
    elif damage == "no image":
        file.write_text("not a picture")
    else:
        draw(file, (1, 2, 3), (3000, 1))
    with pytest.raises(ImagePathError, match=r"1 of 2 images cannot be used") as caught:
        load(pictured, nano)
    assert str(caught.value).startswith(f"{file.resolve()} [q-c0]: ")
    assert "\n" not in str(caught.value)
    assert len(load(pictured, nano, DataConfig()).train.items) == 3


def test_images_may_be_confined_to_a_folder(pictured: Path, nano: Backbone, tmp_path: Path) -> None:
    """States are as another wrote them, and may name any file of this disk."""
    inside, outside = tmp_path / "data", tmp_path / "elsewhere"
    outside.mkdir()
    config = replace(_DATA, image_root=str(inside))
    within = load(pictured, nano, config).train
    assert within.fingerprint() == load(pictured, nano).train.fingerprint()
    with pytest.raises(ImagePathError, match=r"\[q-c0\]: is outside data\.image_root [^\n]*2 of 2 images"):
        load(pictured, nano, replace(_DATA, image_root=str(outside)))
    # a name beside the folder, a way out of it, a link out of it
    (tmp_path / "data2").mkdir()
    secret = draw(tmp_path / "data2" / "secret.png", (1, 2, 3))
    (inside / "link.png").symlink_to(secret)
    record = read_states(pictured, "train")[0]
    shown = Pictures(nano, 64, str(inside), "data.")
    for path in (str(secret), f"{inside}/../data2/secret.png", f"{inside}/link.png", f"{inside}/a\0b", "/etc/passwd"):
        odd = replace(record, pictures=(record.pictures[0]._replace(path=path),))
        with pytest.raises(ImagePathError, match="outside data"):
            shown.files(odd)
    # and where a file becomes a link later
    (inside / "red.png").unlink()
    (inside / "red.png").symlink_to(secret)
    with pytest.raises(ImagePathError, match=r"red\.png \[q-c0\]: is outside"):
        within.items[0].pixels()


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
    pictured: Path, tmp_path: Path, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch with questions that have no image; what is kept of an answer is not used for another image."""
    given: list[Tensor] = []
    generate = GenerationMixin.generate

    def spy(self: Any, **inputs: Any) -> Any:
        given.append(inputs["pixel_values"])
        return generate(self, **inputs)

    monkeypatch.setattr(GenerationMixin, "generate", spy)
    data = replace(_DATA, unlabelled="x2", max_decoded=4, decode_batch=3, cache=str(tmp_path / "cache"))
    tokenizer = load_backbone("nano-untrained").tokenizer

    def trainer_of(name: str, targets: str) -> Trainer:
        config = replace(data, targets=targets)  # type: ignore[arg-type]
        return Trainer(runs.config(pictured, tmp_path / name, data=config, batch_size=3, max_steps=1))

    for targets, level in (("decoded", 2), ("on_policy", 0)):
        trainer = trainer_of(targets, targets)
        found = trainer.data.train.items
        if trainer.student_answers is not None:
            found = trainer.student_answers.at(0, trainer.model)
        (example,) = (one for one in found if one.images)
        assert len(given) == 1  # the three questions are one batch
        torch.testing.assert_close(given.pop(), processed(example)["pixel_values"])
        expected = greedy(trainer.model.eval(), example, level, 4)
        own, wanted = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (example.answer, expected))
        assert own == wanted
        assert example.gold is not None
        assert trainer.train_step()["total"] > 0
    trainer_of("again", "decoded")
    assert not given
    draw(tmp_path / "data" / "red.png", (20, 200, 30))
    (example, *_) = trainer_of("other", "decoded").data.train.items
    torch.testing.assert_close(given.pop(), processed(example)["pixel_values"])


def test_an_image_that_goes_missing_later_is_named(pictured: Path, nano: Backbone, tmp_path: Path) -> None:
    example = load(pictured, nano).train.items[0]
    (tmp_path / "data" / "blue.png").unlink()
    with pytest.raises(ImagePathError, match=r"blue\.png \[q-c0\]: no such image"):
        collate([example], [1.0])


def test_spans_that_do_not_fit_are_refused(tmp_path: Path, nano: Backbone) -> None:
    record = records_of(tmp_path)[0]
    shown = Pictures(nano, 64)
    for broken in (
        replace(record, pictures=record.pictures[::-1]),
        replace(record, pictures=(record.pictures[0]._replace(place=5),)),
        replace(record, x2=replace(record.x2, turns=record.x2.turns[:1])),
    ):
        with pytest.raises(DataError, match=r"\[q-c0\]: x2 does not show the images"):
            shown.prompt(nano.tokenizer, broken, "x2")


def test_what_pixels_cannot_do_is_refused(pictured: Path, tmp_path: Path, nano: Backbone, runs: Any) -> None:
    with pytest.raises(ConfigError, match="minilm takes no images"):
        Pictures(load_backbone("minilm"), 64)
    with pytest.raises(ConfigError, match="no training example has images"):
        captions = DataConfig(unlabelled="skip")
        set_up(runs.config(pictured, tmp_path / "r", data=captions, train_vision=True))


def test_no_process_waits_for_one_without_images() -> None:
    mixed, all_of_them = [True, False], [True, True]
    for pictured, *arguments in (
        (mixed, 1, True, False, True),
        (mixed, 2, False, False, True),
        (all_of_them, 2, True, False, True),
        (all_of_them, 2, True, True, False),
    ):
        check_mixture(pictured, *arguments)
    for arguments in ((True, False, True), (False, True, False)):
        with pytest.raises(ConfigError, match="1 of 2 examples have no image"):
            check_mixture(mixed, 2, *arguments)
    with pytest.raises(ConfigError, match="prefix_sharing false"):
        check_mixture(all_of_them, 2, False, True, True)


@pytest.mark.slow
def test_two_processes_with_unlike_images_are_one(pictured: Path, tmp_path: Path, runs: Any) -> None:
    """A frozen tower: in each step at most one of the processes has an image."""
    told = {"data": _DATA, "max_steps": 2, "batch_size": 2}
    train(runs.config(pictured, tmp_path / "one", **told))
    started = runs.start(runs.config(pictured, tmp_path / "two", **told), processes=2)
    _, errors = started.communicate(timeout=120)
    assert started.returncode == 0, errors[-2000:]
    one, two = (runs.weights(tmp_path / name, 2) for name in ("one", "two"))
    for name, value in one.items():
        # AdamW divides a gradient near zero by itself: a single weight may differ by more than rounding
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-4)
        assert torch.isclose(two[name], value, rtol=1e-4, atol=1e-5).double().mean() > 0.999, name
