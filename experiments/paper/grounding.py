"""Figures 5 and 11: what grounding marks, of the pipeline's own states, with its own SAEs."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.evidence.data import gold_turns
from experiments.paper.cells import cell, product, side_by_side
from experiments.paper.config import PaperConfig
from experiments.paper.items import Result
from experiments.paper.settings import Setting, answerer_of, ask, by_seed, pooled, settings, small_saes, sources
from remind.core.progress import track
from remind.data.dialogue import spread
from remind.evaluation.compare import Rows
from remind.evaluation.run import states_hash
from remind.evaluation.statistics import bootstrap, several
from remind.evaluation.tables import markdown_table, percent
from remind.grounding import Grounder, GroundingConfig, GroundingTrace
from remind.grounding.resonance import select_blocks
from remind.models.encoder import SentenceEncoder
from remind.states.dataset import MANIFEST, read_manifest, read_states
from remind.states.pyramid import FactualState, Span, render, segments_of
from remind.states.records import StateRecord, blocks_of, factual_of
from remind.testbed.ladder import write_records
from remind.viewing.config import InspectConfig
from remind.viewing.inspector.page import Inspector
from sae.figures import COLOURS, Picture, new_figure

#: Random selections that the floor of Figure 11 is the mean of.
_DRAWS = 8
#: Layers of MiniLM that the small form of Figure 5 grounds with.
_SMALL_LAYERS = (4, 5)
#: Tokens that the marked turns may hold: the paper's axis, and the small form's, whose x0 has some 200 tokens.
BUDGETS, _SMALL_BUDGETS = (200, 400, 800, 1600, 3200, 6000), (12, 25, 50, 100, 200)


@dataclass(frozen=True)
class Ground:
    """The questions of a setting, and what they were grounded with.

    Attributes:
        grounder: with the settings that the states were built with.
        asked: record, x0 as a state, and positions in the dialogue of the gold turns (none: it has no gold evidence).
    """

    grounder: Grounder
    asked: list[tuple[StateRecord, FactualState, frozenset[int]]]

    @classmethod
    def of(cls, setting: Setting, backbone: str | None = None, sae: str | None = None) -> Ground:
        """Load backbone, SAEs and dialogues as the states' manifest names them.

        Args:
            backbone, sae: in place of those.

        Raises:
            ConfigError, ModelError, DataError: something of that is not there, or does not fit.
        """
        cfg = setting.evaluate
        inspected = InspectConfig(
            states=cfg.states,
            all=True,
            corpus=cfg.corpus or None,
            format=cfg.corpus_format,
            backbone=backbone,
            sae=sae,
            device=cfg.device,
            dtype=cfg.dtype,
        )
        inspector = Inspector(inspected, read_manifest(cfg.states).get("config", {}))
        records = [record for record in read_states(cfg.states) if record.split == cfg.split]
        chosen = {*spread(range(len(records)), cfg.limit)}
        kept = [record for number, record in enumerate(records) if number in chosen]
        asked = [
            (record, factual_of(record, dialogue, question), frozenset(gold_turns(dialogue, question).tolist()))
            for record, dialogue, question in sources(kept, inspector.corpus)
        ]
        return cls(inspector.grounder, asked)

    def with_config(self, config: GroundingConfig, sentences: SentenceEncoder | None) -> Grounder:
        """A grounder of the same backbone and SAEs with other settings."""
        encoder = self.grounder.encoder
        return Grounder(encoder.backbone, encoder.saes, self.grounder.idf, config, sentences)


def marked_share(state: FactualState, blocks: Sequence[Span], gold: frozenset[int]) -> float:
    """Share of the gold turns inside blocks; those that were not retrieved count as missed."""
    marked = {state.positions[index] for start, end in blocks for index in range(start, end + 1)}
    return len(marked & gold) / len(gold)


def _estimate(values: Sequence[tuple[float, str]], resamples: int) -> Any:
    return bootstrap([v for v, _ in values], resamples, 0, several([dialogue for _, dialogue in values]))


# Figure 5


def fig5(cfg: PaperConfig) -> Result:
    """Evidence ratio, and Acc and MemR of answers from x1, for every α and β. Raises as `evaluate` does."""
    assert cfg.out is not None
    points = [(alpha, beta) for alpha in cfg.alphas for beta in cfg.betas]
    ratios: dict[tuple[float, float], list[tuple[float, str]]] = {point: [] for point in points}
    found: dict[tuple[float, float], list[tuple[Setting, Rows]]] = {point: [] for point in points}
    for setting in settings(cfg):
        folder = Path(cfg.out) / f"seed-{setting.seed}"
        if cfg.small:
            # the nano model has no tokens for the words of reasoning cues, which α weighs anchors against; and the
            # world's own settings join scores of the text to the resonance, which α and β would hardly move
            ground = Ground.of(setting, "minilm", str(small_saes(cfg, "minilm", _SMALL_LAYERS)))
            config = replace(ground.grounder.config, fuse=None, anchor_codes="strategy")
        else:
            ground = Ground.of(setting)
            config = ground.grounder.config
        grid = {point: replace(config, alpha=point[0], beta=point[1]) for point in points}
        own, asked = _ground_all(setting, ground, grid, folder), ground.asked
        # the device's memory is the answering model's now
        del ground
        gc.collect()
        torch.cuda.empty_cache()
        answerer = answerer_of(setting)
        # the limit has been applied already
        whole = replace(setting, evaluate=replace(setting.evaluate, limit=None))
        for point, states in own.items():
            for record, (_, state, gold) in zip(_in_order(states, asked), asked, strict=True):
                if gold:
                    share = marked_share(state, blocks_of(record.x1), gold)
                    ratios[point].append((share, _dialogue(setting, record)))
            runs = ask(whole, folder / states.name.replace("states", "answers"), ["x1"], states, answerer)
            found[point].append((setting, runs["x1"].rows))
    rows = []
    products = {point: product(pooled(found[point]), cfg.resamples) for point in points}
    for (alpha, beta), figures in products.items():
        ratio = _estimate(ratios[alpha, beta], cfg.resamples)
        formats = {format: one["all"] for format, one in figures.items() if format != "all"}
        row = {"alpha": alpha, "beta": beta, "evidence_ratio": ratio, **figures["all"]["all"], "by_format": formats}
        rows.append(row)
    seeds = by_seed({f"alpha {alpha:g}, beta {beta:g}": parts for (alpha, beta), parts in found.items()})
    measures = ("accuracy", "parse_rate", "memory_recall")
    lines = [
        [f"{row['alpha']:g}", f"{row['beta']:g}", percent(row["evidence_ratio"], interval=True)]
        + [cell(row, measure, interval=measure == "accuracy") for measure in measures]
        for row in rows
    ]
    heads = ["α", "β", "gold evidence marked", "Acc from x1", "parsed", "MemR from x1"]
    by_format = side_by_side({f"{alpha:g}, {beta:g}": one for (alpha, beta), one in products.items()}, "α, β")
    tables = "\n".join([markdown_table(heads, lines), by_format])
    return Result({"grid": rows, "by_seed": seeds}, tables, _curves(cfg, rows))


def _ground_all(
    setting: Setting, ground: Ground, grid: Mapping[tuple[float, float], GroundingConfig], folder: Path
) -> dict[tuple[float, float], Path]:
    """States with x1 as each of the settings grounds it; those of an earlier start are kept. Codes are made once."""
    states = setting.evaluate.states
    common = {"of": states_hash(states), "inputs": read_manifest(states)["inputs"], "limit": setting.evaluate.limit}
    about = {point: {**common, "grounding": asdict(config)} for point, config in grid.items()}
    own = {point: folder / f"states-alpha-{point[0]:g}-beta-{point[1]:g}" for point in grid}
    missing = [
        p for p in grid if not (own[p] / MANIFEST).exists() or not about[p].items() <= read_manifest(own[p]).items()
    ]
    if missing:
        reads = any(config.fuse is not None and config.fuse.reads_text for config in grid.values())
        sentences = SentenceEncoder(device=setting.evaluate.device) if reads else None
        grounders = {point: ground.with_config(grid[point], sentences) for point in missing}
        changed: dict[tuple[float, float], list[StateRecord]] = {point: [] for point in missing}
        for record, state, _ in track(ground.asked, "ground", len(ground.asked)):
            codes = grounders[missing[0]].codes(state)
            for point, grounder in grounders.items():
                marked = grounder.trace(state, codes).state
                changed[point].append(replace(record, x1=render(marked), salience=marked.salience))
        for point, records in changed.items():
            write_records(records, own[point], about[point])
    return own


def _in_order(states: Path, asked: Sequence[tuple[StateRecord, FactualState, frozenset[int]]]) -> list[StateRecord]:
    records = {record.question_id: record for record in read_states(states)}
    return [records[record.question_id] for record, *_ in asked]


def _dialogue(setting: Setting, record: StateRecord) -> str:
    """What is resampled: a dialogue, of its own seed where seeds have dialogues of their own."""
    return f"{setting.seed if setting.own_dialogues else ''}/{record.dialogue_id}"


def _curves(cfg: PaperConfig, rows: Sequence[Mapping[str, Any]]) -> Picture:
    figure = new_figure(11, 3.4)
    for axes, measure in zip(figure.subplots(1, 3), ("evidence_ratio", "accuracy", "memory_recall"), strict=True):
        for alpha, colour in zip(cfg.alphas, COLOURS * len(cfg.alphas), strict=False):
            own = [row for row in rows if row["alpha"] == alpha and row[measure] is not None]
            values = [100 * row[measure]["value"] for row in own]
            axes.plot([row["beta"] for row in own], values, "o-", color=colour, label=f"α = {alpha:g}")
        axes.set_xlabel("β")
        axes.set_title(
            {"evidence_ratio": "gold evidence marked, %", "accuracy": "Acc from x1, %"}.get(measure, "MemR from x1, %")
        )
        axes.set_ylim(0, 100)
    axes.legend(fontsize=8)
    return Picture(figure)


# Figure 11


def fig11(cfg: PaperConfig) -> Result:
    """Share of the gold evidence in marked turns at each budget, over all questions with gold evidence.

    random: turns of x0 in random order, the mean of several. resonance: Eq. 3 to 5 alone, with the strategy of the
    states. as built: the states' own settings at each budget, and `as shipped` at their own budget. x0: what was
    retrieved, which none of these can exceed. whole history: as resonance, where nothing was retrieved before.
    """
    budgets = cfg.budgets or (_SMALL_BUDGETS if cfg.small else BUDGETS)
    curves: dict[str, list[list[tuple[float, str]]]] = {}
    points: dict[str, list[tuple[float, str]]] = {"x0": [], "as shipped": []}
    tokens: dict[str, list[int]] = {"x0": [], "as shipped": []}
    for setting in settings(cfg):
        ground = Ground.of(setting)
        built = ground.grounder
        reads = built.config.fuse is not None and built.config.fuse.reads_text
        sentences = SentenceEncoder(device=setting.evaluate.device) if reads else None
        plain = replace(built.config, fuse=None, match="summed", anchor_codes="strategy")
        resonance = ground.with_config(plain, None)
        as_built = ground.with_config(built.config, sentences)
        for record, state, gold in track(ground.asked, "ground", len(ground.asked)):
            if not gold:
                continue
            name = _dialogue(setting, record)
            shipped = as_built.trace(state)
            traces = {"resonance": resonance.trace(state), "as built": shipped}
            if cfg.small or cfg.history:
                everywhere = segments_of(state.dialogue, range(len(state.dialogue.turns)))
                traces["whole history"] = resonance.trace(replace(state, segments=everywhere))
            lengths = shipped.codes.turn_tokens.tolist()
            for label, trace in traces.items():
                chosen = [_selected(trace, built.config.window, budget) for budget in budgets]
                _add(curves, label, [marked_share(trace.state.factual, blocks, gold) for blocks in chosen], name)
            draws = [_drawn(lengths, state.runs, budgets, f"{record.question_id}:{n}") for n in range(_DRAWS)]
            means = np.mean([[marked_share(state, blocks, gold) for blocks in draw] for draw in draws], axis=0)
            _add(curves, "random", means.tolist(), name)
            everything = [(index, index) for index in range(len(lengths))]
            for label, blocks in (("x0", everything), ("as shipped", list(shipped.state.blocks))):
                points[label].append((marked_share(state, blocks, gold), name))
                tokens[label].append(sum(sum(lengths[start : end + 1]) for start, end in blocks))
    lines = {label: [_estimate(values, cfg.resamples) for values in columns] for label, columns in curves.items()}
    ends = {label: _estimate(values, cfg.resamples) for label, values in points.items()}
    mean_tokens = {label: sum(values) / max(1, len(values)) for label, values in tokens.items()}
    table = markdown_table(
        ["tokens marked", *map(str, budgets)],
        [[label, *(percent(value) for value in lines[label])] for label in lines],
    )
    table += "\n" + markdown_table(
        ["", "gold evidence", "tokens, mean"],
        [[label, percent(ends[label], interval=True), f"{mean_tokens[label]:,.0f}"] for label in ends],
    )
    data = {"budgets": list(budgets), "curves": lines, "points": ends, "tokens": mean_tokens}
    figure = new_figure(6.4, 4)
    axes = figure.subplots()
    for (label, values), colour in zip(lines.items(), COLOURS, strict=False):
        axes.plot(budgets, [100 * value["value"] for value in values], "o-", color=colour, label=label, markersize=4)
    axes.axhline(100 * ends["x0"]["value"], color="grey", linestyle=":", label="x0, all of it")
    axes.plot([mean_tokens["as shipped"]], [100 * ends["as shipped"]["value"]], "*", color="black", markersize=11)
    axes.set_xscale("log")
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.minorticks_off()
    axes.set_xlabel("marked tokens (star: the budget that the states were built with)")
    axes.set_ylabel("gold evidence marked, %")
    figure.legend(loc="outside right upper", fontsize=8)
    return Result(data, table, Picture(figure))


def _add(curves: dict[str, list[list[tuple[float, str]]]], label: str, shares: Sequence[float], name: str) -> None:
    columns = curves.setdefault(label, [[] for _ in shares])
    for column, value in zip(columns, shares, strict=True):
        column.append((value, name))


def _selected(trace: GroundingTrace, window: int, budget: int) -> list[Span]:
    state = trace.state
    return select_blocks(
        list(state.salience), trace.codes.turn_tokens, budget=budget, window=window, run=state.factual.runs
    )


def _drawn(lengths: Sequence[int], runs: Sequence[int], budgets: Sequence[int], seed: str) -> list[list[Span]]:
    """Turns in random order, as many as fit each budget."""
    rng = random.Random(f"remind-paper:{seed}")
    salience = [rng.random() for _ in lengths]
    return [select_blocks(salience, lengths, budget=budget, window=0, run=runs) for budget in budgets]
