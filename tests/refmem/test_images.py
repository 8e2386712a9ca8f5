"""Vectors of images: a tiny CLIP against its own forward, captions where pixels are missing."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from remind.core.errors import DataError, ModelError
from remind.data.dialogue import Corpus, Dialogue, Image, Session, Turn
from remind.models.chat import opened
from remind.refmem.config import ClusterConfig
from remind.refmem.images import ClipEncoder, image_clusters


class Captions:
    """Stands for the sentence encoder: a caption's length and first letter."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        self.texts += texts
        return torch.tensor([[float(len(text)), float(ord(text[0]))] for text in texts]).reshape(len(texts), 2)


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**small, "vocab_size": 20, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 2},
        vision_config={**small, "image_size": 16, "patch_size": 8},
        projection_dim=12,
    )
    folder = tmp_path_factory.mktemp("clip")
    CLIPModel(config).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def painted(folder: Path, seed: int) -> str:
    path = folder / f"{seed}.png"
    pixels = np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Pillow.fromarray(pixels).save(path)
    return str(path)


def test_clip_vectors_are_its_image_features(tiny_clip: Path, tmp_path: Path) -> None:
    from transformers import CLIPModel

    paths = [painted(tmp_path, seed) for seed in range(3)]
    model = CLIPModel.from_pretrained(tiny_clip).eval()
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).reshape(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).reshape(3, 1, 1)
    pixels = torch.stack([torch.from_numpy(np.array(Pillow.open(path))).permute(2, 0, 1) / 255 for path in paths])
    with torch.no_grad():
        features = model.visual_projection(model.vision_model((pixels - mean) / std).pooler_output)
    expected = (features / features.norm(dim=-1, keepdim=True)).numpy()
    np.testing.assert_allclose(ClipEncoder(str(tiny_clip)).encode(paths), expected, atol=1e-5)
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bad\.png"):
        ClipEncoder(str(tiny_clip)).encode([str(tmp_path / "bad.png")])
    with pytest.raises(ModelError, match="cannot be loaded"):
        ClipEncoder(str(tmp_path / "nothing"))


def test_pictures_are_opened_one_by_one(tiny_clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files may hold pictures that are large in memory."""
    paths = [painted(tmp_path, seed) for seed in range(4)]
    seen: list[weakref.ref[Pillow.Image]] = []

    def watched(path: str) -> Pillow.Image:
        assert [one for one in seen if one() is not None] == []
        image = opened(path)
        seen.append(weakref.ref(image))
        return image

    monkeypatch.setattr("remind.refmem.images.opened", watched)
    assert ClipEncoder(str(tiny_clip)).encode(paths).shape == (4, 12)
    assert len(seen) == 4


def test_a_speaker_without_all_pixels_is_clustered_by_captions(tiny_clip: Path, tmp_path: Path) -> None:
    a, b, c = (painted(tmp_path, seed) for seed in range(3))
    shared = [
        ("Ana", a, "a boat"),
        ("Bo", b, "a hill"),
        ("Bo", None, "the  moon"),
        ("Ana", c, None),
        ("Bo", None, None),
    ]
    turns = tuple(
        Turn(f"t{n}", who, "look", images=(Image(n, path, caption),)) for n, (who, path, caption) in enumerate(shared)
    )
    corpus = Corpus((Dialogue("talk", (Session("1", None, turns),)),))
    captions, clip = Captions(), ClipEncoder(str(tiny_clip))
    # all of a speaker's images in one cluster
    config = ClusterConfig(distance=2.0)
    clusters, counts = image_clusters(corpus, captions, clip, config)  # type: ignore[arg-type]
    assert counts == {"clip": 2, "caption": 2, "neither": 1}
    places = [(one.speaker, one.turns, one.images) for one in clusters]
    assert places == [("Ana", ("t0", "t3"), (0, 3)), ("Bo", ("t1", "t2"), (1, 2))]
    assert captions.texts == ["a hill", "the moon"]
    # without a checkpoint all go by caption, and an image without one is counted
    assert image_clusters(corpus, captions, None, config)[1] == {"clip": 0, "caption": 3, "neither": 2}  # type: ignore[arg-type]
