"""Claims about engines: the same suite for libaio, portable and the twin, then the pump's rules one by one.

The one-by-one tests serve the bridge themselves, so every order of events is theirs to choose.
"""

import errno
import logging
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvoffload import native
from nvoffload.errors import ConfigError, MachineError, StorageError, UsageError
from nvoffload.io import engine as engine_room
from nvoffload.io import ring
from nvoffload.io.bridge import open_bridge
from nvoffload.io.engine import Op, Priority, open_engine
from nvoffload.io.sim import Sim, open_sim_engine

ffi = native.ffi
ALIGN = 4096
BLOCK = 16 * ALIGN
KINDS = ["libaio", "portable", "sim"]

pytestmark = pytest.mark.timeout(20)


class Memory:
    """Page-aligned memory with an address."""

    def __init__(self, nbytes, content=None):
        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._buffer = ffi.from_buffer(self.map)
        self.address = int(ffi.cast("uintptr_t", self._buffer))
        if content is not None:
            self.map[:] = content

    def __len__(self):
        return len(self.map)

    def bytes(self):
        return self.map[:]


def noise(nbytes, seed):
    return random.Random(seed).randbytes(nbytes)


class File:
    """A file opened for direct I/O where the filesystem has it."""

    def __init__(self, path, content=b""):
        path.write_bytes(content)
        self.path = str(path)
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError:
            self.fd = os.open(path, os.O_RDWR)

    def close(self):
        os.close(self.fd)


@pytest.fixture
def make_file(tmp_path):
    files = []

    def make(content=b""):
        files.append(File(tmp_path / f"{len(files)}.swap", content))
        return files[-1]

    yield make
    for file in files:
        file.close()


@pytest.fixture
def open_any():
    """Open engines of any kind and close them at the end."""
    engines = []

    def open_one(kind, *, block_bytes=BLOCK, queue_depth=4, **behaviour):
        sizes = {"block_bytes": block_bytes, "queue_depth": queue_depth, "align": ALIGN}
        if kind == "sim":
            engine = open_sim_engine(**sizes, **behaviour)
        else:
            if kind == "libaio":
                handle, code = ring.open_ring(native.lib.NVO_RING_AIO, **sizes)
                if handle is None:
                    pytest.skip(f"no kernel AIO here: {ring.refusal(code)}")
                native.lib.nvo_engine_close(handle, 0)
            engine = open_engine(kind, **sizes)
        engines.append(engine)
        return engine

    yield open_one
    for engine in engines:
        if isinstance(engine.puller, Sim):
            engine.puller.release()
        engine.close()


@pytest.fixture
def raw():
    """An engine on the bridge whose puller is the test."""
    bridges = []

    def open_raw(queue_depth=2, block_bytes=BLOCK):
        bridges.append(Raw(queue_depth, block_bytes))
        return bridges[-1]

    yield open_raw
    for bridge in bridges:
        bridge.close()


class Raw:
    """The bridge by hand. Memory is never touched, so addresses may be invented."""

    def __init__(self, queue_depth, block_bytes):
        self.handle = open_bridge(queue_depth=queue_depth, block_bytes=block_bytes, align=ALIGN)
        self._kept = []  # the engine points to them
        self._taken = {}  # by token, until answered
        self._taken = {}

    def submit(self, nbytes, *, offset=0, op=Op.READ, priority=Priority.SHARED, address=1 << 30):
        xfer = ffi.new("nvo_xfer *")
        xfer.fd, xfer.op, xfer.priority = 0, op, priority
        xfer.addr, xfer.offset, xfer.nbytes = ffi.cast("void *", address), offset, nbytes
        self._kept.append(xfer)
        assert native.lib.nvo_engine_submit(self.handle, xfer) == 0
        return xfer

    def take(self, timeout_ms=5000):
        block = ffi.new("nvo_block *")
        code = native.lib.nvo_bridge_take(self.handle, block, timeout_ms)
        if code != 1:
            return code
        self._taken[block.token] = block
        return block

    def done(self, block, result=None):
        self._taken.pop(block.token, None)
        return native.lib.nvo_bridge_done(self.handle, block.token, block.nbytes if result is None else result)

    def has_ended(self, xfer, timeout_ms=5000):
        return bool(native.lib.nvo_engine_wait(self.handle, xfer, timeout_ms))

    def serve(self):
        """Answer everything with success until the engine is drained."""
        for block in list(self._taken.values()):
            self.done(block)
        while not isinstance(block := self.take(), int) or block == 0:
            if block != 0:
                self.done(block)

    def close(self):
        if self.handle is None:
            return
        server = threading.Thread(target=self.serve, daemon=True)
        server.start()
        assert native.lib.nvo_engine_drain(self.handle, 5000) == 0
        server.join()
        assert native.lib.nvo_engine_close(self.handle, 0) == 0
        self.handle = None


