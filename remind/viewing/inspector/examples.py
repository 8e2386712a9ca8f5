"""Top examples of features from a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from remind.core.errors import ModelError
from remind.core.progress import Counter
from remind.data.dialogue import Dialogue
from remind.states.pyramid import line_of
from sae import SAEError, TopKSAE

if TYPE_CHECKING:
    from remind.models.backbone import Backbone
    from sae.probe import TopExamples


def corpus_examples(
    backbone: Backbone, saes: Mapping[int, TopKSAE], dialogues: Iterable[Dialogue], limit: int, per_feature: int
) -> dict[int, TopExamples]:
    """The turns of a corpus on which each feature fires most strongly, by layer; every turn is read by itself.

    Args:
        limit: turns at most. per_feature: examples of each feature, no two from one turn.

    Raises:
        ModelError: a turn the model cannot take.
    """
    from sae.probe import Probe, collect

    def lines() -> Iterator[tuple[str, str]]:
        for dialogue in dialogues:
            for turn in dialogue.turns:
                yield f"{dialogue.id} {turn.id}", line_of(turn)

    chosen = [pair for pair, _ in zip(lines(), range(limit), strict=False)]
    try:
        probe = Probe(backbone.model, backbone.tokenizer, saes)
        with Counter("examples", len(chosen)) as bar:
            return collect(probe, chosen, per_feature=per_feature, context=(10, 10), progress=bar.advance_to)
    except SAEError as error:
        raise ModelError(f"examples: {error}") from None
