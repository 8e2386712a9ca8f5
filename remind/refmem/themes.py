"""What a dialogue's speakers talk of and show, counted word by word: the facts that offline items are made of.

A theme is the stem of a word that behaves like a noun. Whoever names it, and when, is read off the text; nothing is
inferred.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from remind.data.dialogue import Corpus, Dialogue
from remind.text.words import fillers, stem, word_list

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_SENTENCE = re.compile(r"(?<=[.!?…])\s+|\n+")
_LONGEST, _SHORTEST = 16, 4
#: Endings of adjectives, which determiners precede as they do nouns.
_ADJECTIVE = ("ful", "ous", "able", "ible", "ive", "astic", "atic", "less", "ly", "ient", "arming", "ating", "anting")


@cache
def listed(*path: str) -> frozenset[str]:
    """A list of `words.yaml` beside this module."""
    value: Any = yaml.safe_load((files(__package__) / "words.yaml").read_text(encoding="utf-8"))
    for name in path:
        value = value[name]
    return frozenset(value.split())


def spoken(text: str) -> list[str]:
    """Lower-case words, with what clitics belong to them."""
    return [word.lower().replace("’", "'") for word in _WORD.findall(text)]


@cache
def _skipped() -> frozenset[str]:
    lists = fillers() | word_list("months") | word_list("weekdays") | word_list("periods") | word_list("question")
    return lists | listed("empty")


@dataclass(frozen=True)
class Mention:
    """A turn in which a speaker names a theme.

    Attributes:
        turn: its position in the dialogue. session: number of its session, from 0.
        company: words of the sentences that hold the theme.
    """

    turn: int
    session: int
    company: frozenset[str]


@dataclass(frozen=True)
class Nouns:
    """Which stems behave like nouns, over all texts of a corpus: in speech, and in captions."""

    speech: frozenset[str]
    captions: frozenset[str]

    @staticmethod
    def of(corpus: Corpus) -> Nouns:
        """A stem counts where determiners often stand before it, verbs and pronouns seldom, and words after it seldom.

        In a corpus of four dialogues or more, stems that all of them hold are left out of speech as small talk.
        """
        texts = [turn.text for dialogue in corpus.dialogues for turn in dialogue.turns]
        captions = [image.caption for dialogue in corpus.dialogues for image in dialogue.images if image.caption]
        held: Counter[str] = Counter()
        for dialogue in corpus.dialogues:
            held.update({stem(word) for turn in dialogue.turns for word in spoken(turn.text)})
        many = len(corpus.dialogues) if len(corpus.dialogues) >= 4 else len(corpus.dialogues) + 1
        speech = {name for name in _nouns(texts) if held[name] < many}
        return Nouns(frozenset(speech), frozenset(_nouns(captions, least=1)))


def _nouns(texts: Iterable[str], least: int = 2) -> set[str]:
    before, verbal = listed("before"), listed("verbal")
    unlike = verbal | _skipped()
    total: Counter[str] = Counter()
    after_determiner: Counter[str] = Counter()
    after_verbal: Counter[str] = Counter()
    before_word: Counter[str] = Counter()
    for text in texts:
        for sentence in _SENTENCE.split(text):
            words = spoken(sentence)
            for place, word in enumerate(words):
                name = stem(word)
                previous = words[place - 1] if place else ""
                following = words[place + 1] if place + 1 < len(words) else ""
                total[name] += 1
                after_determiner[name] += previous in before
                after_verbal[name] += previous in verbal
                before_word[name] += bool(following) and following not in unlike
    return {
        name
        for name, count in total.items()
        if after_determiner[name] >= max(least, 0.15 * count)
        and after_verbal[name] <= 0.2 * count
        and before_word[name] <= 0.5 * count
    }


class Themes:
    """Who names which theme, and when.

    Attributes:
        mentions: (speaker, stem) to the turns, in time order.
        pictured: image index to the stems its caption names.
        sharer: image index to the speaker, and the position of the turn, it stands in.
    """

    def __init__(self, dialogue: Dialogue, nouns: Nouns) -> None:
        self.dialogue = dialogue
        self.names = frozenset(word for speaker in dialogue.speakers for word in spoken(speaker))
        self._forms: dict[str, Counter[str]] = defaultdict(Counter)
        session = {turn.id: number for number, one in enumerate(dialogue.sessions) for turn in one.turns}
        mentions: dict[tuple[str, str], list[Mention]] = defaultdict(list)
        self.pictured: dict[int, frozenset[str]] = {}
        self.sharer: dict[int, tuple[str, int]] = {}
        self.said: list[frozenset[str]] = []
        for place, turn in enumerate(dialogue.turns):
            company: dict[str, set[str]] = defaultdict(set)
            for sentence in _SENTENCE.split(turn.text):
                words = spoken(sentence)
                for name in self._stems(words, nouns.speech, _skipped()):
                    company[name].update(words)
            for name, words_near in company.items():
                mentions[turn.speaker, name].append(Mention(place, session[turn.id], frozenset(words_near)))
            self.said.append(frozenset(stem(word) for word in spoken(turn.text)))
            for image in turn.images:
                words = spoken(image.caption or "")
                self.pictured[image.index] = frozenset(
                    self._stems(words, nouns.captions, listed("caption") | _skipped())
                )
                self.sharer[image.index] = (turn.speaker, place)
        self.mentions = {key: tuple(found) for key, found in mentions.items()}

    def _stems(self, words: list[str], nouns: frozenset[str], skip: frozenset[str]) -> set[str]:
        found = set()
        for word in words:
            word = word.split("'")[0]
            name = stem(word)
            if (
                name in nouns
                and word not in skip
                and word not in self.names
                and not word.endswith(_ADJECTIVE)
                and _SHORTEST <= len(word) <= _LONGEST
            ):
                self._forms[name][word] += 1
                found.add(name)
        return found

    def form(self, name: str) -> str:
        """The stem as it is written most often."""
        forms = self._forms[name]
        return min(forms, key=lambda word: (-forms[word], word))

    def of(self, speaker: str) -> dict[str, tuple[Mention, ...]]:
        """The themes a speaker names."""
        return {name: found for (who, name), found in self.mentions.items() if who == speaker}

    def images_of(self, speaker: str) -> list[int]:
        """Indices of the images a speaker shared, in order."""
        return [index for index, (who, _) in self.sharer.items() if who == speaker]
