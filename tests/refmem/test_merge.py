"""The merge against small cases decided by hand: majorities, ties, resolutions, removal, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from annotation_samples import item, row

from remind.core.errors import ConfigError, DataError
from remind.refmem.annotations import Row, write_annotations
from remind.refmem.items import Item, read_items, write_items
from remind.refmem.merge import MergeConfig, merge, merge_and_show
from remind.refmem.votes import Outcome, decide

pytest.importorskip("statsmodels", reason="needs statsmodels: pip install 'remind-toolkit[refmem]'")


class Desk:
    """A folder with items and each annotator's file."""

    def __init__(self, folder: Path, items: list[Item]) -> None:
        self.folder, self.items = folder, items
        write_items(folder / "items.jsonl", items)

    def votes(self, **rows: list[Row]) -> Desk:
        for name, given in rows.items():
            write_annotations(given, self.folder / "rows" / f"{name}.jsonl")
        return self

    def merge(self, **options: Any) -> dict[str, Any]:
        paths = {"drafts": str(self.folder / "items.jsonl"), "annotations": str(self.folder / "rows")}
        return merge(MergeConfig(**paths, out=str(self.folder / "out"), **options))

    def resolve(self, *rows: dict[str, Any]) -> str:
        path = self.folder / "resolutions.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        return str(path)

    def read(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "out" / name).read_text().splitlines()]

    @property
    def final(self) -> dict[str, Item]:
        return {one.id: one for one in read_items(self.folder / "out" / "final.jsonl")}


NAMES = ("x", "y", "z")


def cast(given: Item, *votes: Any, **changes: Any) -> list[Row]:
    return [row(given, name, vote, **changes) for name, vote in zip(NAMES, votes, strict=False)]


@pytest.mark.parametrize(
    ("kind", "votes", "answers"),
    [
        ("single", "BBC", ("B",)),
        ("single", "BCD", None),
        ("single", "BC", None),
        ("single", "B", ("B",)),
        ("multi", ("AC", "CA", "A"), ("A", "C")),
        # each option has a majority, but nobody chose the set ABC
        ("multi", ("AB", "BC", "AC"), None),
        ("direct", (["a quiet life"], ["A quiet life."], ["a loud life"]), ("a quiet life",)),
        ("direct", (["her", "his"], ["Her"], ["her", "his"]), ("her", "his")),
        ("direct", (["a"], ["b"], ["c"]), None),
    ],
)
def test_majority_answers_by_hand(kind: str, votes: Any, answers: tuple[str, ...] | None) -> None:
    given = item("i", kind)
    out = decide(given, cast(given, *votes))
    assert out.answers == answers
    assert out.open == ([] if answers else ["answers"])
    assert ("answers" in out.differ) == (len(votes) > 1)


def test_evidence_is_the_majority_of_those_who_checked() -> None:
    given = item("i", evidence=("T20", "T95"))

    def decided(*ticked: tuple[str, ...], images: tuple[int, ...] = ()) -> Outcome:
        rows = cast(given, "B", "B", "B")
        return decide(given, [replace(one, evidence=t, images=images) for one, t in zip(rows, ticked, strict=True)])

    # two checked: both must name a turn
    assert decided(("T20", "T7"), ("T20", "T95"), ()).evidence == ("T20",)
    # order: as proposed, then added ones
    out = decided(("T20", "T7"), ("T20", "T95"), ("T7",), images=(2,))
    assert (out.evidence, out.images) == (("T20", "T7"), (2,))
    assert decided((), (), ()).open == ["evidence"]
    apart = decided(("T0",), ("T1",), ("T2",))
    assert (apart.open, apart.differ) == (["evidence"], ["evidence"])


def test_removal_by_majority_and_ties() -> None:
    given = item("i")
    flagged = row(given, "z", (), remove=True, confidence=None, evidence=())
    assert decide(given, [*cast(given, "B", "B"), flagged]).remove is False
    assert decide(given, [*cast(given, "B"), flagged, replace(flagged, annotator="y")]).remove is True
    tie = decide(given, [*cast(given, "B"), flagged])
    assert (tie.remove, tie.open, tie.differ) == (None, ["remove"], ["remove"])
    assert decide(given, cast(given, "B", "B"), quorum=3).open == ["unannotated"]


