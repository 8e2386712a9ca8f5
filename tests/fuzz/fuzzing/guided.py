"""One target under atheris, in a process of its own: `python -c run.START TARGET OUT SECONDS SEED`."""

from __future__ import annotations

import random
from pathlib import Path

from fuzzing.run import save, scratch
from fuzzing.targets import make_targets, wrong


def main(name: str, out: str, seconds: str, seed: str) -> None:
    """Fuzz until the time is over; libFuzzer then ends the process and prints its counts on standard error."""
    import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

    target = make_targets()[name]
    with scratch() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, data in enumerate(target.seeds):
            (corpus / f"seed{number}").write_bytes(data)
        work = Path(folder) / "work"
        work.mkdir()

        def one(data: bytes) -> None:
            if (problem := wrong(target, data, work)) is not None:
                save(Path(out), name, data, problem)

        def change(data: bytes, most: int, number: int) -> bytes:
            # libFuzzer's own mutations in turn with ours, which keep a file's structure
            made = target.mutate(data, random.Random(number)) if number % 2 else atheris.Mutate(data, most)
            return made[:most]

        options = [f"-max_total_time={seconds}", f"-seed={int(seed) + 1}", "-max_len=400000", "-print_final_stats=1"]
        options += [f"-artifact_prefix={out}/{name}-", "-timeout=60", "-rss_limit_mb=6144", "-detect_leaks=0"]
        atheris.Setup(["fuzz", *options, str(corpus)], one, custom_mutator=change)
        atheris.Fuzz()
