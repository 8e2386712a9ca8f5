"""The bundled benchmark: the files whose answers were checked against the turns they name, well formed and balanced."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from remind.data import sample
from remind.data.dialogue import DIMENSIONS, FORMATS, Corpus, Question
from remind.data.readers import read

LETTERS = "ABCD"
#: Every answer in these files was worked out anew from turns and captions alone. A new version needs that done again.
CHECKED = "c72715958ea7c67e83ae45ad46b3d2ec688a6da8396df1aed9333fc90c2ad8f9"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read(sample.sample_path())


def of_format(corpus: Corpus, *formats: str) -> list[Question]:
    return [question for question in corpus.questions if question.format in formats]


def digest(*folders: Path) -> str:
    paths = [path for folder in folders for path in sorted(folder.glob("*.jsonl"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def test_the_files_are_those_that_were_checked() -> None:
    assert digest(sample.sample_path(), sample.corpus_path()) == CHECKED


def test_sizes_and_splits(corpus: Corpus) -> None:
    assert not corpus.dangling
    assert len(corpus.dialogues) == 12
    assert all(len(dialogue.sessions) == 6 for dialogue in corpus.dialogues)
    assert set(Counter(question.dialogue_id for question in corpus.questions).values()) == {16}
    owners = defaultdict(set)
    for question in corpus.questions:
        owners[question.split].add(question.dialogue_id)
    assert {name: len(ids) for name, ids in owners.items()} == {"train": 7, "dev": 2, "test": 3}
    for split in ("train", "test"):
        there = {(question.dimension, question.format) for question in corpus.questions if question.split == split}
        assert there == {(dimension, kind) for dimension in DIMENSIONS for kind in FORMATS}


def test_small_talk_shares_neither_line_nor_speaker_with_the_benchmark(corpus: Corpus) -> None:
    talk = read(sample.corpus_path())
    assert (len(talk.dialogues), talk.questions) == (48, ())
    for name in ("text", "speaker"):
        lines, ours = ({getattr(t, name) for d in one.dialogues for t in d.turns} for one in (talk, corpus))
        assert not lines & ours


def test_evidence_is_scattered_and_that_of_the_speaker_asked_about(corpus: Corpus) -> None:
    for question in corpus.questions:
        dialogue = corpus.dialogue(question.dialogue_id)
        turns = [dialogue.turn(name) for name in question.evidence]
        assert len(set(question.evidence)) == len(turns) > 0
        assert list(question.images) == [image.index for turn in turns for image in turn.images] * question.visual
        if question.dimension != "cross_modal_latent_inference":
            assert len({dialogue.session_of[turn.id].id for turn in turns}) >= 3, question.id
        named = [name for name in dialogue.speakers if re.search(rf"\b{name}\b", question.text)]
        speakers = {turn.speaker for turn in turns}
        assert len(named) == 1
        assert speakers >= set(named) if question.dimension == "implicit_boundary_modeling" else speakers == set(named)


def test_options_and_answers_fit_the_format_and_give_nothing_away(corpus: Corpus) -> None:
    for question in of_format(corpus, "direct"):
        assert question.options == ()
        assert len(question.answers) >= 2
    for question in of_format(corpus, "single", "multi"):
        assert len(set(question.options)) == 4
        assert list(question.answers) == sorted(set(question.answers) & set(LETTERS))
    single, multi = of_format(corpus, "single"), of_format(corpus, "multi")
    for split in ("train", "test"):
        letters = Counter(question.answers[0] for question in single if question.split == split)
        assert max(letters.values()) - min(letters[letter] for letter in LETTERS) <= 1
    assert {len(question.answers) for question in multi} == {1, 2, 3, 4}
    marked = Counter(letter for question in multi for letter in question.answers)
    assert min(marked[letter] for letter in LETTERS) > 0.7 * max(marked.values())
    longest = [max(q.options, key=len) == q.options[LETTERS.index(q.answers[0])] for q in single]
    assert sum(longest) < 0.5 * len(single)
