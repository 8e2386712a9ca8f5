"""Rendering: section order, byte identity of the dialogue section, spans, targets; our own marks in people's words."""

import json

from hypothesis import given
from hypothesis import strategies as st
from small_corpus import strip_markers, talk

from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.states.pyramid import (
    MARKER,
    AttentionalState,
    FactualState,
    ReflectiveState,
    Segment,
    Strategy,
    line_of,
    one_line,
    render,
    render_target,
)
from remind.states.records import record_of, record_of_row, row_of

VISUAL = "topic_scoped_visual_prototypes"
#: Our own marks, written by the people of a dialogue: they stay words.
MARKS = (
    *(MARKER, f"{MARKER}\n", f"\n{MARKER}\n", f"{MARKER}:", "[Session 1]", "[…]", "[Image #0 Caption]"),
    *("<answer>B</answer>", "</answer>", "<explanation>", "</explanation>", "Question:", "Options:\nA.", "{{ x }}"),
    *("<|vision_start|>", "<|image_pad|>", "<|im_start|>assistant\n", "<|im_end|>", "<|endoftext|>", "[SEP]", "</s>"),
    *("\u2028", "\x85", "מה שלומך", "😀😀", "hello", " "),
)
TEXT = st.text(max_size=40) | st.lists(st.sampled_from(MARKS), min_size=1, max_size=3).map(" ".join)


@st.composite
def states(draw: st.DrawFn) -> AttentionalState:
    """A random dialogue, retrieved segments and blocks that respect the runs."""
    sessions, image = [], 0
    for s in range(draw(st.integers(1, 3))):
        turns = []
        for t in range(draw(st.integers(1, 5))):
            images = tuple(
                Image(image + i, caption=draw(st.none() | TEXT)) for i in range(draw(st.sampled_from([0, 0, 0, 1, 2])))
            )
            image += len(images)
            speaker = draw(st.sampled_from(["Ana", "An", "Dr. O'Hara"]) | TEXT.filter(str.strip))
            turns.append(Turn(f"{s}:{t}", speaker, draw(TEXT), images=images))
        sessions.append(Session(f"s{s}", draw(st.none() | st.just("2024-01-02T03:04")), tuple(turns)))
    dialogue = Dialogue("d", tuple(sessions))
    cuts = sorted(draw(st.sets(st.integers(0, len(dialogue.turns)), max_size=6)))
    segments = tuple(Segment(a, b - 1) for a, b in zip(cuts[::2], cuts[1::2], strict=False))
    strategy = Strategy(("look for habits",), speakers=("Ana",), entities=tuple(draw(st.lists(TEXT, max_size=2))))
    question = Question("q", "d", draw(TEXT), format="single", options=("x", "y"), answers=("B",))
    factual = FactualState(dialogue, question, segments, strategy)
    runs, blocks, index = factual.runs, [], 0
    while index < len(runs):
        if draw(st.booleans()):
            end = index
            while end + 1 < len(runs) and runs[end + 1] == runs[index] and draw(st.booleans()):
                end += 1
            blocks.append((index, end))
            index = end
        index += 1
    return AttentionalState(factual, tuple(blocks))


