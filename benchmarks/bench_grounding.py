"""What grounding costs on top of the backbone's forward, part by part, side by side in one process.

forward: the backbone up to the deepest hooked layer. scoring: all that follows it, Eq. 2 to blocks. encode: of that
Eq. 2. ratio: scoring / forward, medians over the rounds. products: of the coders' encoders alone, [tokens, d] x
[d, d_sae]; no coder that looks at every feature can do without them, so their share of the forward bounds the ratio
from below.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle, pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import about, headline, renumbered, seconds
from remind.core.errors import ConfigError, ModelError
from remind.core.files import write_json
from remind.core.progress import ProgressBar
from remind.data.dialogue import Dialogue, Question, Session
from remind.grounding.codes import token_places
from remind.grounding.config import GroundingConfig
from remind.grounding.ground import Grounder
from remind.models.backbone import Backbone, load_backbone
from remind.states.pyramid import FactualState, Segment, Strategy, render
from sae import TopKSAE
from sae.ranges import PositiveInt, check_ranges

#: Text decoders of Qwen3-VL as `nano_model` builds them, with random weights; only the vocabulary is smaller.
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-vl-2b": {"hidden_size": 2048, "layers": 28, "heads": 16, "kv_heads": 8},
    "qwen3-vl-8b": {"hidden_size": 4096, "layers": 36, "heads": 32, "kv_heads": 8},
}
_STRATEGY = Strategy(
    ("Collect what is said about the habit in order of time.", "Compare earlier and later statements."),
    *(("Mara",), ("running", "the morning", "coffee"), ("how the opinion changes",), ("since spring",)),
)


@dataclass
class BenchGroundingConfig:
    """Time grounding of one x0 against the forward it needs anyway. SAEs have random weights; the text is bundled."""

    backbone: str = "nano"
    """nano; qwen3-vl-2b or qwen3-vl-8b for a decoder of that shape with random weights; or a causal model's folder or
    hub id."""
    tokens: PositiveInt = 7000
    """Length of the prompt of x0; as many turns as fit."""
    layers: list[int] | None = None
    """Layers with an SAE; None: four, from a fifth to four fifths of the depth."""
    d_sae: PositiveInt = 4096
    """Features of each SAE."""
    k: PositiveInt = 32
    """Active features per token."""
    rounds: PositiveInt = 7
    """How often each part is timed; the parts take turns."""
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    """Settings of grounding; context_codes is ignored."""
    device: str = "cpu"
    """Device of backbone and SAEs."""
    dtype: str = "float32"
    """Precision of the backbone."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.k > self.d_sae:
            raise ConfigError(f"k = {self.k} of {self.d_sae} features; need k <= d_sae")


def bench_backbone(name: str, dtype: str, device: str) -> Backbone:
    """A backbone by name, or a decoder of one of `SHAPES` with random weights."""
    if name not in SHAPES:
        return load_backbone(name, dtype=dtype, device=device)
    from remind.models.nano import nano_model

    nano = load_backbone("nano", dtype=dtype, device=device)
    model = nano_model(**SHAPES[name]).to(nano.device, nano.dtype)
    return Backbone(f"{name}, random weights", model, nano.tokenizer, nano.processor, nano.kind)


def bench_state(backbone: Backbone, tokens: int) -> FactualState:
    """x0 of as many turns of the bundled dialogues, repeated where needed, as fit into `tokens` tokens."""
    from remind.data.readers import read
    from remind.data.sample import sample_path

    corpus = read(sample_path())
    sessions: list[Session] = []
    used = 0
    for session in cycle([session for dialogue in corpus.dialogues for session in dialogue.sessions]):
        name = str(len(sessions))
        turns = tuple(replace(turn, id=f"{name}:{n}") for n, turn in enumerate(session.turns))
        sessions.append(Session(name, session.time, turns))
        used += sum(len(backbone.tokenize(turn.text).ids) for turn in turns)
        if used >= 2 * tokens:  # in a prompt, a text may take fewer tokens than by itself
            break
    dialogue = Dialogue("bench", renumbered(sessions))
    question = Question("bench", "bench", "How has the habit changed since spring?")
    bounds = [0, *accumulate(len(session.turns) for session in sessions)]

    def first(turns: int) -> FactualState:
        segments = [Segment(start, min(end, turns) - 1) for start, end in pairwise(bounds) if start < turns]
        return FactualState(dialogue, question, tuple(segments), _STRATEGY)

    def length(turns: int) -> int:
        return len(backbone.tokenize(render(first(turns)).text).ids)

    return first(max(1, bisect_right(range(1, bounds[-1] + 1), tokens, key=length)))


class _Replay(Backbone):
    """A backbone whose forward has been computed before."""

    states: dict[int, Tensor]

    def hidden_states(self, *_: Any, **__: Any) -> dict[int, Tensor]:
        return self.states


