"""Settings of salience-guided grounding (Section 4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from remind.core.errors import ConfigError, DataError, shown
from remind.grounding.fusion import FusionConfig
from remind.grounding.resonance import kernel_radius
from remind.grounding.salience import parse_aggregate


@dataclass
class GroundingConfig:
    """Guidance, resonance, turn selection. Where the paper gives a value it is the default."""

    alpha: float = 6.0
    """Weight of an anchor token against a reasoning token in the guidance (α of Eq. 3)."""
    beta: float = 4.0
    """Weight of the speaker-conditioned broadcast (β of Eq. 4), in units of `beta_unit`."""
    beta_unit: float | None = 0.025
    """What β is counted in, as a share of the mean active code. The broadcast sums weights without activations, so what
    a β is worth depends on the scale of the SAE's codes, which the paper does not tell; with codes of 1.4 on average, a
    plain 4 drowns the local alignment. None: the codes' own units, Eq. 4 as printed."""
    lam: float = 0.3
    """Share of image captions in a turn's salience, between 0 and 1 (λ of Eq. 5)."""
    sigma: float = 0.5
    """Width in tokens of the Gaussian that smooths resonance within a run of turns; 0: none. Not given in the paper; on
    real dialogues every wider one finds less evidence."""
    anchor_codes: Literal["strategy", "question"] = "strategy"
    """Whose tokens count as T_anchor. strategy: the strategy's anchors, as in the paper. question: the question's own
    content words, each seen in the whole question, which finds more evidence where no LLM writes the strategy."""
    match: Literal["summed", "each"] = "summed"
    """How anchors and turns are compared. summed: Eq. 3 to 5, all tokens added up into one guidance. each: every
    anchor token looks for its best partner in the turn (`match_each`); alpha, beta, lam, sigma and agg then have no
    part in the salience."""
    layers: Literal["all", "last"] = "all"
    """Which layers' SAEs are used: all, each standardised and then averaged, or the last alone."""
    agg: str = "top3"
    """How token scores become one score (Agg of Eq. 5): mean, max, or top<m> for the mean of the m largest. The paper
    does not say which; on real dialogues the plain mean finds far less evidence."""
    budget_tokens: int = 3200
    """Tokens that the marked blocks may hold in all (the paper sets δ so that 3.2K tokens are kept)."""
    budget_share: float = 0.44
    """Share of the retrieved tokens that the blocks may hold; the smaller of the two budgets holds. Without it a short
    history would be marked from end to end. 0.44 is 3.2K tokens of the paper's 7.2K."""
    threshold: float | None = None
    """Salience threshold δ in place of both budgets: raw resonance with one layer, standard deviations with several."""
    window: int = 1
    """Turns on either side of a salient one that are marked with it (w)."""
    smooth_turns: float = 0.0
    """Weight with which each neighbouring turn shares in a turn's salience before selection; 0: not at all, as in the
    paper. 0.5 with window 0 is a softer alternative to a window."""
    fuse: FusionConfig | None = None
    """Weights that join retrieval scores and facts of a turn to its resonance; None: resonance alone, as in the paper.
    `{}` takes the fitted weights, which go with anchor_codes question and window 0. Both kinds of `match` are fused, as
    they are before neighbours share in them: match and smooth_turns have no part."""
    context_codes: Literal["auto", "joint", "windowed"] = "auto"
    """Where codes come from. joint: one forward of the x0 prompt, so that dialogue tokens see all of the retrieved
    dialogue before them. windowed: the whole dialogue in windows, kept for its other questions, and the strategy apart.
    auto: joint for causal models, windowed for encoders."""
    window_tokens: int = 256
    """Longest window of `windowed`, in tokens; never more than the model takes."""
    batch_size: int = 8
    """Windows encoded at once. Does not change results beyond rounding."""
    idf: Literal["auto", "dialogue", "corpus", "none"] = "auto"
    """Documents that features' idf is counted over. dialogue: the turns at hand (all of the dialogue's in `windowed`,
    the retrieved ones in `joint`). corpus: what was saved with the SAE. auto: dialogue in `windowed`, corpus in `joint`
    where the SAEs have one. none: every feature weighs the same, for comparison."""
    anchor_idf: bool = True
    """Weigh anchor features by idf too. Eq. 3 does not; on real dialogues it finds more evidence."""
    sink_ratio: float = 10.0
    """Tokens whose hidden state is longer than this many times the median of their window are attention sinks, which
    SAEs are not trained on: they get no codes."""
    cached_dialogues: int = 4
    """Dialogues whose codes stay in memory in `windowed`."""
    codes_folder: str | None = None
    """Folder that keeps the codes of `windowed` for later runs; None: they are kept in memory alone."""

    def __post_init__(self) -> None:
        parse_aggregate(self.agg)
        kernel_radius(self.sigma)
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"grounding: lam must lie between 0 and 1, not {self.lam}")
        if not 0 < self.budget_share <= 1:
            raise ConfigError(f"grounding: budget_share must lie in (0, 1], not {self.budget_share}")
        if self.beta_unit is not None and self.beta_unit <= 0:
            raise ConfigError(f"grounding: beta_unit must be more than 0, or none, not {self.beta_unit}")
        if self.sink_ratio <= 1:
            raise ConfigError(f"grounding: sink_ratio must be more than 1, not {self.sink_ratio}")
        for name, least in (
            ("budget_tokens", 0),
            ("window", 0),
            ("smooth_turns", 0),
            ("window_tokens", 1),
            ("batch_size", 1),
            ("cached_dialogues", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"grounding: {name} must be at least {least}, not {getattr(self, name)}")
        for name, known in (
            ("context_codes", ("auto", "joint", "windowed")),
            ("idf", ("auto", "dialogue", "corpus", "none")),
            ("anchor_codes", ("strategy", "question")),
            ("match", ("summed", "each")),
            ("layers", ("all", "last")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"grounding: {name} is one of {', '.join(known)}, not {getattr(self, name)!r}")


def grounding_config(values: Mapping[str, Any], path: str | Path | None = None) -> GroundingConfig:
    """Settings from a manifest; what this version does not know is passed over, and where codes were kept.

    Args:
        path: the manifest, for errors.

    Raises:
        DataError: a value that cannot be.
    """
    try:
        given = _known(GroundingConfig, values)
        # a manifest may be another's, and names no folder to write to
        given.pop("codes_folder", None)
        if isinstance(fuse := given.get("fuse"), Mapping):
            given["fuse"] = FusionConfig(**_checked(FusionConfig, _known(FusionConfig, fuse)))
        return GroundingConfig(**_checked(GroundingConfig, given))
    except (ConfigError, OverflowError) as error:
        raise DataError(str(error), path) from None


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {entry.name for entry in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _checked(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for a value of another type than its field."""
    hints = get_type_hints(kind)
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise ConfigError(f"grounding: {name} cannot be {shown(value)}")
    return values


def _fits(value: object, hint: Any) -> bool:
    if parts := get_args(hint):
        return value in parts if get_origin(hint) is Literal else any(_fits(value, part) for part in parts)
    # settings are whole numbers where a person left out the point
    return type(value) in ((float, int) if hint is float else (hint,))