# ---- every kind ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [ALIGN, BLOCK - ALIGN, BLOCK, BLOCK + ALIGN, 3 * BLOCK + ALIGN])
def test_odd_lengths_come_back(kind, nbytes, open_any, make_file):
    """A transfer of any aligned length moves exactly its bytes.

    Write at an odd place between guards, look at the file by other means, read it back elsewhere.
    """
    engine, file = open_any(kind), make_file(b"\xee" * (nbytes + 2 * ALIGN))
    source, target = Memory(nbytes, noise(nbytes, 1)), Memory(nbytes + ALIGN, b"\xdd" * (nbytes + ALIGN))
    engine.write(file.fd, source.address, ALIGN, nbytes)
    content = Path(file.path).read_bytes()
    assert content == b"\xee" * ALIGN + source.bytes() + b"\xee" * ALIGN
    engine.read(file.fd, target.address, ALIGN, nbytes)
    assert target.bytes() == source.bytes() + b"\xdd" * ALIGN


@pytest.mark.parametrize("kind", KINDS)
def test_many_transfers_share_a_small_queue(kind, open_any, make_file):
    """More transfers than the queue has places all end, each with its own bytes.

    60 writes of random lengths to two files, all submitted before any is waited for, then read back.
    """
    engine, files = open_any(kind, queue_depth=3), [make_file(), make_file()]
    rng = random.Random(2)
    memories = [Memory(n, rng.randbytes(n)) for n in (ALIGN * rng.randint(1, 40) for _ in range(60))]
    offsets = [sum(len(m) for m in memories[i % 2 : i : 2]) for i in range(60)]

    def submit_all(op, places):
        transfers = [
            engine.submit(files[i % 2].fd, op, places[i].address, offsets[i], len(places[i])) for i in range(60)
        ]
        for transfer in transfers:
            transfer.wait(10)

    submit_all(Op.WRITE, memories)
    copies = [Memory(len(m)) for m in memories]
    submit_all(Op.READ, copies)
    assert all(copy.bytes() == memory.bytes() for copy, memory in zip(copies, memories, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_stats_count_bytes_exactly(kind, open_any, make_file):
    """Bytes, requests and the state at rest are exact; busy time lies within the wall time.

    One write of 3 blocks and a bit, two reads of one block.
    """
    engine, file, memory = open_any(kind), make_file(), Memory(3 * BLOCK + ALIGN)
    start = time.monotonic()
    engine.write(file.fd, memory.address, 0, len(memory))
    engine.read(file.fd, memory.address, BLOCK, BLOCK)
    engine.read(file.fd, memory.address, 0, BLOCK)
    wall_s = time.monotonic() - start
    stats = engine.stats()
    assert (stats.write_bytes, stats.read_bytes) == (len(memory), 2 * BLOCK)
    assert stats.write_requests >= 4 and stats.read_requests >= 2
    assert (stats.inflight, stats.queued) == (0, 0)
    assert 0 < stats.busy_s <= wall_s
    assert start <= stats.last_progress_s <= time.monotonic()


@pytest.mark.parametrize("kind", KINDS)
def test_end_of_file_is_an_error_with_its_place(kind, open_any, make_file):
    """A read past the end raises, naming the block that hit it.

    Read 4 blocks of a file of 2.
    """
    engine, file, memory = open_any(kind), make_file(bytes(2 * BLOCK)), Memory(4 * BLOCK)
    with pytest.raises(StorageError) as info:
        engine.read(file.fd, memory.address, 0, 4 * BLOCK, path=file.path)
    assert (info.value.errno, info.value.filename) == (errno.ENODATA, file.path)
    assert info.value.offset in (2 * BLOCK, 3 * BLOCK)
    assert info.value.nbytes == BLOCK
    assert engine.stats().inflight == 0


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_beyond_4_gib(kind, open_any, make_file):
    """Offsets are 64-bit all the way.

    Write and read at 5 GiB of a sparse file; nothing appears at the truncated offset.
    """
    engine, file = open_any(kind), make_file()
    source, target = Memory(2 * BLOCK, noise(2 * BLOCK, 3)), Memory(2 * BLOCK)
    offset = (5 << 30) + ALIGN
    engine.write(file.fd, source.address, offset, len(source))
    engine.read(file.fd, target.address, offset, len(target))
    assert target.bytes() == source.bytes()
    with open(file.path, "rb") as plain:
        plain.seek(offset % (1 << 32))
        assert plain.read(BLOCK) == bytes(BLOCK)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_descriptor_fails_only_its_transfer(kind, open_any, make_file, tmp_path):
    """A descriptor that cannot do the operation raises; transfers around it are unharmed.

    A write to a file opened for reading, between two good ones.
    """
    engine, file, memory = open_any(kind), make_file(bytes(BLOCK)), Memory(BLOCK, noise(BLOCK, 4))
    read_only = os.open(tmp_path / "0.swap", os.O_RDONLY)
    try:
        good = engine.submit(file.fd, Op.WRITE, memory.address, 0, BLOCK)
        bad = engine.submit(read_only, Op.WRITE, memory.address, 0, BLOCK, path="read-only.swap")
        last = engine.submit(file.fd, Op.WRITE, memory.address, BLOCK, BLOCK)
        with pytest.raises(StorageError, match=r"write of 65536 bytes at 0 of read-only.swap failed: Bad file"):
            bad.wait(10)
        good.wait(10)
        last.wait(10)
    finally:
        os.close(read_only)
    assert Path(file.path).read_bytes() == 2 * memory.bytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wrong",
    [(512, 0, ALIGN), (0, 512, ALIGN), (0, 0, ALIGN + 512), (0, 0, 0), (0, -ALIGN, ALIGN), (0, 0, -ALIGN)],
)
def test_misalignment_is_refused(kind, wrong, open_any, make_file):
    """Nothing unaligned reaches the kernel: it is refused at once, with the rule and the numbers.

    One bad value at a time: of the address, the offset, the length.
    """
    engine, file, memory = open_any(kind), make_file(), Memory(2 * ALIGN)
    address, offset, nbytes = wrong
    with pytest.raises(ConfigError, match="multiples of 4096") as info:
        engine.submit(file.fd, Op.WRITE, memory.address + address, offset, nbytes)
    assert str(nbytes) in str(info.value)
    assert engine.stats().write_requests == 0


def test_overflowing_range_is_refused(open_any, make_file):
    """offset + nbytes beyond 2^63 is refused, not wrapped.

    The last aligned offset, two aligns long.
    """
    engine, file, memory = open_any("sim"), make_file(), Memory(2 * ALIGN)
    with pytest.raises(ConfigError):
        engine.submit(file.fd, Op.READ, memory.address, 2**63 - ALIGN, 2 * ALIGN)


@pytest.mark.parametrize("kind", KINDS)
def test_closed_engine_refuses_politely(kind, open_any, make_file):
    """After close: transfers are refused, ended ones still tell, counters stay, a second close is nothing.

    One write before, each call after.
    """
    engine, file, memory = open_any(kind), make_file(), Memory(BLOCK)
    transfer = engine.submit(file.fd, Op.WRITE, memory.address, 0, BLOCK)
    engine.close()
    transfer.wait(0)
    assert os.fstat(file.fd).st_size == BLOCK, "close must finish what was submitted"
    engine.close()
    assert engine.stats().write_bytes == BLOCK
    assert "CLOSED" in repr(engine)
    with pytest.raises(UsageError, match="closed"):
        engine.submit(file.fd, Op.WRITE, memory.address, 0, BLOCK)
    with pytest.raises(UsageError, match="closed"):
        _ = engine.handle


@pytest.mark.parametrize("kind", KINDS)
def test_fork_leaves_the_child_inert_and_the_parent_running(kind, open_any, make_file):
    """A forked child cannot submit, wait, or keep the engine's descriptors; the parent does not notice.

    Count event descriptors in the child, try each call there, then go on in the parent.
    """

    def event_fds():
        names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum("eventfd" in os.readlink(name) for name in names if os.path.islink(name))

    before = event_fds()
    engine, file, memory = open_any(kind), make_file(), Memory(BLOCK, noise(BLOCK, 5))
    handle, xfer = engine.handle, ffi.new("nvo_xfer *")
    assert event_fds() >= before + 2
    child = os.fork()
    if child == 0:
        try:
            assert event_fds() == 0, "guarded descriptors must be closed"
            assert native.lib.nvo_engine_submit(handle, xfer) == -errno.ESHUTDOWN
            assert native.lib.nvo_engine_wait(handle, xfer, 10_000) == 1
            assert native.lib.nvo_engine_drain(handle, 10_000) == 0
            assert native.lib.nvo_engine_close(handle, 10_000) == 0
            assert native.lib.nvo_bridge_take(handle, ffi.new("nvo_block *"), 10_000) < 0
            with pytest.raises(UsageError, match="forked"):
                engine.submit(file.fd, Op.WRITE, memory.address, 0, BLOCK)
            engine.close()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    engine.write(file.fd, memory.address, 0, BLOCK)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Path(file.path).read_bytes() == memory.bytes()


def test_guarded_descriptor_is_closed_in_children_only(make_file):
    """A guarded descriptor does not reach a child; an unguarded one does.

    Fork once with it guarded, once without.
    """

    def child_has_it():
        child = os.fork()
        if child == 0:
            try:
                os.fstat(file.fd)
            except OSError:
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    file = make_file()
    assert native.lib.nvo_fork_guard(file.fd) == 0
    assert not child_has_it()
    os.fstat(file.fd)
    assert native.lib.nvo_fork_unguard(file.fd) == 0
    assert child_has_it()
    assert native.lib.nvo_fork_unguard(file.fd) == -errno.ENOENT
    assert native.lib.nvo_fork_guard(-1) == -errno.EBADF


def test_pump_takes_no_signals(open_any):
    """Signals go to the user's threads: the pump blocks them all.

    Read the mask of each thread called nvo-pump.
    """
    open_any("portable")
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "nvo-pump\n"]
    assert tasks
    for task in tasks:
        mask = int((task / "status").read_text().split("SigBlk:")[1].split()[0], 16)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
            assert mask >> (number - 1) & 1, number
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "the caller's mask is restored"


