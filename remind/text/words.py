"""Words, their stems, and what they tell without a model: the kind of a question, S_str of Section 4.2, cues, summaries
and verdicts.

`OfflineLLM` is the auxiliary LLM by these rules: deterministic and extractive. Cues are key sentences, strategies come
from the question's words, summaries quote marked turns, and verdicts follow a rule.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
import yaml

from remind.core.errors import DataError
from remind.core.files import sha256_json
from remind.data.dialogue import DIMENSIONS, Dialogue, Question, Turn
from remind.states.pyramid import LETTERS, AttentionalState, Segment, Strategy, line_of, one_line, turn_text

WORD = re.compile(r"\w+")
#: Below this score a question is a plain factual one to `infer_dimension`.
LEAST_ASKED = 0.5
#: Anchors of a kind at most.
MAX_ENTITIES = 6
MAX_FOCUS = 2

_TOKEN = re.compile(r"\w+(?:[-.]\w+)*")
_CLITIC = re.compile(r"['’](?:s|t|d|m|re|ve|ll)\b", re.IGNORECASE)
_QUOTED = re.compile(r"[\"“]([^\"”]+)[\"”]")
_LISTING = re.compile(
    r"(?i)\b(?:both|all|each|either|list|in common|how many|in what ways)\b"
    r"|\b(?:what|which) (?:\w+ )?(?!does|this|was|has)[a-z]{3,}(?<!s)s\b"
)
_LIKELY = re.compile(r"(?i)\b(?:would|likely|might|could|probably|suggest|infer|imply|considered)\b")
_TIME = re.compile(
    r"(?i)\b(?:when|how long|how often|what (?:year|month|day|date|time)|which (?:year|month|day)|since)\b"
)
#: Key sentences together, in words; about what the text encoder still reads whole.
KEY_WORDS = 60
_SENTENCE = re.compile(r"(?<=[.!?…])\s+|\n+")
#: The offline judge's threshold on bag-of-words F1.
JUDGE_F1 = 0.6
_ARTICLES = frozenset({"a", "an", "the"})
_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_UNKNOWN = ("no information", "not mentioned", "not enough information", "cannot be determined", "does not tell")
_OFFLINE_VERSION = 1
#: How much a word of the dimension's lexicon adds to a sentence, next to the rarity of its own words.
LEXICON_WEIGHT = 1.0
#: What a caption's score is multiplied by for the visual dimensions.
CAPTION_WEIGHT = 3.0
#: Lines quoted for each option, and for a question without options.
QUOTED_PER_OPTION = 2
QUOTED = 3


@cache
def data(name: str) -> dict[str, Any]:
    """A word list or guide kept beside this module as `<name>.yaml`."""
    content: dict[str, Any] = yaml.safe_load((files(__package__) / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


@cache
def word_list(name: str) -> frozenset[str]:
    """A list of `words.yaml`."""
    return frozenset(str(data("words")[name]).split())


@cache
def fillers() -> frozenset[str]:
    """Function words and words of small talk."""
    return word_list("stopwords") | word_list("filler")


@lru_cache(maxsize=200_000)
def stem(word: str) -> str:
    """Porter stem of a lower-case word."""
    from nltk.stem import PorterStemmer

    return str(PorterStemmer().stem(word))


def words(text: str) -> list[str]:
    """Lower-case words in order."""
    return WORD.findall(text.lower())


def stems(text: str, skip: frozenset[str] | None = None) -> list[str]:
    """Porter stems of the words that are not skipped (None: function words), in order."""
    skip = word_list("stopwords") if skip is None else skip
    return [stem(word) for word in words(text) if word not in skip]


def rarity(documents: Sequence[Sequence[str]]) -> dict[str, float]:
    """ln((1 + N) / (1 + df)) of every term over N documents."""
    df = Counter(term for document in documents for term in set(document))
    return {term: math.log((1 + len(documents)) / (1 + count)) for term, count in df.items()}


@dataclass(frozen=True)
class Guide:
    """What one kind of question asks of a reader.

    Attributes:
        name: a dimension, or a factual kind (single, temporal, multi_hop, inference).
        demand: what is asked for, to follow "The question asks for".
        reasoning: C_reason.
        lexicon: stems that mark the sentences such a question turns on.
        asks: stems by which such a question is known itself; of dimensions only.
        visual: whether captions matter most.
    """

    name: str
    demand: str
    reasoning: tuple[str, ...]
    lexicon: frozenset[str]
    asks: frozenset[str]
    visual: bool


@cache
def guide(name: str) -> Guide:
    """The guide of a dimension or a factual kind. Raises DataError for another name."""
    guides = data("guides")
    entry = guides["dimensions"].get(name) or guides["factual"].get(name)
    if entry is None:
        raise DataError(f"unknown dimension {name!r}; there are {', '.join(DIMENSIONS)}, or none")
    lexicon, asks = (
        frozenset(stem(word) for word in words(entry.get(key, "")) if len(word) > 1) for key in ("lexicon", "asks")
    )
    return Guide(name, entry["demand"], tuple(entry["reasoning"]), lexicon, asks, entry.get("visual", False))


def kind_of(question: Question) -> str:
    """Its dimension, else the factual kind its wording shows; the benchmark's category is not looked at."""
    if question.dimension is not None:
        return question.dimension
    text = question.text
    if _TIME.search(text):
        return "temporal"
    if _LIKELY.search(text):
        return "inference"
    return "multi_hop" if _LISTING.search(text) else "single"


