"""What grounding costs on top of the backbone's forward, part by part, side by side in one process."""

from __future__ import annotations

import platform
import statistics
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import accumulate, cycle, pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from remind.core.errors import ConfigError, ModelError
from remind.core.files import write_json
from remind.core.progress import Counter
from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.grounding.codes import joint_codes
from remind.grounding.config import GroundingConfig
from remind.grounding.encode import turn_idf
from remind.grounding.ground import Grounder
from remind.grounding.places import token_places
from remind.grounding.resonance import combine_layers, guidance, smooth_runs, token_resonance
from remind.models.backbone import Backbone
from remind.models.load import load_backbone
from remind.states.pyramid import FactualState, Segment, Strategy, render
from sae import TopKSAE

#: Text decoders of Qwen3-VL as `nano_model` builds them, with random weights; only the vocabulary is smaller.
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-vl-2b": {"hidden_size": 2048, "layers": 28, "heads": 16, "kv_heads": 8},
    "qwen3-vl-8b": {"hidden_size": 4096, "layers": 36, "heads": 32, "kv_heads": 8},
}
_STRATEGY = Strategy(
    ("Collect what is said about the habit in order of time.", "Compare earlier and later statements."),
    *(("Mara",), ("running", "the morning", "coffee"), ("how the opinion changes",), ("since spring",)),
)
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
    used = images = 0
    for session in cycle([session for dialogue in corpus.dialogues for session in dialogue.sessions]):
        turns: list[Turn] = []
        for turn in session.turns:
            shown = tuple(Image(images + n, caption=image.caption) for n, image in enumerate(turn.images))
            images += len(shown)
            turns.append(Turn(f"{len(sessions)}:{len(turns)}", turn.speaker, turn.text, turn.time, shown))
            used += len(backbone.tokenize(turn.text).ids)
        sessions.append(Session(str(len(sessions)), session.time, tuple(turns)))
        if used >= tokens:
            break
    dialogue = Dialogue("bench", tuple(sessions))
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
    length = sum(start < rendered.strategy[1] for start, _ in tokens.offsets)
    before, after = backbone.frame
    ids = torch.tensor([[*before, *tokens.ids[:length], *after]])
    if ids.shape[1] > backbone.max_length:
        raise ModelError(f"{backbone.name} takes {backbone.max_length} tokens, not {ids.shape[1]}; set tokens lower")
    replay.states = backbone.hidden_states(ids, None, list(saes))
    states = {layer: hidden[0] for layer, hidden in replay.states.items()}
    codes = joint_codes(grounder.encoder, state)

    def guides_of() -> dict[int, Tensor]:
        layers = codes.layers.items()
        return {layer: guidance(own.reasoning, own.anchors, own.idf, config.alpha) for layer, own in layers}

    guides = guides_of()
    runs = torch.tensor(state.runs)[codes.turn]

    def resonance() -> Tensor:
        by_layer = []
        for layer, own in codes.layers.items():
            speakers = codes.speakers(layer)
            by_layer.append(token_resonance(own.dialogue, guides[layer], codes.turn, speakers, 1.0, run=state.runs))
        return combine_layers(by_layer)

    scores = resonance()
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
        "idf": lambda: [turn_idf(own.dialogue, codes.turn, cfg.d_sae) for own in codes.layers.values()],
        "guidance": guides_of,
        "resonance": resonance,
        "smoothing": lambda: smooth_runs(scores, runs, config.sigma),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    with torch.no_grad(), Counter("rounds", cfg.rounds) as bar:
        for run in list(parts.values())[1:]:  # the forward is warm already, and it may take minutes
            run()
        for _ in range(cfg.rounds):
            for name, run in parts.items():
                seconds[name].append(_timed(run, backbone.device))
            bar.step()
    return seconds


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = perf_counter()
    run()
    wait()
    return perf_counter() - started


def _windowed_seconds(
    backbone: Backbone, saes: Mapping[int, TopKSAE], state: FactualState, config: GroundingConfig
) -> dict[str, float]:
    """Seconds of one question whose dialogue is new, in memory, and on disk as another process left it."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        first, second = (Grounder(backbone, saes, None, replace(config, codes_folder=folder)) for _ in range(2))
        for name, grounder in (("new", first), ("memory", first), ("disk", second)):
            assert grounder.windowed.store is not None
            # hashing the weights happens once in a process, not once a question
            grounder.windowed.store.key([])
            seconds[name] = _timed(lambda g=grounder: g.ground(state), backbone.device)  # type: ignore[misc]
    return seconds


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