def test_final_items_carry_the_majority_and_removals_are_counted(tmp_path: Path) -> None:
    a, b, c, d = item("a"), item("b", "multi"), item("c", dimension="belief_modeling"), item("d", "direct")
    votes = {
        name: [row(a, name, letter), row(b, name, "AC"), row(c, name, letter), row(d, name, ["own"])]
        for name, letter in zip(NAMES, "CCB", strict=True)
    }
    for name in "xy":
        votes[name][2] = row(c, name, (), remove=True, confidence=None, evidence=())
    desk = Desk(tmp_path, [a, b, c, d]).votes(**votes)
    result = desk.merge()
    # all but the answers is as it was
    assert list(desk.final.values()) == [replace(a, answers=("C",)), b, replace(d, answers=("own",))]
    assert (result["kept"], result["removed"], result["open"]) == (3, 1, 0)
    removal = result["removal"]
    assert removal["all"] == {"items": 4, "removed": 1, "share": 0.25}
    assert removal["dimensions"]["belief_modeling"] == {"items": 1, "removed": 1, "share": 1.0}
    assert removal["formats"]["single"] == {"items": 2, "removed": 1, "share": 0.5}
    # decided by a majority, and listed all the same
    assert {one["item_id"]: one["state"] for one in desk.read("conflicts.jsonl")} == {"a": "kept", "c": "removed"}
    assert [one["changed"] for one in desk.read("decisions.jsonl")] == [True, False, False, True]
    assert "| belief modeling | 1 | 1 | 100.00% |" in (tmp_path / "out" / "report.md").read_text()
    assert json.loads((tmp_path / "out" / "agreement.json").read_text())["kept"] == 3


@pytest.fixture
def torn(tmp_path: Path) -> Desk:
    """Three items; the annotators agree on a alone."""
    items = [item("a"), item("b"), item("c")]
    votes = {
        name: [row(items[0], name, "B"), row(items[1], name, vote), row(items[2], name, vote)]
        for name, vote in zip(NAMES, "BCD", strict=True)
    }
    return Desk(tmp_path, items).votes(**votes)


