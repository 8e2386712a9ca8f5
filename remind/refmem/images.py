"""The image branch up to its vectors: each speaker's images, by CLIP where there are pixels, else by captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from remind.core.errors import ModelError
from remind.core.files import write_rows
from remind.core.progress import track, without_loading_bars
from remind.data.dialogue import Corpus, Dialogue, Image
from remind.models.chat import opened
from remind.models.kernels import check_kernels
from remind.refmem.items import read_rows

if TYPE_CHECKING:
    from torch import Tensor

    from remind.models.encoder import SentenceEncoder

#: Images per forward of CLIP.
_BATCH = 16


@dataclass(frozen=True)
class Shown:
    """An image in its place.

    Attributes:
        space: "clip" or "caption": whose vector it has. row: which row of that space's vectors.
    """

    dialogue_id: str
    speaker: str
    turn: str
    image: int
    space: str
    row: int


class ClipEncoder:
    """Images to unit vectors with a CLIP checkpoint of transformers.

    Raises:
        ModelError: the checkpoint cannot be loaded, holds no image tower, or names kernels from elsewhere.
    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        from transformers import AutoImageProcessor, CLIPModel

        self.name, self.device = name, device
        check_kernels(name)
        try:
            with without_loading_bars():
                self._model = CLIPModel.from_pretrained(name, use_safetensors=True).to(device).eval()
                self._processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # the loaders raise OSError, ValueError, KeyError, safetensors errors, ...
            raise ModelError(f"CLIP checkpoint {name!r} cannot be loaded: {error}") from None

    def encode(self, paths: Sequence[str]) -> np.ndarray:
        """Unit rows, float32 [n, d]. Raises ImagePathError for a file that is no image."""
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
        """What the model sees of one image, [1, 3, height, width]; the image itself may be far larger."""
        made: Tensor = self._processor(images=[opened(path).convert("RGB")], return_tensors="pt")["pixel_values"]
        return made


def _own(dialogue: Dialogue) -> list[tuple[str, str, Image]]:
    return [(turn.speaker, turn.id, image) for turn in dialogue.turns for image in turn.images]


def make_images(
    folder: Path, corpus: Corpus, encoder: SentenceEncoder, clip: str | None, device: str
) -> dict[str, Any]:
    """Write images.jsonl, clip.npy and caption.npy (float32, unit rows).

    A speaker's images are told by CLIP if each of them has pixels, since the two spaces cannot be compared; else by
    their captions, and an image without one is left out and counted.
    """
    paths: list[str] = []
    captions: list[str] = []
    rows: list[Shown] = []
    lost = 0
    for dialogue in corpus.dialogues:
        for speaker in dialogue.speakers:
            own = [(turn, image) for name, turn, image in _own(dialogue) if name == speaker]
            pixels = clip is not None and bool(own) and all(image.path is not None for _, image in own)
            for turn, image in own:
                if pixels and image.path is not None:
                    rows.append(Shown(dialogue.id, speaker, turn, image.index, "clip", len(paths)))
                    paths.append(image.path)
                elif image.caption:
                    rows.append(Shown(dialogue.id, speaker, turn, image.index, "caption", len(captions)))
                    captions.append(" ".join(image.caption.split()))
                else:
                    lost += 1
    seen = np.zeros((0, 1), dtype=np.float32)
    if paths and clip is not None:
        model = ClipEncoder(clip, device)
        parts = [paths[start : start + _BATCH] for start in range(0, len(paths), _BATCH)]
        seen = np.concatenate([model.encode(part) for part in track(parts, "images", len(parts))])
    write_rows(folder / "images.jsonl", (asdict(row) for row in rows))
    np.save(folder / "clip.npy", seen.astype(np.float32), allow_pickle=False)
    np.save(folder / "caption.npy", encoder.encode(captions).numpy().astype(np.float32), allow_pickle=False)
    return {"clip": len(paths), "caption": len(captions), "neither": lost, "checkpoint": clip}


def read_images(folder: Path) -> tuple[list[Shown], dict[str, np.ndarray]]:
    """Images, and the vectors of each space."""
    vectors = {space: np.load(folder / f"{space}.npy", allow_pickle=False) for space in ("clip", "caption")}
    return [Shown(**row) for row in read_rows(folder / "images.jsonl")], vectors