FORGETFUL = """
import mmap, os, sys, types
package = types.ModuleType("nvoffload")
package.__path__ = [sys.argv[1]]
sys.modules["nvoffload"] = package
from nvoffload import native
from nvoffload.io.engine import open_engine
from nvoffload.io.sim import open_sim_engine

memory = mmap.mmap(-1, 1 << 20)
address = int(native.ffi.cast("uintptr_t", native.ffi.from_buffer(memory)))
fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
sizes = {"block_bytes": 65536, "queue_depth": 4}
kind = sys.argv[3]
engine = open_sim_engine(**sizes, latency_s=9.0) if kind == "sim" else open_engine(kind, **sizes)
engine.submit(fd, 1, address, 0, 1 << 20)
print("submitted")
"""


@pytest.mark.parametrize("kind", KINDS)
def test_process_ends_without_close(kind, open_any, tmp_path):
    """A script that forgets close, with requests in flight, ends at once and quietly.

    A child process of each kind; the package without its __init__, so that it starts fast.
    """
    open_any(kind)  # skips where there is no kernel AIO
    args = [sys.executable, "-c", FORGETFUL, Path(native.__file__).parent, tmp_path / "x", kind]
    start = time.monotonic()
    child = subprocess.run(args, capture_output=True, text=True, timeout=15, check=False)
    assert (child.returncode, child.stdout, child.stderr) == (0, "submitted\n", "")
    assert time.monotonic() - start < 5


