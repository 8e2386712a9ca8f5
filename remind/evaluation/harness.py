"""Answer every question of a split from its states, score the answers, write the report."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from remind import prompts
from remind.dialogue import FORMATS
from remind.errors import ConfigError, DataError, ModelError
from remind.evaluation.answer import Generation, check_generates, generate
from remind.evaluation.judge import load_judge
from remind.evaluation.predictions import RunFolder, put
from remind.evaluation.report import table, write_report
from remind.evaluation.scores import MEASURES, Score, counts, group, score, summarise
from remind.io import sha256_file, sha256_json, write_text
from remind.progress import Counter
from remind.pyramid import LETTERS, Rendered
from remind.states import StateRecord, check_split, iterate_states, read_manifest

if TYPE_CHECKING:
    from remind.backbone import Backbone
    from remind.llm.base import AuxiliaryLLM

_NOTHING = Rendered("", (0, 0), (), (), ())


@dataclass
class EvaluateConfig:
    """Answer the questions of a split from one level of their states and score the answers."""

    states: str
    """Folder of states (from build_states.py)."""
    model: str
    """Model that answers: nano, or a Hugging Face folder or id, such as an exported checkpoint."""
    out: str
    """Folder for predictions.jsonl, report.json, report.html and report.md. A run that was stopped is resumed."""
    split: Literal["train", "dev", "test"] = "test"
    """Questions to answer."""
    level: Literal["x0", "x1", "x2"] = "x0"
    """State to answer from. x0 is what inference sees; the others show what they hold that x0 does not."""
    max_new_tokens: int = 512
    """Room for answer and explanation; an output that is cut off is scored as it stands, and counted."""
    batch_size: int = 8
    """Prompts per forward. Changes the speed, not the answers."""
    limit: int | None = None
    """At most this many questions, spread evenly over the split; for a quick look."""
    judge: str = "offline"
    """Judge of direct answers: offline, a rule."""
    encoder: str = "minilm"
    """Sentence encoder of text memory recall (Eq. 10)."""
    bootstrap: int = 1000
    """Resamples behind each interval that is not of a share."""
    seed: int = 0
    """Of the resampling; answers are greedy and need none."""
    device: str = "cpu"
    """Where the model runs, e.g. cpu or cuda:0."""
    dtype: str = "float32"
    """Precision of the model: float32, bfloat16, float16 or auto."""
    examples: int = 12
    """Wrong answers shown in the report, with the evidence found and missed."""
    overwrite: bool = False
    """Drop what an earlier run left in out and start again."""

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("batch_size", 1), ("bootstrap", 1), ("examples", 0), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")


class Item(NamedTuple):
    """A question to answer: its prompt, and its record without the rendered levels (they are large)."""

    prompt: str
    record: StateRecord


def load_items(states: str | Path, split: str, level: str, limit: int | None = None) -> list[Item]:
    """The questions of a split.

    Raises:
        FormatError: not a states folder.
        DataError: no questions in the split, a question whose options and answers do not fit its format, a question
            id twice, or gold evidence that train and test share.
    """
    items: list[Item] = []
    splits: set[str] = set()

    def lean() -> Iterator[StateRecord]:
        for record in iterate_states(states):
            splits.add(record.split)
            bare = replace(record, x0=_NOTHING, x1=_NOTHING, x2=_NOTHING)
            if record.split == split:
                _check(record, states)
                items.append(Item(record.level(level).text, bare))
            yield bare

    check_split(lean())
    if not items:
        raise DataError(f"no states of split {split!r} (there are: {', '.join(sorted(splits)) or 'none'})", states)
    seen: set[str] = set()
    for _, record in items:
        if record.question_id in seen:
            raise DataError("this question id occurs twice in the split", states, record.question_id)
        seen.add(record.question_id)
    if limit is not None and limit < len(items):
        items = [items[number * len(items) // limit] for number in range(limit)]
    return items


def _check(record: StateRecord, states: str | Path) -> None:
    if record.format not in FORMATS:
        raise DataError(f"format {record.format!r} is none of {', '.join(FORMATS)}", states, record.question_id)
    if record.format == "direct":
        return
    if not record.options or len(record.options) > len(LETTERS):
        message = f"a {record.format} question needs 1 to {len(LETTERS)} options, this one has {len(record.options)}"
        raise DataError(message, states, record.question_id)
    allowed = LETTERS[: len(record.options)]
    strangers = [answer for answer in record.answers if len(answer) != 1 or answer not in allowed]
    if strangers:
        message = f"gold answer {strangers[0]!r} names none of its options ({allowed[0]} to {allowed[-1]})"
        raise DataError(message, states, record.question_id)


def states_hash(states: str | Path) -> str:
    """Hash over every part and the manifest of a states folder."""
    folder = Path(states)
    files = [*sorted(folder.glob("part-*.parquet")), folder / "manifest.json"]
    return sha256_json({file.name: sha256_file(file) for file in files})


def model_hash(backbone: Backbone) -> str:
    """Hash over the weights as loaded, the tokenizer and the chat template, wherever they came from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(backbone.model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    digest.update(backbone.tokenizer.backend_tokenizer.to_str().encode())
    digest.update(str(backbone.tokenizer.chat_template).encode())
    return digest.hexdigest()


def evaluate(cfg: EvaluateConfig, judge: AuxiliaryLLM | None = None) -> dict[str, Any]:
    """Generate, parse, score, report; see `EvaluateConfig`.

    Args:
        judge: any backend, in place of the one `cfg.judge` names.

    Returns:
        What report.json holds: counts, `overall`, `by_format`, `by_dimension`, `by_category` (rows of `summarise`),
        identity, versions.

    Raises:
        DataError, FormatError: states that cannot be used.
        ModelError: a model that cannot be loaded or run, or does not generate.
        ConfigError: an unknown judge, or an `out` that holds something else.
    """
    from remind.backbone import load_backbone
    from remind.perception.encode import SentenceEncoder

    manifest = read_manifest(cfg.states)
    items = load_items(cfg.states, cfg.split, cfg.level, cfg.limit)
    encoder = SentenceEncoder(cfg.encoder, cfg.device)
    judge = judge or load_judge(cfg.judge)
    backbone = load_backbone(cfg.model, dtype=cfg.dtype, device=cfg.device)
    check_generates(backbone)
    identity = _identity(cfg, backbone, judge.name)
    run = RunFolder(cfg.out, identity, cfg.overwrite)
    _write_config(cfg, run.folder)

    started = time.perf_counter()
    outputs, resumed = answer(backbone, items, cfg, run)
    answered = time.perf_counter()
    scores = score([item.record for item in items], outputs, judge, encoder.encode)
    report = {
        "format": "remind-evaluation-report",
        "config": asdict(cfg),
        "identity": identity,
        "model": {"name": cfg.model, "kind": backbone.kind, "max_length": backbone.max_length},
        "states": {
            key: manifest.get(key) for key in ("inputs", "config_hash", "prompts", "llm", "grounding_tokenizer")
        },
        "prompts": prompts.fingerprints(),
        "counts": counts(scores),
        **_tables(scores, cfg),
        "seconds": {"answering": answered - started, "scoring": time.perf_counter() - answered},
        "resumed": resumed,
        "machine": _machine(backbone),
        "versions": _versions(),
    }
    run.rewrite([_row(item) for item in scores])
    write_report(run.folder, report, scores)
    return report


def evaluate_and_show(cfg: EvaluateConfig) -> None:
    """`evaluate`, then the table and where the report is."""
    print(table(evaluate(cfg)))
    print(f"report: {Path(cfg.out) / 'report.html'}")


def answer(
    backbone: Backbone, items: Sequence[Item], cfg: EvaluateConfig, run: RunFolder
) -> tuple[list[Generation], int]:
    """The output for each item, taken from the folder where it has one; and how many were.

    Raises:
        ModelError: the model could be run on none of the questions it was tried on.
    """
    known = run.read()
    done = [item.record.question_id in known for item in items]
    with run.append() as file, Counter("answer", len(items), sum(done)) as bar:

        def keep(index: int, output: Generation) -> None:
            put(file, items[index].record.question_id, output)
            bar.step()

        fresh = generate(backbone, [item.prompt for item in items], cfg.max_new_tokens, cfg.batch_size, done, keep)
    tried = [output for output in fresh if output is not None and output.failure != "too_long"]
    if tried and all(output.failure == "error" for output in tried) and not any(done):
        raise ModelError(f"{cfg.model} could be run on none of {len(tried)} questions: {tried[0].message}")
    outputs = [
        output if output is not None else known[item.record.question_id]
        for item, output in zip(items, fresh, strict=True)
    ]
    return outputs, sum(done)


def _identity(cfg: EvaluateConfig, backbone: Backbone, judge: str) -> dict[str, Any]:
    # these change no answer and no score; what lies at the paths is hashed
    free = {"out", "overwrite", "batch_size", "examples", "states", "model"}
    config = {key: value for key, value in asdict(cfg).items() if key not in free}
    return {**config, "judge": judge, "states": states_hash(cfg.states), "model": model_hash(backbone)}


def _tables(scores: list[Score], cfg: EvaluateConfig) -> dict[str, Any]:
    def rows(groups: dict[str, list[Score]]) -> dict[str, Any]:
        return {name: summarise(members, cfg.bootstrap, cfg.seed) for name, members in groups.items()}

    by_format = group(scores, lambda record: record.format)
    return {
        "overall": summarise(scores, cfg.bootstrap, cfg.seed),
        "by_format": rows({name: by_format[name] for name in FORMATS if name in by_format}),
        "by_dimension": rows(group(scores, lambda record: record.dimension)),
        "by_category": rows(group(scores, lambda record: record.category)),
    }


def _row(item: Score) -> dict[str, Any]:
    record, parsed = item.record, item.parsed
    return {
        "question_id": record.question_id,
        **asdict(item.generation),
        "dialogue_id": record.dialogue_id,
        "format": record.format,
        "dimension": record.dimension,
        "category": record.category,
        "gold": list(record.answers),
        "answer": parsed.answer,
        "letters": sorted(parsed.letters),
        "evidence": list(parsed.evidence),
        "images": sorted(parsed.images),
        "problems": list(parsed.problems),
        "score_failure": item.failure,
        **{name: getattr(item, name) for name in MEASURES},
    }


def _write_config(cfg: EvaluateConfig, folder: Path) -> None:
    import yaml

    write_text(folder / "config.yaml", yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True))


def _machine(backbone: Backbone) -> str:
    if backbone.device.type == "cuda":
        return f"{platform.machine()}, {torch.cuda.get_device_name(backbone.device)}"
    return f"{platform.machine()}, {platform.system()}, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "sentence-transformers", "remind-toolkit")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
