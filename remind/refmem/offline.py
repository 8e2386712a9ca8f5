"""The stand-in for an LLM that writes items: plain questions whose answers follow from counting (`claims`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import combinations
from random import Random

from remind.core.progress import track
from remind.data.dialogue import Corpus, Dialogue
from remind.refmem.claims import Claim, text_claims
from remind.refmem.cluster import Cluster
from remind.refmem.config import ItemsConfig
from remind.refmem.items import Item, with_id
from remind.refmem.picture_claims import image_claims
from remind.refmem.themes import Nouns, Themes
from remind.states import prompts
from remind.states.pyramid import LETTERS

TEMPLATE = "refmem_offline"
NAME = "offline-1"
OPTIONS = 4
#: Acceptable phrases of a direct item, and candidates shown to annotators, at most.
ACCEPTED, CANDIDATES = 6, 8


def write_offline(corpus: Corpus, clusters: Sequence[Cluster], config: ItemsConfig) -> list[Item]:
    """Items of all clusters, in their order, answer letters balanced over the single-choice ones."""
    nouns = Nouns.of(corpus)
    by_dialogue: dict[str, list[Cluster]] = {dialogue.id: [] for dialogue in corpus.dialogues}
    for cluster in clusters:
        by_dialogue[cluster.dialogue_id].append(cluster)
    themes = {dialogue.id: Themes(dialogue, nouns) for dialogue in corpus.dialogues}
    vocabulary = frozenset(
        one.form(motif) for one in themes.values() for motifs in one.pictured.values() for motif in motifs
    )
    items: dict[str, Item] = {}
    for dialogue in track(corpus.dialogues, "items", len(corpus.dialogues)):
        for cluster in by_dialogue[dialogue.id]:
            for item in of_cluster(dialogue, themes[dialogue.id], cluster, vocabulary, config):
                items.setdefault(item.id, item)
    return balanced(list(items.values()), config.seed)


def of_cluster(
    dialogue: Dialogue, themes: Themes, cluster: Cluster, vocabulary: frozenset[str], config: ItemsConfig
) -> Iterator[Item]:
    """Items of one cluster: of each dimension and format at most `config.per_cluster`."""
    rng = Random(f"{config.seed}:{cluster.id}")
    if cluster.branch == "text":
        claims = list(text_claims(dialogue, themes, cluster))
    else:
        claims = list(image_claims(dialogue, themes, cluster, vocabulary))
    rng.shuffle(claims)
    made: Counter[tuple[str, str]] = Counter()
    for claim in claims:
        for format in claim.formats:
            if format not in config.formats or made[claim.dimension, format] >= config.per_cluster:
                continue
            item = _item(dialogue, cluster, claim, format, rng)
            if item is not None:
                made[claim.dimension, format] += 1
                yield item


def _item(dialogue: Dialogue, cluster: Cluster, claim: Claim, format: str, rng: Random) -> Item | None:
    values = {"scope": "", "theme": "", "least": "", "date": "", **claim.values}
    question = " ".join(
        prompts.render(
            TEMPLATE, kind=claim.kind, format=format, dimension=claim.dimension, speaker=claim.speaker, **values
        ).split()
    )
    held = [answer for answer in claim.holds if answer not in values.values()]
    wrong = [answer for answer in claim.fails if answer not in claim.holds and answer not in values.values()]
    options: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    if not held:
        return None
    if format == "direct":
        if len(held) > ACCEPTED:
            return None
        gold, answers = held, tuple(held)
        extra = rng.sample(wrong, min(len(wrong), CANDIDATES - len(held)))
        candidates = tuple(rng.sample(held + extra, len(held) + len(extra)))
    else:
        count = 1 if format == "single" else rng.randint(1, min(OPTIONS, len(held)))
        gold = rng.sample(held, count)
        if claim.fixed:
            options = claim.fixed
        elif len(wrong) < OPTIONS - count:
            return None
        else:
            options = tuple(gold + rng.sample(wrong, OPTIONS - count))
        answers = tuple(sorted(LETTERS[options.index(answer)] for answer in gold))
    anchors = sorted({anchor for answer in gold for anchor in claim.holds[answer]})
    images = tuple(anchors) if cluster.branch == "image" else ()
    turns = () if cluster.branch == "image" else tuple(dialogue.turns[place].id for place in anchors)
    if claim.turns:
        chosen = set(images)
        turns = tuple(turn.id for turn in dialogue.turns if any(image.index in chosen for image in turn.images))
    return with_id(
        Item(
            "",
            dialogue.id,
            cluster.id,
            cluster.branch,
            claim.dimension,
            format,
            question,
            options,
            answers,
            candidates,
            turns,
            images,
            NAME,
            prompts.prompt_id(TEMPLATE),
        )
    )


def _digest(seed: int, item: Item) -> str:
    return sha256(f"{seed}:{item.id}".encode()).hexdigest()


def balanced(items: Sequence[Item], seed: int) -> list[Item]:
    """The same items with their options in another order.

    The answers of single-choice items stand under each letter equally often (up to one); those of multi-choice items
    form each set of letters of their size equally often.
    """
    turn: Counter[int] = Counter()
    placed: dict[str, Item] = {}
    for item in sorted(items, key=lambda item: _digest(seed, item)):
        if not item.options:
            placed[item.id] = item
            continue
        size = len(item.answers)
        sets = list(combinations(range(len(item.options)), size))
        places = sets[turn[size] % len(sets)] if item.format == "multi" else (turn[0] % len(item.options),)
        turn[size if item.format == "multi" else 0] += 1
        rng = Random(_digest(seed, item))
        gold = rng.sample(item.gold, size)
        rest = [option for option in item.options if option not in gold]
        rng.shuffle(rest)
        order = [gold.pop() if place in places else rest.pop() for place in range(len(item.options))]
        placed[item.id] = replace(item, options=tuple(order), answers=tuple(LETTERS[place] for place in places))
    return [placed[item.id] for item in items]