# ---- the pump, with the test as the device ----------------------------------------------


def test_queue_is_filled_to_its_depth_and_no_further(raw):
    """Exactly queue_depth blocks are in flight, across transfers, oldest first.

    Three transfers of one and two blocks, depth 4: four can be taken, then one more per answer.
    """
    device = raw(queue_depth=4)
    for i, nbytes in enumerate([BLOCK, 2 * BLOCK, 2 * BLOCK]):
        device.submit(nbytes, offset=i << 30)
    taken = [device.take() for _ in range(4)]
    assert [b.offset for b in taken] == [0, 1 << 30, (1 << 30) + BLOCK, 2 << 30]
    assert device.take(timeout_ms=30) == 0
    stats = ffi.new("nvo_engine_stats *")
    native.lib.nvo_engine_stats_read(device.handle, stats)
    assert (stats.inflight, stats.queued) == (4, 3)
    assert device.done(taken[2]) == 0
    assert device.take().offset == (2 << 30) + BLOCK


def test_demand_overtakes_shared(raw):
    """A demanded transfer is served before the rest of a long shared one.

    Depth 2, both places taken by a shared transfer of 8 blocks; then demand; the next block is its.
    """
    device = raw()
    device.submit(8 * BLOCK)
    first, second = device.take(), device.take()
    device.submit(2 * BLOCK, offset=1 << 40, priority=Priority.DEMAND)
    device.done(first)
    third = device.take()
    device.done(second)
    assert [third.offset, device.take().offset] == [1 << 40, (1 << 40) + BLOCK]
    device.done(third)
    assert device.take().offset == 2 * BLOCK, "then the shared one goes on where it was"


