"""Evidence clusters: agglomerative without a fixed number of groups, K-Means on those too large (Appendix D.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from remind.core.errors import DataError
from remind.core.files import write_rows
from remind.data.dialogue import Corpus
from remind.refmem.config import ClusterConfig
from remind.refmem.images import Shown
from remind.refmem.items import read_rows
from remind.refmem.segments import Piece, of_dialogue


@dataclass(frozen=True)
class Cluster:
    """A group of a dialogue's segments ("text") or of one speaker's images ("image").

    Attributes:
        speaker: whose images; None for segments.
        turns: turn ids in time order: of the segments, or those that the images stand in.
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

    Agglomerative clustering on cosine distances up to `config.distance`; a group of more than `config.max_size` is
    divided by K-Means (seeded) into ceil(size / max_size) parts. A part may still be larger than max_size.

    Raises:
        DataError: a row that is zero or not finite, whose cosine is not defined.
    """
    from sklearn.cluster import AgglomerativeClustering, KMeans

    if len(vectors) and (not np.isfinite(vectors).all() or not np.linalg.norm(vectors, axis=1).all()):
        raise DataError("a vector to be clustered is zero or not finite")
    if len(vectors) < 2:
        return np.zeros(len(vectors), dtype=np.int64)
    grown = AgglomerativeClustering(
        n_clusters=None, metric="cosine", linkage=config.linkage, distance_threshold=config.distance
    ).fit_predict(vectors)
    labels = np.zeros(len(vectors), dtype=np.int64)
    following = 0
    for label in np.unique(grown):
        members = np.flatnonzero(grown == label)
        parts = -(-len(members) // config.max_size)
        if parts > 1:
            means = KMeans(n_clusters=parts, n_init=10, random_state=config.seed)
            labels[members] = following + means.fit_predict(vectors[members])
        else:
            labels[members] = following
        following += parts
    order = {int(label): number for number, label in enumerate(dict.fromkeys(labels.tolist()))}
    return np.asarray([order[int(label)] for label in labels], dtype=np.int64)


def groups(vectors: np.ndarray, config: ClusterConfig) -> list[list[int]]:
    """Rows of each cluster that has `config.min_size` members, in order of first appearance."""
    labels = cluster(vectors, config)
    every = [np.flatnonzero(labels == label).tolist() for label in range(int(labels.max()) + 1 if len(labels) else 0)]
    return [members for members in every if len(members) >= config.min_size]


def text_clusters(corpus: Corpus, pieces: Sequence[Piece], vectors: np.ndarray, config: ClusterConfig) -> list[Cluster]:
    """The clusters of each dialogue's segments; one whose segments all lie in one session has nothing to reflect on."""
    found = []
    for dialogue in corpus.dialogues:
        own = of_dialogue(pieces, dialogue.id)
        for number, members in enumerate(groups(vectors[own], config)):
            turns = [turn for member in members for turn in pieces[own[member]].turns(dialogue)]
            if len({dialogue.session_of[turn].id for turn in turns}) > 1:
                found.append(Cluster(f"{dialogue.id}/text-{number}", dialogue.id, "text", None, tuple(turns)))
    return found


def image_clusters(
    corpus: Corpus, shown: Sequence[Shown], vectors: dict[str, np.ndarray], config: ClusterConfig
) -> list[Cluster]:
    """The clusters of each speaker's images in each dialogue."""
    found = []
    for dialogue in corpus.dialogues:
        for place, speaker in enumerate(dialogue.speakers):
            own = [image for image in shown if (image.dialogue_id, image.speaker) == (dialogue.id, speaker)]
            if not own:
                continue
            rows = vectors[own[0].space][[image.row for image in own]]
            for number, members in enumerate(groups(rows, config)):
                name = f"{dialogue.id}/image-{place}-{number}"
                turns = tuple(dict.fromkeys(own[member].turn for member in members))
                images = tuple(own[member].image for member in members)
                found.append(Cluster(name, dialogue.id, "image", speaker, turns, images))
    return found


def write_clusters(folder: Path, clusters: Sequence[Cluster]) -> dict[str, Any]:
    """Write clusters.jsonl; returns how many there are of each branch."""
    write_rows(folder / "clusters.jsonl", (asdict(found) for found in clusters))
    return {branch: sum(found.branch == branch for found in clusters) for branch in ("text", "image")}


def read_clusters(folder: Path) -> list[Cluster]:
    rows = read_rows(folder / "clusters.jsonl")
    return [Cluster(**{**row, "turns": tuple(row["turns"]), "images": tuple(row["images"])}) for row in rows]
