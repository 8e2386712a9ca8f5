"""Are the features that alignment changed the cause of what it changed? They are patched, and answers counted.

`remind compare-models` shows what changed; this intervenes. Both models read x0 and the gold answer. At the layers of
the SAEs the activations of some features are replaced, token by token, by those of the other model (the donor),
h + Σ_j (z_j(donor) - z_j(h)) W_dec[j]. If the features matter, the aligned model falls with those of the untrained one,
and the untrained one rises with those of the aligned one. Features are chosen on one half of the dialogues, by how much
their mean contribution to the stream changed; answers are counted on the other half. Beside them as many random active
features and as many of the largest mean contribution, and as ceilings all features and the whole residual stream.

An answer is right if each of its tokens between the answer tags is the most probable one after those before it. Where
few are, as with a small model and free answers, the mean log-probability of these tokens says more.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from remind.core.errors import ConfigError, DataError
from remind.core.files import write_json, write_text
from remind.core.progress import track
from remind.evaluation.likelihood import AnswerScore
from remind.evaluation.statistics import bootstrap, ratio
from remind.evaluation.tables import markdown_table
from remind.viewing.patching import Edits, answer_score, patches, rankings, whole
from sae.figures import COLOURS, Picture, new_figure
from sae.ranges import PositiveInt, Resamples, Seed, check_ranges

if TYPE_CHECKING:
    from remind.models.backbone import Backbone

Direction = Literal["fall", "rise"]
_CHOSEN = ("changed", "largest", "random")


@dataclass
class InsideConfig:
    """Patch features between a model before and after training, and count right answers under x0."""

    before: str
    """Causal model before training: nano, smollm2, or a folder."""
    after: str | list[str]
    """The same model after it: what `remind export` wrote. Several, of several seeds, are one experiment."""
    states: str | list[str]
    """Folder of states with gold answers; one for each model after."""
    sae: str | list[str]
    """SAEs of the model before; one folder for each model after, or the same one for all."""
    out: str
    """Folder for results.json, table.md and patching.png."""
    split: str | None = "test"
    """Questions of this split; None: of all."""
    limit: PositiveInt = 400
    """Read at most this many questions with a gold answer, the first ones of each states folder."""
    per_dialogue: PositiveInt | None = None
    """Read at most this many of them of each dialogue."""
    ks: tuple[PositiveInt, ...] = (1, 4, 16, 64, 128)
    """Features patched, in all layers together."""
    draws: PositiveInt = 3
    """Draws of random features."""
    resamples: Resamples = 2000
    """Resamples of whole dialogues for the intervals."""
    seed: Seed = 0
    """Of the random features."""
    device: str = "cpu"
    """Device of models and SAEs."""
    dtype: str = "float32"
    """Precision of the models."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


def inside(cfg: InsideConfig) -> dict[str, Any]:
    """Run, write and return the results.

    Raises:
        ConfigError: not as many states, or SAEs, as models after.
        DataError: states of fewer than two dialogues with gold answers.
        ModelError: models or SAEs that cannot be read or do not fit each other.
    """
    from remind.models.backbone import load_backbone
    from remind.models.generate import check_generates

    before = load_backbone(cfg.before, dtype=cfg.dtype, device=cfg.device)
    check_generates(before)
    counts = _Counts([], {})
    chosen_on = 0
    for after, states, sae in _runs(cfg):
        print(f"{after}: features of {sae}, questions of {states}", file=sys.stderr)
        chosen_on += _count(cfg, before, (after, states, sae), counts)
    base, aligned = (counts.scores.pop((arm, "", 0)) for arm in ("before", "after"))
    rows = [_row(arm, "", 0, one, counts.dialogues, cfg) for arm, one in (("before", base), ("after", aligned))]
    ends: dict[Direction, tuple[list[AnswerScore], list[AnswerScore]]]
    ends = {"fall": (aligned, base), "rise": (base, aligned)}
    for (direction, arm, k), values in counts.scores.items():
        rows.append(_row(direction, arm, k, values, counts.dialogues, cfg, ends[cast(Direction, direction)]))
    paired: list[dict[str, Any]] = []
    for (direction, arm, k), values in counts.scores.items():
        for other in _CHOSEN[1:] if arm == _CHOSEN[0] else ():
            row: dict[str, Any] = {"direction": direction, "k": k, "minus": other}
            for measure, ours, theirs in _by_measure(values, counts.scores[direction, other, k]):
                less = [a - b for a, b in zip(ours, theirs, strict=True)]
                row[measure] = bootstrap(less, cfg.resamples, clusters=counts.dialogues)
            paired.append(row)
    results = {
        "config": asdict(cfg),
        "questions": len(base),
        "chosen on": chosen_on,
        "rows": rows,
        "paired": paired,
    }
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "results.json", results)
    write_text(out / "table.md", table(results))
    plot(results).save(out / "patching.png")
    print(table(results))
    return results


