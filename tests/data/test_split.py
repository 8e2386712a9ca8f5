"""Splits: no evidence on both sides, shares respected, deterministic."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remind.core.errors import DataError
from remind.data.dialogue import Question
from remind.data.split import SplitConfig, assign_splits, check_overlap, units_of

EVIDENCE = st.lists(st.sampled_from([f"t{n}" for n in range(10)]), max_size=3, unique=True).map(tuple)


@given(st.lists(EVIDENCE, min_size=1, max_size=25), st.sampled_from(["auto", "evidence"]), st.integers(0, 5))
def test_one_dialogue_is_divided_by_evidence(evidence: list[tuple[str, ...]], by: str, seed: int) -> None:
    questions = [Question(f"q{n}", "d", "?", evidence=turns) for n, turns in enumerate(evidence)]
    splits = assign_splits(questions, SplitConfig(by=by, seed=seed))  # type: ignore[arg-type]
    assert set(splits) == {q.id for q in questions}
    for a, b in itertools.combinations(questions, 2):
        assert splits[a.id] == splits[b.id] or not set(a.evidence) & set(b.evidence)
    check_overlap((q.id, q.dialogue_id, splits[q.id], q.evidence) for q in questions)
    assert splits == assign_splits(questions, SplitConfig(by=by, seed=seed))  # type: ignore[arg-type]
    if len(units_of(questions, "evidence")) > 1:
        assert {"train", "test"} <= set(splits.values())


ROWS = st.lists(st.tuples(st.sampled_from("de"), st.sampled_from(["train", "dev", "test"]), EVIDENCE), max_size=12)


@given(ROWS)
def test_shared_evidence_is_counted_as_by_comparing_all_pairs(drawn: list[tuple[str, str, tuple[str, ...]]]) -> None:
    rows = [(f"q{n}", *row) for n, row in enumerate(drawn)]
    pairs = [
        (a[0], b[0], a[1], piece)
        for b in rows
        for piece in b[3]
        for a in rows
        if (a[1], a[2], b[2]) == (b[1], "train", "test") and piece in a[3]
    ]
    found = check_overlap(rows, report=True)
    if not pairs:
        assert found is None
        check_overlap(rows)
        return
    assert found is not None
    assert found.pieces == len({pair[2:] for pair in pairs})
    assert found.questions == len({pair[1] for pair in pairs})
    train, test, dialogue, piece = pairs[0]
    assert (found.train, found.test, found.dialogue_id, found.first) == (train, test, dialogue, f"turn {piece}")
    with pytest.raises(DataError, match=f"the first of {found.pieces} shared, which {found.questions} test"):
        check_overlap(rows)
