"""Evidence clusters of segments and images: agglomerative clustering, then K-Means on what is too large (App. D.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from remind.core.errors import ModelError
from remind.core.progress import track, without_loading_bars
from remind.data.dialogue import Corpus
from remind.perception.config import SegmentConfig
from remind.perception.perceive import segment
from remind.refmem.config import ClusterConfig
from remind.states.pyramid import one_line, turn_text

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder

#: Image files to unit rows, float32 [n, d].
ImageEncoder = Callable[[Sequence[str]], np.ndarray]


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
    branch: Literal["text", "image"]
    speaker: str | None
    turns: tuple[str, ...]
    images: tuple[int, ...] = ()


def groups(vectors: np.ndarray, config: ClusterConfig) -> list[list[int]]:
    """Row indices of each cluster with at least `config.min_size` members, in order of first appearance.

    Agglomerative clustering on cosine distances up to `config.distance`; a cluster with more than `config.max_size`
    members is divided by K-Means (seeded) into ceil(size / max_size) parts. A part may still be larger than max_size.

    Ward's linkage (Ward, 1963; cited in Appendix D.1) is of Euclidean distances between unit vectors: clusters A and B
    are merged while |A||B| / (|A| + |B|) · ‖mean A − mean B‖², the rise of the sum of squares within clusters, is at
    most `config.distance`.
    """
    from sklearn.cluster import AgglomerativeClustering, KMeans
    from sklearn.preprocessing import normalize

    if len(vectors) < max(2, config.min_size):
        return [[n] for n in range(len(vectors)) if config.min_size == 1]
    metric, threshold, points = "cosine", config.distance, vectors
    if config.linkage == "ward":
        # a height of the tree is the root of twice that rise: of two vectors, their Euclidean distance
        metric, threshold, points = "euclidean", math.sqrt(2 * config.distance), normalize(vectors)
    tree = AgglomerativeClustering(
        n_clusters=None, metric=metric, linkage=config.linkage, distance_threshold=threshold
    ).fit(points)
    found: list[list[int]] = []
    for label in range(tree.n_clusters_):
        members = np.flatnonzero(tree.labels_ == label)
        parts = -(-len(members) // config.max_size)
        own = np.zeros(len(members))
        if parts > 1:
            own = KMeans(n_clusters=parts, n_init=10, random_state=config.seed).fit_predict(vectors[members])
        found += [members[own == part].tolist() for part in range(parts)]
    return sorted(members for members in found if len(members) >= config.min_size)


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
        for number, members in enumerate(groups(vectors, config)):
            ranges = [dialogue.turns[pieces[member].start : pieces[member].end + 1] for member in members]
            turns = tuple(turn.id for turns in ranges for turn in turns)
            if len({dialogue.session_of[turn].id for turn in turns}) > 1:
                clusters.append(Cluster(f"{dialogue.id}/text-{number}", dialogue.id, "text", None, turns))
    return clusters, count


def image_clusters(
    corpus: Corpus, encoder: SentenceEncoder, clip: ImageEncoder | None, config: ClusterConfig
) -> tuple[list[Cluster], dict[str, int]]:
    """The clusters of each speaker's images in each dialogue.

    A speaker's images are embedded by CLIP if each of them has pixels, since the two spaces cannot be compared; else by
    their captions, and an image without one is left out.

    Returns:
        The clusters, and how many images were embedded by "clip", by "caption", and by "neither".
    """
    clusters: list[Cluster] = []
    counts = {"clip": 0, "caption": 0, "neither": 0}
    for dialogue in track(corpus.dialogues, "images", len(corpus.dialogues)):
        for place, speaker in enumerate(dialogue.speakers):
            images = [(turn.id, image) for turn in dialogue.turns if turn.speaker == speaker for image in turn.images]
            paths = [image.path for _, image in images if image.path is not None]
            if clip is not None and images and len(paths) == len(images):
                vectors = clip(paths)
                counts["clip"] += len(images)
            else:
                captioned = [(turn, image) for turn, image in images if image.caption]
                vectors = encoder.encode([one_line(image.caption or "") for _, image in captioned]).numpy()
                counts["caption"] += len(captioned)
                counts["neither"] += len(images) - len(captioned)
                images = captioned
            for number, members in enumerate(groups(vectors, config)):
                name = f"{dialogue.id}/image-{place}-{number}"
                turns = tuple(dict.fromkeys(images[member][0] for member in members))
                indices = tuple(images[member][1].index for member in members)
                clusters.append(Cluster(name, dialogue.id, "image", speaker, turns, indices))
    return clusters, counts


def clip_encoder(name: str, device: str = "cpu") -> ImageEncoder:
    """The image tower of a CLIP checkpoint of transformers, a folder or hub id. It raises ImagePathError.

    Raises:
        ModelError: the checkpoint cannot be loaded, or lacks weights of the tower.
    """
    import torch
    from transformers import AutoImageProcessor, CLIPModel

    from remind.models.images import open_image

    try:
        with without_loading_bars():
            model, loaded = CLIPModel.from_pretrained(name, use_safetensors=True, output_loading_info=True)
            processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the loaders raise OSError, ValueError, KeyError, safetensors errors, ...
        raise ModelError(f"CLIP checkpoint {name!r} cannot be loaded: {error}") from None
    # of another model transformers takes what fits and draws the rest at random
    if missing := sorted(key for key in loaded["missing_keys"] if key.startswith(("vision_model", "visual_"))):
        raise ModelError(f"CLIP checkpoint {name!r} lacks {len(missing)} weights of the image tower: {missing[0]} …")
    model = model.to(device).eval()

    @torch.no_grad()
    def encode(paths: Sequence[str]) -> np.ndarray:
        rows = []
        for path in paths:
            pixels = processor(images=[open_image(path)], return_tensors="pt")["pixel_values"].to(device)
            rows.append(model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output))
        vectors: np.ndarray = torch.nn.functional.normalize(torch.cat(rows).float(), dim=-1).cpu().numpy()
        return vectors

    return encode
