"""How fast 1, 2 and 4 ranks bring a model's parameters from their disks to all of them.

"shards" is this library: of every unit each rank reads its own 1/n, then all gather. "owner" is the plain way, written
out here: every unit stands whole on one rank, in turn, which reads it when it is wanted and broadcasts it. "ahead" is
the same with reads ahead into all frames. Engine, frames and gloo are the same. Every byte is read by one rank and
reaches all; so "model MB/s", bytes read by all ranks per second, is also what each rank gets.

First on a twin of the disk per rank that gives a fixed bandwidth, low enough that it is the limit and not gloo, which
here copies through the loopback device with the cores of one machine. There shards grow with the number of ranks,
whatever the number of frames; owner stays at one disk's bandwidth, for one works at a time; ahead grows up to as many
disks as there are frames. Then on the real disk: all ranks share it, so nothing can grow, and what falls is gloo.

    python benchmarks/scaling.py DIR [--ranks N ...] [--frames N] [--passes N] [--mb-per-s X]
"""

import argparse
import mmap
import pickle
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import nvoffload as nvo
from nvoffload import backend
from nvoffload.config import Io
from nvoffload.io.engine import Engine, Op, open_engine
from nvoffload.io.sim import Sim, open_sim_engine
from nvoffload.layout import ALIGN
from nvoffload.swapfile import RunFolder, SwapFile

ITEM_BYTES = 4
NUM_WARM = 2  # passes: the schedule learns in the first


@dataclass(frozen=True)
class Case:
    """What is measured: units of `unit_bytes`, on twins of `bytes_per_s` each or, if that is None, the real disk."""

    bytes_per_s: float | None
    num_units: int
    unit_bytes: int
    num_frames: int
    passes: int


@dataclass(frozen=True)
class Sample:
    """What one rank read from its disk in the timed passes, and by unit in one pass where that is known."""

    seconds: float
    read_bytes: int
    by_unit: tuple[int, ...] = ()


