"""What an index that lies on disk costs a new process: to open it, and to ask it. Run as a module on a folder."""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from remind.core.errors import DataError
from remind.core.files import atomic_path, read_json, write_json, write_rows
from remind.core.processes import resident
from remind.data.dialogue import Dialogue, Question
from remind.llm.offline import OfflineLLM
from remind.models.encoder import SentenceEncoder
from remind.perception.index import DialogueIndex, content_key
from remind.perception.retrieve import RetrieveConfig, retrieve
from remind.perception.segment import SegmentConfig
from remind.states.auxiliary import blind
from remind.states.pyramid import FactualState, render

METHODS = ("cue", "hybrid")


class Reading(SentenceEncoder):
    """Holds vectors, and has none of its own: for an index that is there already."""

    def __init__(self, name: str, dimension: int) -> None:
        self.name, self.dimension, self._held = name, dimension, OrderedDict()

    def encode_apart(self, texts: Sequence[str]) -> Tensor:
        raise DataError("the index is not there, or cannot be read")


def write_task(
    folder: Path, dialogue: Dialogue, questions: Sequence[Question], vectors: Tensor, encoder: str, config: Any
) -> None:
    """What `measure` reads: the dialogue, its questions, their vectors, and the settings of the index in `index`."""
    sessions = [
        {
            "id": session.id,
            "time": session.time,
            "turns": [
                {name: getattr(turn, name) for name in ("id", "speaker", "text", "time")}
                | {"images": [{"path": None, "caption": image.caption, "source": None} for image in turn.images]}
                for turn in session.turns
            ],
        }
        for session in dialogue.sessions
    ]
    rows: list[dict[str, Any]] = [{"type": "context", "id": dialogue.id, "sessions": sessions}]
    rows += [
        {"type": "question", "id": q.id, "context_id": dialogue.id, "question": q.text, "format": "direct"}
        | {"options": [], "answers": list(q.answers), "evidence": list(q.evidence), "dimension": None}
        for q in questions
    ]
    write_rows(folder / "history.jsonl", rows)
    with atomic_path(folder / "questions.safetensors") as temporary:
        save_file({"vectors": vectors.contiguous()}, temporary)
    write_json(folder / "task.json", {"encoder": encoder, **asdict(config)})


def measured_apart(folder: Path) -> dict[str, float]:
    """`measure` in a process of its own, as a dictionary."""
    command = [sys.executable, "-m", "benchmarks.retrieval_curve.measure", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DataError(f"measuring failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}", folder)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(folder: Path) -> dict[str, float]:
    """Milliseconds (median and 95th percentile over the questions, each asked once before), megabytes, recall."""
    from remind.data.readers import read

    corpus, task = read(folder / "history.jsonl"), read_json(folder / "task.json")
    (dialogue,), questions = corpus.dialogues, corpus.questions
    vectors = load_file(folder / "questions.safetensors")["vectors"]
    segments, llm = SegmentConfig(**task["segment"]), OfflineLLM()
    encoder = Reading(task["encoder"], vectors.shape[1])
    before = _peak()
    started = perf_counter()
    index = DialogueIndex(dialogue, encoder, llm, segments, folder / "index")
    index.cues(None)
    index.bm25.scores([])
    opened = perf_counter()
    content_key(dialogue, encoder.name, segments, llm.name)
    hashed = perf_counter()
    found = {"open_ms": 1000 * (opened - started), "key_ms": 1000 * (hashed - opened)}
    for method in METHODS:
        config = RetrieveConfig(**(task["retrieve"] | {"method": method}))
        found |= {f"{method}_{name}": value for name, value in _asked(index, questions, vectors, config).items()}
    return found | {"rss_before_mb": before, "rss_mb": _peak()}


def _asked(
    index: DialogueIndex, questions: Sequence[Question], vectors: Tensor, config: RetrieveConfig
) -> dict[str, float]:
    retrieved, assembled, busy, recall = [], [], [], []
    for warm in (False, True):
        for question, vector in zip(questions, vectors, strict=True):
            started, used = perf_counter(), process_time()
            segments = retrieve(index, question.text, vector, None, config)
            between, used = perf_counter(), process_time() - used
            strategy = index.llm.strategy(index.dialogue, blind(question))
            state = FactualState(index.dialogue, question, segments, strategy)
            render(state)
            ended = perf_counter()
            if warm:
                retrieved.append(1000 * (between - started))
                busy.append(1000 * used)
                assembled.append(1000 * (ended - started))
                gold = {index.dialogue.positions[turn] for turn in question.evidence}
                recall.append(len(gold & set(state.positions)) / len(gold))
    return {
        "ms": float(np.median(retrieved)),
        "p95_ms": float(np.percentile(retrieved, 95)),
        "cpu_ms": float(np.median(busy)),
        "x0_ms": float(np.median(assembled)),
        "x0_p95_ms": float(np.percentile(assembled, 95)),
        "recall": float(np.mean(recall)),
    }


def _peak() -> float:
    """Peak resident memory of this process so far, MB."""
    if Path("/proc/self/status").is_file():  # getrusage also counts the process that started this one
        return resident("VmHWM") / 2**20
    # macOS counts in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (20 if platform.system() == "Darwin" else 10)


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
