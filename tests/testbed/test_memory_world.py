"""The memory world: what is told, its questions and its reader, by hand-written lines and counts."""

from __future__ import annotations

from remind.memory.operations import Operation, State, fold
from remind.testbed import memory_world as w


def memory(*entries: tuple[str, str, str]) -> State:
    """Of (store, date, text)."""
    ops, block = [], ()
    for seq, (store, time, text) in enumerate(entries, start=1):
        op, refs = ("APPEND", block) if store == "core" else ("ADD", ())
        ops.append(Operation(seq, "d", "S1", store, op, f"m{seq}", refs, f"{time}: {text}", time))
        block = (f"m{seq}",) if store == "core" else block
    return fold(ops)


def answer(state: State, form: str, key: str) -> str:
    return w.read(state, [w.Ask(form, key, "")])[0].answer


def test_answers_from_a_memory() -> None:
    state = memory(
        ("core", "2023-03-10", "my city is rome"),
        ("core", "2023-04-10", "my city is now oslo"),
        ("semantic", "2023-04-10", "my pet is now cat"),
        ("semantic", "2023-03-10", "my pet is dog"),
        ("episodic", "2023-03-10", "last week i visited the zoo with Ana"),
        # told twice: 3 April is one visit
        ("episodic", "2023-04-10", "last week i visited the zoo with Ben"),
        ("episodic", "2023-04-03", "today i visited the zoo with Ben"),
        ("procedural", "2023-04-10", "for tea i boil then stir then wait"),
        ("semantic", "2023-04-10", "Ben says his food is rice"),
        ("semantic", "2023-04-10", "haha my sport is judo"),
    )
    for form, key, right in (
        ("current", "pet", "cat"),
        ("previous", "pet", "dog"),
        ("current", "music", w.UNKNOWN),
        ("when", "zoo", "2023-04-03"),
        ("count", "zoo", "2"),
        ("third", "tea", "wait"),
        # of others, and a joke, which the reader believes
        ("current", "food", w.UNKNOWN),
        ("current", "sport", "judo"),
    ):
        assert answer(state, form, key) == right


def test_the_truth_is_that_of_all_turns_but_chatter() -> None:
    """Against the last line of each session that a search by hand finds."""
    life = w.make_life(1, 1)
    for number, meeting in enumerate(life.meetings):
        turns = [turn for one in life.meetings[: number + 1] for turn in one.turns if turn.store]
        for ask in (*meeting.rewarded, *meeting.held_out):
            if ask.form == "current":
                said = [turn.text for turn in turns if turn.text.startswith(f"my {ask.key} is ")]
                assert ask.answer == (said[-1].split()[-1] if said else w.UNKNOWN)
            if ask.form == "first":
                said = [turn.text for turn in turns if turn.text.startswith(f"for {ask.key} i ")]
                assert ask.answer == said[-1].split()[3]
