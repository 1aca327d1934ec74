"""What a run has cost so far: bytes by kind, seconds by cause. Measures nothing itself."""

from dataclasses import dataclass

from nvoffload.backend import Backend
from nvoffload.residency import Stalls
from nvoffload.values import Values


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


def collect(backend: Backend, stalls: Stalls, values: Values, *, steps: int, step_s: float) -> OffloadStats:
    """Read the counters of a model that is open."""
    engine, mover = backend.engine_stats(), backend.mover.stats()
    return OffloadStats(
        steps=steps,
        read_bytes=engine.read_bytes if engine else 0,
        write_bytes=engine.write_bytes if engine else 0,
        fill_bytes=backend.fill_bytes,
        fetch_bytes=mover.fetch_bytes - values.read_bytes if engine else 0,
        update_read_bytes=mover.read_bytes - mover.fetch_bytes,
        update_write_bytes=mover.write_bytes - backend.fill_bytes - values.write_bytes,
        user_read_bytes=values.read_bytes,
        user_write_bytes=values.write_bytes,
        manifest_bytes=backend.run.manifest_bytes if backend.run else 0,
        requests=engine.read_requests + engine.write_requests if engine else 0,
        step_s=step_s,
        kernel_s=mover.kernel_s,
        verify_s=mover.verify_s,
        disk_wait_s=stalls.disk_s,
        commit_wait_s=stalls.commit_s,
        kernel_wait_s=stalls.kernel_s,
        peer_wait_s=stalls.peer_s,
        disk_busy_s=engine.busy_s if engine else 0.0,
        engine=backend.engine.name if backend.engine else "none",
        is_direct=bool(backend.store and backend.store.file.is_direct),
    )
