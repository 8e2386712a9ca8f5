"""Clusters against scipy's tree and scikit-learn's K-Means on the same vectors; a tiny CLIP against its own forward."""

from __future__ import annotations

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
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from remind.core.errors import ModelError
from remind.refmem.cluster import clip_encoder, groups
from remind.refmem.config import ClusterConfig


def parted(labels: np.ndarray) -> list[list[int]]:
    """Members of each label, in order of first appearance."""
    return sorted(np.flatnonzero(labels == label).tolist() for label in set(labels.tolist()))


def some_vectors(seed: int, n: int = 90) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(7, 24))
    rows = centres[rng.integers(0, 7, n)] + rng.normal(scale=0.7, size=(n, 24))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(("method", "distance"), [("average", 0.5), ("complete", 0.5), ("ward", 0.9)])
def test_small_groups_are_those_of_the_tree_and_large_ones_those_of_kmeans(method: Any, distance: float) -> None:
    vectors = some_vectors(0)
    wide = vectors.astype(np.float64)
    given, height = (wide, np.sqrt(2 * distance)) if method == "ward" else (pdist(wide, "cosine"), distance)
    expected: list[list[int]] = []
    for members in parted(fcluster(linkage(given, method), height, "distance")):
        parts = [members]
        if len(members) > 9:
            labels = KMeans(n_clusters=-(-len(members) // 9), n_init=10, random_state=3).fit_predict(vectors[members])
            parts = [np.array(members)[part].tolist() for part in parted(labels)]
        expected += parts
    for least in (1, 3):
        config = ClusterConfig(distance=distance, linkage=method, max_size=9, min_size=least, seed=3)
        # lengths do not count: cosine distance knows none
        assert groups(4 * vectors, config) == sorted(one for one in expected if len(one) >= least)


def test_clip_vectors_are_its_image_features(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**small, "vocab_size": 20, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 2},
        vision_config={**small, "image_size": 16, "patch_size": 8},
        projection_dim=12,
    )
    folder, model = tmp_path / "clip", CLIPModel(config).eval()
    model.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).reshape(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).reshape(3, 1, 1)
    drawn = np.random.default_rng(0).integers(0, 255, (3, 16, 16, 3), dtype=np.uint8)
    paths = [str(tmp_path / f"{n}.png") for n in range(3)]
    for one, path in zip(drawn, paths, strict=True):
        Pillow.fromarray(one).save(path)
    pixels = (torch.from_numpy(drawn).permute(0, 3, 1, 2) / 255 - mean) / std
    with torch.no_grad():
        features = model.visual_projection(model.vision_model(pixels).pooler_output)
    expected = (features / features.norm(dim=-1, keepdim=True)).numpy()
    np.testing.assert_allclose(clip_encoder(str(folder))(paths), expected, atol=1e-5)
    # loaded all the same, a folder without them would embed images with weights drawn at random
    weights = load_file(folder / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights of the image tower: visual_projection\.weight"):
        clip_encoder(str(folder))
    with pytest.raises(ModelError, match="cannot be loaded"):
        clip_encoder(str(tmp_path / "nothing"))
