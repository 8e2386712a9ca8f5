"""Try hostile inputs for a while: guided by coverage where atheris is installed, else at random from a fixed seed."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fuzzing.targets import Target, make_targets, wrong
from remind.core.errors import ConfigError, DataError
from remind.core.files import atomic_path, write_json, write_text

#: Only what is imported inside is followed, and `python -m` would import the package, readers and all, before.
START = """\
import sys, atheris
with atheris.instrument_imports(include=["remind"]):
    from fuzzing.guided import main
main(*sys.argv[1:])
"""


@dataclass
class FuzzConfig:
    """What to fuzz, and for how long."""

    seconds: float = 600.0
    """Time for all targets together."""
    targets: list[str] = field(default_factory=list)
    """Which ones, e.g. [locomo, states]; none: all of them."""
    out: str = "runs/fuzz"
    """Folder for findings (`<target>-<hash>`, with what was wrong beside it in a .txt) and counts.json."""
    seed: int = 0
    """Of the random numbers."""
    guide: Literal["auto", "coverage", "random"] = "auto"
    """coverage: by atheris (pip install atheris). random: by mutations alone. auto: coverage where it is installed."""
    replay: str | None = None
    """Try this finding again instead, and say what is wrong."""

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ConfigError(f"seconds is {self.seconds}; it must be more than 0")


@dataclass(frozen=True)
class Count:
    """How a target fared."""

    cases: int
    seconds: float
    findings: int


def fuzz(config: FuzzConfig) -> dict[str, Count]:
    """Fuzz each target for its share of the time and print how many cases were tried.

    Raises:
        ConfigError: an unknown target, or coverage without atheris. DataError: inputs were found that are not taken as
            they should be, or a replayed one still is not.
    """
    targets = make_targets()
    if unknown := [name for name in config.targets if name not in targets]:
        raise ConfigError(f"no target {unknown[0]!r}; there are {', '.join(targets)}")
    if config.replay is not None:
        _replay(targets, Path(config.replay))
        return {}
    installed = importlib.util.find_spec("atheris") is not None
    if config.guide == "coverage" and not installed:
        raise ConfigError("guide coverage needs atheris: pip install atheris, or set guide random")
    guided = installed and config.guide != "random"
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    names = config.targets or list(targets)
    counts: dict[str, Count] = {}
    for name in names:
        share = config.seconds / len(names)
        before = set(_findings(out, name))
        start = time.monotonic()
        cases = (
            _guided(name, share, out, config.seed)
            if guided
            else at_random(name, targets[name], share, out, config.seed)
        )
        taken = time.monotonic() - start
        counts[name] = Count(cases, taken, len(set(_findings(out, name)) - before))
        print(f"{name}: {cases} cases, {cases / taken:.0f} a second, {counts[name].findings} findings")
    write_json(out / "counts.json", {name: vars(count) for name, count in counts.items()})
    if found := sum(count.findings for count in counts.values()):
        raise DataError(f"{found} inputs were not taken as they should be; try one again with --replay", out)
    return counts


def at_random(name: str, target: Target, seconds: float, out: Path, seed: int) -> int:
    """Mutate seeds for a while. The number of cases."""
    rng = random.Random(f"{seed} {name}")
    end = time.monotonic() + seconds
    cases = 0
    with scratch() as folder:
        while not cases or time.monotonic() < end:
            data = target.mutate(rng.choice(target.seeds), rng)
            cases += 1
            if (problem := wrong(target, data, Path(folder))) is not None:
                save(out, name, data, problem)
    return cases


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for the inputs, in memory where the system has such."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="remind-fuzz-", dir=memory if memory.is_dir() else None)


def save(out: Path, name: str, data: bytes, problem: str) -> Path:
    """Keep an input for replay, once for each kind of problem."""
    kind = re.sub(r"[0-9]+", "0", problem)
    path = out / f"{name}-{hashlib.sha256(kind.encode()).hexdigest()[:12]}"
    if not path.exists():
        with atomic_path(path) as temporary:
            temporary.write_bytes(data)
        write_text(path.with_suffix(".txt"), problem + "\n")
    return path


def _findings(out: Path, name: str) -> list[Path]:
    return [path for path in out.glob(f"{name}-*") if path.suffix != ".txt"]


def _guided(name: str, seconds: float, out: Path, seed: int) -> int:
    """libFuzzer ends its process, so that it gets one."""
    command = [sys.executable, "-c", START, name, str(out), str(max(1, round(seconds))), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    executed = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
    if executed is None:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise DataError(f"the fuzzer of {name} ended with status {done.returncode}: {last[0]}", out)
    if re.search(r"INITED cov: [1-9]", done.stderr) is None:
        raise DataError(f"the fuzzer of {name} is blind: it does not see which code an input reaches", out)
    return int(executed[1])


def _replay(targets: dict[str, Target], path: Path) -> None:
    name = path.name.split("-")[0]
    if name not in targets:
        raise ConfigError(f"{path.name} does not begin with a target's name; there are {', '.join(targets)}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path) from None
    with scratch() as folder:
        problem = wrong(targets[name], data, Path(folder))
    if problem is not None:
        raise DataError(problem, path)
    print(f"{path}: taken as it should be")
