"""The offline stand-in for the auxiliary LLM: deterministic, extractive, no network.

Cues are key sentences, strategies come from the question's words, summaries quote marked turns, and verdicts follow a
rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from remind.core.files import sha256_json
from remind.data.dialogue import Dialogue, Question, Turn
from remind.states.auxiliary import AuxiliaryLLM, Verdict
from remind.states.pyramid import LETTERS, AttentionalState, Segment, Strategy, line_of, one_line, turn_text
from remind.text.answers import same_answer
from remind.text.sentences import key_sentences, sentences, telling
from remind.text.words import check_dimension, data, guide, infer_dimension, kind_of, plan, rarity, stem, stems, words

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder

VERSION = 1
#: How much a word of the dimension's lexicon adds to a sentence, next to the rarity of its own words.
LEXICON_WEIGHT = 1.0
#: What a caption's score is multiplied by for the visual dimensions.
CAPTION_WEIGHT = 3.0
#: Lines quoted for each option, and for a question without options.
QUOTED_PER_OPTION = 2
QUOTED = 3


class OfflineLLM(AuxiliaryLLM):
    """An `AuxiliaryLLM` without a model.

    Args:
        encoder: judges how close a turn is to an option by meaning; None: by shared words alone.
    """

    def __init__(self, encoder: SentenceEncoder | None = None) -> None:
        self.encoder = encoder
        self._weights: tuple[Dialogue, dict[str, float]] | None = None

    @property
    def name(self) -> str:
        """Changes with the rules, the word lists and the encoder."""
        lists = sha256_json([data("words"), data("guides")])[:8]
        return f"offline-extractive-{VERSION}-{lists}-{self.encoder.name if self.encoder else 'words'}"

    def kinds(self, questions: Sequence[Question]) -> list[str | None]:
        """The dimension that each question's words point to (`infer_dimension`)."""
        return [infer_dimension(question.text) for question in questions]

    def cues(self, dialogue: Dialogue, segments: Sequence[Segment], dimension: str | None) -> list[str]:
        """The key sentences of each segment, in order, with their speakers.

        Sentences rank by the rarity of their words in this dialogue; for a dimension those with words of its lexicon
        gain, and for a visual one captions do.

        Raises:
            DataError: an unknown dimension.
        """
        check_dimension(dimension)
        weights = self._rarity(dialogue)
        lexicon = guide(dimension).lexicon if dimension else frozenset()
        visual = bool(dimension) and guide(str(dimension)).visual
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
        """S_str of each question from its words and those of the dialogue."""
        return [plan(dialogue, question, self._rarity(dialogue)) for question in questions]

    def summaries(self, states: Sequence[AttentionalState]) -> list[str]:
        """G_ref in three parts: what is asked for, what the marked turns say to each option, and a conclusion."""
        return [self._summary(state) for state in states]

    def verdicts(
        self, cases: Sequence[tuple[str, Sequence[str], str]], samples: Sequence[str] | None = None
    ) -> list[Verdict]:
        """A rule, not a reading: containment of a reference or bag-of-words F1 >= `JUDGE_F1` (`same_answer`)."""
        return [Verdict(any(same_answer(one, said) for one in references)) for _, references, said in cases]

    def _summary(self, state: AttentionalState) -> str:
        question, turns = state.factual.question, state.factual.turns
        marked = [turns[index] for start, end in state.blocks for index in range(start, end + 1)]
        ask = guide(kind_of(question))
        parts = [f"Understanding: the question asks for {ask.demand}."]
        if not marked:
            return "\n".join([*parts, "Evidence: no turn stands out.", "Conclusion: the evidence is unclear."])
        weights = self._rarity(state.factual.dialogue)
        if question.options:
            parts += self._weigh_options(question, marked, weights)
        else:
            parts += self._quote_marked(question, marked, weights)
        return "\n".join(parts)

    def _rarity(self, dialogue: Dialogue) -> dict[str, float]:
        if self._weights is None or self._weights[0] is not dialogue:
            self._weights = (dialogue, rarity([stems(turn_text(turn)) for turn in dialogue.turns]))
        return self._weights[1]

    def _closeness(self, wanted: Sequence[str], turns: Sequence[Turn], weights: dict[str, float]) -> np.ndarray:
        """How near each turn is to each wanted text [len(wanted), len(turns)]: shared words plus cosine.

        Words that all wanted texts share tell them apart in nothing and are left out.
        """
        terms = [set(stems(text)) for text in wanted]
        shared = set.intersection(*terms) if len(terms) > 1 else set()
        texts = [turn_text(turn) for turn in turns]
        near = np.array([[_overlap(own - shared, text, weights) for text in texts] for own in terms])
        if self.encoder is not None:
            near = near + (self.encoder.encode(wanted) @ self.encoder.encode(texts).T).numpy()
        # vectors differ in the last bits with the batch they were made in; ranks must not
        return np.round(near, 4)

    def _weigh_options(self, question: Question, marked: Sequence[Turn], weights: dict[str, float]) -> list[str]:
        near = self._closeness(question.options, marked, weights)
        parts, support = ["Evidence by option:"], []
        for letter, option, row in zip(LETTERS, question.options, near, strict=False):
            best = np.argsort(-row, kind="stable")[:QUOTED_PER_OPTION]
            support.append(float(row[best].mean()))
            quotes = " | ".join(_quote(marked[i]) for i in sorted(best.tolist()) if row[i] > 0)
            parts.append(f"{letter}. {one_line(option)} - {quotes or 'no marked turn speaks to it'}")
        order = [LETTERS[i] for i in np.argsort(-np.array(support), kind="stable").tolist()]
        if question.format == "multi":
            mean = sum(support) / len(support)
            chosen = sorted(LETTERS[i] for i, value in enumerate(support) if value >= mean)
            return [*parts, f"Conclusion: the marked turns bear most on {', '.join(chosen)}."]
        then = f", then on {order[1]}" if len(order) > 1 else ""
        return [*parts, f"Conclusion: the marked turns bear most on {order[0]}{then}."]

    def _quote_marked(self, question: Question, marked: Sequence[Turn], weights: dict[str, float]) -> list[str]:
        row = self._closeness([question.text], marked, weights)[0]
        best = np.argsort(-row, kind="stable")[:QUOTED].tolist()
        quotes = [f"- {_quote(marked[i])}" for i in sorted(best)]
        return ["Evidence:", *quotes, f"Conclusion: the answer most likely rests on {_quote(marked[best[0]])}"]


def _quote(turn: Turn) -> str:
    """The turn on one line, cut at 40 words, its captions included."""
    captions = [f"[Image #{image.index}] {one_line(image.caption)}" for image in turn.images if image.caption]
    parts = " ".join([line_of(turn), *captions]).split()
    return " ".join(parts[:40]) + (" …" if len(parts) > 40 else "")


def _overlap(wanted: Iterable[str], text: str, weights: Mapping[str, float]) -> float:
    """Share, by rarity, of the wanted stems that the text holds; 0 if nothing is wanted. Unknown stems weigh most."""
    terms, there = set(wanted), set(stems(text))
    top = max(weights.values(), default=1.0) or 1.0
    total = sum(weights.get(term, top) for term in terms)
    return sum(weights.get(term, top) for term in terms & there) / total if total > 0 else 0.0
