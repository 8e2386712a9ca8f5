"""The words of the synthetic world: each belongs to one value, and gives away nothing where it should not."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import combinations

from solver import bank, values_of


def test_no_word_stands_under_two_values_or_in_two_roles() -> None:
    places: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for name, words in bank()["dimensions"].items():
        for kind in ("topics", "keen", "averse", "texts", "scenes", "dodges", "frank"):
            for text in words.get(kind, ()):
                places[text].append((name, kind))
        for text in words.get("fits", ()):
            places[text].append((name, "fits"))
        for value, entry in words["values"].items():
            for kind in ("label", "gist", "cues", "fits"):
                for text in entry.get(kind, ()):
                    places[text].append((name, value, kind))
    for kind in ("names", "leads", "fillers"):
        for text in bank()[kind]:
            places[text].append((kind,))
    places[bank()["flag"]].append(("flag",))
    assert {text: of for text, of in places.items() if len(of) > 1} == {}


def test_no_cue_stands_in_a_wording() -> None:
    cues = {
        cue for words in bank()["dimensions"].values() for e in words["values"].values() for cue in e.get("cues", ())
    }
    cues |= {cue for stance in ("keen", "averse") for cue in bank()["dimensions"]["temporal_dynamics"][stance]}
    fixed = [*bank()["fillers"], *bank()["leads"]]
    for words in bank()["dimensions"].values():
        for kind in ("ask", "gist", "frames", "topics", "texts", "scenes", "dodges", "frank"):
            fixed += words.get(kind, ())
    assert [(c, t) for c in sorted(cues) for t in fixed if re.search(rf"\b{re.escape(c)}\b", t)] == []


def test_statements_about_a_course_tell_all_values_apart() -> None:
    fits = bank()["dimensions"]["temporal_dynamics"]["fits"]
    values = values_of("temporal_dynamics")
    for one, other in combinations(values, 2):
        assert {text for text, of in fits.items() if one in of} != {text for text, of in fits.items() if other in of}
    # any four of them leave every value something right and something wrong
    for chosen in combinations(fits, 4):
        assert all(0 < sum(value in fits[text] for text in chosen) < 4 for value in values)
