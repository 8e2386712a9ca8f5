"""What LongMemEval's published code finds at the level of turns with the faults of its expanded corpus, and without.

Its ids tell which sessions hold evidence, and its code reads that from them: no memory system can have these faults,
but figures printed with it have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_args

import numpy as np

from experiments.evidence.data import DialogueQuestions, load
from experiments.memory.keys import HoldingEncoder
from remind.build.plan import versions
from remind.core.cli import main
from remind.core.errors import ConfigError
from remind.core.files import input_hashes, write_json
from remind.core.progress import track
from remind.evaluation.metrics import recall_all, recall_any
from remind.evaluation.statistics import bootstrap
from remind.evaluation.tables import markdown_table
from remind.memory.expansions import extractive, read_annotations
from remind.memory.longmemeval import Join, join_keys
from sae.ranges import PositiveInt, check_ranges


@dataclass
class PublishedConfig:
    """Recall over turns with expanded keys, as the published code counts it."""

    data: list[str]
    """Dialogue files or folders with questions and gold evidence."""
    out: str
    """JSON file for the result."""
    annotations: str | None = None
    """LoCoMo's file, whose facts expand the turns of its dialogues; None: key sentences do."""
    k: PositiveInt = 5
    """Entries of the corpus that are retrieved."""
    limit: PositiveInt | None = None
    """At most this many questions per dialogue, the first ones; for a quick look."""
    resamples: PositiveInt = 2000
    """Of the bootstrap over dialogues."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


class IndexedTurn(NamedTuple):
    """A turn as the published code indexes it, whose id tells gold.

    Attributes:
        id: of its session and the turn, as in `answer_x_3`; those of gold sessions begin with `answer`.
        words: what is said.
        gold: whether it has evidence.
        expansions: what was extracted from it; None: nothing was asked of it, empty: nothing was found.
    """

    id: str
    words: str
    gold: bool
    expansions: tuple[str, ...] | None


def corpus(turns: Iterable[IndexedTurn], join: Join, official_quirks: bool = True) -> Iterator[tuple[str, str]]:
    """Ids and texts of what is searched at the level of turns; gold are the ids that begin with `answer`.

    The published code marks a turn without evidence in a gold session by `noans` in its id. With its quirks,

    - separate: expansions keep the session's own id, so that they make gold of every such turn;
    - merge and replace: such turns are not found under their new ids and are never expanded;
    - merge and replace: a turn of which nothing could be extracted is not searched at all.

    Args:
        official_quirks: False: every turn is expanded under its own id and none is left out, as in the banks.
    """
    for turn in turns:
        plain = turn.id if turn.gold else turn.id.replace("answer", "noans", 1)
        if not official_quirks or turn.expansions is None:
            yield from ((plain, key) for key in join_keys(turn.words, turn.expansions or (), join))
        elif join.endswith("separate"):
            yield plain, turn.words
            yield from ((turn.id, key) for key in join_keys(turn.words, turn.expansions, join)[1:])
        elif plain != turn.id:
            yield plain, turn.words
        elif turn.expansions:
            yield from ((plain, key) for key in join_keys(turn.words, turn.expansions, join))


def published(cfg: PublishedConfig) -> dict[str, Any]:
    """Run, write the JSON file, print the table; the result is also returned.

    Raises:
        DataError, FormatError: data that cannot be read.
        ConfigError: a dataset without gold evidence.
    """
    asked, facts = load(cfg.data, cfg.limit)
    annotated = read_annotations(cfg.annotations) if cfg.annotations else {}
    encoder, rows = HoldingEncoder(), []
    found: dict[tuple[str, Join, bool], list[tuple[float, float, str]]] = {}
    for one in track(asked, "dialogues", len(asked)):
        held: dict[str, list[tuple[str, ...]]] = {}
        for session in one.dialogue.sessions:
            stretches = [(turn,) for turn in session.turns]
            own = annotated.get(one.dialogue.id)
            made = own.replay("userfact", session, stretches) if own else extractive(session, stretches)
            held[session.id] = list(map(tuple, made))
        for join in get_args(Join):
            for quirks in (False, True):
                cell = found.setdefault((one.dataset, join, quirks), [])
                cell += _recalls(one, held, join, quirks, encoder, cfg.k)
    for (dataset, join, quirks), scores in found.items():
        clusters = [dialogue for *_, dialogue in scores]
        for name, values in (("any", [some for some, *_ in scores]), ("all", [every for _, every, _ in scores])):
            estimate = bootstrap(values, cfg.resamples, clusters=clusters)
            head = {"dataset": dataset, "join": join, "official_quirks": quirks, "recall": name}
            rows.append({**head, **dict(estimate or {})})
    result = {"rows": rows, "data": facts, "config": asdict(cfg), "versions": versions()}
    result["hashes"] = input_hashes([*cfg.data, *([cfg.annotations] if cfg.annotations else [])])
    write_json(cfg.out, result)
    print(table(rows, cfg.k))
    return result


def table(rows: list[dict[str, Any]], k: int) -> str:
    """Markdown, a line for each dataset, join and kind of recall."""
    by = {(r["dataset"], r["join"], r["recall"], r["official_quirks"]): r for r in rows}
    body = []
    for dataset, join, recall in dict.fromkeys(key[:3] for key in by):
        cells = (by[dataset, join, recall, quirks] for quirks in (False, True))
        figures = ["{value:.3f} [{low:.3f}, {high:.3f}], {n}".format(**cell) if "n" in cell else "–" for cell in cells]
        body.append([dataset, join, f"{recall}@{k}", *figures])
    return markdown_table(["data", "join", "recall", "without, questions", "with the quirks, questions"], body)


def _recalls(
    one: DialogueQuestions,
    held: dict[str, list[tuple[str, ...]]],
    join: Join,
    quirks: bool,
    encoder: HoldingEncoder,
    k: int,
) -> Iterator[tuple[float, float, str]]:
    """recall_any, recall_all and the dialogue of each question that the corpus has gold for, as published."""
    # the corpus is what the user says; where nobody is called so, all turns
    speakers = {turn.speaker for turn in one.dialogue.turns}
    counted = {"user"} if "user" in speakers else speakers
    vectors: dict[str, np.ndarray] = {}
    asked = encoder.encode([question.text for question in one.questions]).numpy()
    for vector, places in zip(asked, one.gold, strict=True):
        gold = {one.dialogue.turns[place].id for place in places.tolist()}
        turns = []
        for session in one.dialogue.sessions:
            answers = "answer_" if any(turn.id in gold for turn in session.turns) else ""
            turns += [
                IndexedTurn(f"{answers}{session.id}_{n}", turn.text, turn.id in gold, expansions)
                for n, (turn, expansions) in enumerate(zip(session.turns, held[session.id], strict=True))
                if turn.speaker in counted
            ]
        entries = list(corpus(turns, join, quirks))
        new = list(dict.fromkeys(text for _, text in entries if text not in vectors))
        vectors |= dict(zip(new, encoder.encode(new).numpy(), strict=True))
        scores = np.stack([vectors[text] for _, text in entries]) @ vector
        ranked = [entries[place][0] for place in np.argsort(-scores, kind="stable")]
        wanted = {name for name, _ in entries if name.startswith("answer")}
        if wanted:
            yield recall_any(ranked, wanted, k), recall_all(ranked, wanted, k), one.dialogue.id


if __name__ == "__main__":
    main(PublishedConfig, published, __doc__)
