"""The pinned buffer pool: one arena of 2 MiB pages, cut into equal buffers, lent as leases.

Owns every byte that an engine moves. Never grows after start, never touches disk.
"""

import mmap
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nvoffload import native
from nvoffload.config import format_bytes
from nvoffload.errors import ConfigError, MachineError, UsageError
from nvoffload.layout import ALIGN, round_up

HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1


def available_memory_bytes() -> int:
    """Return what this process may still take: MemAvailable, or less by the cgroup's limit."""
    text = Path("/proc/meminfo").read_text()
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    available = int(match[1]) * 1024 if match else 1 << 62
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            available = min(available, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return available


class Trimmer:
    """Gives freed heap memory back to the system when the process has grown by more than `slack_bytes`.

    Note [Trim]: gradients are allocated and freed one after the other in backward, and malloc may fail to
    reuse a freed piece for the next one of the same size (before glibc 2.39 it asks for more than an
    aligned block takes). Then a backward grows the heap by the gradients of the whole model.
    """

    def __init__(self, slack_bytes: int) -> None:
        self._slack_bytes = slack_bytes
        self._least_bytes = _resident_bytes()

    def trim(self) -> None:
        """Look, and give back if it is time."""
        now_bytes = _resident_bytes()
        if now_bytes > self._least_bytes + self._slack_bytes:
            native.lib.nvo_trim()
            self._least_bytes = _resident_bytes()
        else:
            self._least_bytes = min(self._least_bytes, now_bytes)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


# Maps that a forked child inherits as objects but not as memory (MADV_DONTFORK): were they freed there,
# an address range that is somebody else's by then would be unmapped. So the child keeps them.
_live: set[mmap.mmap] = set()
_inherited: list[mmap.mmap] = []
os.register_at_fork(after_in_child=lambda: _inherited.extend(_live))


class Arena:
    """Page-aligned memory of 2 MiB pages where the kernel gives them. Not inherited by forks.

    Note [Huge pages]: a request over scattered 4 KiB pages costs the driver one descriptor per
    page; on some disks that halves the bandwidth, everywhere it costs processor time. So the
    arena asks for 2 MiB pages without privileges: aligned, MADV_HUGEPAGE, touched, collapsed.
    MADV_DONTFORK, because a fork would otherwise copy the arena while the disk writes into it.
    """

    def __init__(
        self, nbytes: int, *, is_huge: bool | None = None, is_forkable: bool = False, is_touched: bool = True
    ) -> None:
        """Map zeros. `is_huge`: None means if they fill a huge page. `is_forkable`: children have them too.

        Not `is_touched`: pages come as they are used.
        """
        is_huge = nbytes >= HUGE_PAGE_BYTES if is_huge is None else is_huge
        self.nbytes = nbytes
        self._is_forkable, self._is_touched = is_forkable, is_touched
        self._map: mmap.mmap | None = None
        size = round_up(nbytes, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES if is_huge else round_up(nbytes, ALIGN)
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise MachineError(f"no memory for {format_bytes(nbytes)} of buffers: {error}.") from None
        if not is_forkable:
            _live.add(self._map)
        # The view keeps the mapping alive; it goes before the mapping in close().
        self._view: Any = native.ffi.from_buffer(self._map)
        base = int(native.ffi.cast("intptr_t", self._view))
        self.address = round_up(base, HUGE_PAGE_BYTES) if is_huge else base
        self._advise(self.address - base, size - (self.address - base), is_huge=is_huge)

    def _advise(self, start: int, nbytes: int, *, is_huge: bool) -> None:
        """Best effort: an old kernel that knows an advice less gives plainer pages."""
        wanted = [] if self._is_forkable else [mmap.MADV_DONTFORK]
        wanted += [mmap.MADV_HUGEPAGE] if is_huge else []
        wanted += [_MADV_POPULATE_WRITE, _MADV_COLLAPSE] if is_huge and self._is_touched else []
        for advice in wanted:
            # Only the part that is used is touched; the alignment slack stays unbacked.
            length = round_up(self.nbytes, HUGE_PAGE_BYTES if is_huge else ALIGN)
            try:
                assert self._map is not None
                self._map.madvise(advice, start, min(length, nbytes))
            except OSError:
                continue

    def huge_bytes(self) -> int:
        """Return how many bytes of the arena stand on 2 MiB pages now (from smaps)."""
        found, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if head:
                start, end = int(head[1], 16), int(head[2], 16)
                inside = start < self.address + self.nbytes and end > self.address
            elif inside and line.startswith(("AnonHugePages:", "Private_Hugetlb:")):
                found += int(line.split()[1]) * 1024
        return found

    def view(self) -> memoryview:
        """Return the usable bytes as a writable view. It must be released before close."""
        assert self._map is not None
        start = self.address - int(native.ffi.cast("intptr_t", self._view))
        return memoryview(self._map)[start : start + self.nbytes]

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._map is not None and self._map not in _inherited:
            _live.discard(self._map)
            native.ffi.release(self._view)
            self._map.close()
            self._map = None


@dataclass(frozen=True, slots=True)
class Lease:
    """A borrowed piece of one buffer; `with` gives it back."""

    pool: "Pool"
    address: int
    nbytes: int

    def view(self) -> memoryview:
        """Return the bytes, writable. Use it inside the lease only."""
        return memoryview(native.ffi.buffer(native.ffi.cast("char *", self.address), self.nbytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.release(self)


class Pool:
    """`buffer_count` buffers of `buffer_bytes` in one arena; `register` makes it known to a device."""

    def __init__(
        self,
        *,
        buffer_count: int,
        buffer_bytes: int,
        is_huge: bool = True,
        register: Callable[[int, int], str] | None = None,
    ) -> None:
        self.buffer_count = buffer_count
        self.buffer_bytes = buffer_bytes
        check_affordable(buffer_count, buffer_bytes)
        self._arena = Arena(buffer_count * buffer_bytes, is_huge=is_huge)
        out = native.ffi.new("nvo_pool **")
        code = native.lib.nvo_pool_open(
            out, native.ffi.cast("void *", self._arena.address), buffer_bytes, buffer_count, ALIGN
        )
        native.check(code, "opening the buffer pool")
        self.handle: Any = out[0]
        self.pinned = register(self._arena.address, self.nbytes) if register else "not needed"

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.buffer_count * self.buffer_bytes

    @property
    def num_free(self) -> int:
        """Buffers without a lease."""
        return int(native.lib.nvo_pool_free_buffers(self.handle))

    def huge_bytes(self) -> int:
        """Bytes of the pool on 2 MiB pages."""
        return self._arena.huge_bytes()

    def acquire(self, nbytes: int, *, timeout_s: float = 60.0) -> Lease:
        """Return a lease of at least `nbytes`, aligned; wait for one up to `timeout_s`."""
        out = native.ffi.new("void **")
        code = native.lib.nvo_pool_acquire_wait(self.handle, nbytes, int(timeout_s * 1000), out)
        if code < 0:
            raise UsageError(
                f"no lease of {nbytes} bytes within {timeout_s:g} s: {self.num_free} of {self.buffer_count} "
                f"buffers of {self.buffer_bytes} bytes are free ({native.describe(code)})."
            )
        return Lease(self, int(native.ffi.cast("intptr_t", out[0])), nbytes)

    def release(self, lease: Lease) -> None:
        """Give a lease back."""
        code = native.lib.nvo_pool_release(self.handle, native.ffi.cast("void *", lease.address))
        native.check(code, "giving a lease back")

    def close(self) -> None:
        """Free the arena. Raises MachineError while a lease is out. Idempotent."""
        if self.handle is not None:
            native.check(native.lib.nvo_pool_close(self.handle), "closing the buffer pool")
            self.handle = None
            self._arena.close()


def check_affordable(buffer_count: int, buffer_bytes: int) -> None:
    """Raise ConfigError with the numbers if the pool is larger than nine tenths of free memory."""
    asked, available = buffer_count * buffer_bytes, available_memory_bytes()
    if asked > available * 9 // 10:
        fits = max(0, available * 9 // 10 // buffer_bytes)
        raise ConfigError(
            f"the buffer pool asks {format_bytes(asked)} ({buffer_count} x {format_bytes(buffer_bytes)}), "
            f"and {format_bytes(available)} of memory are available. buffer_count={fits} would fit"
            + ("." if fits >= 2 else "; lower buffer_size as well.")
        )
