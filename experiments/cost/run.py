"""From a configuration to results.json, a table and a plot, with every prefill counted by torch besides."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.cost.config import CONVENTIONS, InferenceCostConfig
from experiments.cost.curve import Inference, Way, crossover, ways
from experiments.cost.flops import TOLERANCE, Counted, Encoder, Shape, load_config
from experiments.cost.plot import plot
from experiments.cost.table import table
from remind.core.errors import ModelError
from remind.core.files import write_json, write_text
from remind.core.progress import Counter


def inference_cost(cfg: InferenceCostConfig) -> dict[str, Any]:
    """Count, write and print; what results.json holds is also returned.

    Returns:
        about, config, shapes; `checks`: forwards counted by torch beside the closed form; `rows`: operations by part
        and calls, for every way and length, with the memory of the keys and values; `ratios[convention][way]`:
        operations of reading the whole history over those of the way, by length;
        `crossover[convention][way][reading]`: the history from which on the way costs no more than that way of reading
        all of it (64 where it always does, None where it never does up to the longest length).

    Raises:
        ModelError: no such model, or one whose operations the closed form does not give.
        ConfigError: an SAE for a layer the model has not.
    """
    names = {"answering": cfg.model, "auxiliary": cfg.auxiliary}
    configs = {name: load_config(name) for name in dict.fromkeys(filter(None, names.values()))}
    shapes = {name: Shape.of(config) for name, config in configs.items()}
    auxiliary = None if cfg.auxiliary is None else shapes[cfg.auxiliary]
    encoder = Encoder()
    inference = Inference(cfg, shapes[cfg.model], auxiliary, encoder)
    prompts = {inference.prompt(kind, length) for length in cfg.lengths for kind in ("full", "x0", "x1", "x2")}  # type: ignore[arg-type]
    wanted = {name: sorted(prompts) if name == cfg.model else [cfg.sizes.cue_request] for name in configs}
    checks: list[dict[str, Any]] = []
    with Counter("forwards counted", sum(map(len, wanted.values()))) as bar:
        for name, lengths in wanted.items():
            model = Counted(configs[name])
            for length in lengths:
                checks += check(name, shapes[name], model, length)
                bar.step()
    compared = ways(cfg.questions)
    results: dict[str, Any] = {
        "about": {name: version(name) for name in ("torch", "transformers")},
        "config": asdict(cfg),
        "shapes": {name: asdict(shape) for name, shape in shapes.items()},
        "checks": checks,
        "rows": [_row(inference, way, length) for length in cfg.lengths for way in compared],
        "ratios": {},
        "crossover": {},
    }
    for convention in CONVENTIONS:
        costs = Inference(cfg, shapes[cfg.model], auxiliary, encoder, convention)
        others = [way for way in compared if way != Way("full")]
        results["ratios"][convention] = {way.name: _ratios(costs, way) for way in others}
        results["crossover"][convention] = {
            way.name: {reading.name: _crossover(costs, reading, way) for reading in compared if reading.kind == "full"}
            for way in others
            if way.kind != "full"
        }
    out = Path(cfg.out)
    text = table(results)
    plot(results, out / "inference_cost.png")
    write_text(out / "table.md", text)
    write_json(out / "results.json", results)
    print(text)
    print(f"results are in {out / 'results.json'}, {out / 'table.md'} and {out / 'inference_cost.png'}")
    return results


def check(name: str, shape: Shape, model: Counted, tokens: int) -> list[dict[str, Any]]:
    """Count a prefill and a step after it, and compare.

    Raises:
        ModelError: the closed form is off, as for models that attend to a window or mix experts.
    """
    pairs = zip(
        ("prefill", "step"),
        model.forwards(tokens, 1),
        (shape.prefill(tokens, "dense"), shape.prefill(1, "dense", tokens)),
        strict=True,
    )
    found = []
    for forward, counted, formula in pairs:
        if abs(counted - formula) > TOLERANCE * counted:
            raise ModelError(
                f"{name}: a {forward} at {tokens} tokens takes {counted:.6g} operations by torch's counter but "
                f"{formula:.6g} by the closed form, which holds for dense decoders with full attention"
            )
        found.append({"model": name, "forward": forward, "tokens": tokens, "counted": counted, "formula": formula})
    return found


def _row(inference: Inference, way: Way, length: int) -> dict[str, Any]:
    parts = {name: round(value) for name, value in inference.parts(way, length).items()}
    prompt = inference.prompt(way.kind, length)
    return {
        "history": length,
        "way": way.name,
        "title": way.title,
        "prompt": prompt,
        "fits": prompt + inference.cfg.sizes.answer <= inference.answering.positions,
        "cache_bytes": inference.answering.cache_bytes(prompt + inference.cfg.sizes.answer),
        "operations": sum(parts.values()),
        "parts": parts,
        "calls": inference.calls(way, length),
    }


def _ratios(inference: Inference, way: Way) -> dict[str, float]:
    full = Way("full")
    return {
        str(length): inference.total(full, length) / inference.total(way, length) for length in inference.cfg.lengths
    }


def _crossover(inference: Inference, reading: Way, way: Way) -> int | None:
    return crossover(
        lambda length: inference.total(reading, length),
        lambda length: inference.total(way, length),
        inference.cfg.lengths[-1],
    )
