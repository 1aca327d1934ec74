"""python -m nvoffload.bench DIR: what a folder's disk gives this library, through its own engine and pool.

Writes one file of random bytes, times reads and writes over it, removes it. Trains nothing.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nvoffload.buffers import Lease, Pool
from nvoffload.config import ENGINES, Io, format_bytes, parse_size
from nvoffload.errors import ConfigError, CorruptionError, MachineError, NvoffloadError
from nvoffload.interrupts import interrupt_behind, interrupt_once
from nvoffload.io.engine import Engine, Op, Transfer, open_engine
from nvoffload.swapfile import RunFolder, SwapFile, check_folder, check_space, crc32c, filesystem_of

SCHEMA = "nvoffload.bench/1"
SIZE_BYTES_MAX = 2 << 30
PIECE_BYTES_MAX = 8 << 20  # what one transfer moves; the engine cuts it into blocks
SWAP_NAME = "bench.r0.f0.swap"


@dataclass(frozen=True, slots=True)
class Row:
    """What is timed. `is_swap`: each transfer takes a lease and copies to or from ordinary memory."""

    name: str
    ops: tuple[Op, ...]
    is_swap: bool = False
    is_huge: bool = True


ROWS = (
    Row("engine read", (Op.READ,)),
    Row("engine read, 4 KiB pages", (Op.READ,), is_huge=False),
    Row("engine write", (Op.WRITE,)),
    Row("engine mixed", (Op.READ, Op.WRITE)),
    Row("pool swap in", (Op.READ,), is_swap=True),
    Row("pool swap out", (Op.WRITE,), is_swap=True),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One timing: from the first submit to the last completion; processor time of all threads."""

    nbytes: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """A row's samples. `spread` is (largest - smallest) / median."""

    name: str
    is_cached: bool
    samples_bytes_per_second: list[float]
    median_bytes_per_second: float
    spread: float
    cpu_seconds_per_gb: float

    @classmethod
    def of(cls, row: Row, samples: Sequence[Sample], *, is_cached: bool) -> "Result":
        """Sum up the samples of `row`."""
        rates = [sample.nbytes / sample.seconds for sample in samples]
        median = statistics.median(rates)
        cpu = statistics.median(sample.cpu_seconds / sample.nbytes * 1e9 for sample in samples)
        return cls(row.name, is_cached, rates, median, (max(rates) - min(rates)) / median, cpu)

    def line(self) -> str:
        """Return the row for people."""
        how = "cached: not the disk's speed" if self.is_cached else "direct"
        rate = self.median_bytes_per_second / 1e9
        return f"{self.name:<26}{rate:>7.2f} GB/s{self.spread:>9.0%}{self.cpu_seconds_per_gb:>12.3f}   {how}"


@dataclass(frozen=True, slots=True)
class Flight:
    """A transfer on its way, between `lease` and `piece` of the file."""

    transfer: Transfer
    lease: Lease
    op: Op
    piece: int


