"""What memory a run is computed to need, said and compared with what there is before the run starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from remind.core.errors import ConfigError

#: Bytes from which a run says what memory it needs.
_WORTH_SAYING = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, for each process.

    Attributes:
        parts: bytes by purpose; "weights" are those of the model, "activations" those of its forward.
        hint: settings that would lower the sum.
        either: purposes of which one is needed at a time.
    """

    parts: Mapping[str, int]
    hint: str
    either: Collection[str] = ()

    def total(self) -> int:
        """Bytes at their highest point."""
        sizes = dict(self.parts)
        one = [sizes.pop(name) for name in self.either]
        return sum(sizes.values()) + max(one, default=0)

    def check(self, device: torch.device, say: bool = True) -> None:
        """Print the sum to standard error where it is large, unless `say` is false.

        Raises:
            ConfigError: the device cannot hold what is planned.
        """
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
        total, most = processes * self.total(), capacity(device)
        sizes = {name: f"{name} {size / 1e9:.1f}" for name, size in self.parts.items()}
        one = " or ".join(sizes.pop(name) for name in self.either)
        each = f", for each of {processes} processes" if processes > 1 else ""
        place = "main memory" if device.type == "cpu" else str(device)
        said = " + ".join(filter(None, [*sizes.values(), one]))
        line = f"{place}: {said}{each}: {total / 1e9:.1f} of {most / 1e9:.1f} GB"
        if total > most:
            raise ConfigError(f"the run needs more memory than there is ({line}); {self.hint} would help")
        if say and self.total() >= _WORTH_SAYING:
            print(f"estimated memory: {line}", file=sys.stderr)


def capacity(device: torch.device) -> int:
    """Bytes of a device, or of main memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