def infer_dimension(text: str) -> str | None:
    """The dimension whose `asks` hold most of a question's words; None below `LEAST_ASKED`.

    A word counts one over the number of dimensions that it may ask for. A question that names images is of a visual
    dimension, any other of none of them. Ties go to the earlier dimension.
    """
    said = {stem(word) for word in words(text)}
    visual = bool(said & {stem(word) for word in ("photo", "picture", "image")})
    guides = [guide(name) for name in DIMENSIONS]
    weights = {word: 1 / sum(word in other.asks for other in guides) for own in guides for word in own.asks}
    scores = {own.name: sum(weights[word] for word in said & own.asks) for own in guides if own.visual == visual}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= LEAST_ASKED else None


def plan(dialogue: Dialogue, question: Question, weights: Mapping[str, float]) -> Strategy:
    """The strategy of a question, from its words and the dialogue's.

    Entities are quotations, names and chunks of content words; the focus is what the target does.

    Args:
        weights: rarity of each stem over the dialogue's turns.
    """
    text = question.text
    speakers, scope = target_speakers(dialogue, text), temporal_scope(text)
    names = {part for speaker in speakers for part in words(speaker)}
    quoted = [quote for match in _QUOTED.finditer(text) if (quote := match.group(1).strip())]
    rest = _QUOTED.sub(" , ", _CLITIC.sub(" ", text))
    for phrase in scope:
        rest = rest.replace(phrase, " , ")
    chunks = _chunks(rest, names)
    focus = list(dict.fromkeys(chunk for chunk, acts in chunks if acts))[:MAX_FOCUS]
    named = dict.fromkeys(chunk for chunk, _ in chunks if chunk not in focus)
    # a chunk weighs as much as its rarest word; one that does not occur in the dialogue comes after those that do
    rarities = {chunk: [weights[term] for term in stems(chunk) if term in weights] for chunk in named}
    ranked = sorted(named, key=lambda chunk: (bool(rarities[chunk]), max(rarities[chunk], default=0.0)), reverse=True)
    entities = tuple(dict.fromkeys([*quoted, *ranked]))[:MAX_ENTITIES]
    return Strategy(guide(kind_of(question)).reasoning, speakers, entities, tuple(focus), scope)


def target_speakers(dialogue: Dialogue, text: str) -> tuple[str, ...]:
    """The dialogue's speakers whom the text names, in order of mention.

    A name counts in any case, with or without a possessive, in full or by one of its words ("Rachel" for
    "Rachel Green"); a capitalised beginning of three letters or more ("Mel" for "Melanie") if one speaker alone fits.
    Where a speaker is called "user", words of the first person name that speaker.
    """
    mentions: dict[str, int] = {}
    for speaker in dialogue.speakers:
        parts = words(speaker)
        single = [part for part in parts if len(part) > 1 and part not in word_list("stopwords")]
        for name in [r"\W+".join(parts), *single] if parts else []:
            # the last may carry an s ("Carolines")
            if match := re.search(rf"\b{name}s?\b", text, re.IGNORECASE):
                mentions[speaker] = min(match.start(), mentions.get(speaker, match.start()))
    common = word_list("stopwords") | word_list("months") | word_list("question") | word_list("weekdays")
    for match in WORD.finditer(text):
        token = match.group()
        if len(token) >= 3 and token[0].isupper() and token.casefold() not in common:
            fits = [s for s in dialogue.speakers if any(p.startswith(token.casefold()) for p in words(s))]
            if len(fits) == 1:
                mentions.setdefault(fits[0], match.start())
    if not mentions and {"i", "me", "my", "mine", "we", "our"} & set(words(text)):
        mentions = {speaker: 0 for speaker in dialogue.speakers if speaker.casefold() == "user"}
    return tuple(sorted(mentions, key=lambda speaker: mentions[speaker]))