class Field:
    """The file, the pools and the engine of a run, and the checksum of every piece of memory and disk."""

    def __init__(self, file: SwapFile, engine: Engine, pools: dict[bool, Pool], *, num_pieces: int) -> None:
        self._file = file
        self._engine = engine
        self._pools = pools  # by is_huge
        self._piece_bytes = pools[True].buffer_bytes
        self._num_flights = pools[True].buffer_count
        self._disk = [0] * num_pieces
        self._memory: dict[int, int] = {}  # by address of a buffer
        self._draw = np.random.default_rng(0)
        self._ordinary = [memoryview(bytearray(self._piece_bytes)) for _ in range(self._num_flights)]
        self._ordinary_crcs = [self._randomize(view) for view in self._ordinary]

    def fill(self) -> None:
        """Write every piece once: first writes onto preallocated extents are slower than later ones."""
        with contextlib.ExitStack() as stack:  # pages that no row should have to fault in
            for _ in range(self._num_flights):
                self._randomize(stack.enter_context(self._pools[False].acquire(self._piece_bytes)).view())
        with self._pending() as pending:
            for piece in range(len(self._disk)):
                if len(pending) == self._num_flights:
                    self._land(pending)
                lease = self._pools[True].acquire(self._piece_bytes)
                with lease.view() as view:
                    self._memory[lease.address] = self._randomize(view)
                pending.append(self._submit(Op.WRITE, piece, lease))
            while pending:
                self._land(pending)

    def measure(self, row: Row, seconds: float) -> Sample:
        """Move pieces for `seconds`, all buffers in flight; raise CorruptionError if the last one differs."""
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        with self._pending() as pending:
            for count, (op, piece) in enumerate(self._walk(row.ops)):
                if count and time.perf_counter() - start_s >= seconds:
                    break
                if len(pending) == self._num_flights:
                    self._land(pending, row.is_swap)
                pending.append(self._start(row, op, piece))
            while pending:
                last = self._land(pending, row.is_swap)
        end_s, end_cpu_s = time.perf_counter(), time.process_time()
        self._check(row, last)
        return Sample(count * self._piece_bytes, end_s - start_s, end_cpu_s - start_cpu_s)

    @contextlib.contextmanager
    def _pending(self) -> Iterator[deque[Flight]]:
        """Give back the leases of what an error leaves in flight: the arena outlives the engine."""
        pending: deque[Flight] = deque()
        try:
            yield pending
        finally:
            for flight in pending:
                flight.lease.pool.release(flight.lease)

    def _walk(self, ops: tuple[Op, ...]) -> Iterator[tuple[Op, int]]:
        """Yield pieces in order, for ever; each op keeps to its own part of the file."""
        share = len(self._disk) // len(ops)
        index = 0
        while True:
            for position, op in enumerate(ops):
                yield op, position * share + index % share
            index += 1

    def _start(self, row: Row, op: Op, piece: int) -> Flight:
        lease = self._pools[row.is_huge].acquire(self._piece_bytes)
        if row.is_swap and op == Op.WRITE:
            slot = piece % self._num_flights
            with lease.view() as view:
                view[:] = self._ordinary[slot]
            self._memory[lease.address] = self._ordinary_crcs[slot]
        return self._submit(op, piece, lease)

    def _submit(self, op: Op, piece: int, lease: Lease) -> Flight:
        if op == Op.WRITE:
            self._disk[piece] = self._memory[lease.address]
        place = (lease.address, piece * self._piece_bytes, self._piece_bytes)
        return Flight(self._engine.submit(self._file.fd, op, *place, path=str(self._file.path)), lease, op, piece)

    def _land(self, pending: deque[Flight], is_swap: bool = False) -> Flight:
        """Wait for the oldest, copy what it brought if it is a swap in, give its lease back."""
        flight = pending[0]
        flight.transfer.wait()
        if flight.op == Op.READ:
            self._memory[flight.lease.address] = self._disk[flight.piece]
            if is_swap:
                slot = flight.piece % self._num_flights
                with flight.lease.view() as view:
                    self._ordinary[slot][:] = view
                self._ordinary_crcs[slot] = self._disk[flight.piece]
        pending.popleft()
        flight.lease.pool.release(flight.lease)
        return flight

    def _check(self, row: Row, flight: Flight) -> None:
        """Raise CorruptionError unless what was read, or what now stands on disk, is what was written."""
        offset = flight.piece * self._piece_bytes
        if flight.op == Op.WRITE:
            found = crc32c(self._file.read(offset, self._piece_bytes))
        elif row.is_swap:
            found = crc32c(self._ordinary[flight.piece % self._num_flights])
        else:
            with flight.lease.view() as view:  # given back, but nobody else takes leases here
                found = crc32c(view)
        expected = self._disk[flight.piece]
        if found != expected:
            raise CorruptionError(
                f"{self._piece_bytes} bytes at {offset} of {self._file.path} have the checksum {found:08x}, and "
                f"{expected:08x} was written. Likely cause: a failing drive or memory. See the kernel log.",
                path=str(self._file.path),
                offset=offset,
                nbytes=self._piece_bytes,
            )

    def _randomize(self, view: memoryview) -> int:
        """Fill `view` with random bytes, which no disk can compress; return their checksum."""
        words = np.frombuffer(view, dtype=np.uint64)
        words[:] = self._draw.integers(0, 1 << 64, size=words.size, dtype=np.uint64)
        return crc32c(view)


