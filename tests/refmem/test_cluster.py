"""Clusters against scipy's tree and scikit-learn's K-Means on the same vectors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist
from sklearn.cluster import KMeans

from remind.core.errors import ConfigError, DataError
from remind.data.dialogue import Corpus
from remind.perception.config import SegmentConfig
from remind.refmem.cluster import cluster, groups, text_clusters
from remind.refmem.config import ClusterConfig
from remind.refmem.images import image_clusters
from remind.states.pyramid import turn_text


def partition(labels: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in set(labels.tolist())}


def some_vectors(seed: int, n: int = 90) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(7, 24))
    rows = centres[rng.integers(0, 7, n)] + rng.normal(scale=0.7, size=(n, 24))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
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


def test_the_same_vectors_give_the_same_groups_and_small_ones_are_left_out() -> None:
    vectors = some_vectors(9)
    config = ClusterConfig(distance=0.4, max_size=8, min_size=3)
    found = groups(vectors, config)
    assert found == groups(vectors.copy(), config)
    assert found
    assert all(len(members) >= 3 for members in found)
    sizes = np.bincount(cluster(vectors, config))
    assert len(found) == int((sizes >= 3).sum())


def test_one_vector_none_and_a_zero_one() -> None:
    config = ClusterConfig()
    assert cluster(np.ones((1, 4)), config).tolist() == [0]
    assert groups(np.zeros((0, 4)), config) == []
    with pytest.raises(DataError, match="zero"):
        cluster(np.array([[1.0, 0.0], [0.0, 0.0]]), config)
    with pytest.raises(ConfigError, match="cosine distance"):
        ClusterConfig(distance=3)


class Range(NamedTuple):
    start: int
    end: int


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
    pieces = [Range(0, 4), Range(5, 9), Range(10, 14), Range(20, 24)]
    vectors = [(1.0, 0.0), (1.0, 0.01), (0.0, 1.0), (0.01, 1.0)]
    starts = {turn_text(talk.turns[piece.start]): vector for piece, vector in zip(pieces, vectors, strict=True)}
    monkeypatch.setattr("remind.refmem.cluster.segment", lambda *_: pieces)
    encoder: Any = Encoder(starts)
    clusters, count = text_clusters(Corpus((talk,)), encoder, SegmentConfig(), ClusterConfig(min_size=2))
    assert [(one.turns[0], one.turns[-1]) for one in clusters] == [("D2:1", "D3:5")]
    assert count == 4


def test_an_image_cluster_has_one_speaker(corpus: Corpus) -> None:
    talk = corpus.dialogues[0]
    encoder: Any = Encoder({})
    clusters, counts = image_clusters(Corpus((talk,)), encoder, None, ClusterConfig(min_size=2, max_size=500))
    assert [one.speaker for one in clusters] == ["Ana", "Bo"]
    for one in clusters:
        assert {talk.turn(turn).speaker for turn in one.turns} == {one.speaker}
    assert sorted(index for one in clusters for index in one.images) == list(range(len(talk.images)))
    assert counts == {"clip": 0, "caption": len(talk.images), "neither": 0}