def test_error_stops_issuing_and_waits_for_what_flies(raw):
    """After the first error no block of the transfer is issued; it ends when none is in flight (R14).

    Depth 2, 8 blocks: fail the second, see that it has not ended, answer the first with another error.
    """
    device = raw()
    xfer = device.submit(8 * BLOCK, offset=BLOCK)
    first, second = device.take(), device.take()
    device.done(second, -errno.EIO)
    assert device.take(timeout_ms=30) == 0
    assert not device.has_ended(xfer, timeout_ms=0), "its first block is still in flight"
    device.done(first, -errno.ENOSPC)
    assert device.has_ended(xfer)
    assert (xfer.result, xfer.error_offset, xfer.error_nbytes) == (-errno.EIO, 2 * BLOCK, BLOCK)
    after = device.submit(BLOCK)
    device.done(device.take())
    assert device.has_ended(after)
    assert after.result == 0


def test_failed_transfer_leaves_the_queue(raw):
    """A transfer whose only block in flight fails ends once, and nothing of it is left behind.

    Depth 1, 4 blocks, the first fails; counters at rest; a transfer in the same memory works.
    """
    device = raw(queue_depth=1)
    xfer, behind = device.submit(4 * BLOCK), device.submit(BLOCK, offset=1 << 30)
    device.done(device.take(), -errno.EIO)
    assert device.has_ended(xfer)
    block = device.take()
    assert block.offset == 1 << 30
    stats = ffi.new("nvo_engine_stats *")
    native.lib.nvo_engine_stats_read(device.handle, stats)
    assert (stats.inflight, stats.queued, stats.read_requests) == (1, 1, 2)
    device.done(block)
    assert device.has_ended(behind)
    assert device.take(timeout_ms=20) == 0
    native.lib.nvo_engine_stats_read(device.handle, stats)
    assert (stats.inflight, stats.queued, stats.read_requests) == (0, 0, 2)


def test_short_transfer_is_completed(raw):
    """The rest of a short transfer is submitted anew, from the last whole align.

    Answer a block of 16 aligns with 3 aligns and 700 bytes, then the rest in two parts.
    """
    device = raw()
    xfer = device.submit(BLOCK, offset=BLOCK)
    for skip, result in [(0, 3 * ALIGN + 700), (3, 5 * ALIGN), (8, 8 * ALIGN)]:
        block = device.take()
        assert (block.offset, block.nbytes) == (BLOCK + skip * ALIGN, BLOCK - skip * ALIGN)
        assert int(ffi.cast("uintptr_t", block.addr)) == (1 << 30) + skip * ALIGN
        device.done(block, result)
    assert device.has_ended(xfer)
    assert xfer.result == 0


@pytest.mark.parametrize(
    ("result", "code"),
    [(512, errno.EIO), (-errno.EAGAIN, errno.EAGAIN), (-errno.EINTR, errno.EINTR)],
)
def test_no_progress_is_retried_a_bounded_number_of_times(result, code, raw):
    """Completions that move nothing are retried, then the transfer fails: no endless loop.

    Always answer the same; count the answers. A single one in between does no harm.
    """
    device = raw()
    xfer = device.submit(ALIGN, op=Op.WRITE)
    answers = 0
    while not device.has_ended(xfer, timeout_ms=0):
        block = device.take(timeout_ms=50)
        if block != 0:
            answers += 1
            device.done(block, result)
        assert answers < 100
    assert xfer.result == -code
    assert answers > 3
    lucky = device.submit(ALIGN, op=Op.WRITE)
    device.done(device.take(), result)
    device.done(device.take())
    assert device.has_ended(lucky)
    assert lucky.result == 0


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize("result", [BLOCK + 1, 1 << 62, -(1 << 40), -(1 << 63)])
def test_nonsense_results_are_errors(op, result, raw):
    """A result that no kernel may give is an error, never taken for success.

    More bytes than asked; negative numbers that are no errno.
    """
    device = raw()
    xfer = device.submit(BLOCK, op=op)
    device.done(device.take(), result)
    assert device.has_ended(xfer)
    assert xfer.result == -errno.EIO


