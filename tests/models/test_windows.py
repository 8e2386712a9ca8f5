"""Dialogue text and images as windows of tokens and batches of model inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image as Picture

from remind.core.errors import ConfigError
from remind.data.dialogue import Dialogue, Image, Session, Turn
from remind.models.backbone import Backbone, load_backbone
from remind.models.windows import batches, make_windows
from sae.harvest import harvest


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return load_backbone("nano")


@pytest.fixture
def pictured(tmp_path: Path) -> Dialogue:
    def image(index: int, size: tuple[int, int], caption: str | None) -> Image:
        path = tmp_path / f"{index}.png"
        Picture.effect_noise(size, 40 + index).convert("RGB").save(path)
        return Image(index, str(path), caption)

    turns = (
        Turn("1:0", "Ana", "look at this", images=(image(0, (90, 60), "a red\nboat"), image(1, (200, 200), None))),
        Turn("1:1", "Ben", "lovely, and here is mine", images=(Image(2, None, "only a caption"),)),
        Turn("1:2", "Ana", "word " * 40, images=(image(3, (64, 128), "a tall tree"),)),
    )
    return Dialogue("d", (Session("s", None, turns),))


def test_images_stand_in_place_of_their_captions_and_stay_whole(nano: Backbone, pictured: Dialogue) -> None:
    for size in (30, 1000):
        windows = make_windows(nano, [pictured], size, "test", image_tokens=16)
        config = nano.model.config
        ids = [token for window in windows for token in window.ids]
        assert all(len(window.ids) <= size for window in windows)
        assert [path for w in windows for path in w.images] == [i.path for i in pictured.images if i.path]
        pads = {config.image_token_id, config.vision_start_token_id, config.vision_end_token_id}
        plain = nano.tokenizer.decode([token for token in ids if token not in pads])
        # as in grounding: no caption beside an image
        assert "look at this\n[Image #0 Caption] \n[Image #1 Caption] \nBen:" in plain
        assert "[Image #2 Caption] only a caption\n" in plain
        # turns of the tokens go up, and an image belongs to its turn
        turns = [turn for window in windows for turn in window.turns]
        assert turns == sorted(turns)
        assert {turn for token, turn in zip(ids, turns, strict=True) if token == config.image_token_id} == {0, 2}


def test_a_batch_with_images_runs_as_the_model_takes_it(nano: Backbone, pictured: Dialogue) -> None:
    windows = make_windows(nano, [pictured], 40, "test", image_tokens=16)
    [(inputs, _)] = list(batches(nano, windows, 16, image_tokens=16))
    assert inputs["position_ids"].shape == (3, *inputs["input_ids"].shape)
    # the median that tells sinks apart is that of the batch
    options = {"special_ids": nano.tokenizer.all_special_ids, "sink_factor": None}
    [batch] = harvest(nano.model, [inputs], [1, 3], **options)
    visual = inputs["input_ids"] == nano.model.config.image_token_id
    assert int(batch.visual.sum()) == int(visual.sum()) > 0
    # each window alone gives what it gives in the batch
    for row, window in enumerate(windows):
        [(alone, _)] = list(batches(nano, [window], 1, image_tokens=16))
        [single] = harvest(nano.model, [alone], [1, 3], **options)
        mine = batch.rows == row
        torch.testing.assert_close(single.activations[3], batch.activations[3][mine], rtol=1e-4, atol=1e-4)


def test_images_that_cannot_be_shown(nano: Backbone, pictured: Dialogue, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="window 8 is too small for the"):
        make_windows(nano, [pictured], 8, "test", image_tokens=16)
