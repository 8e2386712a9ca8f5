"""Evidence clusters of segments: agglomerative clustering, then K-Means on clusters that are too large (App. D.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from remind.core.errors import DataError
from remind.core.progress import track
from remind.data.dialogue import Corpus
from remind.perception.config import SegmentConfig
from remind.perception.index import segment
from remind.refmem.config import ClusterConfig
from remind.refmem.items import read_rows
from remind.states.pyramid import turn_text

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder


@dataclass(frozen=True)
class Cluster:
    """A group of a dialogue's segments ("text") or of one speaker's images ("image").

    Attributes:
        speaker: whose images; None for segments.
        turns: turn ids in time order: of the segments, or those that share the images.
        images: image indices in order; empty for segments.
    """

    id: str
    dialogue_id: str
    branch: str
    speaker: str | None
    turns: tuple[str, ...]
    images: tuple[int, ...] = ()


def cluster(vectors: np.ndarray, config: ClusterConfig) -> np.ndarray:
    """A label for every row, int [n], numbered by first appearance.

    Agglomerative clustering on cosine distances up to `config.distance`; a cluster with more than `config.max_size`
    members is divided by K-Means (seeded) into ceil(size / max_size) parts. A part may still be larger than max_size.

    Ward's linkage (Ward, 1963; cited in Appendix D.1) is of Euclidean distances between unit vectors: clusters A and B
    are merged while |A||B| / (|A| + |B|) · ‖mean A − mean B‖², the rise of the sum of squares within clusters, is at
    most `config.distance`.

    Raises:
        DataError: a row that is zero or not finite, whose cosine is not defined.
    """
    from sklearn.cluster import AgglomerativeClustering, KMeans
    from sklearn.preprocessing import normalize

    if len(vectors) and (not np.isfinite(vectors).all() or not np.linalg.norm(vectors, axis=1).all()):
        raise DataError("a vector to be clustered is zero or not finite")
    if len(vectors) < 2:
        return np.zeros(len(vectors), dtype=np.int64)
    metric, threshold, points = "cosine", config.distance, vectors
    if config.linkage == "ward":
        # a height of the tree is the root of twice that rise: of two vectors, their Euclidean distance
        metric, threshold, points = "euclidean", math.sqrt(2 * config.distance), normalize(vectors)
    grouped = AgglomerativeClustering(
        n_clusters=None, metric=metric, linkage=config.linkage, distance_threshold=threshold
    ).fit_predict(points)
    labels = np.zeros(len(vectors), dtype=np.int64)
    following = 0
    for label in np.unique(grouped):
        members = np.flatnonzero(grouped == label)
        parts = -(-len(members) // config.max_size)
        labels[members] = following
        if parts > 1:
            means = KMeans(n_clusters=parts, n_init=10, random_state=config.seed)
            labels[members] += means.fit_predict(vectors[members])
        following += parts
    order = {label: number for number, label in enumerate(dict.fromkeys(labels.tolist()))}
    return np.asarray([order[label] for label in labels.tolist()], dtype=np.int64)


def groups(vectors: np.ndarray, config: ClusterConfig) -> list[list[int]]:
    """Row indices of each cluster with at least `config.min_size` members, in order of first appearance."""
    labels = cluster(vectors, config)
    clusters = [np.flatnonzero(labels == label).tolist() for label in dict.fromkeys(labels.tolist())]
    return [members for members in clusters if len(members) >= config.min_size]


def text_clusters(
    corpus: Corpus, encoder: SentenceEncoder, segments: SegmentConfig, config: ClusterConfig
) -> tuple[list[Cluster], int]:
    """The clusters of each dialogue's topical segments, without those within a single session.

    Returns:
        The clusters, and how many segments there are.
    """
    clusters, count = [], 0
    for dialogue in track(corpus.dialogues, "segments", len(corpus.dialogues)):
        texts = [turn_text(turn) for turn in dialogue.turns]
        pieces = segment(dialogue, encoder.encode(texts), segments, encoder.count_many(texts))
        vectors = encoder.encode(["\n".join(texts[piece.start : piece.end + 1]) for piece in pieces]).numpy()
        count += len(pieces)
        for number, members in enumerate(groups(vectors.astype(np.float32), config)):
            ranges = [dialogue.turns[pieces[member].start : pieces[member].end + 1] for member in members]
            turns = tuple(turn.id for turns in ranges for turn in turns)
            if len({dialogue.session_of[turn].id for turn in turns}) > 1:
                clusters.append(Cluster(f"{dialogue.id}/text-{number}", dialogue.id, "text", None, turns))
    return clusters, count


def read_clusters(path: Path) -> list[Cluster]:
    """Clusters of a JSONL file."""
    rows = read_rows(path)
    return [Cluster(**{**row, "turns": tuple(row["turns"]), "images": tuple(row["images"])}) for row in rows]