def bench_grounding(cfg: BenchGroundingConfig) -> dict[str, Any]:
    """Run, print and return the figures: seconds, ratios, and what they were measured on.

    Raises:
        ConfigError: settings out of range. ModelError: an encoder, or a model that does not take that many tokens.
    """
    backbone = bench_backbone(cfg.backbone, cfg.dtype, cfg.device)
    if not backbone.causal:
        raise ModelError(f"{backbone.name} is an encoder: it cannot read x0 in one forward; take a causal model")
    depth = backbone.n_layers
    spread = sorted({max(1, round(depth * share)) for share in (0.2, 0.4, 0.6, 0.8)})
    layers = cfg.layers or (spread if len(spread) == 4 else list(range(max(1, depth - 3), depth + 1)))
    state = bench_state(backbone, cfg.tokens)
    saes = {}
    for layer in layers:
        generator = torch.Generator().manual_seed(layer)
        saes[layer] = TopKSAE(backbone.hidden_size, cfg.d_sae, cfg.k, generator=generator).requires_grad_(False)
    config = replace(cfg.grounding, context_codes="joint", idf="dialogue")
    times = _joint_seconds(backbone, saes, state, config, cfg)
    scoring = [whole - prompt for whole, prompt in zip(times["whole"], times["prompt"], strict=True)]
    middle = {name: statistics.median(values) for name, values in times.items()}
    figures: dict[str, Any] = {
        "backbone": backbone.name,
        "hidden_size": backbone.hidden_size,
        "layers": layers,
        "d_sae": cfg.d_sae,
        "k": cfg.k,
        "tokens": len(backbone.tokenize(render(state).text).ids),
        "turns": len(state.turns),
        "scoring_s": statistics.median(scoring),
        **{f"{name}_s": middle[name] for name in ("forward", "encode", "prompt", "products")},
        "about": about("torch", "transformers", device=backbone.device),
    }
    figures["ratio"] = figures["scoring_s"] / figures["forward_s"]
    figures["products_ratio"] = figures["products_s"] / figures["forward_s"]
    _print(figures)
    if cfg.out is not None:
        write_json(cfg.out, figures)
    return figures


def _joint_seconds(
    backbone: Backbone,
    saes: Mapping[int, TopKSAE],
    state: FactualState,
    config: GroundingConfig,
    cfg: BenchGroundingConfig,
) -> dict[str, list[float]]:
    """Seconds of every part in every round. whole: grounding without its forward, the prompt included."""
    replay = _Replay(backbone.name, backbone.model, backbone.tokenizer, backbone.processor, backbone.kind)
    grounder = Grounder(replay, saes, None, config)
    rendered = render(state)
    tokens = backbone.tokenize(rendered.text)
    end = rendered.strategy_end - 1
    length = sum(start < end for start, _ in tokens.offsets)
    before, after = backbone.frame
    ids = torch.tensor([[*before, *tokens.ids[:length], *after]])
    if ids.shape[1] > backbone.max_length:
        raise ModelError(f"{backbone.name} takes {backbone.max_length} tokens, not {ids.shape[1]}; set tokens lower")
    replay.states = backbone.hidden_states(ids, None, list(saes))
    states = {layer: hidden[0] for layer, hidden in replay.states.items()}
    product = torch.empty(min(1024, ids.shape[1]), cfg.d_sae, device=backbone.device)

    def products() -> None:
        for layer, hidden in states.items():
            weights = saes[layer].W_enc
            for part in hidden.to(weights.dtype).split(len(product)):
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
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    with torch.no_grad(), ProgressBar("rounds", cfg.rounds) as bar:
        for run in list(parts.values())[1:]:  # the forward is warm already, and it may take minutes
            run()
        for _ in range(cfg.rounds):
            for name, run in parts.items():
                times[name].append(seconds(run, backbone.device))
            bar.step()
    return times


def _print(figures: Mapping[str, Any]) -> None:
    print(f"{headline(figures['about'])}\n\n{__doc__}")
    layers = ", ".join(map(str, figures["layers"]))
    print(f"\n{figures['backbone']}: {figures['tokens']} tokens, {figures['turns']} turns")
    print(f"layers {layers}; d {figures['hidden_size']}, d_sae {figures['d_sae']}, k {figures['k']}")
    for name in ("forward", "scoring", "encode", "products", "prompt"):
        value = figures[f"{name}_s"]
        print(f"{name:<16}{1000 * value:>10.1f} ms{value / figures['forward_s']:>10.1%}")
    print(f"ratio {figures['ratio']:.1%}, of which products {figures['products_ratio']:.1%}")


if __name__ == "__main__":
    from remind.core.cli import main

    main(
        BenchGroundingConfig,
        bench_grounding,
        __doc__,
    )