def temporal_scope(text: str) -> tuple[str, ...]:
    """Dates, months, weekdays, seasons and spans of time the text names, as written, in order."""
    # march and may are words too: they count as months only next to a number, or after a preposition and capitalised
    plain = "|".join(sorted(word_list("months") - {"march", "may"}))
    months = rf"(?:{plain}|(?<![?.!] )(?<!^)(?-i:March|May))"
    day = r"\d{1,2}(?:st|nd|rd|th)?"
    number = r"(?:\d+|an?|one|two|three|four|five|six|seven|eight|nine|ten|few|several|couple of)"
    unit = r"(?:days?|weeks?|weekends?|months?|years?|decades?)"
    weekdays = "|".join(sorted(word_list("weekdays")))
    season = r"(?:spring|summer|autumn|winter)"
    period = rf"(?:day|night|morning|week|weekend|month|year|fall|semester|{season}|{weekdays})"
    alternatives = (
        r"\d{4}[-/]\d{1,2}[-/]\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}",
        rf"(?:{day}(?: of)? )?{months}(?: {day}(?!\d))?(?:,? ?\d{{4}})?",
        rf"(?:the )?(?:last|next|this|past|previous|following) (?:{number} )?(?:{unit}|{period}|christmas|{plain})",
        rf"(?:in |over |during )?(?:the )?(?:early |mid[- ]|late )?{season}(?: of)?(?: \d{{4}})?",
        rf"{number} {unit} (?:ago|before|after|later|earlier|from now)",
        r"(?:19|20)\d{2}",
        weekdays,
        "|".join(sorted(word_list("periods"))),
    )
    found = re.finditer(rf"\b(?:{'|'.join(alternatives)})\b", text, re.IGNORECASE)
    return tuple(dict.fromkeys(match.group().strip() for match in found))


def _chunks(text: str, names: set[str]) -> list[tuple[str, bool]]:
    """Runs of content words between function words and punctuation, and whether each follows a target speaker's name.

    What follows a name ("did Ana paint", "Ana will move") is taken for what the person does.
    """
    skip = word_list("stopwords") | word_list("question") | names | {name + "s" for name in names}
    chunks: list[tuple[str, bool]] = []
    run: list[str] = []
    acts = after_name = False
    end = 0
    for match in _TOKEN.finditer(text):
        token, between, end = match.group(), text[end : match.start()], match.end()
        lowered = token.lower()
        named = lowered in names or (
            token[0].isupper() and len(token) >= 3 and any(name.startswith(lowered) for name in names)
        )
        skipped = named or lowered in skip or len(token) == 1
        if run and (skipped or not between.isspace()):
            chunks.append((" ".join(run), acts))
            run = []
        if skipped:
            after_name = named or (after_name and lowered in word_list("stopwords"))
        else:
            if not run:
                acts, after_name = after_name and token[0].islower(), False
            run.append(token)
    if run:
        chunks.append((" ".join(run), acts))
    return chunks


class Sentence(NamedTuple):
    """A sentence of a turn, or the caption of one of its images."""

    speaker: str
    text: str
    caption: bool


def sentences(turns: Iterable[Turn]) -> list[Sentence]:
    """What is said and shown in the turns, in order."""
    parts = []
    for turn in turns:
        speaker = one_line(turn.speaker)
        said = (one_line(part) for part in _SENTENCE.split(turn.text))
        parts += [Sentence(speaker, part, False) for part in said if part]
        parts += [Sentence(speaker, one_line(image.caption), True) for image in turn.images if image.caption]
    return parts


def telling(text: str, weights: Mapping[str, float]) -> float:
    """Summed rarity of the content stems, damped by length so that a long sentence does not win by length alone."""
    content = {stem(word) for word in words(text) if word not in fillers()}
    return sum(weights.get(term, 0.0) for term in content) / (len(text.split()) + 3) ** 0.5