@dataclass
class _Counts:
    """Scores by direction, patched arm and k, question by question, and the dialogue of each question."""

    dialogues: list[str]
    scores: dict[tuple[str, str, int], list[AnswerScore]]

    def add(self, direction: str, arm: str, k: int, drawn: Sequence[AnswerScore]) -> None:
        """The mean over draws."""
        mean = AnswerScore(*(sum(values) / len(drawn) for values in zip(*drawn, strict=True)))
        self.scores.setdefault((direction, arm, k), []).append(mean)


def _by_measure(*columns: Sequence[AnswerScore]) -> list[tuple[Any, ...]]:
    """For each measure its name and its values in every column."""
    return [(name, *([one[n] for one in column] for column in columns)) for n, name in enumerate(AnswerScore._fields)]


def _runs(cfg: InsideConfig) -> list[tuple[str, str, str]]:
    """Model after, states and SAEs of each run."""
    after, states, sae = ([one] if isinstance(one, str) else one for one in (cfg.after, cfg.states, cfg.sae))
    sae = sae * len(after) if len(sae) == 1 else sae
    if not len(after) == len(states) == len(sae):
        raise ConfigError(f"{len(after)} models after, {len(states)} states and {len(sae)} SAEs: name one for each")
    return list(zip(after, states, sae, strict=True))


def _count(cfg: InsideConfig, before: Backbone, run: tuple[str, str, str], counts: _Counts) -> int:
    """Patch between the model before and one after; returns how many questions the features were chosen on."""
    from remind.grounding.ground import check_saes, load_saes
    from remind.models.backbone import load_backbone
    from remind.viewing.diff import check_same, measure, questions_of

    saes, _ = load_saes(run[2], cfg.device)
    check_saes(before, saes, folder=run[2])
    after = load_backbone(run[0], dtype=cfg.dtype, device=cfg.device)
    check_same(before, after)
    questions = questions_of(before, run[1], cfg.split, cfg.limit, cfg.per_dialogue)
    names = list(dict.fromkeys(question.record.dialogue_id for question in questions))
    if len(names) < 2:
        raise DataError("features are chosen on other dialogues than answers are counted on: two are needed", run[1])
    chosen_on = set(names[::2])
    choosing = [question for question in questions if question.record.dialogue_id in chosen_on]
    orders = rankings(measure(before, after, saes, choosing, attention=False), saes, cfg.draws, cfg.seed)
    orders["all features"] = [[(layer, feature) for layer, coder in saes.items() for feature in range(coder.d_sae)]]
    layers = list(saes)
    counted = [question for question in questions if question.record.dialogue_id not in chosen_on]
    for question in track(counted, "patch", len(counted)):
        # the same dialogue under several seeds is one
        counts.dialogues.append(f"{run[1]} {question.record.dialogue_id}")
        for name, model in (("before", before), ("after", after)):
            counts.add(name, "", 0, [answer_score(model, question)])
        for direction, recipient, donor in (("fall", after, before), ("rise", before, after)):
            given = donor.hidden_states(question.ids(0)[None], None, layers)
            arms: list[tuple[str, int, list[Edits]]] = []
            for arm, drawn in orders.items():
                for k in cfg.ks if arm in _CHOSEN else (len(drawn[0]),):
                    arms.append((arm, k, [patches(saes, order[:k], given) for order in drawn]))
            arms.append(("residual", 0, [whole(given)]))
            for arm, k, edits in arms:
                counts.add(direction, arm, k, [answer_score(recipient, question, edit) for edit in edits])
    return len(choosing)


