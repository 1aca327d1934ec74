"""What a run has cost so far: bytes by kind, seconds by cause. Measures nothing itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Totals since offload(). Bytes are the disk's; seconds are wall time but kernel_s and verify_s, thread time.

    fill: writing values and zero states at the start. fetch: values read for a forward or backward.
    update: what steps read and wrote, with the fetch they save. user: reads and writes of parameters by
    the program. step_s: in step(). *_wait_s: the program waited in a hook, step, read or flush for the
    disk, for a commit, or for kernels and copies.
    """

    steps: int
    read_bytes: int
    write_bytes: int
    fill_bytes: int
    fetch_bytes: int
    update_read_bytes: int
    update_write_bytes: int
    user_read_bytes: int
    user_write_bytes: int
    manifest_bytes: int
    requests: int
    step_s: float
    kernel_s: float
    verify_s: float
    disk_wait_s: float
    commit_wait_s: float
    kernel_wait_s: float
    peer_wait_s: float
    disk_busy_s: float
    engine: str
    is_direct: bool

    @property
    def wait_s(self) -> float:
        """Seconds the program waited, whatever for."""
        return self.disk_wait_s + self.commit_wait_s + self.kernel_wait_s + self.peer_wait_s

    @property
    def overlap(self) -> float:
        """Share of the disk's busy time in which the program did not wait for it; 0 without a disk."""
        return max(0.0, 1 - self.disk_wait_s / self.disk_busy_s) if self.disk_busy_s else 0.0
