"""Claims about a speaker that a dialogue settles by counting: what holds on a cluster's evidence, and what is false.

A claim that holds rests on the cluster alone; a distractor is checked against the whole dialogue, so that it is false
wherever one looks. Claims of the kind "only", "first", "how many" are made of themes that the speaker names nowhere
outside the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from remind.data.dialogue import Dialogue
from remind.refmem.cluster import Cluster
from remind.refmem.themes import Mention, Themes, listed

#: Anchors that one answer rests on, at most; the paper has four an item.
ANCHORS = 4
#: Sittings in which a theme recurs, and pictures in which a motif does.
RECURS = 3

#: The text dimensions that ask for a stance; its words stand in words.yaml.
STANCES = ("belief_modeling", "experience_grounded_planning", "implicit_boundary_modeling")


@dataclass(frozen=True)
class Claim:
    """A question's substance.

    Attributes:
        kind: which wording of refmem_offline.j2.
        speaker: whom it is about.
        holds: answer to what it rests on: turn positions (text branch) or image indices.
        fails: answers that are false in the whole dialogue.
        values: further words of the question.
        formats: formats it can be asked in.
        fixed: it has these four options rather than drawn ones.
        turns: image branch: whether the turns of the images are evidence too.
    """

    dimension: str
    kind: str
    speaker: str
    holds: dict[str, tuple[int, ...]]
    fails: tuple[str, ...] = ()
    values: dict[str, str] = field(default_factory=dict)
    formats: tuple[str, ...] = ("single", "multi", "direct")
    fixed: tuple[str, ...] = ()
    turns: bool = False


def spread(mentions: list[Mention]) -> tuple[int, ...]:
    """Turn positions: one of each session first, at most ANCHORS."""
    first = list({mention.session: mention.turn for mention in reversed(mentions)}.values())
    return tuple(sorted(sorted(first)[:ANCHORS]))


def _sittings(mentions: list[Mention] | tuple[Mention, ...]) -> set[int]:
    return {mention.session for mention in mentions}


def text_claims(dialogue: Dialogue, themes: Themes, cluster: Cluster) -> Iterator[Claim]:
    """Claims of the five text dimensions about each speaker in a cluster of segments."""
    own = {dialogue.positions[turn] for turn in cluster.turns}
    for speaker in dialogue.speakers:
        every = themes.of(speaker)
        here = {name: [m for m in found if m.turn in own] for name, found in every.items()}
        here = {name: found for name, found in here.items() if found}
        alone = {name: found for name, found in here.items() if len(found) == len(every[name])}
        yield from _stances(speaker, themes, every, here)
        yield from _patterns(speaker, themes, every, here, alone)
        yield from _courses(dialogue, speaker, themes, every, alone)


def _pick(
    themes: Themes, found: dict[str, list[Mention]], test: Callable[[list[Mention]], bool]
) -> dict[str, tuple[int, ...]]:
    return {themes.form(name): spread(mentions) for name, mentions in sorted(found.items()) if test(mentions)}


def _stances(
    speaker: str, themes: Themes, every: dict[str, tuple[Mention, ...]], here: dict[str, list[Mention]]
) -> Iterator[Claim]:
    for dimension in STANCES:
        words = listed("stances", dimension)
        near = {name: [m for m in found if m.company & words] for name, found in here.items()}
        holds = _pick(themes, near, lambda found: len(_sittings(found)) >= 2)
        fails = [name for name, found in sorted(every.items()) if not any(m.company & words for m in found)]
        scope = _scope(themes, here, holds)
        yield Claim(
            dimension, "stance", speaker, holds, tuple(map(themes.form, fails)), {"scope": scope}, _formats(scope)
        )


def _patterns(
    speaker: str,
    themes: Themes,
    every: dict[str, tuple[Mention, ...]],
    here: dict[str, list[Mention]],
    alone: dict[str, list[Mention]],
) -> Iterator[Claim]:
    dimension = "pattern_induction"
    holds = _pick(themes, here, lambda found: len(_sittings(found)) >= RECURS)
    once = tuple(themes.form(name) for name, found in sorted(every.items()) if len(_sittings(found)) == 1)
    scope = _scope(themes, here, holds)
    values = {"scope": scope, "least": "three"}
    yield Claim(dimension, "recurs", speaker, holds, once, values, _formats(scope))
    for name, found in sorted(alone.items()):
        if 2 <= len(_sittings(found)) <= 2 * ANCHORS:
            places = tuple(sorted({m.session: m.turn for m in reversed(found)}.values()))
            answer = {str(len(_sittings(found))): places}
            numbers = tuple(str(n) for n in range(1, 2 * ANCHORS + 2))
            yield Claim(dimension, "sittings", speaker, answer, numbers, {"theme": themes.form(name)}, ("direct",))
    for name, found in sorted(here.items()):
        if len(_sittings(found)) < 2:
            continue
        together: dict[str, tuple[int, ...]] = {}
        for other, beside in sorted(here.items()):
            shared = sorted(_sittings(found) & _sittings(beside))
            if other != name and len(shared) >= 2:
                both = [m.turn for m in (*found, *beside) if m.session in shared[:2]]
                together[themes.form(other)] = tuple(sorted(set(both)))[: 2 * ANCHORS]
        apart = [other for other, rest in sorted(every.items()) if not _sittings(every[name]) & _sittings(rest)]
        often = [o for o, rest in every.items() if len(_sittings(every[name]) & _sittings(rest)) >= 2 and o != name]
        formats = _formats("all" if {themes.form(other) for other in often} == set(together) else "")
        values = {"theme": themes.form(name)}
        yield Claim(dimension, "company", speaker, together, tuple(map(themes.form, apart)), values, formats)


def _courses(
    dialogue: Dialogue,
    speaker: str,
    themes: Themes,
    every: dict[str, tuple[Mention, ...]],
    alone: dict[str, list[Mention]],
) -> Iterator[Claim]:
    dimension, count = "temporal_dynamics", len(dialogue.sessions)
    for share in (3, 2):
        cut = count // share
        for kind, border in (("later", cut), ("earlier", count - cut - 1)):
            date = day(dialogue, border)
            if sum(day(dialogue, number) == date for number in range(count)) > 1:
                continue  # "after that day" would not say where the border lies

            inside = {n for n in range(count) if (n > border if kind == "later" else n < border)}
            kept = {name: found for name, found in alone.items() if _sittings(found) <= inside}
            holds = _pick(themes, kept, lambda found: len(_sittings(found)) > 1)
            wrong = [name for name, found in sorted(every.items()) if not _sittings(found) <= inside]
            formats = ("single", "multi")
            yield Claim(dimension, kind, speaker, holds, tuple(map(themes.form, wrong)), {"date": date}, formats)
    days = tuple(dict.fromkeys(day(dialogue, number) for number in range(count)))
    for name, found in sorted(alone.items()):
        if len(_sittings(found)) < 2:
            continue
        values = {"theme": themes.form(name)}
        first, last = found[0], found[-1]
        ends = tuple(sorted({first.turn, last.turn}))
        yield Claim(dimension, "begins", speaker, {day(dialogue, first.session): ends}, days, values, ("direct",))
        yield Claim(dimension, "ends", speaker, {day(dialogue, last.session): ends}, days, values, ("direct",))
        if count >= 6 and len(found) <= 2 * ANCHORS:
            turns = tuple(sorted({m.turn for m in found}))
            options = shapes(count)
            answer = options[shape([m.session for m in found], count)]
            yield Claim(dimension, "course", speaker, {answer: turns}, (), values, ("single",), options)


def shapes(count: int) -> tuple[str, ...]:
    """The four ways a theme can run over `count` sittings."""
    gap = max(2, count // 3)
    return (
        "In the first half of the sittings only",
        "In the second half of the sittings only",
        f"In both halves, never silent for {gap} sittings",
        f"In both halves, once silent for {gap} sittings",
    )


def shape(sessions: list[int], count: int) -> int:
    """Which of `shapes` it is: the sittings in which a theme is named, numbered from 0, of `count`."""
    ordered = sorted(set(sessions))
    if ordered[-1] < count / 2:
        return 0
    if ordered[0] >= count / 2:
        return 1
    silence = max((b - a - 1 for a, b in pairwise(ordered)), default=0)
    return 3 if silence >= max(2, count // 3) else 2


def day(dialogue: Dialogue, session: int) -> str:
    """The day of a session as "8 May 2023"; its number where the file gives no ISO date."""
    time = dialogue.sessions[session].time
    try:
        date = datetime.fromisoformat(time or "")
    except ValueError:
        return f"sitting {session + 1}"
    return f"{date.day} {date:%B %Y}"


def _scope(themes: Themes, here: dict[str, list[Mention]], holds: dict[str, tuple[int, ...]]) -> str:
    """Two themes of the cluster that are no answers, to tell which talk is meant; "" if there are none.

    A question without options needs it: what holds elsewhere in the dialogue is no answer to it.
    """
    rest = [name for name in here if themes.form(name) not in holds]
    rest.sort(key=lambda name: (-len(here[name]), name))
    return " and ".join(themes.form(name) for name in rest[:2]) if len(rest) > 1 else ""


def _formats(scope: str) -> tuple[str, ...]:
    return ("single", "multi", "direct") if scope else ("single", "multi")
