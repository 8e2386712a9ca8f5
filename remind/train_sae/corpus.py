"""Dialogues to train on: reading, splitting, and names for numbered speakers. Importing this needs no torch."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from remind.core.errors import DataError
from remind.core.files import input_hashes
from remind.data.dialogue import Dialogue
from remind.data.readers import read
from remind.train_sae.config import TrainSAEConfig

#: Given names that are common somewhere.
NAMES = tuple(Path(__file__).with_name("names.txt").read_text(encoding="utf-8").split())
_LABEL = r"(?:(?:speaker|user|person|participant|agent|human|caller)[ _#-]*)?"
_NUMBERED = re.compile(_LABEL + r"(?:\d+|[A-Z])", re.IGNORECASE)


def data_paths(data: str | Sequence[str]) -> list[Path]:
    """Files and folders; the bundled small talk where none are given."""
    if data:
        return [Path(data)] if isinstance(data, str) else [Path(path) for path in data]
    from remind.data.sample import corpus_path

    return [Path(corpus_path())]


def read_corpus(cfg: TrainSAEConfig) -> tuple[list[Dialogue], list[Dialogue]]:
    """The dialogues to train on, with speakers named, and those held out.

    Raises DataError for no dialogues, or a file to evaluate on that is also trained on.
    """
    paths = data_paths(cfg.data)
    training, held_out = read_dialogues(paths, cfg), []
    if cfg.evaluate_on:
        others, hashes = data_paths(cfg.evaluate_on), {*input_hashes(paths).values()}
        for path in others:
            for name, digest in input_hashes([path]).items():
                if digest in hashes:
                    raise DataError(f"{name} is trained on and cannot be evaluated on", path)
        held_out = _with_images(others, replace(cfg, format=None, limit=None))
    else:
        training, held_out = split_dialogues(training, cfg.held_out, cfg.trainer.seed)
    if cfg.name_speakers:
        training = [with_names(dialogue, cfg.trainer.seed) for dialogue in training]
    return training, held_out


def _with_images(paths: Sequence[Path], cfg: TrainSAEConfig) -> list[Dialogue]:
    """`read_dialogues`, with files of `cfg.images` where any belongs to them."""
    try:
        return read_dialogues(paths, cfg)
    except DataError:
        if cfg.images is None:
            raise
        # a folder without any of theirs is an error, and those to evaluate on need have none
        return read_dialogues(paths, replace(cfg, images=None))


def read_dialogues(paths: Sequence[Path], cfg: TrainSAEConfig) -> list[Dialogue]:
    """Dialogues of all paths in a random order fixed by the seed, until they have `cfg.limit` turns in all."""
    dialogues = [
        (f"{number}:{dialogue.id}", dialogue)
        for number, path in enumerate(paths)
        for dialogue in read(path, cfg.format, cfg.images).dialogues
    ]
    dialogues.sort(key=lambda item: hashlib.sha256(f"{cfg.trainer.seed}:{item[0]}".encode()).digest())
    chosen, turns = [], 0
    for _, dialogue in dialogues:
        if cfg.limit is not None and turns >= cfg.limit:
            break
        chosen.append(dialogue)
        turns += len(dialogue.turns)
    if not chosen:
        raise DataError("no dialogues to train on", paths[0])
    return chosen


def split_dialogues(dialogues: list[Dialogue], share: float, seed: int) -> tuple[list[Dialogue], list[Dialogue]]:
    """(training, held out). Whole dialogues; at least one is held out if there are two and share > 0."""
    order = list(range(len(dialogues)))
    random.Random(seed).shuffle(order)
    held_out = set(order[: min(math.ceil(share * len(dialogues)), len(dialogues) - 1)])
    return (
        [d for number, d in enumerate(dialogues) if number not in held_out],
        [d for number, d in enumerate(dialogues) if number in held_out],
    )


def with_names(dialogue: Dialogue, seed: int) -> Dialogue:
    """Give numbered speakers ("Speaker 1", "user_2", "B") names drawn anew for each session; others keep theirs.

    An SAE that never saw a name before a turn reconstructs names badly, and real dialogues hold one in every turn.
    """
    numbered = sorted({turn.speaker for turn in dialogue.turns if _NUMBERED.fullmatch(turn.speaker.strip())})
    if not numbered:
        return dialogue
    draw = random.Random(f"{seed}:{dialogue.id}")
    sessions = []
    for session in dialogue.sessions:
        # more speakers than names: the rest keep their numbers
        names = dict(zip(numbered, draw.sample(NAMES, min(len(numbered), len(NAMES))), strict=False))
        turns = tuple(replace(turn, speaker=names.get(turn.speaker, turn.speaker)) for turn in session.turns)
        sessions.append(replace(session, turns=turns))
    return replace(dialogue, sessions=tuple(sessions))