def test_transfer_longer_than_4_gib_is_cut_right(raw):
    """Lengths are 64-bit: cutting and counting a huge transfer loses nothing (R19).

    5 GiB at an offset of 2^50 with 1 GiB blocks and invented addresses; nothing is touched.
    """
    device = raw(block_bytes=1 << 30)
    nbytes, offset, address = (5 << 30) + ALIGN, 1 << 50, 1 << 45
    xfer = device.submit(nbytes, offset=offset, address=address)
    at = 0
    while at < nbytes:
        block = device.take()
        assert block.offset == offset + at
        assert int(ffi.cast("uintptr_t", block.addr)) == address + at
        at += block.nbytes
        device.done(block)
    assert at == nbytes
    assert device.has_ended(xfer)
    stats = ffi.new("nvo_engine_stats *")
    native.lib.nvo_engine_stats_read(device.handle, stats)
    assert (stats.read_bytes, stats.read_requests) == (nbytes, 6)


def test_unknown_stale_and_second_answers_are_refused(raw):
    """Only the one answer to a block in flight counts.

    An invented token; the same answer twice; the token of before a resubmission.
    """
    device = raw()
    xfer = device.submit(2 * ALIGN)
    assert native.lib.nvo_bridge_done(device.handle, 12345, ALIGN) == -errno.EINVAL
    old = device.take()
    assert device.done(old, ALIGN) == 0
    assert device.done(old, ALIGN) == -errno.EINVAL
    new = device.take()
    assert new.token != old.token
    assert device.done(old, ALIGN) == -errno.EINVAL
    assert not device.has_ended(xfer, timeout_ms=20)
    assert device.done(new) == 0
    assert device.has_ended(xfer)
    assert xfer.result == 0


def test_taken_blocks_are_answerable_while_closing(raw):
    """A drain that timed out keeps serving what was submitted, refuses the rest, and can be tried again.

    Submit 3 blocks at depth 2, drain for no time, then serve; only then does take say shutdown.
    """
    device = raw()
    xfer = device.submit(3 * BLOCK)
    first = device.take()
    assert native.lib.nvo_engine_drain(device.handle, 0) == -errno.ETIMEDOUT
    assert native.lib.nvo_engine_submit(device.handle, ffi.new("nvo_xfer *", xfer[0])) == -errno.ESHUTDOWN
    assert native.lib.nvo_engine_close(device.handle, 0) == -errno.ETIMEDOUT
    assert device.done(first) == 0
    for _ in range(2):
        assert device.done(device.take()) == 0
    assert native.lib.nvo_engine_drain(device.handle, 5000) == 0
    assert xfer.result == 0
    assert device.take() == -errno.ESHUTDOWN


def test_on_end_may_submit_again(raw):
    """The callback runs without the engine's lock and may reuse its transfer at once.

    A callback that resubmits the same transfer, 4 times; the last one dawdles, and drain waits for it.
    """
    device, ends = raw(), []

    @ffi.callback("void(nvo_xfer *)")
    def again(xfer):
        if len(ends) == 4:
            time.sleep(0.05)
        ends.append((threading.get_ident(), xfer.offset, xfer.result))
        if len(ends) < 5:
            xfer.offset += BLOCK
            assert native.lib.nvo_engine_submit(device.handle, xfer) == 0

    xfer = ffi.new("nvo_xfer *")
    xfer.op, xfer.priority, xfer.nbytes = Op.READ, Priority.DEMAND, BLOCK
    xfer.addr, xfer.on_end = ffi.cast("void *", 1 << 30), again
    assert native.lib.nvo_engine_submit(device.handle, xfer) == 0
    for _ in range(5):
        device.done(device.take())
    assert native.lib.nvo_engine_drain(device.handle, 5000) == 0
    assert [(offset, result) for _, offset, result in ends] == [(i * BLOCK, 0) for i in range(5)]
    assert {ident for ident, _, _ in ends} != {threading.get_ident()}


# ---- the twin -----------------------------------------------------------------------------


def test_first_error_is_raised_and_the_next_transfer_works(open_any, make_file):
    """One typed error with place and path; then the same memory and file work again (R14).

    The third of eight requests fails; nothing flies afterwards.
    """
    engine, file = open_any("sim", fail={3: errno.EIO}), make_file(noise(8 * BLOCK, 6))
    memory = Memory(8 * BLOCK)
    with pytest.raises(StorageError) as info:
        engine.read(file.fd, memory.address, 0, len(memory), path=file.path)
    error = info.value
    assert (error.errno, error.filename, error.offset, error.nbytes) == (
        errno.EIO,
        file.path,
        2 * BLOCK,
        BLOCK,
    )
    expected = f"read of {BLOCK} bytes at {2 * BLOCK} of {file.path} failed: Input/output error (5)."
    assert str(error).startswith(expected)
    stats = engine.stats()
    assert (stats.inflight, stats.queued) == (0, 0)
    engine.read(file.fd, memory.address, 0, len(memory))
    assert memory.bytes() == Path(file.path).read_bytes()


