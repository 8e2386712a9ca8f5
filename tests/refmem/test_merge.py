"""The merge against small cases decided by hand: majorities, ties, resolutions, removal, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from annotation_samples import item, row

from remind.core.cli import main
from remind.core.errors import ConfigError, DataError
from remind.refmem.annotations import Row, write_annotations
from remind.refmem.items import Item, read_items, write_items
from remind.refmem.merge import MergeConfig, merge, merge_and_show
from remind.refmem.votes import decide

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
        (
            "direct",
            (["a quiet life", "her own"], ["Her own"], ["her own", "a quiet life"]),
            ("her own", "a quiet life"),
        ),
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
    rows = cast(given, "B", "B", "B")
    rows[0] = replace(rows[0], evidence=("T20", "T7"))
    rows[1] = replace(rows[1], evidence=("T20", "T95"), images=(2,))
    rows[2] = replace(rows[2], evidence=())
    # two checked: both must name a turn
    assert decide(given, rows).evidence == ("T20",)
    assert decide(given, rows).images == ()
    rows[2] = replace(rows[2], evidence=("T7",), images=(2,))
    # order: as proposed, then added ones
    assert decide(given, rows).evidence == ("T20", "T7")
    assert decide(given, rows).images == (2,)
    nobody = [replace(one, evidence=(), images=()) for one in rows]
    assert decide(given, nobody).open == ["evidence"]
    apart = [replace(one, evidence=(f"T{n}",), images=()) for n, one in enumerate(rows)]
    assert (decide(given, apart).open, decide(given, apart).differ) == (["evidence"], ["evidence"])


def test_removal_by_majority_and_ties() -> None:
    given = item("i")
    flagged = row(given, "z", (), remove=True, confidence=None, evidence=())
    assert decide(given, [*cast(given, "B", "B"), flagged]).remove is False
    assert decide(given, [*cast(given, "B"), flagged, replace(flagged, annotator="y")]).remove is True
    tie = decide(given, [*cast(given, "B"), flagged])
    assert (tie.remove, tie.open, tie.differ) == (None, ["remove"], ["remove"])
    assert decide(given, cast(given, "B", "B"), quorum=3).open == ["unannotated"]


def test_final_items_carry_the_majority_and_removals_are_counted(tmp_path: Path) -> None:
    items = [item("a"), item("b", "multi"), item("c", dimension="belief_modeling"), item("d", "direct")]
    gone = {"remove": True, "confidence": None, "evidence": ()}
    desk = Desk(tmp_path, items).votes(
        x=[
            row(items[0], "x", "C"),
            row(items[1], "x", "AC"),
            row(items[2], "x", (), **gone),
            row(items[3], "x", ["own"]),
        ],
        y=[
            row(items[0], "y", "C"),
            row(items[1], "y", "AC"),
            row(items[2], "y", (), **gone),
            row(items[3], "y", ["own"]),
        ],
        z=[row(items[0], "z", "B"), row(items[1], "z", "AC"), row(items[2], "z", "B"), row(items[3], "z", ["own"])],
    )
    result = desk.merge()
    assert {name: one.answers for name, one in desk.final.items()} == {"a": ("C",), "b": ("A", "C"), "d": ("own",)}
    # all else is as it was
    assert desk.final["a"] == replace(items[0], answers=("C",))
    assert desk.final["b"] == items[1]
    assert (result["kept"], result["removed"], result["open"]) == (3, 1, 0)
    assert result["removal"]["all"] == {"items": 4, "removed": 1, "share": 0.25}
    assert result["removal"]["dimensions"]["belief_modeling"] == {"items": 1, "removed": 1, "share": 1.0}
    assert result["removal"]["formats"]["single"] == {"items": 2, "removed": 1, "share": 0.5}
    assert result["removal"]["cells"]["pattern_induction/multi"] == {"items": 1, "removed": 0, "share": 0.0}
    # decided by a majority, and listed all the same
    assert {one["item_id"]: one["state"] for one in desk.read("conflicts.jsonl")} == {"a": "kept", "c": "removed"}
    changed = {one["item_id"]: one["changed"] for one in desk.read("decisions.jsonl")}
    assert changed == {"a": True, "b": False, "c": False, "d": True}
    told = (tmp_path / "out" / "report.md").read_text()
    assert "| belief modeling | 1 | 1 | 100.00% |" in told
    assert json.loads((tmp_path / "out" / "agreement.json").read_text())["kept"] == 3


def test_undecided_items_are_listed_and_the_others_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [item("a"), item("b"), item("c")]
    desk = Desk(tmp_path, items).votes(
        **{
            name: [row(items[0], name, "B"), row(items[1], name, vote), row(items[2], name, vote)]
            for name, vote in zip(NAMES, "BCD", strict=True)
        }
    )
    result = desk.merge()
    assert (result["open"], result["undecided"]) == (2, {"b": ["answers"], "c": ["answers"]})
    assert list(desk.final) == ["a"]
    conflicts = desk.read("conflicts.jsonl")
    assert [(one["item_id"], one["state"], one["decided"]) for one in conflicts] == [
        ("b", "open", None),
        ("c", "open", None),
    ]
    assert [vote["answers"] for vote in conflicts[0]["votes"]] == [["B"], ["C"], ["D"]]
    assert [vote["annotator"] for vote in conflicts[0]["votes"]] == list(NAMES)
    # the script ends well, and says how many are undecided, which, and where they are listed
    words = ["--drafts", str(tmp_path / "items.jsonl"), "--annotations", str(tmp_path / "rows")]
    words += ["--out", str(tmp_path / "out")]
    main(MergeConfig, merge_and_show, "", words)
    shown = capsys.readouterr().out
    assert "2 undecided items are left out" in shown
    assert str(tmp_path / "out" / "conflicts.jsonl") in shown
    assert "- b: answers\n- c: answers" in shown
    # whoever insists gets no final file, not even an older one
    with pytest.raises(DataError, match="2 items are undecided") as caught:
        desk.merge(require_complete=True)
    assert "conflicts.jsonl [b]" in str(caught.value)
    assert not (tmp_path / "out" / "final.jsonl").exists()
    with pytest.raises(SystemExit) as left:
        main(MergeConfig, merge_and_show, "", [*words, "--require_complete", "true"])
    assert left.value.code == 2


def test_resolutions_decide_what_was_open(tmp_path: Path) -> None:
    items = [item("a"), item("b"), item("c")]
    desk = Desk(tmp_path, items).votes(
        **{
            name: [row(items[0], name, "B"), row(items[1], name, vote), row(items[2], name, vote)]
            for name, vote in zip(NAMES, "BCD", strict=True)
        }
    )
    before = desk.merge()
    # a resolution of one only; a row of conflicts.jsonl, filled in, is a resolution
    conflicts = desk.read("conflicts.jsonl")
    half = desk.resolve({**conflicts[0], "answers": ["D"], "evidence": ["T3"]})
    with pytest.raises(DataError, match="1 items are undecided"):
        desk.merge(resolutions=half, require_complete=True)
    assert list(desk.merge(resolutions=half)["undecided"]) == ["c"]
    whole = desk.resolve({"item_id": "b", "answers": ["D"], "evidence": ["T3"]}, {"item_id": "c", "remove": True})
    result = desk.merge(resolutions=whole, require_complete=True)
    assert (result["kept"], result["removed"], result["resolved"]) == (2, 1, 2)
    assert (desk.final["b"].answers, desk.final["b"].evidence) == (("D",), ("T3",))
    # agreement stays what it was before discussion
    assert result["agreement"] == before["agreement"]
    # the merge writes conflicts.jsonl anew: what was filled in there would be lost
    with pytest.raises(ConfigError, match="an edited copy"):
        desk.merge(resolutions=str(tmp_path / "out" / "conflicts.jsonl"))


def test_a_majority_can_be_put_up_for_discussion(tmp_path: Path) -> None:
    items = [item("a"), item("b")]
    desk = Desk(tmp_path, items).votes(
        **{name: [row(items[0], name, vote), row(items[1], name, "B")] for name, vote in zip(NAMES, "BBC", strict=True)}
    )
    assert desk.merge()["open"] == 0
    assert desk.merge(discuss="all")["undecided"] == {"a": ["answers"]}
    desk.merge(discuss="all", resolutions=desk.resolve({"item_id": "a"}))
    assert desk.final["a"].answers == ("B",)
    desk.merge(discuss="all", resolutions=desk.resolve({"item_id": "a", "answers": ["C"]}))
    assert desk.final["a"].answers == ("C",)


def test_resolutions_that_decide_nothing_leave_it_open(tmp_path: Path) -> None:
    given = item("a")
    flag = row(given, "y", (), remove=True, confidence=None, evidence=())
    desk = Desk(tmp_path, [given]).votes(x=[row(given, "x", "B")], y=[flag])
    for record, open_ in (({}, 1), ({"answers": []}, 1), ({"remove": False}, 0), ({"answers": ["C"]}, 0)):
        resolved = desk.merge(resolutions=desk.resolve({"item_id": "a", **record}))
        assert resolved["open"] == open_, record
    for record, message in (
        ({"item_id": "b"}, "another build"),
        ({"item_id": "a", "fingerprint": "0"}, "another build"),
        ({"item_id": "a", "answers": ["Z"]}, "names no option"),
        ({"item_id": "a", "remove": 1}, "true or false"),
    ):
        with pytest.raises(DataError, match=message):
            desk.merge(resolutions=desk.resolve(record))


def test_skipped_items_and_one_annotator(tmp_path: Path) -> None:
    items = [item("a"), item("b"), item("c")]
    desk = Desk(tmp_path, items).votes(x=[row(items[0], "x", "B"), row(items[1], "x", "C")])
    result = desk.merge()
    assert (result["kept"], result["open"], result["rows"]) == (2, 1, {"x": 2})
    assert result["agreement"]["all"]["kappa"] is None
    assert "One annotator" in (tmp_path / "out" / "report.md").read_text()
    assert [(one["item_id"], one["open"]) for one in desk.read("conflicts.jsonl")] == [("c", ["unannotated"])]
    desk.votes(y=[row(items[2], "y", "D")])
    assert desk.merge()["kept"] == 3
    # two annotators who share no item agree on nothing
    assert desk.merge()["agreement"]["all"] == {"kappa": None, "items": 0, "subjects": 0, "left_out": 3}


def test_files_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    # the script: one line, status 2
    arguments = [
        "--drafts",
        str(tmp_path / "items.jsonl"),
        "--annotations",
        str(tmp_path / "no"),
        "--out",
        str(tmp_path),
    ]
    with pytest.raises(SystemExit) as left:
        main(MergeConfig, merge_and_show, "", arguments)
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
