"""Names for speakers who have none.

Corpora such as MSC number their speakers. An SAE that never saw a name before a turn reconstructs names badly, and real
dialogues hold one in every turn.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from remind.data.dialogue import Dialogue

_COMMON = """
Aaron Abigail Adam Aisha Alan Alejandro Alex Alice Alina Amanda Amina Amir Amy Ana Anders Andrea Angela Anita Anna
Anton Arjun Arthur Astrid Ayse Beatriz Benjamin Bianca Boris Brandon Brian Bruno Camila Carla Carlos Carmen Cecilia
Charles Charlotte Chen Chiara Chloe Christian Claire Claudia Cristina Daniel Daniela David Denise Diana Diego Dmitri
Eduardo Elena Eleanor Elias Elif Elizabeth Ella Emily Emma Enrique Eric Erika Esther Eva Fatima Felix Fernando
Florence Francesca Frank Gabriela George Georgia Giulia Grace Greta Gustav Hamid Hannah Hans Harry Hassan Heather
Helen Henry Hiroshi Hugo Ian Ibrahim Ingrid Irene Isabel Ivan Jack Jacob Jamal Jane Jasmine Javier Jennifer Jesse Joan
Joel Jonathan Jorge Joseph Juan Julia Julian Justin Karen Karim Katarina Kate Keiko Kenneth Khalid Kimberly Kofi Lara
Laura Lauren Layla Leila Leo Leonard Liam Lina Linda Louis Lucas Lucia Luis Lydia Magnus Manuel Marco Margaret Mariam
Marina Mario Marta Martin Mateo Matthew Maya Megan Mei Michael Michelle Miguel Mikhail Mina Mohammed Monica Nadia
Naomi Natalia Nathan Nicole Nikhil Nina Noah Nora Oleg Olga Oliver Olivia Omar Oscar Pablo Patricia Patrick Paul Pedro
Peter Philip Priya Rachel Rafael Rahul Raj Ravi Rebecca Ricardo Richard Rita Robert Roberto Rosa Ruth Ryan Said Salma
Samira Samuel Sandra Sanjay Sara Sarah Sebastian Sergei Silvia Simon Sofia Sonia Stefan Stella Stephen Steven Susan
Sven Sylvia Tamara Tania Teresa Thomas Tomas Tunde Valentina Vera Victor Victoria Vikram Vincent Walter Wei William
Xavier Yara Yasmin Yuki Yusuf Zainab Zara Zoe
"""
#: Given names that are common somewhere.
NAMES = tuple(_COMMON.split())

_LABEL = r"(?:(?:speaker|user|person|participant|agent|human|caller)[ _#-]*)?"
_NUMBERED = re.compile(_LABEL + r"(?:\d+|[A-Z])", re.IGNORECASE)


def with_names(dialogue: Dialogue, seed: int) -> Dialogue:
    """Numbered speakers ("Speaker 1", "user_2", "B") under names drawn anew for each session; others keep theirs."""
    numbered = sorted({turn.speaker for turn in dialogue.turns if _NUMBERED.fullmatch(turn.speaker.strip())})
    if not numbered:
        return dialogue
    draw = random.Random(f"{seed}:{dialogue.id}")
    sessions = []
    for session in dialogue.sessions:
        # more speakers than names: the rest keep their numbers
        names = dict(zip(numbered, draw.sample(NAMES, min(len(numbered), len(NAMES))), strict=False))
        turns = tuple(replace(turn, speaker=names.get(turn.speaker, turn.speaker)) for turn in session.turns)
        sessions.append(replace(session, turns=turns))
    return replace(dialogue, sessions=tuple(sessions))
