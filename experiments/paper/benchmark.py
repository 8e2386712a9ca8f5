"""Table 2: statistics of the benchmark."""

from __future__ import annotations

from typing import Any

from experiments.paper.config import PaperConfig
from experiments.paper.items import Result
from remind.core.progress import track
from remind.data.dialogue import Corpus
from remind.data.readers import read
from remind.data.sample import sample_path
from remind.models.encoder import SentenceEncoder
from remind.perception.config import SegmentConfig
from remind.perception.perceive import segment
from remind.refmem.benchmark import as_markdown, statistics
from remind.states.pyramid import turn_text
from sae.figures import COLOURS, Picture, new_figure


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
    return Result(counts, as_markdown(counts).partition("\n\n")[2], _bars(counts["questions"]))


def _bars(questions: dict[str, Any]) -> Picture:
    """Questions by dimension, their formats stacked."""
    by_dimension = questions["by_dimension_and_format"]
    figure = new_figure(7, 3.2)
    axes = figure.subplots()
    left = dict.fromkeys(by_dimension, 0)
    for format, colour in zip(questions["by_format"], COLOURS, strict=False):
        for name, counts in by_dimension.items():
            label = format if name == next(iter(by_dimension)) else None
            axes.barh(name.replace("_", " "), counts.get(format, 0), left=left[name], color=colour, label=label)
            left[name] += counts.get(format, 0)
    axes.invert_yaxis()
    axes.set_xlabel("questions")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return Picture(figure)
