"""Claims about the images a speaker shares: what they show, what stands beside it, and what is said with it."""

from __future__ import annotations

from collections.abc import Iterator

from remind.data.dialogue import Dialogue
from remind.refmem.claims import ANCHORS, RECURS, Claim
from remind.refmem.cluster import Cluster
from remind.refmem.themes import Themes, spoken
from remind.text.words import stem


def image_claims(dialogue: Dialogue, themes: Themes, cluster: Cluster, vocabulary: frozenset[str]) -> Iterator[Claim]:
    """Claims of the three visual dimensions on a cluster of one speaker's images.

    Args:
        vocabulary: motifs of all captions of the corpus, as written; those the speaker never shows are distractors.
    """
    speaker = cluster.speaker or ""
    every = themes.images_of(speaker)
    own = list(cluster.images)
    motifs = sorted({motif for index in own for motif in themes.pictured[index]})
    shown = {motif: [index for index in own if motif in themes.pictured[index]] for motif in motifs}
    yield from _baseline(themes, speaker, every, shown, vocabulary)
    for motif, images in shown.items():
        if len(images) >= 2:
            yield _beside(themes, speaker, every, motif, images)
            yield _spoken(dialogue, themes, speaker, every, motif, images)


def _baseline(
    themes: Themes, speaker: str, every: list[int], shown: dict[str, list[int]], vocabulary: frozenset[str]
) -> Iterator[Claim]:
    dimension = "personalized_visual_baselines"
    held = {themes.form(motif) for index in every for motif in themes.pictured[index]}
    # stems as well: a caption of another dialogue may write the same motif in another form
    stems = {motif for index in every for motif in themes.pictured[index]}
    never = tuple(sorted(word for word in vocabulary if word not in held and stem(word) not in stems))
    holds = {themes.form(m): tuple(images[:ANCHORS]) for m, images in shown.items() if len(images) >= RECURS}
    rest = [m for m in shown if themes.form(m) not in holds]
    rest.sort(key=lambda m: (-len(shown[m]), m))
    scope = " and ".join(themes.form(m) for m in rest[:2]) if len(rest) > 1 else ""
    formats = ("single", "multi", "direct") if scope else ("single", "multi")
    yield Claim(dimension, "shows", speaker, holds, never, {"scope": scope, "least": "three"}, formats)
    for motif, images in shown.items():
        total = sum(motif in themes.pictured[index] for index in every)
        if 2 <= total == len(images) <= 2 * ANCHORS:
            numbers = tuple(str(n) for n in range(1, 2 * ANCHORS + 2))
            values = {"theme": themes.form(motif)}
            yield Claim(dimension, "pictures", speaker, {str(total): tuple(images)}, numbers, values, ("direct",))


def _beside(themes: Themes, speaker: str, every: list[int], motif: str, images: list[int]) -> Claim:
    others = sorted({other for index in images for other in themes.pictured[index]} - {motif})
    holds = {}
    for other in others:
        both = [index for index in images if other in themes.pictured[index]]
        if len(both) >= 2:
            holds[themes.form(other)] = tuple(both[:ANCHORS])
    all_of = [index for index in every if motif in themes.pictured[index]]
    # without options the question is about all of the speaker's pictures: the cluster has to hold them
    formats = ("single", "multi", "direct") if len(all_of) == len(images) else ("single", "multi")
    beside = {other for index in every if motif in themes.pictured[index] for other in themes.pictured[index]}
    rest = {other for index in every for other in themes.pictured[index]} - beside
    wrong = tuple(themes.form(other) for other in sorted(rest))
    values = {"theme": themes.form(motif)}
    return Claim("topic_scoped_visual_prototypes", "beside", speaker, holds, wrong, values, formats)


def _spoken(dialogue: Dialogue, themes: Themes, speaker: str, every: list[int], motif: str, images: list[int]) -> Claim:
    holds: dict[str, tuple[int, ...]] = {}
    for index in images:
        turn = themes.sharer[index][1]
        words = {stem(word) for word in spoken(" ".join(i.caption or "" for i in dialogue.turns[turn].images))}
        for name, found in themes.of(speaker).items():
            if name not in words and any(mention.turn == turn for mention in found):
                holds[themes.form(name)] = (*holds.get(themes.form(name), ()), index)
    heard = {stem(w) for i in every if motif in themes.pictured[i] for w in _with(dialogue, themes, i)}
    wrong = tuple(themes.form(name) for name in sorted(themes.of(speaker)) if name not in heard)
    ordered = dict(sorted(holds.items(), key=lambda pair: (-len(pair[1]), pair[0])))
    whole = len(images) == sum(motif in themes.pictured[index] for index in every)
    formats = ("single", "multi", "direct") if whole else ("single", "multi")
    values = {"theme": themes.form(motif)}
    return Claim("cross_modal_latent_inference", "spoken", speaker, ordered, wrong, values, formats, turns=True)


def _with(dialogue: Dialogue, themes: Themes, index: int) -> list[str]:
    """Words of the turn an image stands in, its captions included."""
    turn = dialogue.turns[themes.sharer[index][1]]
    return spoken(" ".join([turn.text, *(image.caption or "" for image in turn.images)]))
