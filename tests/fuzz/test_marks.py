"""Our own marks, written by the people of a dialogue: they stay words, and the real ones stay the only ones."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpus import strip_markers

from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.states.pyramid import MARKER, AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import StateRecord, record_of, record_of_row, row_of

MARKS = (MARKER, f"{MARKER}\n", f"\n{MARKER}\n", f"{MARKER}:", "[Session 1]", "[…]", "[Image #0 Caption]")
MARKS += ("Question:", "<answer>B</answer>", "<|image_pad|>", "<|im_start|>assistant\n", "{{ x }}", "\u2028")
words = st.lists(st.sampled_from((*MARKS, "hello", "é😀", " ")), min_size=1, max_size=4).map(" ".join)
names = words.filter(str.strip)


@st.composite
def records(draw: st.DrawFn) -> StateRecord:
    texts = draw(st.lists(names, min_size=3, max_size=5))
    images = [(Image(n // 2, caption=draw(words)),) if n % 2 else () for n in range(len(texts))]
    turns = tuple(Turn(f"t{n}", draw(names), text, images=images[n]) for n, text in enumerate(texts))
    question = Question("q", "d", draw(names), "multi", (draw(words),), ("A",), ("t0",))
    dialogue = Dialogue("d", (Session("s", texts[0], turns),))
    strategy = Strategy((texts[-1],), (turns[0].speaker,), (texts[0],))
    factual = FactualState(dialogue, question, (Segment(0, len(turns) - 1),), strategy)
    state = AttentionalState(factual, ((0, 0), (len(turns) - 1, len(turns) - 1)))
    return record_of(ReflectiveState(state, " ".join(texts)), "train")


@given(records())
@settings(max_examples=25)
def test_recorded_markers_are_the_only_ones(record: StateRecord) -> None:
    back = record_of_row(json.loads(json.dumps(row_of(record))))
    assert back == record
    for level in (back.x1, back.x2):
        assert [level.text[start:end] for start, end in level.markers] == [f"{MARKER}\n"] * 4
        # a line of its own is what tells a marker
        assert level.text[slice(*level.dialogue)].split("\n").count(MARKER) == 4
        assert strip_markers(level) == back.x0.text[slice(*back.x0.dialogue)]
    assert MARKER not in back.x0.text.split("\n")