@given(states(), TEXT)
def test_sections_markers_and_spans(state: AttentionalState, summary: str) -> None:
    first, x1, x2 = render(state.factual), render(state), render(ReflectiveState(state, summary))
    section = first.text[slice(*first.dialogue)]
    assert strip_markers(x1) == strip_markers(x2) == section
    # the same by an independent route: a marker is a whole line, and no dialogue line can be one
    lines = x1.text[slice(*x1.dialogue)].split("\n")
    assert "\n".join(line for line in lines if line != MARKER) == section
    assert lines.count(MARKER) == 2 * len(state.blocks)
    # quoting a turn ends no answer
    assert "<answer>" not in section
    assert first.text[: first.dialogue[0]] == x1.text[: x1.dialogue[0]]
    end = x1.text.rindex("markers") if state.blocks else x1.dialogue[1]
    assert x2.text[: x1.text.rindex("\nQuestion: ")].startswith(x1.text[:end])

    record = record_of(ReflectiveState(state, summary), "train")
    assert record_of_row(json.loads(json.dumps(row_of(record)))) == record
    assert [x2.text[slice(*span)] for span in x2.markers] == [f"{MARKER}\n"] * len(x2.markers)

    pairs = list(zip(x1.markers[::2], x1.markers[1::2], strict=True))
    for (start, end), (opened, closed) in zip(state.blocks, pairs, strict=True):
        assert (opened[1], closed[0]) == (x1.turns[start].start, x1.turns[end].end)
        inside = x1.text[opened[1] : closed[0]].split("\n")
        assert MARKER not in inside
        assert "[…]" not in inside or any("[…]" in turn.text for turn in state.factual.turns)

    strategy = state.factual.strategy
    for rendered in (first, x1):
        for span, turn in zip(rendered.turns, state.factual.turns, strict=True):
            assert (span.turn_id, len(span.captions)) == (turn.id, len(turn.images))
            assert rendered.text[slice(*span.speaker)] == f"{one_line(turn.speaker)}:"
            assert rendered.text[slice(*span.text)] == one_line(turn.text)
            assert rendered.text[span.start : span.end].startswith(line_of(turn) + "\n")
        for texts, spans in ((strategy.reasoning, rendered.reasoning), (strategy.anchors, rendered.anchors)):
            assert [rendered.text[slice(*span)] for span in spans] == [*map(one_line, texts)]


TALK = talk(
    ["Ben: first 0", "Ana: first 1", "Ben: first 2", "Ana: first 3"],
    ["Ana:  | a red bike | -", "Ben: nice\nbike | hills"],
)


def test_sections_stand_in_the_documented_order() -> None:
    question = Question("q", "d", "What colour?", "multi", ("red", "blue"), ("B", "A"), time="2024-05-05")
    segments, strategy = (Segment(0, 0), Segment(2, 3), Segment(4, 5)), Strategy(("find colours",), ("Ana",))
    factual = FactualState(TALK, question, segments, strategy)
    text = render(ReflectiveState(AttentionalState(factual, ((1, 2), (3, 3))), "It is red.")).text
    landmarks = [
        "between answer tags: <answer>[A,D]</answer>",
        "Conversation\n[Session 1, 2024-03-01]\nBen: first 0\n[…]\n",
        "[ATTENTION]\nBen: first 2\nAna: first 3\n[ATTENTION]\n",
        "[Session 2, 2024-03-02]\n[ATTENTION]\nAna:\n[Image #0 Caption] a red bike\n",
        "[Image #1 Caption] (no caption)\n[ATTENTION]\n",
        "Ben: nice bike\n[Image #2 Caption] hills\n",
        "Guide to the question",
        "Target speaker: Ana\nStep 1: find colours\n",
        "between a pair of [ATTENTION] markers",
        "Reflection\n",
        "It is red.\n",
        "Asked on: 2024-05-05\nQuestion: What colour?\nOptions:\nA. red\nB. blue\n",
    ]
    places = [text.index(landmark) for landmark in landmarks]
    assert places == sorted(places)
    assert text.endswith(landmarks[-1])


def x0(question: Question, *segments: Segment) -> FactualState:
    return FactualState(TALK, question, segments, Strategy(()))


def test_target_quotes_only_what_x0_holds() -> None:
    question = Question("q", "d", "?", answers=("red bike", "bike"), evidence=("2:2", "1:2"))
    target = render_target(x0(question, Segment(4, 5)))
    assert target == "<answer>red bike</answer><explanation>Ben: nice bike</explanation>"
    # a visual question has image indices
    visual = Question("q", "d", "?", "multi", ("x", "y", "z"), ("C", "A"), images=(2, 0), dimension=VISUAL)
    assert render_target(x0(visual, Segment(5, 5))) == "<answer>[A,C]</answer><explanation>[2]</explanation>"
    assert render_target(x0(Question("q", "d", "?"), Segment(0, 0))) is None
