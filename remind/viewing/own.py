"""One's own chat and questions, on the way to states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from remind.core.errors import ConfigError
from remind.data.dialogue import Corpus, Question
from remind.data.readers import write_refmem


def new_folder(path: str | Path) -> Path:
    """`path`-1, or the first number after it that is not taken: a notebook that is run again keeps what was there."""
    number = 1
    while (folder := Path(f"{path}-{number}")).exists():
        number += 1
    folder.mkdir(parents=True)
    return folder


def ask_about(
    corpus: Corpus,
    questions: Mapping[str, tuple[str | None, str | None]],
    out: str | Path,
    split: str = "train",
    dialogue_id: str = "",
) -> Path:
    """Write a dialogue with questions in free text about it, as RefMem-Bench JSONL for `build_states`.

    Args:
        corpus: of `remind.read`; questions it has already are kept.
        questions: of each the answer, None where nobody knows it (see `data.unlabelled`); and
            its dimension, one of `remind.data.dialogue.DIMENSIONS`, or None.
        split: train, dev or test, of all of them.
        dialogue_id: which dialogue they are about; "": the first one.

    Returns:
        `out`.

    Raises:
        ConfigError: no questions. DataError: no such dialogue.
    """
    if not questions:
        raise ConfigError("give at least one question")
    about = corpus.dialogue(dialogue_id or corpus.dialogues[0].id)
    asked = [
        Question(
            f"own-{number}", about.id, text, answers=() if answer is None else (answer,), dimension=kind, split=split
        )
        for number, (text, (answer, kind)) in enumerate(questions.items(), start=len(corpus.questions) + 1)
    ]
    write_refmem(Corpus(corpus.dialogues, (*corpus.questions, *asked)), out)
    return Path(out)