def key_sentences(said: Sequence[Sentence], scores: Sequence[float]) -> str:
    """The best-scored sentences within `KEY_WORDS`, in order, each a line with its speaker; the best one at any length.

    Sentences that score nothing are left out, unless there are no others.
    """
    chosen: list[int] = []
    used = 0
    for number in sorted(range(len(said)), key=lambda n: -scores[n]):
        length = len(said[number].text.split())
        if chosen and (scores[number] <= 0 or used + length > KEY_WORDS):
            continue
        chosen.append(number)
        used += length
    return "\n".join(f"{said[number].speaker}: {said[number].text}" for number in sorted(chosen))


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict on one case.

    Attributes:
        value: whether the prediction means the same as a reference; None: there is no verdict, for or against.
        failure: why there is none: as in `remind.llm.request.Reply`, or "neither" where the reply is neither verdict.
        message: the same in a line.
    """

    value: bool | None
    failure: str | None = None
    message: str = ""


def _answer_tokens(text: str) -> list[str]:
    """Lower-case words without articles; thousands commas dropped, numbers to twelve as digits."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    said = [word for word in words(text) if word not in _ARTICLES]
    return [str(_NUMBERS.index(word)) if word in _NUMBERS else word for word in said]


def declines(text: str) -> bool:
    """Whether an answer says that the dialogue does not tell."""
    plain = " ".join(words(text))
    return any(phrase in plain for phrase in _UNKNOWN)


def same_answer(reference: str, prediction: str) -> bool:
    """The rule of the offline judge.

    Equal if both decline; else if every number of the reference is in the prediction and either the reference's words
    stand in a row in it, or the bag-of-words F1 reaches `JUDGE_F1`.
    """
    if declines(reference) or declines(prediction):
        return declines(reference) and declines(prediction)
    gold, said = _answer_tokens(reference), _answer_tokens(prediction)
    if not gold or not said:
        return gold == said
    numbers = {token for token in gold if token.isdigit()}
    if not numbers <= set(said):
        return False
    if any(said[start : start + len(gold)] == gold for start in range(len(said) - len(gold) + 1)):
        return True
    common = sum((Counter(map(stem, gold)) & Counter(map(stem, said))).values())
    return 2 * common / (len(gold) + len(said)) >= JUDGE_F1


