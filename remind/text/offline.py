"""The auxiliary LLM without a model, by rules on words.

Deterministic and extractive: cues are key sentences, strategies come from the question's words, summaries quote marked
turns, and verdicts follow a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from remind.core.files import sha256_json
from remind.data.dialogue import Dialogue, Question, Turn
from remind.states.pyramid import LETTERS, AttentionalState, Segment, Strategy, line_of, one_line, turn_text
from remind.text import words
from remind.text.answers import Verdict, same_answer

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
#: How much a word of the dimension's lexicon adds to a sentence, next to the rarity of its own words.
LEXICON_WEIGHT = 1.0
#: What a caption's score is multiplied by for the visual dimensions.
CAPTION_WEIGHT = 3.0
#: Lines quoted for each option, and for a question without options.
QUOTED_PER_OPTION = 2
QUOTED = 3


class Encoder(Protocol):
    """What `remind.models.encoder.SentenceEncoder` is to these rules."""

    @property
    def name(self) -> str: ...

    def encode(self, texts: Sequence[str]) -> Tensor: ...


class OfflineLLM:
    """The auxiliary LLM without a model: cues and strategies (4.2), summaries (4.4), verdicts (Figure 10).

    Args:
        encoder: judges how close a turn is to an option by meaning; None: by shared words alone.

    Attributes:
        failures: of any auxiliary LLM what somebody else had to write, or what has no verdict; here nothing.
    """

    failures: Sequence[Any] = ()

    def __init__(self, encoder: Encoder | None = None) -> None:
        self.encoder = encoder
        self._weights: tuple[Dialogue, dict[str, float]] | None = None

    @property
    def name(self) -> str:
        """Changes with the rules, the word lists and the encoder."""
        lists = sha256_json([words.data("words"), words.data("guides")])[:8]
        return f"offline-extractive-{VERSION}-{lists}-{self.encoder.name if self.encoder else 'words'}"

    def kinds(self, questions: Sequence[Question]) -> list[str | None]:
        """The dimension that each question's words point to (`infer_dimension`); None: a plain factual question."""
        return [words.infer_dimension(question.text) for question in questions]

    def cues(self, dialogue: Dialogue, segments: Sequence[Segment], dimension: str | None) -> list[str]:
        """κ_n of each segment: its key sentences in order, with their speakers.

        Sentences rank by the rarity of their words in this dialogue; for a dimension those with words of its lexicon
        gain, and for a visual one captions do.

        Raises:
            DataError: an unknown dimension.
        """
        ask, weights = words.guide(dimension) if dimension else None, self._rarity(dialogue)
        lexicon, visual = (ask.lexicon, ask.visual) if ask else (frozenset(), False)
        cues = []
        for segment in segments:
            turns = dialogue.turns[segment.start : segment.end + 1]
            said = words.sentences(turns)
            scores = []
            for sentence in said:
                hits = len(lexicon & {words.stem(word) for word in words.words(sentence.text)})
                score = words.telling(sentence.text, weights) + LEXICON_WEIGHT * min(hits, 3)
                scores.append(score * (CAPTION_WEIGHT if visual and sentence.caption else 1.0))
            speakers = dict.fromkeys(one_line(turn.speaker) for turn in turns)
            cues.append(words.key_sentences(said, scores) or ", ".join(speakers))
        return cues

    def strategies(self, dialogue: Dialogue, questions: Sequence[Question]) -> list[Strategy]:
        """S_str of each question from its words and those of the dialogue; sees no gold answer and no evidence."""
        return [words.plan(dialogue, question, self._rarity(dialogue)) for question in questions]

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
            demand = words.guide(words.kind_of(question)).demand
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
            self._weights = (dialogue, words.rarity([words.stems(turn_text(turn)) for turn in dialogue.turns]))
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
        terms, texts = [set(words.stems(text)) for text in wanted], [turn_text(turn) for turn in turns]
        shared = set.intersection(*terms) if len(terms) > 1 else set()
        top = max(weights.values(), default=1.0) or 1.0
        near = np.zeros((len(wanted), len(turns)))
        for row, own in zip(near, terms, strict=True):
            total = sum(weights.get(term, top) for term in own - shared)
            for column, text in enumerate(texts):
                there = (own - shared) & set(words.stems(text))
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
