"""The part of the dialogues that one of several processes builds."""

from __future__ import annotations

import os
from collections.abc import Mapping

from remind.core.errors import ConfigError
from remind.core.processes import WHOLE, Shard


def shard_of(text: str | None, environment: Mapping[str, str] | None = None) -> Shard:
    """The shard of this process.

    Args:
        text: `i/n` counted from 1; auto: from accelerate launch or torchrun, else everything; slurm: from the task of
            a job array, else of the job step; None: everything.

    Raises:
        ConfigError: none of these, i outside 1 to n, or slurm outside of Slurm.
    """
    environment = os.environ if environment is None else environment
    if text is None:
        return WHOLE
    if text == "auto":
        return _numbers(environment, "RANK", "WORLD_SIZE") or WHOLE
    if text == "slurm":
        shard = _array(environment) or _numbers(environment, "SLURM_PROCID", "SLURM_NTASKS")
        if shard is None:
            raise ConfigError("shard slurm: neither a task of a job array nor of a job step (srun)")
        return shard
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ConfigError(f"shard is i/n with i from 1 to n, auto or slurm, not {text!r}")
    return Shard(int(index) - 1, int(count))


def _numbers(environment: Mapping[str, str], index: str, count: str) -> Shard | None:
    if index not in environment or count not in environment:
        return None
    numbers = environment[index], environment[count]
    if not (all(map(str.isdecimal, numbers)) and int(numbers[0]) < int(numbers[1])):
        raise ConfigError(f"{index} {numbers[0]!r} of {count} {numbers[1]!r} is not a valid part")
    return Shard(int(numbers[0]), int(numbers[1]))


def _array(environment: Mapping[str, str]) -> Shard | None:
    names = [f"SLURM_ARRAY_TASK_{part}" for part in ("ID", "MIN", "MAX", "STEP")]
    if not {*names[:3]} <= environment.keys():
        return None
    task, least, most, step = (int(environment.get(name, "1")) for name in names)
    count = (most - least) // step + 1
    if int(environment.get("SLURM_ARRAY_TASK_COUNT", count)) != count:
        raise ConfigError(f"the job array has not {count} tasks ({least} to {most}): name the parts with --shard i/n")
    return Shard((task - least) // step, count)
