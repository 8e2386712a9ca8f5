"""Clusters against scipy's tree and scikit-learn's K-Means on the same vectors; a tiny CLIP against its own forward."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from safetensors.torch import load_file, save_file
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist
from sklearn.cluster import KMeans

from remind.core.errors import DataError, ModelError
from remind.data.dialogue import Corpus, Dialogue, Image, Session, Turn
from remind.models.images import open_image
from remind.perception.config import SegmentConfig
from remind.refmem.cluster import cluster, groups, text_clusters
from remind.refmem.config import ClusterConfig
from remind.refmem.images import ClipEncoder, image_clusters
from remind.states.pyramid import Segment, turn_text


def partition(labels: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in set(labels.tolist())}


def some_vectors(seed: int, n: int = 90) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(7, 24))
    rows = centres[rng.integers(0, 7, n)] + rng.normal(scale=0.7, size=(n, 24))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", ["average", "complete", "single"])
def test_small_groups_are_those_of_the_tree_and_large_ones_those_of_kmeans(seed: int, method: str) -> None:
    vectors = some_vectors(seed)
    config = ClusterConfig(distance=0.5, linkage=method, max_size=9, seed=3)  # type: ignore[arg-type]
    tree = fcluster(linkage(pdist(vectors.astype(np.float64), "cosine"), method), 0.5, "distance")
    expected: set[frozenset[int]] = set()
    divided = 0
    for members in partition(tree):
        own = np.array(sorted(members))
        if len(own) <= 9:
            expected.add(members)
            continue
        divided += 1
        parts = KMeans(n_clusters=int(np.ceil(len(own) / 9)), n_init=10, random_state=3).fit_predict(vectors[own])
        expected |= {frozenset(own[parts == part].tolist()) for part in set(parts.tolist())}
    labels = cluster(vectors, config)
    assert partition(labels) == expected
    assert divided or method == "complete"
    # numbered by first appearance, so that ids do not hang on a library's order
    assert list(dict.fromkeys(labels.tolist())) == list(range(labels.max() + 1))


@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_wards_linkage_is_scipys_on_unit_vectors(scale: float) -> None:
    vectors = some_vectors(4)
    config = ClusterConfig(distance=0.9, linkage="ward", max_size=90)
    # lengths do not count: cosine distance knows none
    labels = cluster(vectors * np.linspace(1, scale, len(vectors), dtype=np.float32)[:, None], config)
    tree = linkage(vectors.astype(np.float64), "ward")
    assert partition(labels) == partition(fcluster(tree, np.sqrt(2 * 0.9), "distance"))
    assert 3 < labels.max() < 60
    assert partition(labels) != partition(cluster(vectors, ClusterConfig(distance=0.9, max_size=90)))


@pytest.mark.parametrize("method", ["average", "ward"])
def test_two_vectors_are_merged_up_to_the_same_cosine_distance(method: str) -> None:
    two = np.array([[1.0, 0.0], [0.6, 0.8]])  # 0.4 apart
    found = [cluster(two, ClusterConfig(distance=d, linkage=method)).tolist() for d in (0.39, 0.41)]  # type: ignore[arg-type]
    assert found == [[0, 1], [0, 0]]


def test_small_groups_are_left_out_and_a_zero_vector_is_refused() -> None:
    vectors = some_vectors(9)
    config = ClusterConfig(distance=0.4, max_size=8, min_size=3)
    members = groups(vectors, config)
    assert members == groups(vectors.copy(), config)
    sizes = np.bincount(cluster(vectors, config))
    assert [len(group) for group in members] == [size for size in sizes if size >= 3]
    assert 0 < len(members) < len(sizes)
    assert cluster(np.ones((1, 4)), config).tolist() == [0]
    assert groups(np.zeros((0, 4)), config) == []
    with pytest.raises(DataError, match="zero"):
        cluster(np.array([[1.0, 0.0], [0.0, 0.0]]), config)


class Encoder:
    """Stands for the sentence encoder: a segment's vector is told by its first words."""

    def __init__(self, vectors: dict[str, tuple[float, float]]) -> None:
        self.vectors = vectors

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        default = (1.0, 1.0)
        rows = [next((v for start, v in self.vectors.items() if text.startswith(start)), default) for text in texts]
        return torch.tensor(rows).reshape(len(texts), 2)

    def count_many(self, texts: Sequence[str]) -> list[int]:
        return [1] * len(texts)


def test_a_text_cluster_spans_sessions(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = corpus.dialogues[0]
    # two segments of session 1, two alike of sessions 2 and 3
    pieces = [Segment(0, 4), Segment(5, 9), Segment(10, 14), Segment(20, 24)]
    vectors = [(1.0, 0.0), (1.0, 0.01), (0.0, 1.0), (0.01, 1.0)]
    starts = {turn_text(talk.turns[piece.start]): vector for piece, vector in zip(pieces, vectors, strict=True)}
    monkeypatch.setattr("remind.refmem.cluster.segment", lambda *_: pieces)
    encoder: Any = Encoder(starts)
    clusters, count = text_clusters(Corpus((talk,)), encoder, SegmentConfig(), ClusterConfig(min_size=2))
    assert [(one.turns[0], one.turns[-1]) for one in clusters] == [("D2:1", "D3:5")]
    assert count == 4


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


def test_a_folder_that_is_no_clip_is_refused(tiny_clip: Path, tmp_path: Path) -> None:
    """Loaded all the same, it would embed images with weights drawn at random."""
    other = shutil.copytree(tiny_clip, tmp_path / "other")
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 16}))
    with pytest.raises(ModelError, match="holds a model of type vit, not CLIP"):
        ClipEncoder(str(other))
    (other / "config.json").write_text(json.dumps(settings))
    weights = load_file(other / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights of the image tower: visual_projection\.weight"):
        ClipEncoder(str(other))


def test_pictures_are_opened_one_by_one(tiny_clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files may hold pictures that are large in memory."""
    paths = [painted(tmp_path, seed) for seed in range(4)]
    seen: list[weakref.ref[Pillow.Image]] = []

    def watched(path: str) -> Pillow.Image:
        assert [one for one in seen if one() is not None] == []
        image = open_image(path)
        seen.append(weakref.ref(image))
        return image

    monkeypatch.setattr("remind.refmem.images.open_image", watched)
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