def _row(
    direction: str,
    arm: str,
    k: int,
    values: Sequence[AnswerScore],
    dialogues: Sequence[str],
    cfg: InsideConfig,
    ends: tuple[Sequence[AnswerScore], Sequence[AnswerScore]] | None = None,
) -> dict[str, Any]:
    """Both measures, and the share of the way from the recipient's (ends[0]) to the donor's (ends[1])."""

    row: dict[str, Any] = {"direction": direction, "arm": arm, "k": k}
    for measure, own, *bounds in _by_measure(values, *(ends or ())):
        row[measure] = bootstrap(own, cfg.resamples, clusters=dialogues)
        if bounds:
            pairs = [(value - start, end - start) for value, start, end in zip(own, *bounds, strict=True)]
            if sum(way for _, way in pairs) < 0:
                pairs = [(-gone, -way) for gone, way in pairs]
            row[f"{measure}_way"] = ratio(pairs, dialogues, cfg.resamples)
    return row


def table(results: Mapping[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [f"{results['questions']} questions; features chosen on {results['chosen on']} of other dialogues", ""]
    heads = ["patched", "features", "k", "right", "share of the way", "nats a token", "share of the way"]
    body = []
    for row in results["rows"]:
        cells = [row["direction"], row["arm"], row["k"] or ""]
        for measure in AnswerScore._fields:
            cells += [_cell(row[measure], ".3f"), _cell(row.get(f"{measure}_way"), ".2f")]
        body.append(cells)
    lines += [markdown_table(heads, body), "The changed features less others:", ""]
    body = [
        [row["direction"], row["k"], row["minus"]] + [_cell(row[measure], "+.3f") for measure in AnswerScore._fields]
        for row in results["paired"]
    ]
    return "\n".join([*lines, markdown_table(["patched", "k", "less", "right", "nats a token"], body)])


def _cell(figures: Mapping[str, Any] | None, form: str) -> str:
    """A value and its interval; nothing where there is none."""
    if figures is None or figures["value"] is None:
        return ""
    return f"{figures['value']:{form}} [{figures['low']:{form}}, {figures['high']:{form}}]"


def plot(results: Mapping[str, Any]) -> Picture:
    """Right answers over patched features, a panel for each direction."""
    figure = new_figure(10, 3.4)
    found = {(row["direction"], row["arm"], row["k"]): row["right"] for row in results["rows"]}
    titles = {"fall": "aligned model, features of the untrained", "rise": "untrained model, features of the aligned"}
    for axes, (direction, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        for arm, colour in zip(_CHOSEN, COLOURS, strict=False):
            points = {k: one for (d, name, k), one in found.items() if (d, name) == (direction, arm)}
            values = [one["value"] for one in points.values()]
            low = [one["value"] - one["low"] for one in points.values()]
            high = [one["high"] - one["value"] for one in points.values()]
            axes.errorbar(list(points), values, yerr=[low, high], color=colour, label=arm, marker="o", capsize=3)
        lines = [("all features", direction, "#555555", "--"), ("residual", direction, "#555555", ":")]
        lines += [("", "before", "#bbbbbb", "-"), ("", "after", "#E69F00", "-")]
        for arm, end, colour, style in lines:
            value = next(one["value"] for (d, name, _), one in found.items() if (d, name) == (end, arm))
            axes.axhline(value, color=colour, linestyle=style, linewidth=1, label=arm or f"{end}, unpatched")
        axes.set_xscale("log")
        ks = sorted({k for _, arm, k in found if arm in _CHOSEN})
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.minorticks_off()
        axes.set_xlabel("features patched")
        axes.set_title(title, fontsize=9)
    figure.axes[0].set_ylabel("right under x0")
    figure.axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return Picture(figure)


if __name__ == "__main__":
    from remind.core.cli import main

    main(InsideConfig, inside, __doc__)
