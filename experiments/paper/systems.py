"""Tables 1 and 4 to 7: systems by format and dimension, those of others read from their runs or answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.official.files import ResultFile
from experiments.paper.cells import TITLES, bars, by_dimension, product, recalls, side_by_side
from experiments.paper.config import PaperConfig
from experiments.paper.items import Result
from experiments.paper.settings import Setting, ask, by_seed, pooled, settings
from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json, sha256_file
from remind.evaluation.answerers import Answerer, OnOutput
from remind.evaluation.compare import Rows
from remind.evaluation.contexts import bare, questions_of
from remind.evaluation.predictions import PASSING, PREDICTIONS
from remind.evaluation.tables import HEADS, markdown_table
from remind.llm.endpoints import LOCAL, EndpointConfig, LLMConfig
from remind.memory.config import RunMemoryConfig
from remind.memory.run import run_memory
from remind.memory.score import MANIFEST, read_answers
from remind.memory.systems import COLUMNS, ROWS, TABLE_1, title
from remind.models.chat import Content
from remind.models.generate import Generation
from remind.states.dataset import question_splits
from remind.states.records import StateRecord

#: Conditions of the answering model by the name of their row.
OURS = {
    "Whole conversation": "full_context",
    "Whole conversation, x0's strategy": "full_context_strategy",
    "Naive RAG": "rag",
    "Naive RAG, x0's strategy": "rag_strategy",
    "x0": "x0",
}
#: Tokens of memories that the small form answers from.
SMALL_TOKENS = 60
_NAME = re.compile(r"[\w.+ -]+")
_TAGGED = "<answer>{}</answer><explanation>{}</explanation>"


class FileAnswers(Answerer):
    """Answers of another system, from JSON lines {question_id, answer, explanation?}, or the predictions of a run.

    `answer` is what would stand between answer tags: a letter, letters, or a phrase; `explanation` evidence lines, or
    image indices as a JSON list. An answer that failed (null, or a failure in predictions) is blank, and so wrong.

    Args:
        known: ids of the states' questions. asked: those of them that are put to every system.

    Raises:
        DataError: a row that is no answer, an id twice, ids that are no question's, or questions without an answer;
            the first of them is named, and how many there are.
    """

    def __init__(self, name: str, path: str | Path, known: Iterable[str], asked: Sequence[str]) -> None:
        file = ResultFile(path)
        self.texts: dict[str, str] = {}
        self.explains = False
        for index, row in enumerate(file.records):
            question, answer, explanation = (row.get(key) for key in ("question_id", "answer", "explanation"))
            if not isinstance(question, str) or not all(isinstance(one, str | None) for one in (answer, explanation)):
                message = "needs question_id as text, answer as text or null, and explanation as text or not at all"
                raise DataError(message, path, file.place(index))
            if question in self.texts:
                raise DataError(f"question {question!r} is answered twice", path, file.place(index))
            # a row of predictions has the output as it came
            text = str(row["text"]) if "score_failure" in row else _TAGGED.format(answer or "", explanation or "")
            failed = answer is None or bool(row.get("failure"))
            self.explains |= not failed and not text.endswith("<explanation></explanation>")
            self.texts[question] = "" if failed else text
        there = set(known)
        unknown = [question for question in self.texts if question not in there]
        missing = [question for question in asked if question not in self.texts]
        wrong = [
            f"{len(ids)} {what} (first: {ids[0]!r})"
            for ids, what in ((unknown, "ids that are no question here"), (missing, "questions without an answer"))
            if ids
        ]
        if wrong:
            raise DataError("; ".join(wrong), path)
        super().__init__(sha256_file(path), name, "answers file")

    def answer(self, prompts: Sequence[Content], ids: Sequence[str], done: Sequence[bool], on_output: OnOutput) -> None:
        for n, (question, skip) in enumerate(zip(ids, done, strict=True)):
            if not skip:
                on_output(n, Generation(self.texts[question], 0, finished=True))


def named_paths(systems: Sequence[str]) -> dict[str, Path]:
    """NAME=PATH by name; of a folder without a name, which is a run of memory systems, the answers of each of these.

    Raises:
        ConfigError: another form, a name twice or not fit for a file, or no such path.
        DataError: a run of memory systems without answers.
    """
    found: dict[str, Path] = {}
    for text in systems:
        run = answers(Path(text).expanduser())
        if run is not None and (twice := [name for name in run if name in found or name in OURS]):
            raise ConfigError(f"systems: {text} has {twice[0]}, which is named already; name it as NAME=PATH")
        if run is not None:
            found |= run
            continue
        name, equals, path = text.partition("=")
        if not equals or not _NAME.fullmatch(name) or name in found or name in OURS:
            raise ConfigError(
                f"systems: {text!r} is neither NAME=PATH with a name of its own in letters and digits nor a run of "
                "memory systems"
            )
        found[name] = Path(path).expanduser()
    if missing := [str(path) for path in found.values() if not path.exists()]:
        raise ConfigError(f"systems: there is no {', '.join(missing)}")
    return found


def answers(folder: Path) -> dict[str, Path] | None:
    """The answers of each system of a run of memory systems, by name; None: the folder is no such run.

    Raises:
        DataError: the run has no answers, since no model was named for them.
    """
    if not (folder / MANIFEST).is_file() or not (folder / "memory").is_dir():
        return None
    names = [path.parent.name for path in sorted(folder.glob(f"*/{PREDICTIONS}"))]
    found = {title(name): folder / name for name in names if read_answers(folder, name)}
    if not found:
        raise DataError("the run has no answers; give `remind run-memory` an endpoint for them", folder)
    return found


def split_records(setting: Setting) -> tuple[list[StateRecord], list[str]]:
    """The records that every system is asked, without their prompts, and the ids of all splits: a run of memory systems
    answers every question of a file."""
    cfg = setting.evaluate
    asked = [bare(record) for one in questions_of(cfg.states, cfg.split, cfg.limit).asked() for record in one.records]
    return asked, list(question_splits(cfg.states))


def foreign_rows(setting: Setting, name: str, path: Path, out: Path) -> Rows:
    """Scored rows of a system's answers, in a file or a finished run, which the setting's judge rules on.

    A system that explains nothing takes no part in MemR.

    Raises:
        DataError: answers that cannot be used, or are to other questions.
    """
    asked, known = split_records(setting)
    ids = [record.question_id for record in asked]
    own = FileAnswers(name, path / PREDICTIONS if path.is_dir() else path, known, ids)
    rows = ask(setting, out, ["no_context"], answerer=own)["no_context"].rows
    manifest = path.parent / MANIFEST
    # of a run, whether its prompt asks for evidence decides: a model that never gives any recalls nothing
    asked_for = path.is_dir() and (not manifest.is_file() or read_json(manifest)["config"]["reader"] == "x0")
    if own.explains or asked_for:
        return rows
    nothing = dict.fromkeys(("memory_recall", "memory_recall_text", "memory_recall_visual"))
    return {question: {**row, **nothing} for question, row in rows.items()}


def small_baselines(setting: Setting, out: Path) -> str:
    """Memory systems that write by rules on the setting's dialogues, answered for by its model: the folder of the run.

    Raises:
        As `run_memory` does.
    """
    cfg = setting.evaluate
    reader = EndpointConfig(model=cfg.model, base_url=LOCAL, max_tokens=cfg.max_new_tokens, concurrency=cfg.batch_size)
    made = run_memory(
        RunMemoryConfig(
            cfg.corpus,
            str(out),
            ["dense", "bm25", "hybrid", "remind"],
            budgets=[SMALL_TOKENS],
            budget_tokens=SMALL_TOKENS,
            full_tokens=SMALL_TOKENS,
            reader="x0",
            split=cfg.split,
            states=cfg.states,
            llm=LLMConfig(answer=reader, cache=str(out.parent / "memory_replies.sqlite")),
        )
    )
    return str(made)


def as_printed(names: Iterable[str]) -> list[str]:
    """Figures of Table 1 for those of the systems that it has, as lines of Markdown; none where it has none."""
    rows = [(name, row) for name in names if (row := ROWS.get(name)) is not None]
    if not rows:
        return []
    body = [[name, row, *("–" if figure is None else f"{figure:.1f}" for figure in TABLE_1[row])] for name, row in rows]
    heads = ["System", "row of the paper", *(f"{TITLES[format]} {HEADS[measure]}" for format, measure in COLUMNS)]
    return ["", "## As the paper prints them, with its models: means over dimensions", "", markdown_table(heads, body)]


def table1(cfg: PaperConfig) -> Result:
    """See the module. Raises as `evaluate` and `foreign_rows` do."""
    assert cfg.out is not None
    found: dict[str, list[tuple[Setting, Rows]]] = {}
    for setting in settings(cfg):
        folder = Path(cfg.out) / f"seed-{setting.seed}"
        systems = cfg.systems
        if cfg.small and not systems:
            systems = [small_baselines(setting, folder / "memory")]
        for name, path in named_paths(systems).items():
            found.setdefault(name, []).append((setting, foreign_rows(setting, name, path, folder / f"system-{name}")))
        runs = ask(setting, folder / "answers", list(OURS.values()))
        for name, condition in OURS.items():
            own, answered = runs[condition].rows, folder / "answers" / condition
            if any(row.get("failure") in PASSING for row in own.values()):
                own = foreign_rows(setting, name, answered, folder / f"blank-{condition}")
            found.setdefault(name, []).append((setting, own))
    rows = {name: pooled(found[name]) for name in (*OURS, *(name for name in found if name not in OURS))}
    products = {name: product(own, cfg.resamples) for name, own in rows.items()}
    formats = [format for format in TITLES if any(format in one for one in products.values())]
    parts = ["## Table 1: means over questions (Eq. 8)", "", side_by_side(products), recalls(products)]
    if any("macro" in one["all"] for one in products.values()):
        parts += ["## Table 1: means over dimensions, as the paper prints it", "", side_by_side(products, mean="macro")]
    for format in formats:
        parts += [
            f"## Tables 4 and 5: {TITLES[format]}",
            "",
            by_dimension(products, format, ("accuracy", "memory_recall")),
        ]
    if "direct" in formats:
        parts += [f"## Tables 6 and 7: {TITLES['direct']}", "", by_dimension(products, "direct", ("bleu1", "f1"))]
    panels = {f: {n: one.get(f, {}).get("all", {}).get("accuracy") for n, one in products.items()} for f in formats}
    parts += as_printed(found)
    data = {"systems": products, "by_seed": by_seed(found)}
    return Result(data, "\n".join(parts), bars(panels, "Accuracy in percent"))