def test_queue_reaches_its_depth_on_the_twin(open_any, make_file):
    """A slow device sees as many requests as the queue is deep.

    Depth 8, 5 ms each, one transfer of 40 blocks; the log holds each block once.
    """
    engine, file, memory = open_any("sim", queue_depth=8, latency_s=0.005), make_file(), Memory(40 * BLOCK)
    engine.write(file.fd, memory.address, 0, len(memory))
    assert engine.puller.inflight_max == 8
    assert sorted(r.offset for r in engine.puller.log) == [i * BLOCK for i in range(40)]


def test_silence_times_out_and_names_the_file(open_any, make_file):
    """A request that never completes becomes an error in bounded time, in wait and in close (R73).

    The second request is held; close leaks; after the release both end well.
    """
    engine, file, memory = open_any("sim", never={2}), make_file(), Memory(3 * BLOCK)
    transfer = engine.submit(file.fd, Op.WRITE, memory.address, 0, len(memory), path=file.path)
    start = time.monotonic()
    with pytest.raises(StorageError, match=f"of {file.path} failed: no completion for 0.2 s") as info:
        transfer.wait(0.2)
    assert info.value.errno == errno.ETIMEDOUT
    with pytest.raises(StorageError, match=r"1 requests in flight .* on .*swap") as info:
        engine.close(timeout_s=0.1)
    assert info.value.errno == errno.ETIMEDOUT
    assert time.monotonic() - start < 5
    assert engine in engine_room._undrained
    with pytest.raises(UsageError, match="closing"):
        engine.submit(file.fd, Op.WRITE, memory.address, 0, BLOCK)
    engine.puller.release()
    transfer.wait(10)
    engine.close()
    assert engine not in engine_room._undrained


def test_slow_is_not_silent(open_any, make_file):
    """The time limit is for no progress at all, not for the transfer.

    10 requests of 60 ms in a row under a limit of 0.3 s.
    """
    engine = open_any("sim", queue_depth=1, latency_s=0.06)
    file, memory = make_file(), Memory(10 * BLOCK)
    start = time.monotonic()
    engine.write(file.fd, memory.address, 0, len(memory), timeout_s=0.3)
    assert time.monotonic() - start >= 0.6


def test_close_in_one_thread_lets_waits_in_others_finish(open_any, make_file):
    """Closing never pulls the engine from under a waiting thread.

    Two threads wait for slow writes while the main thread closes.
    """
    engine, file, memory = open_any("sim", latency_s=0.05, queue_depth=1), make_file(), Memory(BLOCK)
    transfers = [engine.submit(file.fd, Op.WRITE, memory.address, i * BLOCK, BLOCK) for i in range(4)]
    ended = []
    threads = [threading.Thread(target=lambda t=t: ended.append(t.wait(10))) for t in transfers[2:]]
    for thread in threads:
        thread.start()
    engine.close()
    for thread in threads:
        thread.join()
    assert ended == [None, None]


def test_context_manager_keeps_the_users_exception(open_any, make_file):
    """An error of close does not hide the error that led to it.

    Leave the block by an exception while a request is held.
    """
    engine, file, memory = open_any("sim", never={1}), make_file(), Memory(BLOCK)
    engine.close = lambda close=engine.close: close(timeout_s=0.05)
    with pytest.raises(KeyError) as info, engine:
        engine.submit(file.fd, Op.WRITE, memory.address, 0, BLOCK)
        raise KeyError("the user's")
    assert "in flight" in info.value.__notes__[0]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 8)),
    short_every=st.sampled_from([None, 2, 3, 5]),
    reorder=st.booleans(),
)
def test_bytes_survive_a_bad_device(tmp_path_factory, seed, sizes, short_every, reorder):
    """Whatever the device does short of failing, the file and the memory end up right.

    Random disjoint writes and reads, checked against a bytearray.
    """
    queue_depth, blocks = sizes
    rng = random.Random(seed)
    sim = Sim(seed=seed, short_every=short_every, reorder=reorder, latency_s=(0.0, 0.0005))
    shadow = bytearray(noise(64 * ALIGN, seed))
    file = File(tmp_path_factory.mktemp("bad") / "x.swap", bytes(shadow))
    try:
        with open_sim_engine(sim, block_bytes=blocks * ALIGN, queue_depth=queue_depth) as engine:
            cuts = sorted(rng.sample(range(1, 64), 12))
            ranges = list(zip([0, *cuts], [*cuts, 64], strict=True))
            work = []
            for first, last in rng.sample(ranges, len(ranges)):
                low, high, op = first * ALIGN, last * ALIGN, rng.choice([Op.READ, Op.WRITE])
                memory = Memory(high - low, rng.randbytes(high - low))
                before = bytes(shadow[low:high])
                if op == Op.WRITE:
                    shadow[low:high] = memory.bytes()
                priority = rng.choice([Priority.DEMAND, Priority.SHARED])
                transfer = engine.submit(file.fd, op, memory.address, low, high - low, priority=priority)
                work.append((transfer, op, memory, before))
            for transfer, op, memory, before in work:
                transfer.wait(10)
                assert op == Op.WRITE or memory.bytes() == before
        assert Path(file.path).read_bytes() == bytes(shadow)
    finally:
        file.close()


