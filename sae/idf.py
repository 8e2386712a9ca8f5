"""Inverse document frequency of features, counted over the corpus a coder was trained on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sae import files
from sae.errors import ShapeError
from sae.topk import IDF, SparseCodes


class DocumentFrequency:
    """Counts in how many documents (turns, texts) each feature is active on at least one token.

    Documents are numbered from 0 and must come in order; a document may continue in the next call.
    """

    def __init__(self, d_sae: int) -> None:
        self.df = torch.zeros(d_sae, dtype=torch.int64)
        self.n_documents = 0
        self._last = -1
        # features already counted for the last document
        self._seen = torch.zeros(d_sae, dtype=torch.bool)

    def add(self, codes: SparseCodes, documents: Tensor) -> None:
        """Count codes of N tokens of documents [N] int64, ascending, none before the last of earlier calls.

        Raises ShapeError for another number of tokens, or documents out of order.
        """
        documents = documents.cpu()
        if codes.indices.shape[:-1] != documents.shape or documents.ndim != 1:
            raise ShapeError(f"{list(documents.shape)} documents for codes of {list(codes.indices.shape)}")
        if not len(documents):
            return
        if int(documents[0]) < self._last or bool((documents.diff() < 0).any()):
            raise ShapeError("documents must come in ascending order")
        d_sae = len(self.df)
        pairs = torch.unique((documents[:, None] * d_sae + codes.indices.cpu())[codes.active().cpu()])
        document, feature = pairs // d_sae, pairs % d_sae
        new = ~((document == self._last) & self._seen[feature])
        self.df += torch.bincount(feature[new], minlength=d_sae)
        distinct = torch.unique(documents)
        self.n_documents += len(distinct) - int(distinct[0] == self._last)
        last = int(distinct[-1])
        if last != self._last:
            self._seen.zero_()
        self._seen[feature[document == last]] = True
        self._last = last

    def idf(self) -> Tensor:
        """ln((1 + N) / (1 + df_j)), [d_sae] float32."""
        return torch.log((1 + self.n_documents) / (1 + self.df.double())).float()


def save_idf(folder: str | Path, frequency: DocumentFrequency) -> None:
    """Write `idf.safetensors` (idf, df [d_sae]; n_documents) beside a coder."""
    tensors = {"idf": frequency.idf(), "df": frequency.df, "n_documents": torch.tensor(frequency.n_documents)}
    files.write_tensors(Path(folder) / IDF, tensors)
