"""Files of items and annotations, κ by hand, and the merge against small cases decided by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from refmem_samples import HOSTILE, item, row

from remind.core.errors import ConfigError, DataError
from remind.core.files import write_rows
from remind.refmem.items import Item, read_items, write_items
from remind.refmem.merge import MergeConfig, Row, agreement, choices, decide, merge, phrase, read_annotations

pytest.importorskip("statsmodels", reason="needs statsmodels: pip install 'remind-toolkit[refmem]'")
SINGLE, MULTI = item("one"), item("two", "multi", question=HOSTILE[3], images=(0, 2))
NAMES = ("x", "y", "z")
PAIRS = (("x", "B"), ("y", "C"), ("z", "D"))


def test_a_record_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (read_items, {"id": "one"}, "its id occurs twice"),
        (read_items, {"branch": "sound"}, "branch: Input should be 'text' or 'image'"),
        (read_annotations, {"fingerprint": "0" * 16}, "another build"),
        (read_annotations, {"item_id": "two", "fingerprint": None}, "Ana has annotated the item twice"),
    ]
    for read, change, message in wrong:
        drafts = read is read_items
        first, second = (SINGLE, MULTI) if drafts else (row(MULTI, "Ana", "B"), row(SINGLE, "Ana", "B"))
        write_rows(path, [asdict(first), {**asdict(second), **change}])
        with pytest.raises(DataError, match=rf"^{path} \[line 2.*{message}"):
            read(path) if drafts else read(path, [SINGLE, MULTI])


def test_letters_are_categories_and_options_decisions() -> None:
    """Two annotators: B and B, B and C; and of several answers A and C, and A."""
    items = [item("a"), item("b"), item("m", "multi")]
    votes = zip(items, ("B", "B", "AC"), ("B", "C", "A"), strict=True)
    ballots = {one.id: {"x": row(one, "x", x), "y": row(one, "y", y)} for one, x, y in votes}
    figures = agreement(items, ballots, ["x", "y"])
    # letters: P̄ = 1/2, p = 3/4 and 1/4, P̄e = 5/8. options of m: P̄ = 3/4, p(yes) = 3/8, P̄e = 34/64
    assert figures["formats"]["single"]["kappa"] == pytest.approx((1 / 2 - 5 / 8) / (3 / 8))
    assert figures["formats"]["multi"]["kappa"] == pytest.approx((3 / 4 - 34 / 64) / (30 / 64))
    # the options of all three: P̄ = 9/12, 7 of 24 yes
    assert figures["all"]["kappa"] == pytest.approx((3 / 4 - 338 / 576) / (238 / 576))
    # what someone only flagged is in no κ of answers
    ballots["b"]["y"] = row(items[1], "y", (), remove=True, confidence=None)
    figures = agreement(items[:2], ballots, ["x", "y"])
    assert (figures["all"]["items"], figures["all"]["left_out"], figures["remove"]["items"]) == (1, 1, 2)
    # direct answers are votes on candidates, and one for an answer of one's own
    assert choices(item("i", "direct"), ("A Quiet  Life!", "sailing")) == (True, False, False, True)
    assert (phrase("Ｃafé, au lait."), phrase("!?")) == ("café au lait", "!?")
    for one, other in (("दाल", "दिल"), ("ไม่", "ไม้"), ("C++", "C#"), ("-5", "5"), ("$5", "5")):
        assert phrase(one) != phrase(other)
    for one, other in (("tea ☕️", "tea"), ("10−20", "10-20"), ("tea|milk", "tea milk"), ("−5", "-5")):
        assert phrase(one) == phrase(other)
    assert phrase("well-known tea 🍵!") == phrase("Well known: tea")


def test_answers_by_majority() -> None:
    cases: list[tuple[str, Any, tuple[str, ...] | None]] = [
        ("single", "BC", None),
        ("multi", ("AC", "CA", "A"), ("A", "C")),
        # each option has a majority, but nobody chose the set ABC
        ("multi", ("AB", "BC", "AC"), None),
        ("direct", (["a quiet life"], ["A quiet life."], ["a loud life"]), ("a quiet life",)),
    ]
    for kind, votes, answers in cases:
        given = item("i", kind)
        out = decide(given, [row(given, name, vote) for name, vote in zip(NAMES, votes, strict=False)])
        assert (out.answers, "answers" in out.open) == (answers, answers is None)


class Desk:
    """A folder with items and each annotator's file."""

    def __init__(self, folder: Path, items: list[Item], **votes: list[Row]) -> None:
        self.folder = folder
        write_items(folder / "items.jsonl", items)
        for name, given in votes.items():
            write_rows(folder / "rows" / f"{name}.jsonl", map(asdict, given))

    def merge(self, *resolutions: dict[str, Any], **options: Any) -> dict[str, Any]:
        paths = {"drafts": f"{self.folder}/items.jsonl", "annotations": f"{self.folder}/rows"}
        if resolutions:
            options["resolutions"] = f"{self.folder}/resolutions.jsonl"
            write_rows(options["resolutions"], resolutions)
        return merge(MergeConfig(**paths, out=f"{self.folder}/out", **options))

    def read(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "out" / name).read_text().splitlines()]

    def final(self) -> list[Item]:
        return read_items(self.folder / "out" / "final.jsonl")


