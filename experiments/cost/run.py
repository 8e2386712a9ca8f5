"""From a configuration to results.json, a table and a plot, with every prefill counted by torch besides."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.cost.config import InferenceCostConfig
from experiments.cost.curve import Inference, Way, crossover, ways
from experiments.cost.flops import TOLERANCE, Counted, Encoder, Shape, load_config
from experiments.cost.report import plot, table
from remind.core.errors import ModelError
from remind.core.files import write_json, write_text
from remind.core.progress import ProgressBar


def inference_cost(cfg: InferenceCostConfig) -> dict[str, Any]:
    """Count, write and print; what results.json holds is also returned.

    Returns:
        about, config, shapes; `checks`: forwards counted by torch beside the closed form; `rows`: operations by part
        and calls, for every way and length, with the memory of the keys and values; `ratios[way]`: operations of
        reading the whole history over those of the way, by length; `crossover[way][reading]`: the history from which on
        the way costs no more than that way of reading all of it (64 where it always does, None where it never does up
        to the longest length).

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
    with ProgressBar("forwards counted", sum(map(len, wanted.values()))) as bar:
        for name, lengths in wanted.items():
            model = Counted(configs[name])
            for length in lengths:
                checks += check(name, shapes[name], model, length)
                bar.step()
    compared, whole = ways(cfg.questions), Way("full")
    results: dict[str, Any] = {
        "about": {name: version(name) for name in ("torch", "transformers")},
        "config": asdict(cfg),
        "shapes": {name: asdict(shape) for name, shape in shapes.items()},
        "checks": checks,
        "rows": [_row(inference, way, length) for length in cfg.lengths for way in compared],
        "ratios": {
            way.name: {str(n): inference.total(whole, n) / inference.total(way, n) for n in cfg.lengths}
            for way in compared
            if way != whole
        },
        "crossover": {
            way.name: {
                reading.name: crossover(
                    partial(inference.total, reading), partial(inference.total, way), cfg.lengths[-1]
                )
                for reading in compared
                if reading.kind == "full"
            }
            for way in compared
            if way.kind != "full"
        },
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
    counted = model.forwards(tokens, 1)
    formulas = (shape.prefill(tokens, dense=True), shape.prefill(1, tokens, dense=True))
    checks: list[dict[str, Any]] = [
        {"model": name, "forward": forward, "tokens": tokens, "counted": count, "formula": formula}
        for forward, count, formula in zip(("prefill", "step"), counted, formulas, strict=True)
    ]
    for one in checks:
        if abs(one["counted"] - one["formula"]) > TOLERANCE * one["counted"]:
            raise ModelError(
                f"{name}: a {one['forward']} at {tokens} tokens takes {one['counted']:.6g} operations by torch's "
                f"counter but {one['formula']:.6g} by the closed form, which holds for dense decoders with full "
                "attention"
            )
    return checks


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