def machine_facts() -> dict[str, Any]:
    """Return what a number needs beside it to mean something."""
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return {
        "cpu": model[1] if model else platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory[1]) * 1024 if memory else 0,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def disk_facts(folder: Path) -> dict[str, Any]:
    """Return the filesystem and, where the kernel tells, the block device."""
    space, number = os.statvfs(folder), os.stat(folder).st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    facts: dict[str, Any] = {
        "path": str(folder),
        "filesystem": filesystem_of(folder),
        "free_bytes": space.f_bavail * space.f_frsize,
        "device": node.name if node.exists() else None,
    }
    for name in ("device/model", "queue/scheduler", "queue/physical_block_size", "queue/rotational"):
        files = [file for file in (node / name, node.parent / name) if file.exists()]  # a disk, or a partition's
        facts[name.partition("/")[2]] = files[0].read_text().strip() if files else None
    return facts


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        prog="python -m nvoffload.bench",
        description="Measure what a folder's disk gives, through the engine and through the buffer pool.",
        epilog="examples:\n  python -m nvoffload.bench /mnt/ssd\n"
        "  python -m nvoffload.bench /mnt/ssd --size 512MiB --seconds 1 --json\n"
        "exit status: 0 measured, 1 a transfer failed, 2 wrong usage, 3 this machine can't, 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder on the disk to measure")
    parser.add_argument("--size", help="of the file (2GiB, or 5 %% of the free space if that is less)")
    parser.add_argument("--seconds", type=float, default=2.0, help="per row and repeat (2)")
    parser.add_argument("--repeats", type=int, default=3, help="samples of each row, taken in turn (3)")
    parser.add_argument("--block-size", default="1MiB", help="the most one request moves (1MiB)")
    parser.add_argument("--queue-depth", type=int, default=32, help="requests in flight (32)")
    parser.add_argument("--engine", default="auto", help=f"{', '.join(ENGINES)} (auto)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="print JSON only, or write it to FILE")
    chosen = parser.parse_args(arguments)
    if not chosen.seconds > 0 or chosen.repeats < 1:
        parser.error("--seconds must be positive and --repeats at least 1")
    return chosen


def choose_geometry(folder: Path, size: str | None, io: Io) -> tuple[int, int, int]:
    """Return bytes per piece, pieces in the file, and buffers: a full queue, twice."""
    space = os.statvfs(folder)
    wanted = parse_size(size, "--size") if size else min(SIZE_BYTES_MAX, space.f_bavail * space.f_frsize // 20)
    if wanted < 4 * io.block_bytes:
        raise ConfigError(f"--size is {wanted} bytes; the least is four blocks: {4 * io.block_bytes}.")
    blocks_per_piece = max(1, min(PIECE_BYTES_MAX, wanted // 8) // io.block_bytes)
    piece_bytes = blocks_per_piece * io.block_bytes
    num_pieces = wanted // piece_bytes
    count = 2 * -(-io.queue_depth * io.block_bytes // piece_bytes)
    return piece_bytes, num_pieces, max(2, min(count, num_pieces // 2))


def run(settings: argparse.Namespace) -> dict[str, Any]:
    """Measure; return the figures. Nothing stays in the folder, whatever happens."""
    io = Io(engine=settings.engine, block_size=settings.block_size, queue_depth=settings.queue_depth)
    folder = check_folder(settings.folder)
    piece_bytes, num_pieces, count = choose_geometry(folder, settings.size, io)
    size_bytes, disk = piece_bytes * num_pieces, disk_facts(folder)
    check_space(folder, size_bytes, "the benchmark's file")
    timed_s = settings.repeats * settings.seconds * sum(row.ops.count(Op.WRITE) / len(row.ops) for row in ROWS)
    say(
        f"writing {size_bytes} bytes ({format_bytes(size_bytes)}) in {folder}, then rewriting them "
        f"for {timed_s:.3g} s as fast as the disk takes them"
    )
    with contextlib.ExitStack() as stack:
        run_folder = RunFolder.create(folder)
        stack.callback(run_folder.close)
        stack.callback(run_folder.remove)
        file = SwapFile(run_folder, SWAP_NAME)
        stack.callback(file.close, remove=True)
        file.extend(size_bytes)
        pools = {}
        for is_huge in (True, False):
            pools[is_huge] = Pool(buffer_count=count, buffer_bytes=piece_bytes, is_huge=is_huge)
            stack.callback(pools[is_huge].close)
        kind = "portable" if io.engine == "auto" and not file.is_direct else io.engine
        engine = stack.enter_context(open_engine(kind, block_bytes=io.block_bytes, queue_depth=io.queue_depth))
        field = Field(file, engine, pools, num_pieces=num_pieces)
        field.fill()
        samples: dict[Row, list[Sample]] = {row: [] for row in ROWS}
        for repeat in range(settings.repeats):
            for row in ROWS:
                say(f"repeat {repeat + 1}/{settings.repeats}: {row.name}")
                samples[row].append(field.measure(row, settings.seconds))
        return {
            "schema": SCHEMA,
            "machine": machine_facts(),
            "disk": {**disk, "is_direct": file.is_direct},
            "config": {
                "engine": engine.name,
                "library": engine.library,
                "block_bytes": io.block_bytes,
                "queue_depth": engine.queue_depth,
                "size_bytes": size_bytes,
                "piece_bytes": piece_bytes,
                "buffer_count": count,
                "huge_bytes": pools[True].huge_bytes(),
                "seconds": settings.seconds,
                "repeats": settings.repeats,
            },
            "results": [asdict(Result.of(row, samples[row], is_cached=not file.is_direct)) for row in ROWS],
        }


def table(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    machine, disk, config = figures["machine"], figures["disk"], figures["config"]
    pool_bytes = config["buffer_count"] * config["piece_bytes"]
    return "\n".join(
        [
            f"machine  {machine['cpu']}, {machine['num_cpus']} processors, Linux {machine['kernel']}",
            f"disk     {disk['device'] or 'unknown device'}, {disk['filesystem']}, {disk['path']}",
            f"config   {config['engine']}, depth {config['queue_depth']}, block {format_bytes(config['block_bytes'])}, "
            f"file {format_bytes(config['size_bytes'])}, {format_bytes(pool_bytes)} of buffers "
            f"({format_bytes(config['huge_bytes'])} on 2 MiB pages)",
            f"{'':<26}{'median':>12}{'spread':>9}{'cpu s/GB':>12}",
            *(Result(**result).line() for result in figures["results"]),
        ]
    )


def say(line: str) -> None:
    """Show progress on stderr: the results have stdout."""
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    settings = parse(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt_once)
    try:
        figures = run(settings)
        text = json.dumps(figures, indent=1)
        print(text if settings.json == "-" else table(figures))
        if settings.json not in (None, "-"):
            Path(settings.json).write_text(text + "\n")
    except (KeyboardInterrupt, NvoffloadError, OSError) as error:
        stop = interrupt_behind(error)
        if stop is not None:
            say("interrupted; the file is removed.")
            return 128 + int(stop.args[0])
        say(str(error))
        return 2 if isinstance(error, ConfigError) else 3 if isinstance(error, MachineError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
