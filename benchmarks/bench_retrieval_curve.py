"""Time, memory, disk and evidence recall of retrieval from histories of up to two million tokens."""

from __future__ import annotations

import re
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from time import perf_counter, process_time

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.measure import about, headline, renumbered, resident
from remind.core.errors import ConfigError, DataError
from remind.core.files import write_json
from remind.core.processes import spawned_pool
from remind.data.dialogue import Corpus, Dialogue, Question, Session, Turn
from remind.data.readers import read, write_refmem
from remind.llm.auxiliary import OfflineLLM
from remind.models.encoder import SentenceEncoder
from remind.perception import PerceptionConfig, RetrieveConfig, SegmentConfig
from remind.perception.perceive import DialogueIndex, retrieve
from remind.states.pyramid import FactualState, blind, render, turn_text
from remind.text.words import sentences

_LEGEND = """A history is one dialogue in the midst of copies of the others: with its speakers' names, dates
shifted, words dropped and swapped. Questions are that dialogue's. Encoded for real: that dialogue's turns and cues, and
of the others each turn once. A copy has its source's vector, turned away at random as far as copies on average are; a
cue of copies the mean of its turns' vectors.
build: seconds to encode and write; open: a new process reads the index, the dialogue being in memory. Milliseconds from
the encoded question, each asked once before, median and 95th percentile: to the segments (cue is Eq. 1), and to the
rendered prompt (x0); cpu: of the former, what the process itself ran."""
_COLUMNS = (
    *("tokens", "turns", "segments", "build_s", "disk_mb", "open_ms", "cue_ms", "cue_p95_ms", "cue_cpu_ms"),
    *("hybrid_ms", "hybrid_p95_ms", "hybrid_cpu_ms", "hybrid_x0_ms", "hybrid_x0_p95_ms", "rss_mb", "rss_before_mb"),
    *("cue_recall", "hybrid_recall"),
)
#: Chance of a word of a copy to be dropped, and to change places with the next; range of the shift of its dates.
_DROPPED, _SWAPPED, _DAYS = 0.1, 0.1, 3650
#: Copied turns that are really encoded, to measure how far a copy lies from its source.
_SAMPLE = 128