class Rows(nn.Module):
    """A unit: one parameter full of its number, of which forward uses one element."""

    def __init__(self, number: int, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((numel,), float(number)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[-1]


class Tower(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Rows(i, case.unit_bytes // ITEM_BYTES) for i in range(case.num_units)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sum_of_numbers(case: Case) -> float:
    """What a pass must have seen at the end of all units."""
    return sum(range(case.num_units))


def open_throttled(case: Case, *, block_bytes: int, queue_depth: int) -> Engine:
    """Return an engine of a case: a twin that gives `bytes_per_s`, or the real one."""
    if case.bytes_per_s is None:
        return open_engine("auto", block_bytes=block_bytes, queue_depth=queue_depth)
    sim = Sim(bytes_per_s=case.bytes_per_s, parallel=1)
    return open_sim_engine(sim, block_bytes=block_bytes, queue_depth=queue_depth)


def shards(group: Any, rank: int, folder: Path, case: Case) -> Sample:
    """Run evaluation forwards of an offloaded model."""

    def open_twin(kind: str, *, block_bytes: int, queue_depth: int) -> Engine:
        return open_throttled(case, block_bytes=block_bytes, queue_depth=queue_depth)

    patch: AbstractContextManager[Any] = nullcontext()
    if case.bytes_per_s is not None:
        patch = mock.patch.object(backend, "open_engine", open_twin)
    with patch:
        model = nvo.offload(
            Tower(case),
            mesh=group,
            nvme_path=folder,
            device_budget=case.num_frames * (case.unit_bytes + ALIGN),  # gathered, shards are padded
            keep="never",
        )
    with model, torch.no_grad():
        for number in range(NUM_WARM + case.passes):
            if number == NUM_WARM:
                dist.barrier(group)
                before, begin_s = model.offload_stats().read_bytes, time.perf_counter()
            assert model(torch.zeros(())).item() == sum_of_numbers(case)
        return Sample(time.perf_counter() - begin_s, model.offload_stats().read_bytes - before)


class Owner:
    """One rank of the plain way: its units in a file, frames, and reads ahead."""

    def __init__(self, group: Any, rank: int, folder: RunFolder, case: Case, num_ahead: int) -> None:
        self.case, self.rank, self.num_ranks = case, rank, dist.get_world_size(group)
        self.by_unit = [0] * case.num_units
        self._num_ahead = num_ahead  # fewer than frames
        self._group = group
        self._roots = dist.get_process_group_ranks(group)
        self._frames = [
            torch.frombuffer(mmap.mmap(-1, case.unit_bytes), dtype=torch.float32) for _ in range(case.num_frames)
        ]
        self._reads: dict[int, Any] = {}  # by the running number of a unit
        self.file = SwapFile(folder, f"owner.r{rank}.f0.swap")
        self.engine = open_throttled(case, block_bytes=Io().block_bytes, queue_depth=Io().queue_depth)
        for unit in range(rank, case.num_units, self.num_ranks):
            self._frames[0].fill_(unit)
            offset = self.file.extend(case.unit_bytes)
            self.engine.write(self.file.fd, self._frames[0].data_ptr(), offset, case.unit_bytes)

    def run(self, passes: int) -> None:
        """Use all units in order, so many times; read on over the end of a pass."""
        num_units, num_frames = self.case.num_units, self.case.num_frames
        end, started, total = passes * num_units, 0, 0.0
        for number in range(end):
            while started < min(end, number + 1 + self._num_ahead):
                self._start_read(started)
                started += 1
            frame = self._frames[number % num_frames]
            if number in self._reads:
                self._reads.pop(number).wait()
            root = self._roots[number % num_units % self.num_ranks]
            dist.broadcast(frame, src=root, group=self._group)
            total += frame[-1].item()
        assert total == passes * sum_of_numbers(self.case)

    def _start_read(self, number: int) -> None:
        """Read the unit that comes as the `number`th, if it is this rank's, into its frame."""
        unit = number % self.case.num_units
        if unit % self.num_ranks != self.rank:
            return
        address = self._frames[number % self.case.num_frames].data_ptr()
        offset = unit // self.num_ranks * self.case.unit_bytes
        self._reads[number] = self.engine.submit(self.file.fd, Op.READ, address, offset, self.case.unit_bytes)
        self.by_unit[unit] += self.case.unit_bytes

    def close(self) -> None:
        self.engine.close()
        self.file.close(remove=True)


def owner(group: Any, rank: int, folder: Path, case: Case, num_ahead: int = 0) -> Sample:
    """Let whoever owns a unit read it and broadcast it."""
    (folder / str(rank)).mkdir()
    run = RunFolder.create(folder / str(rank))
    it = Owner(group, rank, run, case, num_ahead)
    try:
        it.run(NUM_WARM)
        it.by_unit = [0] * case.num_units
        before = it.engine.stats().read_bytes
        dist.barrier(group)
        begin_s = time.perf_counter()
        it.run(case.passes)
        seconds = time.perf_counter() - begin_s
        return Sample(seconds, it.engine.stats().read_bytes - before, tuple(it.by_unit))
    finally:
        it.close()
        run.remove()
        run.close()


def ahead(group: Any, rank: int, folder: Path, case: Case) -> Sample:
    """Do what `owner` does, with as many reads on their way as there are frames."""
    return owner(group, rank, folder, case, case.num_frames - 1)


DESIGNS = {"shards": shards, "owner": owner, "ahead": ahead}


def work(rank: int, folder: Path, counts: list[int], cases: list[Case]) -> None:
    """Be one of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=max(counts))
    groups = {count: dist.new_group(list(range(count))) for count in counts}
    found = {}
    for number, case in enumerate(cases):
        for count in counts:
            for name, design in DESIGNS.items():
                files = folder / f"{number}-{count}-{name}"
                files.mkdir(exist_ok=True)
                if rank < count:
                    found[number, count, name] = design(groups[count], rank, files, case)
                dist.barrier()  # the others stand aside
    (folder / f"found.{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def show(case: Case, number: int, counts: list[int], every: list[dict[Any, Sample]]) -> None:
    where = "the real disk, shared" if case.bytes_per_s is None else f"twins of {case.bytes_per_s / 1e6:.0f} MB/s each"
    size = case.num_units * case.unit_bytes
    print(f"\n{where}; {case.num_units} units, {size / 1e6:.0f} MB, {case.num_frames} frames, {case.passes} passes")
    print("ranks  way     model MB/s  to 1 rank  busiest disk  MB/s of it")
    first: dict[str, float] = {}
    for count in counts:
        for name in DESIGNS:
            samples = [found[number, count, name] for found in every[:count]]
            read_bytes, seconds = sum(s.read_bytes for s in samples), max(s.seconds for s in samples)
            rate, busiest = read_bytes / seconds / 1e6, max(s.read_bytes for s in samples)
            row = f"{count:>5}  {name:<8}{rate:>10.1f}{rate / first.setdefault(name, rate):>11.2f}"
            print(f"{row}{busiest / read_bytes:>13.0%}{busiest / seconds / 1e6:>12.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--frames", type=int, default=2)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--mb-per-s", type=float, default=10.0, help="of each twin")
    args = parser.parse_args()

    cases = [
        Case(args.mb_per_s * 1e6, 8, 1 << 20, args.frames, args.passes),
        Case(None, 12, 16 << 20, args.frames, args.passes),
    ]
    with tempfile.TemporaryDirectory(dir=args.dir, prefix=".nvoffload-scaling-") as name:
        torch.multiprocessing.spawn(work, (Path(name), args.ranks, cases), nprocs=max(args.ranks))
        every = [pickle.loads((Path(name) / f"found.{rank}").read_bytes()) for rank in range(max(args.ranks))]
    for number, case in enumerate(cases):
        show(case, number, args.ranks, every)


if __name__ == "__main__":
    main()
