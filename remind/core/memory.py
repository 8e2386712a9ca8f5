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
        on_host: purposes in main memory, whatever the device.
    """

    parts: Mapping[str, int]
    hint: str
    either: Collection[str] = ()
    on_host: Collection[str] = ()

    def total(self, purposes: Collection[str] | None = None) -> int:
        """Bytes of these purposes, or of all, at their highest point."""
        sizes = {name: size for name, size in self.parts.items() if purposes is None or name in purposes}
        one = [sizes.pop(name) for name in self.either if name in sizes]
        return sum(sizes.values()) + max(one, default=0)

    def check(self, device: torch.device, say: bool = True) -> None:
        """Print the sums to standard error where they are large, unless `say` is false.

        Raises:
            ConfigError: the device, or main memory, cannot hold what is planned for it.
        """
        on_host = self.parts.keys() if device.type == "cpu" else self.on_host
        places = {device: self.parts.keys() - on_host, torch.device("cpu"): on_host}
        lines = [self._sum(place, names) for place, names in places.items() if names]
        if say and self.total() >= _WORTH_SAYING:
            print(f"estimated memory: {'; '.join(lines)}", file=sys.stderr)

    def _sum(self, device: torch.device, purposes: Collection[str]) -> str:
        host = device.type == "cpu"
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if host else 1
        total, most = processes * self.total(purposes), capacity(device)
        sizes = {name: f"{name} {size / 1e9:.1f}" for name, size in self.parts.items() if name in purposes}
        one = [sizes.pop(name) for name in self.either if name in sizes]
        said = [*sizes.values(), *([" or ".join(one)] if one else [])]
        each = f", for each of {processes} processes" if processes > 1 else ""
        place = "main memory" if host else str(device)
        line = f"{place}: {' + '.join(said)}{each}: {total / 1e9:.1f} of {most / 1e9:.1f} GB"
        if total > most:
            raise ConfigError(f"the run needs more memory than there is ({line}); {self.hint} would help")
        return line


def capacity(device: torch.device) -> int:
    """Bytes of a device, or of main memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
