from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.bench_retrieval_curve import (
    BorrowingEncoder,
    RetrievalCurveConfig,
    make_history,
    retrieval_curve,
)
from remind.data.dialogue import Corpus, Dialogue, Question, Session, Turn
from remind.data.readers import write_refmem
from remind.models.encoder import SentenceEncoder
from remind.states.pyramid import turn_text


def words(texts: list[str]) -> list[int]:
    return [len(text.split()) for text in texts]


@pytest.fixture
def other(make_dialogue: Callable[..., Dialogue]) -> Dialogue:
    said = [f"Cleo: Dan and I saw {n} herons by the river this week. | heron {n}" for n in range(20)]
    return make_dialogue(said[:9], [text.replace("Cleo", "Dan") for text in said[9:]], name="other")


def test_a_history_holds_the_base_and_changed_copies(park: Dialogue, other: Dialogue) -> None:
    history, _ = make_history(park, [other], 3000, words, 0)  # type: ignore[arg-type]
    turns = history.turns
    assert 3000 <= sum(words([turn_text(turn) for turn in turns])) < 3300
    assert history.speakers == park.speakers or set(history.speakers) == set(park.speakers)
    first = history.positions["1:1"]
    own = turns[first : first + len(park.turns)]
    assert [(turn.id, turn.text, turn.speaker) for turn in own] == [(t.id, t.text, t.speaker) for t in park.turns]
    copies = [turn for turn in turns if turn not in own]
    assert not any("Cleo" in turn.text for turn in copies)
    assert len({turn.text for turn in copies}) > 0.9 * len(copies)
    plain = {turn_text(turn) for turn in make_history(park, [other], 3000, words, 0)[0].turns}  # type: ignore[arg-type]
    assert plain == {turn_text(turn) for turn in turns}
    assert plain != {turn_text(turn) for turn in make_history(park, [other], 3000, words, 1)[0].turns}  # type: ignore[arg-type]


def test_copies_borrow_vectors_and_the_base_has_its_own(
    park: Dialogue, other: Dialogue, encoder: SentenceEncoder
) -> None:
    history, sources = make_history(park, [other], 900, words, 0)  # type: ignore[arg-type]
    borrowed = BorrowingEncoder(encoder, history, sources, park, 0)
    copy, source = next(iter(sources.items()))
    cue = "Ana: Very shy.\nBen: Lovely!"
    own = turn_text(park.turns[2])
    found = borrowed.encode_apart([copy, own, cue])
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(3))
    assert float(found[0] @ encoder.encode([source])[0]) == pytest.approx(borrowed.likeness, abs=1e-4)
    assert 0.5 < borrowed.likeness < 1
    torch.testing.assert_close(found[1:], encoder.encode_apart([own, cue]), atol=1e-5, rtol=1e-4)
    quoted = turn_text(history.turns[-1])
    assert torch.equal(borrowed.encode_apart([copy]), borrowed.encode_apart([copy]))
    assert borrowed.encode_apart([f"{quoted}\n{quoted}"]).shape == (1, 384)


def test_a_curve_is_measured_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dialogues = []
    for name in ("one", "two"):
        turns = tuple(Turn(f"{name}:{n}", "AB"[n % 2], f"{name} saw {n} geese.") for n in range(30))
        dialogues.append(Dialogue(name, (Session("s", None, turns),)))
    question = Question("q", "one", "Who saw 4 geese?", answers=("A",), evidence=("one:4",))
    path, out, plot = (tmp_path / name for name in ("geese.jsonl", "curve.json", "curve.png"))
    write_refmem(Corpus(tuple(dialogues), (question,)), path)
    (row,) = retrieval_curve(RetrievalCurveConfig(str(path), [900], out=str(out), plot=str(plot)))
    assert row["turns"] > 60
    assert row["questions"] == 1
    assert 0 <= row["cue_recall"] <= 1
    assert row["rss_mb"] >= row["rss_before_mb"] > 10
    assert json.loads(out.read_text())["rows"] == [row]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "Encoded for real" in capsys.readouterr().out
