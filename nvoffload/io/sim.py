"""The engine's twin for tests: a seeded puller that is late, short, wrong or silent on demand.

Moves real bytes on real descriptors, one request at a time. Never used outside tests.
"""

import errno
import heapq
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from nvoffload.io.bridge import Block, Bridge, open_bridge
from nvoffload.io.engine import Engine, Op, check_geometry

SECTOR_BYTES = 512
IDLE_S = 1.0
HELD_S = 0.01  # between looks for a release


class Request(NamedTuple):
    """A request as the twin saw it."""

    op: Op
    fd: int
    offset: int
    nbytes: int


class Sim:
    """How the twin behaves, and what it has seen. Requests and reads are counted from 1.

    latency_s: fixed, or drawn from (low, high). bytes_per_s: of the whole device, shared by `parallel`
    requests at a time. reorder: those due together are answered in random order, else all in order.
    short_every: every nth completion moves a part only. fail: errno of the nth request, a table or a
    function (0: none). never: requests that stay unanswered until `release`. flip_bit: the nth read gets
    one bit wrong.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        latency_s: float | tuple[float, float] = 0.0,
        reorder: bool = False,
        short_every: int | None = None,
        fail: Mapping[int, int] | Callable[[int, Request], int] | None = None,
        never: Collection[int] = (),
        flip_bit: int | None = None,
        parallel: int = 1 << 20,
        bytes_per_s: float | None = None,
    ) -> None:
        self.log: list[Request] = []  # in the order taken
        self.inflight = 0
        self.inflight_max = 0
        self._random = random.Random(seed)
        self._latency_s = latency_s if isinstance(latency_s, tuple) else (latency_s, latency_s)
        self._reorder = reorder
        self._short_every = short_every
        self._fail = fail
        self._never = never
        self._flip_bit = flip_bit
        self._parallel = parallel
        self._bytes_per_s = bytes_per_s
        self._align = SECTOR_BYTES
        self._free_at_s: list[float] = []  # heap: when each of the parallel servers is free
        self._last_due_s = 0.0
        self._pending: list[tuple[float, int, Block]] = []  # heap: due, number, block
        self._held: list[tuple[float, int, Block]] = []
        self._num_moves = self._num_reads = 0
        self._cut: set[tuple[int, int, int]] = set()  # last moved in part only
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvoffload-sim", daemon=True)

    def start(self, handle: Any, *, queue_depth: int, align: int) -> None:
        """Serve the bridge of `handle`; once only."""
        self._align = align
        self._parallel = min(self._parallel, queue_depth)
        self._free_at_s = [0.0] * self._parallel
        self._bridge = Bridge(handle)
        self._thread.start()

    def release(self) -> None:
        """Let the requests of `never` be answered, those to come too."""
        self._released.set()

    def join(self) -> None:
        """Wait until the thread has gone. REQUIRES: the engine is drained."""
        self._thread.join()

    def _run(self) -> None:
        while not self._bridge.is_drained:
            block = self._bridge.take(self._patience_s())
            while block is not None:
                self._accept(block)
                block = self._bridge.take(0)
            if self._released.is_set():
                self._pending, self._held = sorted(self._pending + self._held), []
            self._serve_due()

    def _patience_s(self) -> float:
        if not self._pending:
            return HELD_S if self._held else IDLE_S
        wait_s = self._pending[0][0] - time.monotonic()
        if 0.0 < wait_s < 0.001:  # take counts in whole milliseconds
            time.sleep(wait_s)
        return min(max(wait_s, 0.0), HELD_S if self._held else IDLE_S)

    def _accept(self, block: Block) -> None:
        op = Op.READ if block.is_read else Op.WRITE
        self.log.append(Request(op, block.fd, block.offset, block.nbytes))
        self.inflight += 1
        self.inflight_max = max(self.inflight_max, self.inflight)
        number = len(self.log)
        is_held = number in self._never and not self._released.is_set()
        entry = (self._due_s(block.nbytes), number, block)
        if is_held:
            self._held.append(entry)
        else:
            heapq.heappush(self._pending, entry)

    def _due_s(self, nbytes: int) -> float:
        begin_s = max(time.monotonic(), heapq.heappop(self._free_at_s))
        due_s = begin_s + self._random.uniform(*self._latency_s)
        if self._bytes_per_s is not None:
            due_s += nbytes * self._parallel / self._bytes_per_s
        heapq.heappush(self._free_at_s, due_s)
        if not self._reorder:
            due_s = self._last_due_s = max(due_s, self._last_due_s)
        return due_s

    def _serve_due(self) -> None:
        now_s = time.monotonic()
        due = []
        while self._pending and self._pending[0][0] <= now_s:
            due.append(heapq.heappop(self._pending))
        if self._reorder:
            self._random.shuffle(due)
        for _, number, block in due:
            code = self._error_of(number)
            result = -code if code else self._move(block)
            self.inflight -= 1
            self._bridge.answer(block, result)

    def _error_of(self, number: int) -> int:
        if callable(self._fail):
            return self._fail(number, self.log[number - 1])
        return (self._fail or {}).get(number, 0)

    def _move(self, block: Block) -> int:
        self._num_moves += 1
        nbytes = block.nbytes
        place = (block.fd, block.offset, nbytes)
        if place in self._cut:
            self._cut.remove(place)  # nothing of it counted: not twice in a row
        elif self._short_every is not None and self._num_moves % self._short_every == 0:
            self._cut.add(place)
            nbytes = self._part_of(nbytes)
        try:
            if not block.is_read:
                return os.pwritev(block.fd, [block.memory[:nbytes]], block.offset)
            moved = os.preadv(block.fd, [block.memory[:nbytes]], block.offset)
        except OSError as error:
            return -(error.errno or errno.EIO)
        self._num_reads += 1
        if self._num_reads == self._flip_bit and moved > 0:
            block.memory[self._random.randrange(moved)] ^= 1 << self._random.randrange(8)
        return moved

    def _part_of(self, nbytes: int) -> int:
        """Return a random part: of whole aligns if there are two or more, else of whole sectors."""
        grain = self._align if nbytes > self._align else SECTOR_BYTES
        return grain * self._random.randrange(1, nbytes // grain) if nbytes > grain else nbytes


def open_sim_engine(
    sim: Sim | None = None, *, block_bytes: int, queue_depth: int, align: int = 4096, **behaviour: Any
) -> Engine:
    """Open an engine served by `sim`, or by a new Sim(**behaviour), which is its `puller`."""
    check_geometry(block_bytes=block_bytes, queue_depth=queue_depth, align=align)
    sim = sim or Sim(**behaviour)
    handle = open_bridge(queue_depth=queue_depth, block_bytes=block_bytes, align=align)
    sim.start(handle, queue_depth=queue_depth, align=align)
    return Engine(handle, name="sim", why="a test", block_bytes=block_bytes, align=align, puller=sim)
