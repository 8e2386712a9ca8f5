"""The evidence benchmark from data files to result.json, table and plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from experiments.evidence.controls import null_ratios
from experiments.evidence.crossval import CrossValidation
from experiments.evidence.data import DialogueQuestions, load
from experiments.evidence.methods import ABLATIONS, BASELINES, METHODS, PARTS, SIGMA, prepare
from remind.build.plan import versions
from remind.core.errors import ConfigError
from remind.core.files import input_hashes, write_json
from remind.core.progress import track
from remind.evaluation.statistics import bootstrap, several
from remind.grounding.codes import SparseEncoder, WindowedCodes
from remind.grounding.config import GroundingConfig
from remind.grounding.ground import folder_of_saes, load_saes
from remind.models.backbone import load_backbone
from remind.models.encoder import SentenceEncoder
from sae.figures import Picture, new_figure
from sae.ranges import PositiveInt, check_ranges

BUDGETS = (200, 400, 800, 1600, 3200, 6000)
_RESAMPLES = 2000
_COLOURS = ("#9a9a9a", "#c58b1b", "#4a90c2", "#2a5d84", "#b0413e", "#1f7a4d")
Ratios = Mapping[str, Sequence[np.ndarray]]


@dataclass
class BenchEvidenceConfig:
    """Share of gold evidence turns that salience marks, against retrieval baselines."""

    data: str | list[str]
    """Dialogue files or folders with questions and gold evidence; each is a dataset of its own."""
    out: str
    """JSON file for the result; the plot is written beside it as PNG."""
    sae: str | None = None
    """Folder of trained SAEs. None: a small one is trained on sae_data first, and cached."""
    sae_data: str | list[str] | None = None
    """Dialogues to train that small SAE on; they should share nothing with the data. None: synthetic small talk."""
    backbone: str = "minilm"
    """Model whose hidden states the SAEs read: minilm, nano, smollm2, a GGUF file, or a Hugging Face folder or id."""
    controls: bool = False
    """Also measure the resonance without idf, broadcast or smoothing, and with controls in the SAEs' place: untrained
    ones, raw neurons."""
    budget: PositiveInt = 3200
    """The budget in tokens at which the layers of fused are chosen."""
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    """Resonance besides match and layers, both kinds of which are compared; anchors are the question's own words."""
    limit: PositiveInt | None = None
    """At most this many questions per dialogue, the first ones; for a quick look."""
    cache: str = "~/.cache/remind"
    """Folder for dialogue indexes, sparse codes and the small SAE; safe to delete."""
    device: str = "cpu"
    """Where backbone and sentence encoder run."""
    dtype: str = "float32"
    """Precision of the backbone."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.budget not in BUDGETS:
            raise ConfigError(f"budget is one of {', '.join(map(str, BUDGETS))}, not {self.budget}")


def bench_evidence(cfg: BenchEvidenceConfig) -> dict[str, Any]:
    """Run, write result.json and plot, print the table; the result is also returned.

    A ratio is the share of a question's gold evidence turns that are marked, its mean over all questions with evidence,
    LoCoMo's category 5 included. Budgets are tokens of the marked turns' lines, by the backbone's tokenizer. Settings
    are chosen for each method and budget on the other dialogues, the weights of fused once a fold. bm25 and dense read
    the question as it is asked, the readings in fused leave speakers' names out.

    Raises:
        DataError, FormatError: data that cannot be read.
        ConfigError: no gold evidence, or fewer than two dialogues to validate across.
        ModelError: backbone and SAEs do not fit.
    """
    started = perf_counter()
    paths = [cfg.data] if isinstance(cfg.data, str) else list(cfg.data)
    asked = load(paths, cfg.limit)
    if len(asked) < 2:
        raise ConfigError("cross-validation leaves one dialogue out and needs two; give more data")
    sae_data = [cfg.sae_data] if isinstance(cfg.sae_data, str) else list(cfg.sae_data or [])
    folder = folder_of_saes(cfg.sae, sae_data, cfg.backbone, cfg.cache, cfg.device, cfg.dtype)
    saes, _ = load_saes(folder)
    backbone = load_backbone(cfg.backbone, cfg.dtype, cfg.device)
    encoder = SparseEncoder(backbone, saes, cfg.grounding.sink_ratio, 16)
    sentences = SentenceEncoder(device=cfg.device)
    cache = Path(cfg.cache).expanduser()
    windowed = WindowedCodes(encoder, cfg.grounding.window_tokens, cache / "codes")
    ready = [prepare(one, windowed, sentences, cfg.grounding) for one in track(asked, "encode", len(asked))]

    validation = CrossValidation(ready, BUDGETS, cfg.budget)
    _, chosen = validation.all_dialogues()
    ratios = validation.run()
    nulls = null_ratios(ready, encoder, saes, cfg.grounding, BUDGETS) if cfg.controls else {}
    ratios |= nulls
    table = Table(asked, ratios, BUDGETS)
    extra = [name for name in (*PARTS, *ABLATIONS) if name not in METHODS]
    without = list(nulls)
    result: dict[str, Any] = {
        "rows": table.rows(),
        "differences": [row for one in ("fused", "resonance") for row in table.differences(one, BASELINES)],
        "ablations": table.rows(extra),
        "ablation_differences": [row for name in extra for row in table.differences("fused", [name])],
        "controls": table.rows(without),
        "control_differences": [row for name in without for row in table.differences("resonance", [name])],
        "chosen_on_all": {**asdict(chosen), "sigma": SIGMA},
        "hashes": {"data": input_hashes(paths), "sae": input_hashes([folder])},
        "config": asdict(cfg),
        "versions": versions(),
    }
    result["seconds"] = round(perf_counter() - started, 1)
    out = Path(cfg.out)
    write_json(out, result)
    plot(result["rows"], out.with_suffix(".png"))
    _print(result, table, [*extra, *without], out)
    return result


def _print(result: dict[str, Any], table: Table, extra: Sequence[str], out: Path) -> None:
    print(f"\n{table.text((*METHODS, *extra))}")
    print(f"\nfused less the best of {', '.join(BASELINES)}, 95 % intervals over dialogues")
    for row in result["differences"]:
        if row["method"] == "fused":
            gain = f"{row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"
            print(f"  {row['dataset']:<10}{row['budget']:>6}  − {row['baseline']}: {gain}")
    print(f"\n{result['seconds']:.0f} s; {out}, {out.with_suffix('.png')}")


class Table:
    """Ratios of all questions side by side.

    Args:
        asked: the dialogues. ratios: method → for each dialogue [Q, budgets].
    """

    def __init__(self, asked: Sequence[DialogueQuestions], ratios: Ratios, budgets: Sequence[int]) -> None:
        self.budgets = list(budgets)
        self.values = {key: np.concatenate(list(found)) for key, found in ratios.items()}
        sizes = [len(one.questions) for one in asked]
        self.dataset = np.repeat([one.dataset for one in asked], sizes)
        self.dialogue = np.repeat(np.arange(len(asked)), sizes)
        self.category = np.array([name for one in asked for name in one.categories])
        self.datasets = list(dict.fromkeys(one.dataset for one in asked))

    def rows(self, methods: Sequence[str] = METHODS) -> list[dict[str, Any]]:
        """A row per dataset, category ("all" last), method and budget, with 95 % intervals over dialogues."""
        found = []
        for dataset in self.datasets:
            here = self.dataset == dataset
            for category in [*sorted(set(self.category[here])), "all"]:
                chosen = here if category == "all" else here & (self.category == category)
                for method, values in self.values.items():
                    if method in methods:
                        cell = {"dataset": dataset, "category": category, "method": method}
                        found += [
                            {**cell, "budget": budget, **self._estimate(values[chosen, b], chosen, "ratio")}
                            for b, budget in enumerate(self.budgets)
                        ]
        return found

    def differences(self, method: str, others: Sequence[str]) -> list[dict[str, Any]]:
        """`method` less the best of `others` (by mean ratio) at each budget, paired by question."""
        found = []
        for dataset, (b, budget) in product(self.datasets, enumerate(self.budgets)):
            here = self.dataset == dataset
            best = max(others, key=lambda other: float(self.values[other][here, b].mean()))
            gain = (self.values[method] - self.values[best])[here, b]
            cell = {"dataset": dataset, "method": method, "budget": budget, "baseline": best}
            found.append({**cell, **self._estimate(gain, here, "difference")})
        return found

    def _estimate(self, values: np.ndarray, here: np.ndarray, name: str) -> dict[str, Any]:
        estimate = bootstrap(list(values), _RESAMPLES, 0, several(list(self.dialogue[here])))
        assert estimate is not None
        return {name: estimate["value"], "low": estimate["low"], "high": estimate["high"], "n": estimate["n"]}

    def text(self, methods: Sequence[str]) -> str:
        """Means by method and budget, the datasets one below the other."""
        lines = []
        for dataset in self.datasets:
            here = self.dataset == dataset
            lines.append(f"{dataset}: {here.sum()} questions".ljust(42) + _cells(self.budgets, "d"))
            for method in methods:
                if method in self.values:
                    means = self.values[method][here].mean(0)
                    lines.append(f"  {method:<40}" + _cells(means, ".3f"))
        return "\n".join(lines)


def _cells(values: Any, form: str) -> str:
    return "".join(f"{value:>8{form}}" for value in values)


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel per dataset, with 95 % bands; PNG."""
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    figure = new_figure(5.2, 3.9 * len(datasets))
    panels = figure.subplots(len(datasets), 1, squeeze=False)[:, 0]
    for axes, dataset in zip(panels, datasets, strict=True):
        shown = [row for row in rows if (row["dataset"], row["category"]) == (dataset, "all")]
        for method, colour in zip(METHODS, _COLOURS, strict=True):
            points = sorted((row for row in shown if row["method"] == method), key=lambda row: row["budget"])
            budgets, ratios, low, high = ([p[key] for p in points] for key in ("budget", "ratio", "low", "high"))
            style = "-" if method in ("resonance", "fused") else "--"
            axes.plot(budgets, ratios, style, color=colour, marker="o", markersize=3.5, label=method)
            axes.fill_between(budgets, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.set_xscale("log")
        axes.set_xticks(budgets, [str(budget) for budget in budgets])
        axes.minorticks_off()
        axes.set_ylim(0, 1.02)
        axes.set_title(f"{dataset} (n = {shown[0]['n']})", fontsize=10)
        axes.set_xlabel("marked tokens")
        axes.set_ylabel("gold evidence turns marked")
    panels[0].legend(fontsize=8, loc="upper left")
    Picture(figure).save(path)
