"""The Python face of an engine: opens one, submits transfers, turns its codes into errors.

The engine itself runs in C; no call here moves bytes or holds the GIL while waiting.
"""

import errno
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, Protocol, Self

from nvoffload import native
from nvoffload.errors import ConfigError, StorageError, UsageError
from nvoffload.io.bridge import open_bridge
from nvoffload.io.portable import Portable
from nvoffload.io.ring import open_ring, refusal, ring_error

KINDS = ("auto", "libaio", "portable")
QUEUE_DEPTH_MAX = 4096
BLOCK_BYTES_MAX = 1 << 30
WAIT_SLICE_S = 0.2  # so that a waiting main thread sees Ctrl-C

CAUSES = {
    errno.EIO: "a failing drive or connection; see the kernel log",
    errno.ENOSPC: "the filesystem is full; free some space or choose another folder",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a limit on file sizes; see ulimit -f",
    errno.ENODATA: "the file ends before the requested range; it was truncated",
    errno.EINVAL: "the filesystem refuses direct I/O, or asks for a larger alignment",
    errno.EBADF: "the file was closed or not opened for this",
    errno.EAGAIN: "the kernel had no resources for the request for 10 s with nothing in flight",
    errno.ETIMEDOUT: "a drive or network filesystem that no longer answers; see the kernel log",
}

# Engines that could not be drained. The kernel may still write to their memory, so they live as long
# as the process.
_undrained: list["Engine"] = []


class Op(IntEnum):
    """What a transfer does, seen from memory."""

    READ = 0
    WRITE = 1


