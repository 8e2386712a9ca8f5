"""The benchmark of a build: the pieces it builds, and the memory it sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing import seeds
from small_corpus import rows

from benchmarks.bench_states import cut, peak_of_session, perturbed
from remind import read

#: A child takes 150 MB, gives them back and waits; its parent takes 30 and waits for it.
HOLDING = """
import subprocess, sys
child = "import sys; held = bytearray(150 << 20); del held; print('there', flush=True); sys.stdin.read()"
held = bytearray(30 << 20)
subprocess.run([sys.executable, "-c", child], stdin=sys.stdin)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_peak_is_that_of_the_largest_process_of_a_session() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert 150 < peak_of_session(process.pid) < 190
        process.communicate("")
    assert peak_of_session(process.pid) == 0


def test_pieces_keep_whole_sessions_and_the_questions_answered_in_them(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_bytes(seeds.as_lines(rows(3)))
    pieces = cut(read(path), 1, 1)
    assert [piece.questions[0].evidence for piece in pieces] == [("t2",)] * 3
    made = list(perturbed(pieces, 7))
    assert len({piece.dialogues[0].id for piece in made}) == 7
    assert len({piece.questions[0].id for piece in made}) == 7
    texts = [[turn.text for turn in piece.dialogues[0].turns] for piece in made]
    # the first round is the pieces as they are; then words are missing, and none is new
    assert texts[:3] == [[turn.text for turn in piece.dialogues[0].turns] for piece in pieces]
    for number in range(3, 7):
        words = [set(text.split()) for text in texts[number]]
        assert all(some <= set(text.split()) for some, text in zip(words, texts[number % 3], strict=True))
        assert texts[number] != texts[number % 3]