def test_undecided_items_are_listed_and_the_others_merged(torn: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    result = torn.merge()
    assert (result["open"], result["undecided"]) == (2, {"b": ["answers"], "c": ["answers"]})
    assert list(torn.final) == ["a"]
    conflicts = torn.read("conflicts.jsonl")
    states = [(one["item_id"], one["state"], one["decided"]) for one in conflicts]
    assert states == [("b", "open", None), ("c", "open", None)]
    assert [(vote["annotator"], vote["answers"]) for vote in conflicts[0]["votes"]] == list(
        zip(NAMES, (["B"], ["C"], ["D"]), strict=True)
    )
    # the command ends well, and says how many are undecided, which, and where they are listed
    folder = torn.folder
    merge_and_show(MergeConfig(f"{folder}/items.jsonl", f"{folder}/rows", f"{folder}/out"))
    shown = capsys.readouterr().out
    for line in ("2 undecided items are left out", f"{folder}/out/conflicts.jsonl", "- b: answers\n- c: answers"):
        assert line in shown
    # whoever insists gets no final file, not even an older one
    with pytest.raises(DataError, match=r"2 items are undecided") as caught:
        torn.merge(require_complete=True)
    assert "conflicts.jsonl [b]" in str(caught.value)
    assert not (folder / "out" / "final.jsonl").exists()


def test_resolutions_decide_what_was_open(torn: Desk) -> None:
    before = torn.merge()
    # a resolution of one only; a row of conflicts.jsonl, filled in, is a resolution
    half = torn.resolve({**torn.read("conflicts.jsonl")[0], "answers": ["D"], "evidence": ["T3"]})
    with pytest.raises(DataError, match="1 items are undecided"):
        torn.merge(resolutions=half, require_complete=True)
    assert list(torn.merge(resolutions=half)["undecided"]) == ["c"]
    whole = torn.resolve({"item_id": "b", "answers": ["D"], "evidence": ["T3"]}, {"item_id": "c", "remove": True})
    result = torn.merge(resolutions=whole, require_complete=True)
    assert (result["kept"], result["removed"], result["resolved"]) == (2, 1, 2)
    assert (torn.final["b"].answers, torn.final["b"].evidence) == (("D",), ("T3",))
    # agreement stays what it was before discussion
    assert result["agreement"] == before["agreement"]
    # the merge writes conflicts.jsonl anew: what was filled in there would be lost
    with pytest.raises(ConfigError, match="an edited copy"):
        torn.merge(resolutions=str(torn.folder / "out" / "conflicts.jsonl"))


def test_a_majority_can_be_put_up_for_discussion(tmp_path: Path) -> None:
    given = item("a")
    desk = Desk(tmp_path, [given]).votes(
        **{name: [row(given, name, vote)] for name, vote in zip(NAMES, "BBC", strict=True)}
    )
    assert desk.merge()["open"] == 0
    assert desk.merge(discuss="all")["undecided"] == {"a": ["answers"]}
    for resolution, answers in (({}, ("B",)), ({"answers": ["C"]}, ("C",))):
        desk.merge(discuss="all", resolutions=desk.resolve({"item_id": "a", **resolution}))
        assert desk.final["a"].answers == answers


def test_resolutions_that_decide_nothing_leave_it_open(tmp_path: Path) -> None:
    given = item("a")
    flag = row(given, "y", (), remove=True, confidence=None, evidence=())
    desk = Desk(tmp_path, [given]).votes(x=[row(given, "x", "B")], y=[flag])
    for record, count in (({}, 1), ({"answers": []}, 1), ({"remove": False}, 0), ({"answers": ["C"]}, 0)):
        assert desk.merge(resolutions=desk.resolve({"item_id": "a", **record}))["open"] == count, record
    for record, message in (
        ({"item_id": "b"}, "another build"),
        ({"fingerprint": "0"}, "another build"),
        ({"answers": ["Z"]}, "names no option"),
        ({"images": ["0"]}, "image indices"),
        ({"remove": 1}, "true or false"),
    ):
        with pytest.raises(DataError, match=message):
            desk.merge(resolutions=desk.resolve({"item_id": "a", **record}))
    with pytest.raises(DataError, match="resolved twice"):
        desk.merge(resolutions=desk.resolve({"item_id": "a"}, {"item_id": "a"}))


def test_skipped_items_and_one_annotator(tmp_path: Path) -> None:
    items = [item("a"), item("b"), item("c")]
    desk = Desk(tmp_path, items).votes(x=[row(items[0], "x", "B"), row(items[1], "x", "C")])
    result = desk.merge()
    assert (result["kept"], result["open"], result["rows"]) == (2, 1, {"x": 2})
    assert result["agreement"]["all"]["kappa"] is None
    assert "One annotator" in (tmp_path / "out" / "report.md").read_text()
    assert [(one["item_id"], one["open"]) for one in desk.read("conflicts.jsonl")] == [("c", ["unannotated"])]
    # two annotators who share no item agree on nothing
    result = desk.votes(y=[row(items[2], "y", "D")]).merge()
    assert result["kept"] == 3
    assert result["agreement"]["all"] == {"kappa": None, "items": 0, "subjects": 0, "left_out": 3}


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [item("a")]).votes(x=[row(item("a"), "x", "B")], x_again=[row(item("a"), "x", "B")])
    with pytest.raises(DataError, match="x has another file"):
        desk.merge()
    (tmp_path / "rows" / "x_again.jsonl").write_text("")
    desk.merge()
    write_items(tmp_path / "items.jsonl", [item("a", question="Rewritten?")])
    with pytest.raises(DataError, match="another build"):
        desk.merge()
    (tmp_path / "rows" / "x.jsonl").write_text("")
    with pytest.raises(DataError, match="no annotation"):
        desk.merge()
