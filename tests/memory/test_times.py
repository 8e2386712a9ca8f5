"""Events and time ranges from an LLM, for which rules stand in."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from scripted import ScriptedChat
from words import services

from remind.data.dialogue import Session, Turn
from remind.llm.request import Reply
from remind.memory.bank import Bank
from remind.memory.longmemeval import ask_events, ask_range, told_days
from remind.memory.plain import PlainSystem
from remind.text.days import Span

TODAY = date(2024, 3, 14)


def asking(folder: Path, chat: ScriptedChat) -> Bank:
    return PlainSystem("plain").open(folder, "d", services(chat))


def test_an_endpoint_gives_the_range_and_rules_stand_for_it(tmp_path: Path) -> None:
    def ranged(value: object, text: str = "", failure: str | None = None) -> tuple[Span | None, str]:
        reply = Reply(text, value, failure=failure)  # type: ignore[arg-type]
        with asking(tmp_path, ScriptedChat(lambda _: reply)) as bank:
            return ask_range(bank, "What did I do in May 2023?", TODAY, TODAY)

    may = Span(date(2023, 5, 1), date(2023, 5, 31))
    june = Span(date(2023, 6, 1), date(2023, 6, 9))
    assert ranged({"start": "2023/06/01", "end": "2023/06/09"}) == (june, "llm")
    assert ranged({"start": "N/A", "end": "N/A"}) == (None, "llm")
    assert ranged({"start": "2023/06/09", "end": "2023/06/01"}) == (None, "llm")
    assert ranged({"start": "2024/03/14", "end": "2024/03/15"}) == (None, "llm")
    assert ranged({"start": "soon", "end": "later"}) == (may, "rules")
    assert ranged(None, "from 2023/06/01 to 2023-06-09, I think", "invalid") == (may, "rules")
    assert ranged(None, "", "server") == (may, "rules")
    assert ask_range(None, "What did I do in May 2023?", None, TODAY) == (may, "rules")


TALK = Session(
    "S1",
    "2023-05-10T09:00",
    (Turn("a", "Bo", "We moved house yesterday"), Turn("b", "Al", "Nice", "2023-05-11T08:00"), Turn("c", "Bo", "Ok")),
)


def test_events_are_of_their_message(tmp_path: Path) -> None:
    days = [Span(date(2023, 5, n), date(2023, 5, n)) for n in (9, 10, 11)]
    said = {"a": [days[1]], "b": [days[2]], "c": [days[1]]}
    assert told_days(TALK) == {**said, "a": [days[1], days[0]]}
    may = Span(date(2023, 5, 9), date(2023, 5, 9))

    lost: list[str] = []

    def told(events: object, failure: str | None = None) -> dict[str, list[Span]]:
        value = None if events is None else {"events": events}
        chat = ScriptedChat(lambda _: Reply("", value, failure=failure))  # type: ignore[arg-type]
        with asking(tmp_path, chat) as bank:
            found = ask_events(bank, TALK)
            lost[:] = bank.lost
        assert "2023/05/10 (Wednesday)" in chat.asked[0].messages[1].text
        return found

    event = {"message": 1, "date": "2023/05/09", "event": "moved"}
    assert told([event]) == {**said, "a": [days[1], may]}
    assert told([{**event, "date": "soon"}]) == said
    everywhere = {name: [*spans, may] for name, spans in said.items()}
    assert told([{**event, "message": 9}]) == everywhere
    assert not lost
    assert told(None, "server") == told_days(TALK)
    assert len(lost) == 1
    assert "S1" in lost[0]
