"""Evidence clusters of each speaker's images, embedded by CLIP where there are pixels, else by their captions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from remind.core.errors import ModelError
from remind.core.progress import track, without_loading_bars
from remind.data.dialogue import Corpus
from remind.models.images import open_image
from remind.refmem.cluster import Cluster, groups
from remind.refmem.config import ClusterConfig

if TYPE_CHECKING:
    from torch import Tensor

    from remind.models.encoder import SentenceEncoder

#: Images per forward of CLIP.
_BATCH = 16


class ClipEncoder:
    """Images to unit vectors with a CLIP checkpoint of transformers.

    Raises:
        ModelError: the checkpoint cannot be loaded, is of another model, or lacks weights of the image tower.
    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        from transformers import AutoConfig, AutoImageProcessor, CLIPModel

        self.name, self.device = name, device
        try:
            # of another model transformers would take what fits and draw the rest at random
            if (kind := AutoConfig.from_pretrained(name, trust_remote_code=False).model_type) != "clip":
                raise ModelError(f"{name!r} holds a model of type {kind}, not CLIP")
            with without_loading_bars():
                model, loaded = CLIPModel.from_pretrained(name, use_safetensors=True, output_loading_info=True)
                self._processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        except ModelError:
            raise
        except Exception as error:  # the loaders raise OSError, ValueError, KeyError, safetensors errors, ...
            raise ModelError(f"CLIP checkpoint {name!r} cannot be loaded: {error}") from None
        if missing := sorted(key for key in loaded["missing_keys"] if key.startswith(("vision_model", "visual_"))):
            raise ModelError(
                f"CLIP checkpoint {name!r} lacks {len(missing)} weights of the image tower: {missing[0]} …"
            )
        self._model = model.to(device).eval()

    def encode(self, paths: Sequence[str]) -> np.ndarray:
        """Unit rows, float32 [n, d]. Raises ImagePathError for a file that is not an image."""
        import torch

        rows = []
        for start in range(0, len(paths), _BATCH):
            pixels = torch.cat([self._pixels(path) for path in paths[start : start + _BATCH]]).to(self.device)
            with torch.no_grad():
                pooled = self._model.vision_model(pixel_values=pixels).pooler_output
                vectors = self._model.visual_projection(pooled)
            rows.append(torch.nn.functional.normalize(vectors.float(), dim=-1).cpu().numpy())
        return np.concatenate(rows)

    def _pixels(self, path: str) -> Tensor:
        """The model's input for one image, [1, 3, height, width]; the image itself may be far larger."""
        pixels: Tensor = self._processor(images=[open_image(path)], return_tensors="pt")["pixel_values"]
        return pixels


def image_clusters(
    corpus: Corpus, encoder: SentenceEncoder, clip: ClipEncoder | None, config: ClusterConfig
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
                vectors = clip.encode(paths)
                counts["clip"] += len(images)
            else:
                captioned = [(turn, image) for turn, image in images if image.caption]
                vectors = encoder.encode([" ".join((image.caption or "").split()) for _, image in captioned]).numpy()
                counts["caption"] += len(captioned)
                counts["neither"] += len(images) - len(captioned)
                images = captioned
            for number, members in enumerate(groups(vectors.astype(np.float32), config)):
                name = f"{dialogue.id}/image-{place}-{number}"
                turns = tuple(dict.fromkeys(images[member][0] for member in members))
                indices = tuple(images[member][1].index for member in members)
                clusters.append(Cluster(name, dialogue.id, "image", speaker, turns, indices))
    return clusters, counts