class OfflineLLM:
    """The auxiliary LLM without a model: cues and strategies (4.2), summaries (4.4), verdicts (Figure 10).

    Args:
        encoder: a `remind.models.encoder.SentenceEncoder`, which judges how close a turn is to an option by meaning;
            None: shared words do.

    Attributes:
        failures: of any auxiliary LLM what somebody else had to write, or what has no verdict; here nothing.
    """

    failures: Sequence[Any] = ()

    def __init__(self, encoder: Any = None) -> None:
        self.encoder = encoder
        self._weights: tuple[Dialogue, dict[str, float]] | None = None

    @property
    def name(self) -> str:
        """Changes with the rules, the word lists and the encoder."""
        lists = sha256_json([data("words"), data("guides")])[:8]
        return f"offline-extractive-{_OFFLINE_VERSION}-{lists}-{self.encoder.name if self.encoder else 'words'}"

    def kinds(self, questions: Sequence[Question]) -> list[str | None]:
        """The dimension that each question's words point to (`infer_dimension`); None: a plain factual question."""
        return [infer_dimension(question.text) for question in questions]

    def cues(self, dialogue: Dialogue, segments: Sequence[Segment], dimension: str | None) -> list[str]:
        """κ_n of each segment: its key sentences in order, with their speakers.

        Sentences rank by the rarity of their words in this dialogue; for a dimension those with words of its lexicon
        gain, and for a visual one captions do.

        Raises:
            DataError: an unknown dimension.
        """
        ask, weights = guide(dimension) if dimension else None, self._rarity(dialogue)
        lexicon, visual = (ask.lexicon, ask.visual) if ask else (frozenset(), False)
        cues = []
        for segment in segments:
            turns = dialogue.turns[segment.start : segment.end + 1]
            said = sentences(turns)
            scores = []
            for sentence in said:
                hits = len(lexicon & {stem(word) for word in words(sentence.text)})
                score = telling(sentence.text, weights) + LEXICON_WEIGHT * min(hits, 3)
                scores.append(score * (CAPTION_WEIGHT if visual and sentence.caption else 1.0))
            speakers = dict.fromkeys(one_line(turn.speaker) for turn in turns)
            cues.append(key_sentences(said, scores) or ", ".join(speakers))
        return cues

    def strategies(self, dialogue: Dialogue, questions: Sequence[Question]) -> list[Strategy]:
        """S_str of each question from its words and those of the dialogue; sees no gold answer and no evidence."""
        return [plan(dialogue, question, self._rarity(dialogue)) for question in questions]

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        """G_ref in three parts: what is asked for, what the marked turns say to each option, and a conclusion."""
        summaries = []
        for state in states:
            question, turns = state.factual.question, state.factual.turns
            marked = [turns[index] for start, end in state.blocks for index in range(start, end + 1)]
            parts = ["Evidence: no turn stands out.", "Conclusion: the evidence is unclear."]
            if marked:
                weights = self._rarity(state.factual.dialogue)
                parts = self._evidence(question, marked, weights)
            demand = guide(kind_of(question)).demand
            summaries.append("\n".join([f"Understanding: the question asks for {demand}.", *parts]))
        return summaries

    def verdicts(
        self, cases: Sequence[tuple[str, Sequence[str], str]], samples: Sequence[str] | None = None
    ) -> list[Verdict]:
        """J(ŷ, y) of Eq. 9 for each (question, references, prediction): is it equivalent to any of the references?

        A rule, not a reading: containment of a reference or bag-of-words F1 >= `JUDGE_F1` (`same_answer`).

        Args:
            samples: ids that costs are reported by, one for each case.
        """
        return [Verdict(any(same_answer(one, said) for one in references)) for _, references, said in cases]

    def _rarity(self, dialogue: Dialogue) -> dict[str, float]:
        if self._weights is None or self._weights[0] is not dialogue:
            self._weights = (dialogue, rarity([stems(turn_text(turn)) for turn in dialogue.turns]))
        return self._weights[1]

    def _evidence(self, question: Question, marked: Sequence[Turn], weights: Mapping[str, float]) -> list[str]:
        """Quotes of the marked turns that are nearest to each option, or to the question, and the conclusion."""
        near = self._closeness(question.options or [question.text], marked, weights)
        order = np.argsort(-near, axis=1, kind="stable")
        if not question.options:
            best = order[0, :QUOTED].tolist()
            quotes = [f"- {_quote(marked[i])}" for i in sorted(best)]
            return ["Evidence:", *quotes, f"Conclusion: the answer most likely rests on {_quote(marked[best[0]])}"]
        parts, support = ["Evidence by option:"], []
        for letter, option, row, ranks in zip(LETTERS, question.options, near, order, strict=False):
            best = ranks[:QUOTED_PER_OPTION]
            support.append(float(row[best].mean()))
            quoted = " | ".join(_quote(marked[i]) for i in sorted(best.tolist()) if row[i] > 0)
            parts.append(f"{letter}. {one_line(option)} - {quoted or 'no marked turn speaks to it'}")
        mean = sum(support) / len(support)
        letters = [LETTERS[i] for i in np.argsort(-np.array(support), kind="stable").tolist()]
        most = ", then on ".join(letters[:2])
        if question.format == "multi":
            most = ", ".join(LETTERS[i] for i, value in enumerate(support) if value >= mean)
        return [*parts, f"Conclusion: the marked turns bear most on {most}."]

    def _closeness(self, wanted: Sequence[str], turns: Sequence[Turn], weights: Mapping[str, float]) -> np.ndarray:
        """How near each turn is to each wanted text [len(wanted), len(turns)]: shared words plus cosine.

        The share, by rarity, of the wanted stems that the turn holds; unknown stems weigh most. Words that all wanted
        texts share tell them apart in nothing and are left out.
        """
        terms, texts = [set(stems(text)) for text in wanted], [turn_text(turn) for turn in turns]
        shared = set.intersection(*terms) if len(terms) > 1 else set()
        top = max(weights.values(), default=1.0) or 1.0
        near = np.zeros((len(wanted), len(turns)))
        for row, own in zip(near, terms, strict=True):
            total = sum(weights.get(term, top) for term in own - shared)
            for column, text in enumerate(texts):
                there = (own - shared) & set(stems(text))
                row[column] = sum(weights.get(term, top) for term in there) / total if total > 0 else 0.0
        if self.encoder is not None:
            near = near + (self.encoder.encode(wanted) @ self.encoder.encode(texts).T).numpy()
        # vectors differ in the last bits with the batch they were made in; ranks must not
        return np.round(near, 4)


def _quote(turn: Turn) -> str:
    """The turn on one line, cut at 40 words, its captions included."""
    captions = [f"[Image #{image.index}] {one_line(image.caption)}" for image in turn.images if image.caption]
    parts = " ".join([line_of(turn), *captions]).split()
    return " ".join(parts[:40]) + (" …" if len(parts) > 40 else "")
