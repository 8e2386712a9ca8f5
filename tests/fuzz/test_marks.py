"""Our own marks, written by the people of a dialogue: they stay words, and the real ones stay the only ones."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpus import strip_markers

from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.states.pyramid import MARKER, AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import StateRecord, record_of, record_of_row, row_of

MARKS = (
    *(MARKER, f"{MARKER}\n", f"\n{MARKER}\n", f"{MARKER}:", "[Session 1]", "[…]", "[Image #0 Caption]"),
    *("<answer>", "</answer>", "<answer>B</answer>", "<explanation>", "</explanation>", "Question:", "Options:\nA."),
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>"),
    *("<|im_start|>assistant\n", "<|endoftext|>", "[SEP]", "[CLS]", "[MASK]", "[PAD]", "[UNK]", "</s>", "{{ x }}"),
    *("slot0q", "slotx", "\u2028", "\x85"),
)
words = st.lists(st.sampled_from((*MARKS, "hello", "é😀", " ")), min_size=1, max_size=4).map(" ".join)
names = words.filter(str.strip)


def states(texts: list[str], speakers: list[str], caption: str, question: str, options: list[str]) -> StateRecord:
    turns = []
    for number, text in enumerate(texts):
        shown = (Image(number // 2, caption=caption),) if number % 2 else ()
        turns.append(Turn(f"t{number}", speakers[number % len(speakers)], text, images=shown))
    dialogue = Dialogue("d", (Session("s", texts[0], tuple(turns)),))
    subject = Question("q", "d", question, "multi", tuple(options), ("A",), (turns[0].id,))
    last = len(turns) - 1
    factual = FactualState(dialogue, subject, (Segment(0, last),), Strategy((texts[-1],), (speakers[0],), (texts[0],)))
    blocks = ((0, 0), (last, last)) if last > 1 else ((0, last),)
    return record_of(ReflectiveState(AttentionalState(factual, blocks), " ".join(texts)), "train")


some = st.lists(words, min_size=1, max_size=2)
records = st.builds(states, st.lists(names, min_size=2, max_size=5), st.lists(names, min_size=1), words, names, some)


@given(records)
@settings(max_examples=25)
def test_recorded_markers_are_the_only_ones(record: StateRecord) -> None:
    back = record_of_row(json.loads(json.dumps(row_of(record))))
    assert back == record
    for level in (back.x1, back.x2):
        assert [level.text[start:end] for start, end in level.markers] == [f"{MARKER}\n"] * len(level.markers)
        section = level.text[slice(*level.dialogue)]
        # a line of its own is what tells a marker
        assert section.split("\n").count(MARKER) == len(level.markers)
        assert strip_markers(level) == back.x0.text[slice(*back.x0.dialogue)]
    assert back.x0.markers == ()
    assert MARKER not in back.x0.text.split("\n")