def test_final_items_carry_the_majority_and_removals_are_counted(tmp_path: Path) -> None:
    a, b, c, d = item("a"), item("b", "multi"), item("c", dimension="belief_modeling"), item("d", "direct")
    votes = {
        name: [row(a, name, letter), row(b, name, "AC"), row(c, name, letter), row(d, name, ["own"])]
        for name, letter in zip(NAMES, "CCB", strict=True)
    }
    for name in "xy":
        votes[name][2] = row(c, name, (), remove=True, confidence=None, evidence=())
    desk = Desk(tmp_path, [a, b, c, d], **votes)
    result = desk.merge()
    # all but the answers is as it was
    assert desk.final() == [replace(a, answers=("C",)), b, replace(d, answers=("own",))]
    assert (result["kept"], result["removed"], result["open"]) == (3, 1, 0)
    assert result["removal"]["dimensions"]["belief_modeling"] == {"items": 1, "removed": 1, "share": 1.0}
    # decided by a majority, and listed all the same
    assert {one["item_id"]: one["state"] for one in desk.read("conflicts.jsonl")} == {"a": "kept", "c": "removed"}
    assert "| belief modeling | 1 | 1 | 100.00% |" in (tmp_path / "out" / "report.md").read_text()


def test_undecided_items_are_listed_and_resolved(tmp_path: Path) -> None:
    """The annotators agree on a alone, and differ on evidence of none."""
    items = [item("a"), item("b"), item("c")]
    votes = {name: [row(items[0], name, "B"), *(row(one, name, vote) for one in items[1:])] for name, vote in PAIRS}
    torn = Desk(tmp_path, items, **votes)
    before = torn.merge()
    assert (before["open"], before["undecided"]) == (2, {"b": ["answers"], "c": ["answers"]})
    assert torn.final() == items[:1]
    conflicts = torn.read("conflicts.jsonl")
    assert [(one["item_id"], one["state"], one["decided"]) for one in conflicts] == [(n, "open", None) for n in "bc"]
    # a row of conflicts.jsonl, filled in, is a resolution
    filled = {**conflicts[0], "answers": ["D"], "evidence": ["T3"]}
    assert list(torn.merge(filled)["undecided"]) == ["c"]
    result = torn.merge(filled, {"item_id": "c", "remove": True})
    assert (result["kept"], result["removed"], result["resolved"]) == (2, 1, 2)
    assert torn.final() == [items[0], replace(items[1], answers=("D",), evidence=("T3",))]
    # agreement stays what it was before discussion
    assert result["agreement"] == before["agreement"]
    # the merge writes conflicts.jsonl anew: what was filled in there would be lost
    with pytest.raises(ConfigError, match="an edited copy"):
        torn.merge(resolutions=str(torn.folder / "out" / "conflicts.jsonl"))


def test_resolutions_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [item("a")], x=[row(item("a"), "x", "B")])
    for record, message in (({"item_id": "b"}, "another build"), ({"answers": ["Z"]}, "an answer that is no option")):
        with pytest.raises(DataError, match=message):
            desk.merge({"item_id": "a", **record})
    # kept, by one annotator, but for what nobody has looked at
    result = Desk(tmp_path, [item("a"), item("c")], x=[row(item("a"), "x", "B")]).merge()
    assert (result["kept"], result["undecided"]) == (1, {"c": ["unannotated"]})
    assert result["agreement"]["all"]["kappa"] is None
