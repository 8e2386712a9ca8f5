"""Table 2: statistics of the benchmark."""

from __future__ import annotations

from experiments.paper.config import PaperConfig
from experiments.paper.items import Result
from remind.core.progress import track
from remind.data.dialogue import Corpus
from remind.data.readers import read
from remind.data.sample import sample_path
from remind.models.encoder import SentenceEncoder
from remind.perception.config import SegmentConfig
from remind.perception.perceive import segment
from remind.refmem.build import as_markdown, statistics
from remind.states.pyramid import turn_text


def table2(cfg: PaperConfig) -> Result:
    """Counts over dialogues and questions; segments as perception cuts them by default.

    Raises:
        DataError, FormatError: files that cannot be read.
    """
    paths = cfg.benchmark or [str(sample_path())]
    corpus = Corpus.merge([read(path, cfg.format) for path in paths], paths)
    encoder, pieces = SentenceEncoder(), 0
    for dialogue in track(corpus.dialogues, "segments", len(corpus.dialogues)):
        texts = [turn_text(turn) for turn in dialogue.turns]
        pieces += len(segment(dialogue, encoder.encode(texts), SegmentConfig(), encoder.count_many(texts)))
    counts = statistics(corpus, pieces)
    return Result(counts, as_markdown(counts).partition("\n\n")[2], None)
