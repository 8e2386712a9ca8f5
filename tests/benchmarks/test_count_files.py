"""What one has to read to know what a step does."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.count_files import Entered, memory, pra_step


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