class Priority(IntEnum):
    """Demand goes first; everything else shares the queue by age."""

    DEMAND = 0
    SHARED = 1


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine opened. `inflight` counts requests, `queued` transfers, both now."""

    read_bytes: int
    write_bytes: int
    read_requests: int
    write_requests: int
    busy_s: float
    inflight: int
    queued: int
    last_progress_s: float  # time.monotonic() of the last completion, 0.0 before the first


class ClosedError(UsageError):
    """A call on an engine that has been closed."""


class Puller(Protocol):
    """Whoever serves the bridge of an engine."""

    def join(self) -> None:
        """Return once it makes no further call. REQUIRES: the engine is drained."""


def storage_error(op: int, path: str, *, offset: int, nbytes: int, code: int, what: str = "") -> StorageError:
    """Return the error for a transfer that ended with `code`, a negative errno."""
    name = "read" if op == Op.READ else "write"
    cause = CAUSES.get(-code, "see the kernel log")
    return StorageError(
        f"{name} of {nbytes} bytes at {offset} of {path or '(unnamed file)'} failed: "
        f"{what or native.describe(code)}. Likely cause: {cause}.",
        errno=-code,
        path=path,
        offset=offset,
        nbytes=nbytes,
    )


class Transfer:
    """A submitted transfer.

    Its memory must live until `wait` has returned, or raised an error other than ETIMEDOUT.
    """

    def __init__(self, engine: "Engine", xfer: Any, path: str) -> None:
        self.path = path
        self._engine = engine
        self._xfer = xfer

    def wait(self, timeout_s: float = 60.0) -> None:
        """Return once all bytes have moved; raise StorageError if they did not.

        `timeout_s` bounds the time in which the whole engine completes nothing. After a timeout the
        transfer is still in flight.
        """
        xfer = self._xfer
        if not self._engine._has_ended(self, timeout_s):
            raise storage_error(
                xfer.op,
                self.path,
                offset=xfer.offset,
                nbytes=xfer.nbytes,
                code=-errno.ETIMEDOUT,
                what=f"no completion for {timeout_s:g} s",
            )
        if xfer.result < 0:
            raise storage_error(
                xfer.op, self.path, offset=xfer.error_offset, nbytes=xfer.error_nbytes, code=xfer.result
            )


class Engine:
    """Owns one engine in C with its pump thread, and the puller that serves it, if any."""

    def __init__(
        self, handle: Any, *, name: str, why: str, block_bytes: int, align: int, puller: Puller | None = None
    ) -> None:
        self.name = name
        self.why = why
        self.block_bytes = block_bytes
        self.align = align
        self.puller = puller
        self.queue_depth: int = native.lib.nvo_engine_depth(handle)
        self.library: str = native.ffi.string(native.lib.nvo_engine_library(handle)).decode()
        self._handle = handle  # None: closed
        self._pid = os.getpid()
        self._live: set[Transfer] = set()  # keeps what the engine points to
        self._live_max = 64
        self._last_stats: EngineStats | None = None
        self._calls = threading.Condition()
        self._num_calls = 0  # in C now; the handle is freed only at 0
        self._close_lock = threading.Lock()

    def __repr__(self) -> str:
        state = "CLOSED" if self._handle is None else "OPEN"
        return f"<Engine {self.name} {state}, {self.library}, depth {self.queue_depth}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StorageError as close_error:
            if error is None:
                raise
            error.add_note(str(close_error))

    @property
    def handle(self) -> Any:
        """The engine in C, for others in C. Valid until `close`."""
        self._check_pid()
        self._check_open()
        return self._handle

    def submit(
        self,
        fd: int,
        op: int,
        address: int,
        offset: int,
        nbytes: int,
        *,
        priority: int = Priority.SHARED,
        path: str = "",
    ) -> Transfer:
        """Queue a transfer and return at once. REQUIRES: `fd` and the memory live until it has ended."""
        xfer = native.ffi.new("nvo_xfer *")
        xfer.fd, xfer.op, xfer.priority = fd, op, priority
        xfer.addr = native.ffi.cast("void *", address)
        xfer.offset, xfer.nbytes = offset, nbytes
        transfer = Transfer(self, xfer, path)
        with self._using() as handle:
            self._keep(transfer, handle)
            code = native.lib.nvo_engine_submit(handle, xfer)
            if code < 0:
                self._live.discard(transfer)
        if code == -errno.ESHUTDOWN:
            raise UsageError("The engine is closing and takes no more transfers.")
        if code < 0:
            raise ConfigError(
                f"Op {op}, priority {priority}, descriptor {fd}, {nbytes} bytes at {offset}, memory at "
                f"{address:#x}: refused. The engine needs a valid descriptor and an address, an offset and a "
                f"length that are multiples of {self.align}, with at least one byte."
            )
        return transfer

    def read(self, fd: int, address: int, offset: int, nbytes: int, *, path: str = "", timeout_s: float = 60.0) -> None:
        """Fill memory from the file and wait, ahead of everything that is queued as shared."""
        transfer = self.submit(fd, Op.READ, address, offset, nbytes, priority=Priority.DEMAND, path=path)
        transfer.wait(timeout_s)

    def write(
        self, fd: int, address: int, offset: int, nbytes: int, *, path: str = "", timeout_s: float = 60.0
    ) -> None:
        """Write memory to the file and wait, ahead of everything that is queued as shared."""
        transfer = self.submit(fd, Op.WRITE, address, offset, nbytes, priority=Priority.DEMAND, path=path)
        transfer.wait(timeout_s)

    def stats(self) -> EngineStats:
        """Return the counters; those of the end once closed."""
        if self._last_stats is not None:
            return self._last_stats
        with self._using() as handle:
            return _read_stats(handle)

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish what was submitted and free the engine; a second call does nothing.

        Raise StorageError if something stays in flight for `timeout_s`. Then nothing is freed, here or by
        the caller: the kernel may still write to that memory. A later call tries again.
        """
        if os.getpid() != self._pid:
            return  # the parent's
        with self._close_lock:
            if self._handle is None:
                return
            if native.lib.nvo_engine_drain(self._handle, int(timeout_s * 1000)) < 0:
                self._give_up(timeout_s)
            if self.puller is not None:
                self.puller.join()
            self._last_stats = _read_stats(self._handle)
            with self._calls:
                handle, self._handle = self._handle, None
                self._calls.wait_for(lambda: self._num_calls == 0)
            native.check(native.lib.nvo_engine_close(handle, 0), "closing an engine")
            self._live.clear()
            if self in _undrained:
                _undrained.remove(self)

    def _give_up(self, timeout_s: float) -> None:
        if self not in _undrained:
            _undrained.append(self)
        stats = _read_stats(self._handle)
        paths = sorted({transfer.path for transfer in self._live if not transfer._xfer.ended} - {""})
        raise StorageError(
            f"{self.name} engine: {stats.queued} transfers with {stats.inflight} requests in flight have not "
            f"ended within {timeout_s:g} s{' on ' if paths else ''}{', '.join(paths)}. Likely cause: "
            f"{CAUSES[errno.ETIMEDOUT]}. Their memory is kept until the process ends.",
            errno=errno.ETIMEDOUT,
            path=paths[0] if paths else "",
        )

    def _check_pid(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(f"This engine belongs to process {self._pid}; a forked process opens its own.")

    def _check_open(self) -> None:
        if self._handle is None:
            raise ClosedError("The engine is closed.")

    @contextmanager
    def _using(self) -> Iterator[Any]:
        """Keep the handle alive within the block."""
        self._check_pid()
        with self._calls:
            self._check_open()
            handle = self._handle
            self._num_calls += 1
        try:
            yield handle
        finally:
            with self._calls:
                self._num_calls -= 1
                self._calls.notify_all()

    def _has_ended(self, transfer: Transfer, timeout_s: float) -> bool:
        start_s = time.monotonic()
        try:
            with self._using() as handle:
                while True:
                    quiet_s = time.monotonic() - max(start_s, _read_stats(handle).last_progress_s)
                    slice_s = min(max(timeout_s - quiet_s, 0.0), WAIT_SLICE_S)
                    if native.lib.nvo_engine_wait(handle, transfer._xfer, math.ceil(slice_s * 1000)):
                        self._live.discard(transfer)
                        return True
                    if quiet_s >= timeout_s:
                        return False
        except ClosedError:
            return True  # an engine closes drained

    def _keep(self, transfer: Transfer, handle: Any) -> None:
        with self._calls:
            if len(self._live) >= self._live_max:
                wait = native.lib.nvo_engine_wait
                self._live = {other for other in self._live if not wait(handle, other._xfer, 0)}
                self._live_max = max(64, 2 * len(self._live))
            self._live.add(transfer)


def open_engine(kind: str, *, block_bytes: int, queue_depth: int, align: int = 4096) -> Engine:
    """Open an engine of `kind`: auto, libaio or portable. Auto takes the first that works, and says so."""
    check_geometry(block_bytes=block_bytes, queue_depth=queue_depth, align=align)
    if kind not in KINDS:
        raise ConfigError(f"engine={kind!r}: choose one of {', '.join(KINDS)}.")
    why = "asked for"
    if kind != "portable":
        handle, code = open_ring(native.lib.NVO_RING_AIO, queue_depth=queue_depth, block_bytes=block_bytes, align=align)
        if handle is not None:
            why = "the first choice" if kind == "auto" else why
            engine = Engine(handle, name="libaio", why=why, block_bytes=block_bytes, align=align)
            _announce(logging.INFO, _describe(engine, queue_depth))
            return engine
        if kind == "libaio":
            raise ring_error(code, queue_depth)
        why = f"libaio: {refusal(code)}"
    handle = open_bridge(queue_depth=queue_depth, block_bytes=block_bytes, align=align)
    puller = Portable(handle, queue_depth)
    engine = Engine(handle, name="portable", why=why, block_bytes=block_bytes, align=align, puller=puller)
    _announce(logging.INFO if kind == "portable" else logging.WARNING, _describe(engine, queue_depth))
    return engine


def check_geometry(*, block_bytes: int, queue_depth: int, align: int) -> None:
    """Raise ConfigError unless an engine of these sizes can exist."""
    if align < 1 or align & (align - 1):
        raise ConfigError(f"align={align}: must be a power of two; disks use 512 or 4096.")
    if block_bytes % align or not align <= block_bytes <= BLOCK_BYTES_MAX:
        raise ConfigError(f"block_bytes={block_bytes}: must be a multiple of align={align}, at most {BLOCK_BYTES_MAX}.")
    if not 1 <= queue_depth <= QUEUE_DEPTH_MAX:
        raise ConfigError(f"queue_depth={queue_depth}: must be from 1 to {QUEUE_DEPTH_MAX}.")


def _describe(engine: Engine, queue_depth: int) -> str:
    how = f" through {engine.library}" if engine.name == "libaio" else f" on aiofiles ({engine.why})"
    asked = f" (of {queue_depth}: fs.aio-max-nr is spent)" if engine.queue_depth < queue_depth else ""
    mib, rest = divmod(engine.block_bytes, 1 << 20)
    block = f"{engine.block_bytes} bytes" if rest else f"{mib} MiB"
    return f"I/O: {engine.name}{how}, depth {engine.queue_depth}{asked}, block {block}"


@functools.cache  # once per process and text
def _announce(level: int, text: str) -> None:
    logging.getLogger("nvoffload.io").log(level, text)


def _read_stats(handle: Any) -> EngineStats:
    out = native.ffi.new("nvo_engine_stats *")
    native.lib.nvo_engine_stats_read(handle, out)
    return EngineStats(
        read_bytes=out.read_bytes,
        write_bytes=out.write_bytes,
        read_requests=out.read_requests,
        write_requests=out.write_requests,
        busy_s=out.busy_ns / 1e9,
        inflight=out.inflight,
        queued=out.queued,
        last_progress_s=out.last_progress_ns / 1e9,
    )
