"""Settings of salience-guided grounding (Section 4.3)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from remind.core.errors import ConfigError, DataError, brief
from sae.ranges import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    Share,
    check_ranges,
)

#: Scores that `fuse` standardises and weighs twice: as they stand, and averaged over the turns around.
SCORES = ("summed", "each", "dense", "bm25")
#: Facts of a turn that `fuse` weighs as they are.
FACTS = ("speaker", "date", "asks", "answers", "length")
#: Names of the weights, in the order of `fusion.design`'s last dimension.
WEIGHTS = tuple(name for score in SCORES for name in (score, f"{score}_context")) + FACTS
#: How token scores become one (Agg of Eq. 5); a number: of the largest ones that are averaged.
AGGREGATE = re.compile(r"mean|max|top([1-9][0-9]*)")
#: What the sparse codes and their places give by themselves.
_FROM_CODES = ("summed", "each", "length")


@dataclass
class FusionConfig:
    """Weights of the fused salience: a logit of "this turn is evidence", linear in the scores.

    The defaults were fitted (`python -m experiments.evidence`) to 1,249 questions on LoCoMo and 428 on REALTALK, with
    MiniLM, SAEs of layers 4 and 5 and the question's own words as anchors, and held on dialogues left out. The scores
    nearly repeat each other, so that a single weight, or its sign, says little.
    """

    summed: FiniteFloat = 0.15
    """Weight of the turn's resonance (Eq. 3 to 5), in standard deviations over the turns at hand."""
    summed_context: FiniteFloat = -0.09
    """Weight of that resonance around the turn, in standard deviations of it."""
    each: FiniteFloat = 0.08
    """Weight of the resonance counted word by word (`match_each`)."""
    each_context: FiniteFloat = 0.22
    """Weight of it around the turn."""
    dense: FiniteFloat = 0.6
    """Weight of the cosine of question and turn."""
    dense_context: FiniteFloat = 0.32
    """Weight of that cosine around the turn."""
    bm25: FiniteFloat = -0.01
    """Weight of BM25 over stems."""
    bm25_context: FiniteFloat = 0.18
    """Weight of BM25 around the turn."""
    speaker: FiniteFloat = 1.84
    """Added where the question names the turn's speaker."""
    date: FiniteFloat = 3.54
    """Added where the turn's day is one the question names; half of it up to two days from a single day."""
    asks: FiniteFloat = -0.62
    """Added to a turn with a question mark."""
    answers: FiniteFloat = 0.75
    """Added to the turn that follows one."""
    length: FiniteFloat = -0.46
    """Weight of ln(1 + tokens). Short turns rarely are evidence, but a budget in tokens pays for long ones: this is the
    fitted weight, .54, less 1, so that what is ranked is about evidence per token."""
    sigma: Annotated[float, Range(gt=0, le=10_000)] = 3.0
    """Width in turns of the Gaussian that "around" means; it does not leave a run of turns."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)

    @property
    def reads_text(self) -> bool:
        """Whether any weight needs what `TurnIndex` computes."""
        return any(getattr(self, name) for name in WEIGHTS if name.removesuffix("_context") not in _FROM_CODES)


@dataclass
class GroundingConfig:
    """Guidance, resonance, turn selection.

    The paper's α, β, λ, w and 3.2K tokens (Section 5.1, Appendix E.2) are defaults. Other fields say what is ours, or
    not in the paper at all; configs/paper/grounding_as_printed.yaml is Section 4.3 without what is ours.
    """

    alpha: NonNegativeFloat = 6.0
    """Weight of an anchor token against a reasoning token in the guidance (α of Eq. 3)."""
    beta: NonNegativeFloat = 4.0
    """Weight of the speaker-conditioned broadcast (β of Eq. 4), in units of `beta_unit`."""
    beta_unit: PositiveFloat | None = 0.025
    """Unit of β, as a share of the mean active code. The broadcast sums weights without activations, so the effect of a
    β depends on the scale of the SAE's codes, which the paper does not give; with codes of 1.4 on average, a plain 4
    drowns the local alignment. The default is ours. None: the codes' own units, Eq. 4 as printed."""
    lam: Share = 0.3
    """Share of image captions in a turn's salience, between 0 and 1 (λ of Eq. 5)."""
    sigma: Annotated[float, Range(ge=0, le=10_000)] = 0.5
    """Width in tokens of the Gaussian that smooths resonance within a run of turns; 0: none. The paper has a Gaussian
    and names no width; on real dialogues every wider one finds less evidence."""
    anchor_codes: Literal["strategy", "question"] = "strategy"
    """Whose tokens count as T_anchor. strategy: the strategy's anchors, as in the paper. question: the question's own
    content words, each seen in the whole question, which finds more evidence where no LLM writes the strategy."""
    match: Literal["summed", "each"] = "summed"
    """How anchors and turns are compared. summed: Eq. 3 to 5, all tokens added up into one guidance. each: every
    anchor token looks for its best partner in the turn (`match_each`); alpha, beta, lam, sigma and agg then have no
    part in the salience."""
    layers: Literal["all", "last"] = "all"
    """Which layers' SAEs are used: all, each standardised and then averaged, or the last alone. The paper has SAEs of
    four layers and does not say how they are joined."""
    agg: str = "top3"
    """How token scores become one score (Agg of Eq. 5): mean, max, or top<m> for the mean of the m largest. The paper
    does not say which; on real dialogues the plain mean finds far less evidence."""
    budget_tokens: NonNegativeInt = 3200
    """Tokens that the marked blocks may hold in all (the paper sets δ so that 3.2K tokens are kept)."""
    budget_share: PositiveShare = 0.44
    """Share of the retrieved tokens that the blocks may hold; the smaller of the two budgets holds. Without it a short
    history would be marked from end to end. Ours: 0.44 is 3.2K tokens of the 7.2K that a fifth of RefMem-Bench's
    average history takes. 1: the budget in tokens alone."""
    threshold: FiniteFloat | None = None
    """Salience threshold δ in place of both budgets: raw resonance with one layer, standard deviations with several."""
    window: NonNegativeInt = 1
    """Turns on either side of a salient one that are marked with it (w)."""
    fuse: FusionConfig | None = None
    """Weights that join retrieval scores and facts of a turn to its resonance; None: resonance alone, as in the paper.
    `{}` takes the fitted weights, which go with anchor_codes question and window 0. Both kinds of `match` are fused, so
    that match has no effect."""
    context_codes: Literal["auto", "joint", "windowed"] = "auto"
    """Where codes come from, which the paper does not say. joint: one forward of the x0 prompt, so that dialogue tokens
    see all of the retrieved dialogue before them. windowed: the whole dialogue in windows, cached for its other
    questions, and the strategy apart. auto: joint for causal models, windowed for encoders."""
    window_tokens: PositiveInt = 256
    """Longest window of `windowed`, in tokens; never more than the model takes."""
    batch_size: PositiveInt = 8
    """Windows encoded at once. Does not change results beyond rounding."""
    idf: Literal["auto", "dialogue", "corpus", "none"] = "auto"
    """Documents that features' idf is counted over, which the paper does not name. dialogue: the turns at hand (all of
    the dialogue's in `windowed`, the retrieved ones in `joint`). corpus: what was saved with the SAE. auto: dialogue in
    `windowed`, corpus in `joint` where the SAEs have one. none: every feature weighs the same, for comparison."""
    anchor_idf: bool = True
    """Weigh anchor features by idf too. Ours: Eq. 3 does not; on real dialogues it finds more evidence."""
    sink_ratio: Annotated[float, Range(gt=1)] = 10.0
    """Tokens whose hidden state is longer than this many times the median of their window are attention sinks, which
    SAEs are not trained on: they get no codes. Not in the paper."""
    codes_folder: str | None = None
    """Folder that keeps the codes of `windowed` for later runs; None: in memory only."""
    images: Literal["captions", "pixels"] = "captions"
    """What the model reads of images in `joint`: their captions, or the images as pixels in place of the caption
    wherever the file is known, as training shows them (data.images). Image tokens count as those of the caption."""
    image_tokens: PositiveInt = 256
    """At most about so many tokens for an image shown as pixels; larger ones are made smaller."""
    image_root: str | None = None
    """Folder that the image files must lie in, links followed; None: they are read wherever the dialogues say."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if AGGREGATE.fullmatch(self.agg) is None:
            raise ConfigError(f"no aggregate {self.agg!r}; there are mean, max and top<m>, such as top5")
        if self.images == "pixels" and self.context_codes == "windowed":
            raise ConfigError("grounding.images pixels needs grounding.context_codes joint: windows show captions")


def grounding_config(values: Mapping[str, Any], path: str | Path | None = None) -> GroundingConfig:
    """Settings from a manifest; fields this version does not know are ignored, and so are folders.

    Args:
        path: the manifest, for errors.

    Raises:
        DataError: a value that its field cannot hold.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        # a manifest may be somebody else's, and must name no folder to write to
        return TypeAdapter(GroundingConfig).validate_python({**values, "codes_folder": None, "image_root": None})
    except (ValidationError, ConfigError) as error:
        raise DataError(f"grounding: {brief(error)}", path) from None
