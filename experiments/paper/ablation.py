"""Figure 4: what strategy, markers and summary are worth to a model as it is, each added and each removed.

The base is the retrieved evidence alone. All eight combinations of the three are answered; a summary is always the one
that was written from the marked turns, so that removing the markers removes the markers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.paper.cells import bars, product, side_by_side
from experiments.paper.config import PaperConfig
from experiments.paper.items import Result
from experiments.paper.settings import Setting, answerer_of, ask, by_seed, pooled, settings, sources
from remind.core.errors import ConfigError
from remind.data.dialogue import Corpus
from remind.data.readers import read
from remind.evaluation import compare
from remind.evaluation.compare import Rows
from remind.evaluation.run import states_hash
from remind.evaluation.statistics import Difference
from remind.evaluation.tables import markdown_table, percent
from remind.states.dataset import read_manifest, read_states
from remind.states.pyramid import AttentionalState, ReflectiveState, Strategy, render
from remind.states.records import StateRecord, attentional_of, summary_of
from remind.testbed.ladder import write_records

#: Row of the figure → which of (strategy, markers, summary) the prompt has.
STAGES = {
    "evidence": (False, False, False),
    "evidence + strategy (x0)": (True, False, False),
    "evidence + markers": (False, True, False),
    "evidence + summary": (False, False, True),
    "all - summary (x1)": (True, True, False),
    "all - markers": (True, False, True),
    "all - strategy": (False, True, True),
    "all (x2)": (True, True, True),
}
BASE, WHOLE = "evidence", "all (x2)"
#: Records, their dialogues, whether strategy and markers stay → the records changed.
Change = Callable[[Sequence[StateRecord], Corpus, bool, bool], list[StateRecord]]
#: Rows that are x0, x1 and x2.
_LAYERS = ("evidence + strategy (x0)", "all - summary (x1)", WHOLE)
#: States folder ("": as built; else with those parts left out) → condition asked there → row.
_ASKED: dict[tuple[bool, bool], dict[str, str]] = {
    (True, True): {
        "evidence": BASE,
        "x0": "evidence + strategy (x0)",
        "x1": "all - summary (x1)",
        "x2": WHOLE,
        "altered": "altered order",
        "no_context": "no context",
    },
    (False, True): {"x1": "evidence + markers", "x2": "all - strategy"},
    (True, False): {"x2": "all - markers"},
    (False, False): {"x2": "evidence + summary"},
}


def without(
    records: Sequence[StateRecord], corpus: Corpus, strategy: bool = True, markers: bool = True
) -> list[StateRecord]:
    """The records with the strategy or the markers left out of every level that has them.

    Args:
        strategy, markers: False: left out.

    Raises:
        DataError: the dialogues are not those of the states, or were built with other prompt templates.
    """
    changed = []
    for record, dialogue, question in sources(records, corpus):
        state = attentional_of(record, dialogue, question)
        factual = state.factual if strategy else replace(state.factual, strategy=Strategy(()))
        marked = AttentionalState(factual, state.blocks if markers else (), state.salience)
        whole = ReflectiveState(marked, summary_of(record))
        changed.append(replace(record, x0=render(factual), x1=render(marked), x2=render(whole)))
    return changed


def variant(
    setting: Setting, out: Path, strategy: bool = True, markers: bool = True, change: Change = without, split: str = ""
) -> Path:
    """States with parts left out; kept from an earlier start.

    Args:
        change: makes the records, as `without` does.
        split: the one split that is kept; none: all.
    """
    states = setting.evaluate.states
    about = {
        "strategy": strategy,
        "markers": markers,
        "change": change.__name__,
        "split": split,
        "of": states_hash(states),
        "inputs": read_manifest(states)["inputs"],
    }
    if not (out / "manifest.json").exists() or any(read_manifest(out).get(k) != v for k, v in about.items()):
        records = [record for record in read_states(states) if split in ("", record.split)]
        write_records(change(records, corpus_of(setting), strategy, markers), out, about)
    return out


def corpus_of(setting: Setting) -> Corpus:
    """The dialogue files of the states. Raises ConfigError where the config names none."""
    paths = setting.evaluate.corpus
    if not paths:
        raise ConfigError("the config of evaluate names no corpus: set it to the files the states were built from")
    return Corpus.merge([read(path, setting.evaluate.corpus_format) for path in paths], paths)


def fig4(cfg: PaperConfig) -> Result:
    """See the module. Raises as `evaluate` does."""
    assert cfg.out is not None
    found: dict[str, list[tuple[Setting, Rows]]] = {}
    for setting in settings(cfg):
        folder = Path(cfg.out) / f"seed-{setting.seed}"
        corpus_of(setting)
        # the same model answers everything: it is loaded once
        answerer = answerer_of(setting)
        for (strategy, markers), asked in _ASKED.items():
            name = "-".join(["states", *["no-strategy"] * (not strategy), *["no-markers"] * (not markers)])
            states = None
            if not (strategy and markers):
                states = variant(setting, folder / name, strategy, markers, split=setting.evaluate.split)
            runs = ask(setting, folder / name.replace("states", "answers"), list(asked), states, answerer)
            for condition, row in asked.items():
                found.setdefault(row, []).append((setting, runs[condition].rows))
    order = [*STAGES, "altered order", "no context"]
    rows = {name: pooled(found[name]) for name in order}
    products = {name: product(own, cfg.resamples) for name, own in rows.items()}
    steps = {name: differences(rows, name, cfg.resamples) for name in order}
    layers = {name: products[row] for name, row in zip(("x0", "x1", "x2"), _LAYERS, strict=True)}
    text = f"{side_by_side(products, 'Prompt')}\n{steps_table(steps)}\n(d)\n\n{side_by_side(layers, 'Layer')}"
    data = {"rows": products, "differences": steps, "layers": layers, "by_seed": by_seed(found)}
    shown = [format for format in ("multi", "single", "direct") if format in products[BASE]]
    panels = {f: {n: products[n].get(f, {}).get("all", {}).get("accuracy") for n in order} for f in (*shown, "all")}
    return Result(data, text, bars(panels, "Accuracy in percent by what the prompt holds"))


def differences(rows: Mapping[str, Rows], name: str, resamples: int) -> dict[str, Difference | None]:
    """Accuracy of a row less that of the base (what it holds is added) and of the whole (what it lacks is removed)."""
    against = {"added to evidence": BASE, "removed from all": WHOLE}
    return {
        what: compare.differences(rows[base], rows[name], ["accuracy"], resamples)["all"].get("accuracy")
        for what, base in against.items()
        if base in rows
    }


def steps_table(steps: Mapping[str, Mapping[str, Difference | None]]) -> str:
    """`differences` of every row, as Markdown."""
    lines = [[name, *(percent(one, interval=True, signed=True) for one in row.values())] for name, row in steps.items()]
    return markdown_table(["Acc", *next(iter(steps.values()))], lines)
