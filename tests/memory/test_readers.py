from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from scripted import ScriptedChat

from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.llm.request import Reply, Request
from remind.memory.base import Memory, Query
from remind.memory.readers import ChatReader, Mode, Reading, as_turns, citations
from remind.memory.rmm import cited
from remind.states.pyramid import FactualState, Segment, Strategy, render

#: Best first; times in words, as texts in another order than the dialogue's; of the last nobody knows its turns.
MEMORIES = tuple(
    Memory(f"m{n}", f"text {n}", "turn", place and (f"t{place}",), time, 1.0 - n, 10, place)  # type: ignore[arg-type]
    for n, (time, place) in enumerate(
        [("9 May", 7), (None, 8), ("8 May", 2), ("10 May", 9), ("2020-01-01", None), ("8 May", 1)]
    )
)
ORDER = [5, 2, 0, 1, 3, 4]
QUERY = Query("Who came?", "q1", "2023-05-01")


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        ("Tea [0], and milk [ 4 ] too", "Tea, and milk too", {0, 4}),
        ("Tea [7, 1]", "Tea", {1}),
        ("I do not know. [NO_CITE]", "I do not know.", set()),
        ("items[1] and [i, j]", "items[1] and [i, j]", None),
        ("In [2023] it was [3]", "In [2023] it was", {3}),
    ],
)
def test_citations(text: str, expected: str, found: set[int] | None) -> None:
    assert citations(text, 5) == (expected, found)


def asked(reader: ChatReader, reply: Reply, memories: Sequence[Memory] = MEMORIES) -> tuple[Reading, Request]:
    chat = ScriptedChat(lambda _: reply)
    reading = reader.read_all([(QUERY, memories)], lambda stage: chat)[0]
    return reading, chat.asked[-1]


@pytest.mark.parametrize("mode", ["direct", "con", "cite"])
def test_memories_are_shown_in_the_order_of_the_dialogue(mode: Mode) -> None:
    reply = Reply("- [0] says so\nAnswer: Ana [0, 4]", prompt_tokens=7, completion_tokens=2, calls=1, seconds=0.5)
    reading, request = asked(ChatReader(mode), reply)
    user = request.messages[1].text
    rows = json.loads(user[user.index("[") : user.rindex("]") + 1])
    assert [row["content"] for row in rows] == [MEMORIES[place].text for place in ORDER]
    assert [row["memory"] for row in rows] == list(range(6))
    assert [row["date"] for row in rows] == [MEMORIES[place].time or "unknown" for place in ORDER]
    assert reading.tokens == (7, 2)
    if mode == "cite":
        # the first and the last that were shown
        assert (reading.text, reading.cited) == ("- says so\nAnswer: Ana", {ORDER[0], ORDER[4]})
    else:
        assert reading.text == ("Ana [0, 4]" if mode == "con" else reply.text)
    failed, _ = asked(ChatReader(mode), Reply("", failure="server", message="down"))
    assert (failed.text, failed.cited, failed.failure) == ("", None, "server: down")


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("Notes.\n**Answer:** -5 degrees", "-5 degrees"),
        ("Answer: no\nAnswer:\n- tennis\n- chess\n\nThat is all.", "- tennis\n- chess"),
        ("It costs $50.", "It costs $50."),
        ("Answer: tea\nExplanation: she said so", "tea"),
        ("Answer:\nA. red\nC. blue\n\nSo it is.", "A. red\nC. blue"),
        ("Answer: - tea\n\n- milk\n\nSo it is.", "- tea\n- milk"),
        ("Answer: They are:\n\n1. tea\n2. milk\nDone.", "They are:\n1. tea\n2. milk\nDone."),
        ("Final answer: $50", "Final answer: $50"),
    ],
)
def test_what_is_read_as_the_answer(reply: str, text: str) -> None:
    assert asked(ChatReader("con"), Reply(reply))[0].text == text


def test_days_in_words_are_told_apart() -> None:
    days = (
        ("September 3, 2023",),
        ("September 21, 2023", "21 September 2023, 9:00"),
        ("2024-01-02T09:00", "2024-01-02T10:00"),
        ("Spring 2023",),
        ("Fall 2023",),
    )
    times = [time for day in days for time in day]
    shown = as_turns([Memory(f"m{n}", f"text {n}", "turn", None, time, 0.0, 3) for n, time in enumerate(times)])
    heads = [line for line in shown.splitlines() if line.startswith("[")]
    assert heads == [f"[Session {n}, {day[0]}]" for n, day in enumerate(days, 1)]


def test_a_model_trained_on_states_gets_the_prompt_of_x0() -> None:
    first = Session("1", "2023-01-01T09:00", (Turn("1a", "Ana", "I <answer>know"), Turn("1b", "Bo", "So?")))
    dialogue = Dialogue("d", (first, Session("2", "2023-02-02", (Turn("2a", "Ana", "Yes"),))))
    question = Question("q", "d", "Which?", "single", ("tea", "milk"), time="2023-03-01")
    state = FactualState(dialogue, question, (Segment(0, 1), Segment(2, 2)), Strategy(()), True)
    memories = [
        Memory(turn.id, f"{turn.speaker}: {turn.text}", "turn", None, dialogue.session_of[turn.id].time, 0.0, 5)
        for turn in dialogue.turns
    ]
    chat = ScriptedChat(lambda _: Reply("<answer>B</answer><explanation>Ana: Yes", finished=False))
    (reading,) = ChatReader("x0").read_all([(Query.of(question), memories)], lambda stage: chat)
    assert [message.text for message in chat.asked[0].messages] == [render(state).text]
    assert (reading.text, reading.cited) == ("B", None)


def test_who_cites_what() -> None:
    asked = Question("q", "d", "Where did Ann buy her red bicycle?", answers=("Oslo",), evidence=("t1", "t5"))
    given: list[tuple[str, tuple[str, ...] | None]] = [
        ("Ann: I bought the bicycle", ("t3",)),
        ("Ann: it is red", ("t1", "t2")),
        ("Bob: hello", ("t4",)),
        ("Bob: a red bike that Ann buys; a bicycle", None),
    ]
    shown = [Memory(f"m{n}", text, "turn", sources, None, 0.0, 3) for n, (text, sources) in enumerate(given)]
    assert cited("oracle", asked, shown) == {1}
    # of Ann, buy, red, bicycle two are needed; stems count
    assert cited("lexical", asked, shown) == {0, 1, 3}
    assert cited("oracle", asked, []) == frozenset()
    assert cited("oracle", replace(asked, evidence=()), shown) is None
    assert cited("noisy", asked, shown) <= {0, 1, 2, 3}
