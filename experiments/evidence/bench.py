"""The evidence benchmark from data files to result.json, table and plot."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from experiments.evidence.controls import Remembering
from experiments.evidence.crossval import CrossValidation
from experiments.evidence.data import load
from experiments.evidence.methods import ABLATIONS, BASELINES, METHODS, PARTS, SIGMA
from experiments.evidence.prepare import SCOPES, prepare
from experiments.evidence.report import Table, all_differences, difference_lines, plot
from experiments.evidence.variations import null_ratios, sweep
from remind.core.errors import ConfigError
from remind.core.files import input_hashes, write_json
from remind.core.progress import track
from remind.grounding.codes import SparseEncoder, WindowedCodes
from remind.grounding.config import GroundingConfig
from remind.grounding.ground import folder_of_saes, load_saes
from remind.llm.auxiliary import OfflineLLM
from remind.models.backbone import load_backbone
from remind.models.encoder import SentenceEncoder
from remind.perception import Perception, PerceptionConfig
from sae.ranges import PositiveInt, check_ranges

BUDGETS = (200, 400, 800, 1600, 3200, 6000)
NOTES = (
    "ratio: share of a question's gold evidence turns that are marked, mean over all questions with evidence",
    "budgets: tokens of the marked turns' lines, by the backbone's tokenizer",
    "retrieved: only turns of the retrieved segments can be marked; gold turns that were not retrieved count as missed",
    "settings are chosen for each method, scope and budget; the fused weights once per fold, on the full history",
    "bm25 and dense read the question as it is asked; the readings in fused leave speakers' names out",
    "LoCoMo's category 5 (adversarial) has evidence and is counted, also in all",
)


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
    """Also measure the resonance without idf, broadcast or smoothing, with the strategy's anchors, and with controls in
    the SAEs' place: untrained, shuffled features, principal directions, raw neurons, cosine of hidden states."""
    sweep: bool = False
    """Also move α, β, λ, σ, Agg, idf and the layers one at a time."""
    budget: PositiveInt = 3200
    """The budget in tokens at which the layers of fused are chosen, and of the sweep."""
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    """Resonance besides match and layers, both kinds of which are compared; anchors are the question's own words."""
    perception: PerceptionConfig = field(default_factory=PerceptionConfig)
    """What is retrieved in scope retrieved."""
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

    Raises:
        DataError, FormatError: data that cannot be read.
        ConfigError: no gold evidence, or fewer than two dialogues to validate across.
        ModelError: backbone and SAEs do not fit.
    """
    started = perf_counter()
    paths = [cfg.data] if isinstance(cfg.data, str) else list(cfg.data)
    asked, facts = load(paths, cfg.limit)
    if len(asked) < 2:
        raise ConfigError("cross-validation leaves one dialogue out and needs two; give more data")
    sae_data = [cfg.sae_data] if isinstance(cfg.sae_data, str) else list(cfg.sae_data or [])
    folder = folder_of_saes(cfg.sae, sae_data, cfg.backbone, cfg.cache, cfg.device, cfg.dtype)
    saes, _ = load_saes(folder)
    backbone = load_backbone(cfg.backbone, cfg.dtype, cfg.device)
    if cfg.controls:
        backbone = Remembering.of(backbone)
    encoder = SparseEncoder(backbone, saes, cfg.grounding.sink_ratio, 16)
    sentences = SentenceEncoder(device=cfg.device)
    cache = Path(cfg.cache).expanduser()
    perception = Perception(cfg.perception, sentences, OfflineLLM(sentences), cache / "index")
    windowed = WindowedCodes(encoder, cfg.grounding.window_tokens, 1, cache / "codes")
    ready = [prepare(one, windowed, perception, cfg.grounding) for one in track(asked, "encode", len(asked))]

    main = cfg.budget
    validation = CrossValidation(ready, BUDGETS, main)
    _, chosen = validation.all_dialogues()
    ratios, folds = validation.run()
    nulls = null_ratios(ready, encoder, saes, cfg.grounding, BUDGETS) if cfg.controls else {}
    ratios |= nulls
    table = Table(asked, ratios, BUDGETS)
    extra = [name for name in (*PARTS, *ABLATIONS) if name not in METHODS]
    without = [name for name, _ in nulls]
    result: dict[str, Any] = {
        "rows": table.rows(),
        "differences": all_differences(table),
        "ablations": table.rows(extra),
        "ablation_differences": [row for name in extra for row in table.differences("fused", [name], "full")],
        "controls": table.rows(without),
        "control_differences": [row for name in without for row in table.differences("resonance", [name], "full")],
        "folds": [
            {"dataset": one.dataset, "held_out": one.dialogue.id, **asdict(choice)}
            for one, choice in zip(asked, folds, strict=True)
        ],
        "chosen_on_all": {**asdict(chosen), "sigma": SIGMA},
        "sweep": [],
        "data": facts,
        "hashes": {"data": input_hashes(paths), "sae": input_hashes([folder])},
        "config": asdict(cfg),
        "notes": list(NOTES),
        "versions": _versions(),
    }
    if cfg.sweep:
        result["sweep"] = sweep(ready, cfg.grounding, chosen.settings["resonance"]["full"][main], main)
    result["seconds"] = round(perf_counter() - started, 1)
    out = Path(cfg.out)
    write_json(out, result)
    plot(result["rows"], out.with_suffix(".png"))
    _print(result, table, [*extra, *without], out)
    return result


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "sentence-transformers", "bm25s", "numpy", "remind-toolkit")
    return {"python": platform.python_version(), "platform": platform.platform(), **{n: version(n) for n in names}}


def _print(result: dict[str, Any], table: Table, extra: Sequence[str], out: Path) -> None:
    for fact in result["data"]:
        print(
            f"{fact['dataset']}: {fact['dialogues']} dialogues, {fact['questions']} questions, {fact['with_evidence']} "
            f"with evidence; {fact['dangling']} of {fact['references']} references name no turn and are left out"
        )
    print("\n".join(result["notes"]))
    for scope in SCOPES:
        print(f"\n{table.text(scope, (*METHODS, *extra))}")
    print(f"\npaired differences, 95 % intervals over questions and over dialogues (baselines: {', '.join(BASELINES)})")
    print(difference_lines([row for row in result["differences"] if row["method"] == "fused"]))
    for row in result["sweep"]:
        figures = "  ".join(f"{name} {value:.3f}" for name, value in row["ratio"].items())
        print(f"sweep {row['setting']:>7} = {row['value']!s:<6}{figures}{'  (default)' if row['default'] else ''}")
    print(f"\n{result['seconds']:.0f} s; {out}, {out.with_suffix('.png')}")
