"""The plan: what a run will take of host memory and disk, said before it is taken."""

import re
from dataclasses import dataclass
from pathlib import Path

from nvoffload.config import format_bytes


def resident_bytes(field: str = "VmRSS") -> int:
    """Return this process's resident memory now, or its peak with field="VmHWM"."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes by kind. `host_bytes` is what the process should peak at, activations aside."""

    resident_bytes: int
    pool_bytes: int
    gradient_bytes: int
    host_state_bytes: int
    disk_bytes: int
    pool_text: str

    @property
    def host_bytes(self) -> int:
        """Sum of the parts in host memory."""
        return self.resident_bytes + self.pool_bytes + self.gradient_bytes + self.host_state_bytes

    def lines(self) -> list[str]:
        """Return the plan for people, one part per line."""
        parts = [
            ("gradients", self.gradient_bytes, "one per trainable element, torch's own"),
            ("resident now", self.resident_bytes, "the process at offload(), with its parameters"),
            ("buffer pool", self.pool_bytes, self.pool_text),
            ("states in memory", self.host_state_bytes, "optimizer states and remainders kept on the host"),
        ]
        rows = [f"  {name:<18}{format_bytes(nbytes):>12}  {why}" for name, nbytes, why in parts if nbytes]
        total = f"  {'host memory':<18}{format_bytes(self.host_bytes):>12}  plus activations"
        return [
            "plan",
            *rows,
            total,
            f"  {'disk':<18}{format_bytes(self.disk_bytes):>12}  two slots of every tile",
        ]
