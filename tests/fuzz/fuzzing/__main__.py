"""Hostile input for a while: `python tests/fuzz/fuzzing --seconds 600`. Guided by coverage where atheris is installed.

A finding stops its target and is kept in the folder `.hypothesis`, from where the next run and the tests replay it.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]

#: Only what is imported inside the block is followed by atheris, so it needs a process without our imports.
GUIDED = """\
import sys
sys.path[:0] = [{tests!r}, {root!r}]
import atheris
with atheris.instrument_imports(include=["remind"]):
    from fuzzing.targets import make_check
atheris.Setup(["fuzz", "-max_total_time={seconds}", "-len_control=0", "-max_len=4096",
              "-print_final_stats=1", "-rss_limit_mb=6144"],
              make_check({name!r}).hypothesis.fuzz_one_input)
atheris.Fuzz()
"""


def guided(name: str, seconds: float, template: str = GUIDED) -> int:
    """Fuzz by coverage in a process of its own, which libFuzzer ends. The number of cases."""
    tests, root = sys.path[:2]
    code = template.format(tests=tests, root=root, seconds=max(1, round(seconds)), name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    if re.search(r"DONE\s+cov: [1-9]", done.stderr) is None:
        raise SystemExit(f"{name}: the fuzzer does not see which code an input reaches")
    match = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
    return int(match[1]) if match else 0


def at_random(name: str, seconds: float) -> int:
    """Let hypothesis draw cases. The number of cases."""
    from hypothesis import seed

    from fuzzing.targets import make_check

    end, rounds = time.monotonic() + seconds, 0
    while not rounds or time.monotonic() < end:
        seed(rounds)(make_check(name, 200))()
        rounds += 1
    return 200 * rounds


def main() -> None:
    from fuzzing.targets import make_targets

    names = list(make_targets())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all targets together")
    parser.add_argument("--targets", nargs="*", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--random", action="store_true", help="no guidance by coverage")
    options = parser.parse_args()
    run = at_random if options.random or importlib.util.find_spec("atheris") is None else guided
    for name in options.targets:
        print(f"{name}: {run(name, options.seconds / len(options.targets))} cases, no finding", flush=True)


if __name__ == "__main__":
    main()