@dataclass
class RetrievalCurveConfig:
    """Measure retrieval from longer and longer histories, each index on disk and read by a new process."""

    input: str | list[str]
    """Dialogue files or folders; the first dialogue with questions is asked about, the others surround it."""
    tokens: list[int] = field(default_factory=lambda: [16_000, 64_000, 256_000, 1_000_000, 2_000_000])
    """Lengths of the histories."""
    questions: int = 100
    """How many questions are asked, the first ones with gold evidence."""
    perception: PerceptionConfig = field(
        default_factory=lambda: PerceptionConfig(retrieve=RetrieveConfig(max_context_tokens=7200))
    )
    """Segments and retrieval. retrieve.method is ignored: both are run. A fifth of two million tokens is no prompt, so
    there is a cap, of a fifth of RefMem-Bench's average history."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""
    plot: str | None = None
    """PNG, SVG or PDF file for the curves."""
    seed: int = 0
    """Of the copies."""

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1 or self.questions < 1:
            raise ConfigError("tokens and questions must be at least 1")


def retrieval_curve(cfg: RetrievalCurveConfig) -> list[dict[str, float]]:
    """Run, print and return a row of figures per length.

    Raises:
        ConfigError: no dialogue with questions and gold evidence, or no other dialogue.
    """
    paths = [cfg.input] if isinstance(cfg.input, str) else list(cfg.input)
    corpora = [read(path) for path in paths]
    dialogues = [dialogue for corpus in corpora for dialogue in corpus.dialogues]
    questions = [question for corpus in corpora for question in corpus.questions]
    base = next((d for d in dialogues if any(q.dialogue_id == d.id and q.evidence for q in questions)), None)
    if base is None or len(dialogues) < 2:
        raise ConfigError("a curve needs a dialogue whose questions have gold evidence, and another dialogue")
    others = [dialogue for dialogue in dialogues if dialogue is not base]
    encoder = SentenceEncoder()
    print(f"{headline(about('torch', 'numpy', 'safetensors'))}\n{_LEGEND}")
    print("  ".join(f"{name:>9}" for name in _COLUMNS), flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="remind-curve-") as temporary:
        for tokens in sorted(cfg.tokens):
            history, sources = make_history(base, others, tokens, encoder.count_many, cfg.seed)
            reader = BorrowingEncoder(encoder, history, sources, base, cfg.seed)
            asked = [q for q in questions if q.dialogue_id == base.id and q.evidence][: cfg.questions]
            rows.append(_row(cfg.perception, history, asked, reader, Path(temporary) / f"{tokens}"))
            widths = {name: max(9, len(name)) for name in _COLUMNS}
            print("  ".join(f"{rows[-1][name]:>{width}.7g}" for name, width in widths.items()), flush=True)
    print(f"cosine of a copy with its source, sample of the longest: {reader.likeness:.3f}")
    if cfg.out is not None:
        write_json(cfg.out, {"format": "remind-retrieval-curve", "rows": rows})
    if cfg.plot is not None:
        plot_curve(rows, cfg.plot)
    return rows


def _row(
    config: PerceptionConfig, dialogue: Dialogue, questions: Sequence[Question], encoder: SentenceEncoder, folder: Path
) -> dict[str, float]:
    started = perf_counter()
    index = DialogueIndex(dialogue, encoder, OfflineLLM(), config.segment, folder / "index")
    index.cues(None)
    index.bm25.scores([])
    build = perf_counter() - started
    vectors = torch.cat([encoder.encode([question.text]) for question in questions])
    asked = [replace(question, dialogue_id=dialogue.id, images=()) for question in questions]
    write_refmem(Corpus((dialogue,), tuple(asked)), folder / "history.jsonl")
    with spawned_pool(1) as pool:
        task = pool.submit(measure, folder, encoder.name, vectors.numpy(), config.segment, config.retrieve)
        figures = task.result()
    return {
        "tokens": sum(index.costs.turns) + sum(index.costs.headings),
        "turns": len(dialogue.turns),
        "segments": len(index.segments),
        "questions": len(asked),
        "build_s": build,
        "disk_mb": sum(path.stat().st_size for path in (folder / "index").rglob("*.safetensors")) / 1e6,
        **figures,
    }


def make_history(
    base: Dialogue, others: Sequence[Dialogue], tokens: int, count: Callable[[Sequence[str]], list[int]], seed: int
) -> tuple[Dialogue, dict[str, str]]:
    """The base whole, whose turns keep their ids, amid as many copies of the others' sessions as fill the tokens.

    In every copy the speakers have the base's names, dates are shifted, words are dropped and neighbours swapped.

    Args:
        count: tokens of each text.

    Returns:
        The long dialogue; text of each copied turn, as retrieval reads it, to the same before words were changed.
    """
    total = sum(count([turn_text(turn) for turn in base.turns]))
    before: list[Session] = []
    after: list[Session] = []
    sources: dict[str, str] = {}
    number = 0
    while total < tokens and others:
        source = others[number % len(others)]
        random = Random(f"{seed} {number} {source.id}")
        for original in _renamed(source, base):
            if total >= tokens:
                break
            session = _worn(original, number, random)
            total += sum(count([turn_text(turn) for turn in session.turns]))
            (before if number % 2 else after).append(session)
            pairs = zip(session.turns, original.turns, strict=True)
            sources |= {turn_text(turn): turn_text(plain) for turn, plain in pairs}
        number += 1
    return Dialogue(f"{base.id}-{tokens}", renumbered([*before, *base.sessions, *after])), sources


def _renamed(dialogue: Dialogue, base: Dialogue) -> list[Session]:
    """The sessions with the base's speakers instead of the dialogue's, in what they say too."""
    names = {old: base.speakers[place % len(base.speakers)] for place, old in enumerate(dialogue.speakers)}
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b", re.IGNORECASE)
    folded = {old.casefold(): new for old, new in names.items()}

    def renamed(turn: Turn) -> Turn:
        text = pattern.sub(lambda match: folded[match.group().casefold()], turn.text)
        return replace(turn, speaker=names[turn.speaker], text=text)

    return [replace(session, turns=tuple(map(renamed, session.turns))) for session in dialogue.sessions]


def _worn(session: Session, number: int, random: Random) -> Session:
    """A copy with words dropped and swapped, dates shifted, and ids of its own."""
    days = timedelta(random.randrange(-_DAYS, _DAYS))

    def shifted(time: str | None) -> str | None:
        try:
            return None if time is None else (datetime.fromisoformat(time) + days).isoformat()
        except ValueError:
            return time

    def worn(text: str) -> str:
        words = [word for word in text.split() if random.random() >= _DROPPED] or text.split()
        for place in range(len(words) - 1):
            if random.random() < _SWAPPED:
                words[place], words[place + 1] = words[place + 1], words[place]
        return " ".join(words)

    turns = [replace(t, id=f"{number}/{t.id}", text=worn(t.text), time=shifted(t.time)) for t in session.turns]
    return Session(f"{number}/{session.id}", shifted(session.time), tuple(turns))


class BorrowingEncoder(SentenceEncoder):
    """An encoder whose `encode_apart` encodes only the base's texts, and each source of a copy once.

    A copied turn has its source's vector, turned away from it at random as far as copies on average are. A cue of
    copies has the mean vector of the turns it quotes.

    Args:
        inner: encodes; its weights and its cached vectors are shared.
        history, sources, base: as in `make_history`.
    """

    def __init__(
        self, inner: SentenceEncoder, history: Dialogue, sources: dict[str, str], base: Dialogue, seed: int
    ) -> None:
        self.__dict__.update(inner.__dict__)
        self.name = f"{inner.name}-borrowed-{seed}"
        self._sources, self._seed = sources, seed
        pairs = list(sources.items())[:: max(1, len(sources) // _SAMPLE)][:_SAMPLE]
        #: Cosine of a copy with its source, mean of a sample.
        self.likeness = 1.0
        if pairs:
            both = [super(BorrowingEncoder, self).encode_apart(side) for side in zip(*pairs, strict=True)]
            self.likeness = float((both[0] * both[1]).sum(-1).mean())
        self._own, self._quoted = set(_lines(base)), _lines(history)

    def encode_apart(self, texts: Sequence[str]) -> Tensor:
        kinds: dict[Callable[[list[str]], Tensor], dict[str, None]] = {}
        for text in texts:
            kinds.setdefault(self._kind(text), {})[text] = None
        vectors: dict[str, Tensor] = {}
        for encode, group in kinds.items():
            vectors |= dict(zip(group, encode(list(group)), strict=True))
        return torch.stack([vectors[text] for text in texts])

    def _kind(self, text: str) -> Callable[[list[str]], Tensor]:
        if text in self._sources:
            return self._copies
        lines = text.split("\n")
        quotes = not self._own.issuperset(lines) and all(line in self._quoted for line in lines)
        return self._means if quotes else super().encode_apart

    def _copies(self, texts: Sequence[str]) -> Tensor:
        sources = super().encode([self._sources[text] for text in texts])
        away = torch.randn(sources.shape, generator=torch.Generator().manual_seed(self._seed))
        away = normalize(away - (away * sources).sum(-1, keepdim=True) * sources, dim=-1)
        return self.likeness * sources + (1 - self.likeness**2) ** 0.5 * away

    def _means(self, texts: Sequence[str]) -> Tensor:
        turns = list(dict.fromkeys(self._quoted[line] for text in texts for line in text.split("\n")))
        vectors = dict(zip(turns, self.encode_apart(turns), strict=True))
        sums = [sum(vectors[self._quoted[line]] for line in text.split("\n")) for text in texts]
        return normalize(torch.stack([torch.as_tensor(one) for one in sums]), dim=-1)


def _lines(dialogue: Dialogue) -> dict[str, str]:
    """`Speaker: sentence` as a cue quotes it, to the text of the first turn that holds it."""
    lines: dict[str, str] = {}
    for turn in dialogue.turns:
        for sentence in sentences([turn]):
            lines.setdefault(f"{sentence.speaker}: {sentence.text}", turn_text(turn))
    return lines


class VectorlessEncoder(SentenceEncoder):
    """Reads an index that exists; encodes nothing."""

    def __init__(self, name: str, dimension: int) -> None:
        self.name, self.dimension, self._held = name, dimension, OrderedDict()

    def encode_apart(self, texts: Sequence[str]) -> Tensor:
        raise DataError("the index is missing, or cannot be read")


def measure(
    folder: Path, encoder: str, vectors: np.ndarray, segment: SegmentConfig, retrieving: RetrieveConfig
) -> dict[str, float]:
    """Milliseconds (median and 95th percentile over the questions, each asked once before), megabytes, recall.

    For a process of its own.

    Args:
        folder: holds history.jsonl and the index.
        encoder: name of the one that encoded it.
        vectors: of the questions [n, d].
    """
    corpus = read(folder / "history.jsonl")
    (dialogue,), questions = corpus.dialogues, corpus.questions
    before, started = _peak(), perf_counter()
    reader = VectorlessEncoder(encoder, vectors.shape[1])
    index = DialogueIndex(dialogue, reader, OfflineLLM(), segment, folder / "index")
    index.cues(None)
    index.bm25.scores([])
    figures = {"open_ms": 1000 * (perf_counter() - started)}
    for method in ("cue", "hybrid"):
        times = _times(index, questions, torch.from_numpy(vectors), replace(retrieving, method=method))
        figures |= {f"{method}_{name}": value for name, value in times.items()}
    return figures | {"rss_before_mb": before, "rss_mb": _peak()}


def _times(
    index: DialogueIndex, questions: Sequence[Question], vectors: Tensor, config: RetrieveConfig
) -> dict[str, float]:
    columns: dict[str, list[float]] = {"ms": [], "cpu_ms": [], "x0_ms": [], "recall": []}
    for warm in (False, True):
        for question, vector in zip(questions, vectors, strict=True):
            started, used = perf_counter(), process_time()
            segments = retrieve(index, question.text, vector, None, config).segments
            between, used = perf_counter(), process_time() - used
            strategy = index.llm.strategies(index.dialogue, [blind(question)])[0]
            state = FactualState(index.dialogue, question, segments, strategy)
            render(state)
            ended = perf_counter()
            if warm:
                gold = {index.dialogue.positions[turn] for turn in question.evidence}
                recall = len(gold & set(state.positions)) / len(gold)
                row = (1000 * (between - started), 1000 * used, 1000 * (ended - started), recall)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
    medians = {name: float(np.median(values)) for name, values in columns.items() if name != "recall"}
    tails = {f"{name[:-2]}p95_ms": float(np.percentile(columns[name], 95)) for name in ("ms", "x0_ms")}
    return medians | tails | {"recall": float(np.mean(columns["recall"]))}


def _peak() -> float:
    """Peak resident memory of this process so far, MB; 0 where there is no /proc."""
    return resident("VmHWM") / 2**20 if Path("/proc/self/status").is_file() else 0.0


def plot_curve(rows: Sequence[Mapping[str, float]], path: str) -> None:
    """Draw three panels over tokens: milliseconds per question, megabytes, evidence recall."""
    from sae.figures import COLOURS, Picture, new_figure

    figure = new_figure(11, 3.2)
    panels = figure.subplots(1, 3)
    times, sizes, recall = panels
    tokens = [row["tokens"] for row in rows]
    for method, name, colour in (("cue", "Eq. 1", COLOURS[0]), ("hybrid", "hybrid", COLOURS[5])):
        times.plot(tokens, [row[f"{method}_ms"] for row in rows], marker="o", color=colour, label=f"{name}, segments")
        times.plot(tokens, [row[f"{method}_x0_ms"] for row in rows], "--", color=colour, label=f"{name}, x0")
        recall.plot(tokens, [row[f"{method}_recall"] for row in rows], marker="o", color=colour, label=name)
    sizes.plot(tokens, [row["disk_mb"] for row in rows], marker="o", color=COLOURS[2], label="index on disk")
    added = [row["rss_mb"] - row["rss_before_mb"] for row in rows]
    sizes.plot(tokens, added, marker="^", color=COLOURS[3], label="memory the index adds")
    for axes, label in zip(panels, ("ms per question, median", "MB", "evidence recall"), strict=True):
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of the history")
        axes.set_ylabel(label)
        axes.legend(fontsize=8, frameon=False)
    Picture(figure).save(path)


if __name__ == "__main__":
    from remind.core.cli import main

    main(RetrievalCurveConfig, retrieval_curve, __doc__)
