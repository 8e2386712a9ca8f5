"""The figures in Markdown."""

from __future__ import annotations

from typing import Any

from experiments.cost.curve import SHORTEST

_COUNTED = {
    "causal": "half of the square, as a fused kernel computes it",
    "dense": "the whole square, as torch's counter counts it",
    "none": "left out, as counters that see modules alone do",
}


def length_label(tokens: int) -> str:
    """16K, 2M; other numbers as they are."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def table(results: dict[str, Any]) -> str:
    """Operations, calls, ratios and crossovers, and what they rest on."""
    cfg = results["config"]
    lengths = cfg["lengths"]
    rows = {(row["way"], row["history"]): row for row in results["rows"]}
    titles = {row["way"]: row["title"] for row in results["rows"]}
    convention = cfg["convention"]

    def block(head: str, cells: dict[str, list[str]]) -> list[str]:
        heads = [head, *map(length_label, lengths)]
        body = ["| " + " | ".join([titles[name], *row]) + " |" for name, row in cells.items()]
        return ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *body, ""]

    operations = {
        name: [_number(rows[name, n]["operations"] / 1e12) + ("" if rows[name, n]["fits"] else "*") for n in lengths]
        for name in titles
    }
    calls = {name: [_number(sum(rows[name, n]["calls"].values())) for n in lengths] for name in titles}
    lines = ["# Cost of a question at inference", ""]
    lines += [f"Attention in a prefill: {_COUNTED[convention]}.", ""]
    lines += block("TFLOPs per question", operations)
    if not all(row["fits"] for row in results["rows"]):
        positions = results["shapes"][cfg["model"]]["positions"]
        lines += [f"\\* more than the {positions:,} tokens the model was made for", ""]
    lines += block("calls per question", calls)
    kept = {name: [_number(rows[name, n]["cache_bytes"] / 1e9) for n in lengths] for name in titles if "/" not in name}
    lines += block("keys and values at 16 bits, GB", kept)
    for name, ratios in results["ratios"].items():
        lines += [f"Whole history over each way; attention: {_COUNTED[name]}.", ""]
        lines += block(
            "times as many operations",
            {way: [_number(ratio[str(n)]) for n in lengths] for way, ratio in ratios.items()},
        )
        found = results["crossover"][name]
        readings = list(next(iter(found.values())))
        heads = ["no dearer from so many tokens on", *(f"than {titles[reading]}" for reading in readings)]
        lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        lines += [
            "| " + " | ".join([titles[way], *(_start(starts[reading], lengths[-1]) for reading in readings)]) + " |"
            for way, starts in found.items()
        ]
        lines.append("")
    worst = max(abs(one["counted"] - one["formula"]) / one["counted"] for one in results["checks"])
    auxiliary = cfg["auxiliary"] and f"counted as {cfg['auxiliary']}"
    lines += [
        f"Model: {cfg['model']}; auxiliary LLM: {auxiliary or 'its operations are not counted'}; encoder: MiniLM.",
        f"Retrieval keeps {cfg['top_share']:.0%}, at most {cfg['max_context_tokens']:,} tokens; "
        f"the index holds cues for {cfg['dimensions']} kinds of question.",
        "Tokens: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in cfg["sizes"].items()) + ".",
        f"{len(results['checks'])} forwards counted by torch {results['about']['torch']} on the meta device; "
        f"largest difference from the closed form {worst:.1g} (of the whole).",
    ]
    return "\n".join(lines) + "\n"


def _start(tokens: int | None, longest: int) -> str:
    if tokens is None:
        return f"not by {length_label(longest)}"
    return "always" if tokens <= SHORTEST else f"{tokens:,}"


def _number(value: float) -> str:
    """Without exponent; three digits where the value is 1 or more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
