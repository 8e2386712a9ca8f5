"""How retrieval scales with the length of the history: time, memory, disk, and whether the evidence is still found."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.retrieval_curve.borrowed import Borrowed
from benchmarks.retrieval_curve.history import asked_of, make_history
from benchmarks.retrieval_curve.measure import measured_apart, write_task
from benchmarks.retrieval_curve.plot import plot_curve
from remind.core.errors import ConfigError
from remind.core.files import write_json
from remind.data.dialogue import Dialogue, Question
from remind.llm.offline import OfflineLLM
from remind.models.encoder import SentenceEncoder
from remind.perception import PerceptionConfig
from remind.perception.index import DialogueIndex

_LEGEND = """A history is one dialogue in the midst of copies of the others: with its speakers' names, dates
shifted, words dropped and swapped. Questions are that dialogue's. {vectors}
build: seconds to encode and write; open: a new process reads the index, the dialogue being in memory. Times from the
encoded question, each asked once before: to the segments (Eq. 1, hybrid), and to the rendered prompt of x0 (hybrid);
CPU: of the former, what the process itself ran."""
_BORROWED = """Encoded for real: that dialogue's turns and cues, and of the others each turn once.
A copy has its source's vector, turned away at random as far as copies on average are; a cue of copies the mean of its
turns' vectors."""
_COLUMNS = (
    ("tokens", "tokens", ".0f"),
    ("turns", "turns", ".0f"),
    ("segments", "segments", ".0f"),
    ("build s", "build_s", ".1f"),
    ("disk MB", "disk_mb", ".1f"),
    ("open ms", "open_ms", ".0f"),
    ("Eq. 1 ms", "cue_ms", ".2f"),
    ("p95", "cue_p95_ms", ".2f"),
    ("CPU", "cue_cpu_ms", ".2f"),
    ("hybrid ms", "hybrid_ms", ".2f"),
    ("p95", "hybrid_p95_ms", ".2f"),
    ("CPU", "hybrid_cpu_ms", ".2f"),
    ("x0 ms", "hybrid_x0_ms", ".2f"),
    ("p95", "hybrid_x0_p95_ms", ".2f"),
    ("RSS MB", "rss_mb", ".0f"),
    ("before", "rss_before_mb", ".0f"),
    ("recall", "cue_recall", ".3f"),
    ("hybrid", "hybrid_recall", ".3f"),
)


@dataclass
class RetrievalCurveConfig:
    """Measure retrieval from longer and longer histories, each index on disk and asked by a new process."""

    input: str | list[str]
    """Dialogue files or folders; the first dialogue with questions is asked about, the others surround it."""
    tokens: list[int] = field(default_factory=lambda: [16_000, 64_000, 256_000, 1_000_000, 2_000_000])
    """Lengths of the histories."""
    questions: int = 100
    """How many questions are asked, the first ones with gold evidence."""
    encode_all: bool = False
    """Encode every copy too, which takes minutes per 100,000 tokens on a CPU."""
    perception: PerceptionConfig = field(default_factory=PerceptionConfig)
    """Segments and retrieval. retrieve.method is ignored: both are run."""
    work: str | None = None
    """Folder that keeps histories and indexes; None: a temporary one."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""
    plot: str | None = None
    """PNG, SVG or PDF file for the curves."""
    seed: int = 0
    """Of the copies."""
    device: str = "cpu"
    """Device of the text encoder."""

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1 or self.questions < 1:
            raise ConfigError("tokens and questions must be at least 1")


def retrieval_curve(cfg: RetrievalCurveConfig) -> list[dict[str, float]]:
    """Run, print and return a row of figures per length.

    Raises:
        ConfigError: no dialogue with questions and gold evidence, or no other dialogue.
    """
    base, others, questions = _read(cfg)
    encoder = SentenceEncoder(device=cfg.device)
    names = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "safetensors"))
    print(f"{platform.platform()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {names}")
    print(_LEGEND.format(vectors="Every turn and cue is encoded." if cfg.encode_all else _BORROWED))
    print("  ".join(f"{title:>9}" for title, _, _ in _COLUMNS), flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="remind-curve-") as temporary:
        for tokens in sorted(cfg.tokens):
            folder = Path(cfg.work or temporary) / f"{tokens}"
            rows.append(_row(cfg, tokens, base, others, questions, encoder, folder))
            print("  ".join(f"{rows[-1][key]:>9{form}}" for _, key, form in _COLUMNS), flush=True)
    if not cfg.encode_all:
        print(f"cosine of a copy with its source, sample of the longest: {rows[-1]['likeness']:.3f}")
    if cfg.out is not None:
        write_json(cfg.out, {"format": "remind-retrieval-curve", "rows": rows})
    if cfg.plot is not None:
        print(f"plot: {plot_curve(rows).save(cfg.plot)}")
    return rows


def _read(cfg: RetrievalCurveConfig) -> tuple[Dialogue, list[Dialogue], list[Question]]:
    from remind.data.readers import read

    corpora = [read(path) for path in ([cfg.input] if isinstance(cfg.input, str) else cfg.input)]
    dialogues = [dialogue for corpus in corpora for dialogue in corpus.dialogues]
    questions = [question for corpus in corpora for question in corpus.questions]
    asked = {question.dialogue_id for question in questions if question.evidence}
    base = next((dialogue for dialogue in dialogues if dialogue.id in asked), None)
    if base is None or len(dialogues) < 2:
        raise ConfigError("a curve needs a dialogue whose questions have gold evidence, and another dialogue")
    return base, [dialogue for dialogue in dialogues if dialogue is not base], questions


def _row(
    cfg: RetrievalCurveConfig,
    tokens: int,
    base: Dialogue,
    others: Sequence[Dialogue],
    questions: Sequence[Question],
    encoder: SentenceEncoder,
    folder: Path,
) -> dict[str, float]:
    history = make_history(base, others, tokens, encoder.count_many, cfg.seed)
    dialogue = history.dialogue
    asked = asked_of(dialogue, base, questions)[: cfg.questions]
    reader = encoder if cfg.encode_all else Borrowed(encoder, history, base, cfg.seed)
    started = perf_counter()
    index = DialogueIndex(dialogue, reader, OfflineLLM(), cfg.perception.segment, folder / "index")
    index.cues(None)
    index.bm25.scores([])
    build = perf_counter() - started
    vectors = torch.cat([encoder.encode([question.text]) for question in asked])
    write_task(folder, dialogue, asked, vectors, reader.name, cfg.perception)
    return {
        "tokens": sum(index.costs.turns) + sum(index.costs.headings),
        "turns": len(dialogue.turns),
        "segments": len(index.segments),
        "questions": len(asked),
        "build_s": build,
        "disk_mb": sum(path.stat().st_size for path in (folder / "index").iterdir()) / 1e6,
        "likeness": 1.0 if cfg.encode_all else getattr(reader, "likeness", 1.0),
        **measured_apart(folder),
    }