def test_twin_flips_one_bit(open_any, make_file):
    """The nth read, and only that, has exactly one bit wrong.

    Read the same block three times.
    """
    engine, file = open_any("sim", flip_bit=2), make_file(noise(BLOCK, 7))
    wrong_bits = []
    for _ in range(3):
        memory = Memory(BLOCK)
        engine.read(file.fd, memory.address, 0, BLOCK)
        difference = int.from_bytes(memory.bytes()) ^ int.from_bytes(noise(BLOCK, 7))
        wrong_bits.append(difference.bit_count())
    assert wrong_bits == [0, 1, 0]


def test_twin_keeps_its_bandwidth(open_any, make_file):
    """bytes_per_s bounds the whole device however many requests fly.

    32 blocks at 20 MB/s take at least their time.
    """
    engine = open_any("sim", queue_depth=8, parallel=4, bytes_per_s=20e6)
    file, memory = make_file(), Memory(32 * BLOCK)
    start = time.monotonic()
    engine.write(file.fd, memory.address, 0, len(memory))
    assert time.monotonic() - start >= 0.9 * len(memory) / 20e6


# ---- choosing an engine ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "uring"}, "auto, libaio, portable"),
        ({"align": 1000}, "power of two"),
        ({"block_bytes": ALIGN + 512}, "multiple of align"),
        ({"block_bytes": 2 << 30}, "at most"),
        ({"queue_depth": 0}, "from 1 to"),
    ],
)
def test_settings_that_cannot_work_are_refused(change, text):
    """A bad setting is refused with the rule it breaks.

    One bad value at a time.
    """
    sizes = {"kind": "auto", "block_bytes": BLOCK, "queue_depth": 4, "align": ALIGN} | change
    with pytest.raises(ConfigError, match=text):
        open_engine(sizes.pop("kind"), **sizes)


@pytest.fixture
def no_ring(monkeypatch):
    """Make the kernel refuse with a code."""

    def refuse(code):
        monkeypatch.setattr(engine_room, "open_ring", lambda *_args, **_sizes: (None, -code))

    return refuse


def test_auto_falls_back_aloud(no_ring, caplog):
    """Without kernel AIO, auto takes portable and says why, once per process.

    Open two of a size that no other test uses, look at the log.
    """
    no_ring(errno.EPERM)
    with caplog.at_level(logging.INFO, logger="nvoffload.io"):
        for _ in range(2):
            with open_engine("auto", block_bytes=7 << 20, queue_depth=3) as engine:
                assert engine.name == "portable"
                assert "Operation not permitted" in engine.why
    assert [record.message for record in caplog.records] == [
        "I/O: portable on aiofiles (libaio: Operation not permitted (1)), depth 3, block 7 MiB"
    ]
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        (errno.EAGAIN, ["fs.aio-nr", "fs.aio-max-nr 6", "raise it"]),
        (errno.ENOSYS, ["Function not implemented (38)", "sandbox"]),
    ],
)
def test_libaio_by_name_does_not_fall_back(no_ring, code, texts, monkeypatch):
    """Who asks for libaio gets it, or the reason, the numbers and what to write instead (R07).

    Two refusals.
    """
    no_ring(code)
    monkeypatch.setattr(ring, "_limit", lambda _name: "65536")
    with pytest.raises(MachineError) as info:
        open_engine("libaio", block_bytes=BLOCK, queue_depth=4)
    for text in [*texts, 'engine="portable"']:
        assert text in str(info.value)
