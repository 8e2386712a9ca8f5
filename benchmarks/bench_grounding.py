"""What grounding costs on top of the backbone's forward, part by part, side by side in one process."""

from __future__ import annotations

import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.grounding_input import bench_backbone, bench_state
from remind.core.errors import ConfigError, ModelError
from remind.core.files import write_json
from remind.core.progress import Counter
from remind.grounding.codes import joint_codes
from remind.grounding.config import GroundingConfig
from remind.grounding.encode import turn_idf
from remind.grounding.ground import Grounder
from remind.grounding.guidance import guidance
from remind.grounding.places import token_places
from remind.grounding.resonance import combine_layers, smooth_runs, token_resonance
from remind.models.backbone import Backbone
from remind.states.pyramid import FactualState, render
from sae import TopKSAE

_LEGEND = """forward: the backbone up to the deepest hooked layer. scoring: all that follows it, Eq. 2 to blocks.
ratio: scoring / forward, medians over the rounds. products: of the coders' encoders alone, [tokens, d] x [d, d_sae];
no coder that looks at every feature can do without them, so their share of the forward bounds the ratio from below."""


@dataclass
class BenchGroundingConfig:
    """Time grounding of one x0 against the forward it needs anyway. SAEs have random weights; the text is bundled."""

    backbone: str = "nano"
    """nano; qwen3-vl-2b or qwen3-vl-8b for a decoder of that shape with random weights; or a causal model's folder or
    hub id."""
    tokens: int = 7000
    """Length of the prompt of x0; as many turns as fit."""
    layers: list[int] | None = None
    """Layers with an SAE; None: four, from a fifth to four fifths of the depth."""
    d_sae: int = 4096
    """Features of each SAE."""
    k: int = 32
    """Active features per token."""
    rounds: int = 7
    """How often each part is timed; the parts take turns."""
    windowed: bool = True
    """Also time a question in `windowed`: its dialogue encoded anew, found in memory, found on disk."""
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    """Settings of grounding; context_codes is ignored."""
    device: str = "cpu"
    """Device of backbone and SAEs."""
    dtype: str = "float32"
    """Precision of the backbone."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""

    def __post_init__(self) -> None:
        for name in ("tokens", "rounds", "d_sae", "k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.k > self.d_sae:
            raise ConfigError(f"k = {self.k} of {self.d_sae} features; need k <= d_sae")


class _Replay(Backbone):
    """A backbone whose forward has been computed before."""

    states: dict[int, Tensor]

    def hidden_states(self, *_: Any, **__: Any) -> dict[int, Tensor]:
        return self.states


def bench_grounding(cfg: BenchGroundingConfig) -> dict[str, Any]:
    """Run, print and return the figures: seconds, ratios, and what they were taken on.

    Raises:
        ConfigError: settings out of range. ModelError: an encoder, or a model that does not take that many tokens.
    """
    backbone = bench_backbone(cfg.backbone, cfg.dtype, cfg.device)
    if not backbone.causal:
        raise ModelError(f"{backbone.name} is an encoder: it cannot read x0 in one forward; take a causal model")
    layers = cfg.layers or _spread(backbone.n_layers)
    state = bench_state(backbone, cfg.tokens)
    saes = {
        layer: TopKSAE(
            backbone.hidden_size, cfg.d_sae, cfg.k, generator=torch.Generator().manual_seed(layer)
        ).requires_grad_(False)
        for layer in layers
    }
    config = replace(cfg.grounding, context_codes="joint", idf="dialogue")
    seconds = _joint_seconds(backbone, saes, state, config, cfg)
    scoring = [whole - prompt for whole, prompt in zip(seconds["whole"], seconds["prompt"], strict=True)]
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    figures: dict[str, Any] = {
        "backbone": backbone.name,
        "hidden_size": backbone.hidden_size,
        "layers": layers,
        "d_sae": cfg.d_sae,
        "k": cfg.k,
        "tokens": len(backbone.tokenize(render(state).text).ids),
        "turns": len(state.turns),
        "forward_s": middle.pop("forward"),
        "scoring_s": statistics.median(scoring),
        "prompt_s": middle.pop("prompt"),
        "products_s": middle.pop("products"),
        "parts_s": {name: value for name, value in middle.items() if name != "whole"},
        "machine": f"{platform.machine()}, {platform.system()}, {torch.get_num_threads()} threads, {backbone.device}",
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    figures["ratio"] = figures["scoring_s"] / figures["forward_s"]
    figures["products_ratio"] = figures["products_s"] / figures["forward_s"]
    if cfg.windowed:
        figures["windowed_s"] = _windowed_seconds(backbone, saes, state, replace(config, context_codes="windowed"))
    _print(figures)
    if cfg.out is not None:
        write_json(cfg.out, figures)
    return figures


def _spread(depth: int) -> list[int]:
    layers = sorted({max(1, round(depth * share)) for share in (0.2, 0.4, 0.6, 0.8)})
    return layers if len(layers) == 4 else list(range(max(1, depth - 3), depth + 1))


def _joint_seconds(
    backbone: Backbone,
    saes: Mapping[int, TopKSAE],
    state: FactualState,
    config: GroundingConfig,
    cfg: BenchGroundingConfig,
) -> dict[str, list[float]]:
    """Seconds of every part in every round. whole: grounding without its forward, the prompt included."""
    replay = _Replay(backbone.name, backbone.model, backbone.tokenizer, backbone.processor, backbone.kind)
    grounder = Grounder(replay, dict(saes), None, config)
    coders = grounder.encoder.saes
    text = render(state)
    tokens = backbone.tokenize(text.text)
    length = sum(start < text.strategy[1] for start, _ in tokens.offsets)
    before, after = backbone.frame
    ids = torch.tensor([[*before, *tokens.ids[:length], *after]])
    if ids.shape[1] > backbone.max_length:
        raise ModelError(f"{backbone.name} takes {backbone.max_length} tokens, not {ids.shape[1]}; set tokens lower")
    # a first forward, also to warm up
    replay.states = backbone.hidden_states(ids, None, list(saes))
    states = {layer: found[0] for layer, found in replay.states.items()}
    codes = joint_codes(grounder.encoder, state)
    guides = {
        layer: guidance(found.reasoning, found.anchors, found.idf, config.alpha)
        for layer, found in codes.layers.items()
    }
    runs = torch.tensor(state.runs)[codes.turn]

    def resonance() -> Tensor:
        return combine_layers(
            [
                token_resonance(found.dialogue, guides[layer], codes.turn, codes.speakers(layer), 1.0, run=state.runs)
                for layer, found in codes.layers.items()
            ]
        )

    scores = resonance()
    product = torch.empty(min(1024, ids.shape[1]), cfg.d_sae, device=backbone.device)

    def products() -> None:
        for layer, found in states.items():
            weights = coders[layer].W_enc  # type: ignore[attr-defined]
            for part in found.to(weights.dtype).split(len(product)):
                torch.mm(part, weights, out=product[: len(part)])

    def prompt() -> None:
        rendered = render(state)
        token_places(rendered, state.turns, backbone.tokenize(rendered.text).offsets)

    parts: dict[str, Callable[[], Any]] = {
        "forward": lambda: backbone.hidden_states(ids, None, list(saes)),
        "whole": lambda: grounder.ground(state),
        "prompt": prompt,
        "products": products,
        "encode": lambda: grounder.encoder.encode([tokens.ids[:length]]),
        "idf": lambda: [turn_idf(found.dialogue, codes.turn, cfg.d_sae) for found in codes.layers.values()],
        "guidance": lambda: [
            guidance(found.reasoning, found.anchors, found.idf, config.alpha) for found in codes.layers.values()
        ],
        "resonance": resonance,
        "smoothing": lambda: smooth_runs(scores, runs, config.sigma),
    }
    return _take_turns(parts, cfg.rounds, backbone.device)


def _take_turns(parts: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    with torch.no_grad(), Counter("rounds", rounds) as bar:
        # the forward is warm already and may take minutes
        for name, run in parts.items():
            if name != "forward":
                run()
        for _ in range(rounds):
            for name, run in parts.items():
                seconds[name].append(_timed(run, device))
            bar.step()
    return seconds


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    started = perf_counter()
    run()
    wait()
    return perf_counter() - started


def _windowed_seconds(
    backbone: Backbone, saes: Mapping[int, TopKSAE], state: FactualState, config: GroundingConfig
) -> dict[str, float]:
    """Seconds of one question whose dialogue is new, in memory, and on disk as another process left it."""
    with tempfile.TemporaryDirectory() as folder:

        def fresh() -> Grounder:
            grounder = Grounder(backbone, dict(saes), None, config)
            grounder.windowed = type(grounder.windowed)(
                grounder.encoder, config.window_tokens, config.cached_dialogues, folder
            )
            assert grounder.windowed.store is not None
            # hashing the weights happens once in a process, not once a question
            grounder.windowed.store.path([])
            return grounder

        first, second = fresh(), fresh()
        runs: Sequence[tuple[str, Grounder]] = (("new", first), ("memory", first), ("disk", second))
        return {name: _timed(lambda g=grounder: g.ground(state), backbone.device) for name, grounder in runs}  # type: ignore[misc]


def _print(figures: Mapping[str, Any]) -> None:
    versions = ", ".join(f"{name} {number}" for name, number in figures["versions"].items())
    print(f"{figures['machine']}, {versions}")
    print(_LEGEND)
    layers = ", ".join(map(str, figures["layers"]))
    print(f"\n{figures['backbone']}: {figures['tokens']} tokens, {figures['turns']} turns")
    print(f"layers {layers}; d {figures['hidden_size']}, d_sae {figures['d_sae']}, k {figures['k']}")
    rows = {"forward": figures["forward_s"], "scoring": figures["scoring_s"], "products": figures["products_s"]}
    rows |= {f"  {name}": value for name, value in figures["parts_s"].items()} | {"prompt": figures["prompt_s"]}
    for name, value in rows.items():
        print(f"{name:<16}{1000 * value:>10.1f} ms{value / figures['forward_s']:>10.1%}")
    print(f"ratio {figures['ratio']:.1%}, of which products {figures['products_ratio']:.1%}")
    for name, value in figures.get("windowed_s", {}).items():
        print(f"windowed, {name:<8}{1000 * value:>8.1f} ms per question")


if __name__ == "__main__":
    from remind.core.cli import main

    main(
        BenchGroundingConfig,
        bench_grounding,
        "Cost of grounding one x0 on top of the backbone's forward, part by part.",
    )
