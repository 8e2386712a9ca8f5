"""Names for numbered speakers."""

from __future__ import annotations

from remind.data.dialogue import Dialogue, Session, Turn
from remind.train_sae.corpus import NAMES, with_names


def test_numbered_speakers_get_names_and_others_keep_theirs() -> None:
    def talk(*speakers: str) -> Dialogue:
        turns = [tuple(Turn(f"{s}:{n}", speaker, "hi") for n, speaker in enumerate(speakers * 2)) for s in (1, 2)]
        return Dialogue("d", tuple(Session(str(number), None, part) for number, part in enumerate(turns)))

    named = with_names(talk("Speaker 1", "Speaker 2", "Ana"), 0)
    first, second = ([turn.speaker for turn in session.turns] for session in named.sessions)
    assert first[:3] == first[3:] == [first[0], first[1], "Ana"]
    assert len({*first[:2]} & {*NAMES}) == 2
    assert first[:2] != second[:2]
    assert with_names(talk("Ana", "Dr. Who", "Speaker"), 0) == talk("Ana", "Dr. Who", "Speaker")
