"""What one has to read to know what a step does."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.count_files import Entered, memory, pra_step
from remind.alignment.config import Edge, edge_of


def test_what_is_entered_is_counted_once_and_by_its_file() -> None:
    entered = Entered()
    edge_of((0, 1))  # before: not seen
    with entered:
        assert {edge_of((0, 1)), edge_of((1, 2))} == {Edge(0, 1), Edge(1, 2)}
        assert Path("remind").name == "remind"
    assert entered.functions["remind/alignment/config.py"] == {"edge_of", "Edge.__post_init__"}
    assert set(entered.functions) == {"remind/alignment/config.py", "sae/ranges.py"}


@pytest.mark.slow
def test_a_step_of_alignment_takes_eight_files_at_most() -> None:
    entered = Entered()
    pra_step(entered)
    assert "PRATrainer.training_step" in entered.functions["remind/alignment/trainer.py"]
    assert len(entered.functions) <= 8, entered


@pytest.mark.parametrize(("system", "file"), [("dense", "plain"), ("mem0", "mem0")])
def test_a_memory_system_takes_six_files_at_most(system: str, file: str) -> None:
    entered = Entered()
    memory(entered, Namespace(system=system))
    assert f"remind/memory/{file}.py" in entered.functions
    assert len(entered.functions) <= 6, entered
