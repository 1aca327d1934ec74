"""Two ranks killed at a thousand instants: is there always a generation that both have, whole?

Two processes train a small model on the engine's twin. Writes of rank 1 take SLOWER times as long as those of
rank 0. Everything written to swap files and manifests is noted with its begin, its end and its bytes. Then, for
each instant, the files are what had been written by then; of what was on its way each sector stands there
or not, as a coin says. Looked for is a generation whose manifest is valid on both ranks and whose tiles all agree
with their checksums. It is done with the fence, and with one that lets everybody through at once; and once more
with equal disks, to see what the fence costs where nobody is late. Instants are those from when both ranks have
committed a step up to the last write.

    python benchmarks/fence.py DIR [--cuts N] [--steps N] [--seed N]
"""

import argparse
import bisect
import os
import pickle
import random
import struct
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import nvoffload as nvo
from nvoffload import backend, peers
from nvoffload.errors import CorruptionError
from nvoffload.io.bridge import Block
from nvoffload.io.sim import SECTOR_BYTES, Sim, open_sim_engine
from nvoffload.layout import ALIGN, Layout, pack_zone, round_up
from nvoffload.manifest import Manifest, decode
from nvoffload.store import RECORD
from nvoffload.swapfile import SwapFile, crc32c

NUM_RANKS = 2
SLOWER = 6  # writes of the last rank
READ_S = 0.0005
WRITE_S = 0.006
WIDTH, DEPTH = 96, 5
NUM_FRAMES = 2


class Write(NamedTuple):
    """What one write brought to a file, and from when to when it was on its way (time.monotonic)."""

    begin_s: float
    end_s: float
    file: str
    offset: int
    content: bytes


@dataclass(frozen=True)
class Record:
    """What one rank did: its writes, when the fence let it pass, how long it waited."""

    layout: Layout
    writes: list[Write]
    passed: list[tuple[float, int]]  # seconds, generation
    stats: nvo.OffloadStats
    train_s: float


class Disk(Sim):
    """The twin with writes slower than reads; it notes what it writes."""

    def __init__(self, *, write_s: float, writes: list[Write], seed: int) -> None:
        super().__init__(seed=seed, reorder=True)
        self._write_s = write_s
        self._writes = writes
        self._begun_s: dict[int, float] = {}  # by token

    def _accept(self, block: Block) -> None:
        latency_s = READ_S if block.is_read else self._write_s
        self._latency_s = (latency_s / 2, latency_s * 3 / 2)
        self._begun_s[block.token] = time.monotonic()
        super()._accept(block)

    def _move(self, block: Block) -> int:
        result = super()._move(block)
        begin_s = self._begun_s.pop(block.token)
        if not block.is_read:
            name = os.path.basename(os.readlink(f"/proc/self/fd/{block.fd}"))
            self._writes.append(Write(begin_s, time.monotonic(), name, block.offset, bytes(block.memory[:result])))
        return result


class Layers(nn.Module):
    """A chain of Linear layers: one unit each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


# ---- one rank


@contextmanager
def noted(writes: list[Write], *, write_s: float, seed: int) -> Iterator[None]:
    """Within the block models use a Disk; what else is written to files of a run takes as long and is noted too."""
    real = SwapFile.write

    def open_twin(kind: str, *, block_bytes: int, queue_depth: int) -> Any:
        disk = Disk(write_s=write_s, writes=writes, seed=seed)
        return open_sim_engine(disk, block_bytes=block_bytes, queue_depth=queue_depth)

    def write(file: SwapFile, content: bytes, offset: int) -> int:
        begin_s = time.monotonic()
        time.sleep(write_s)
        nbytes = real(file, content, offset)
        writes.append(Write(begin_s, time.monotonic(), file.path.name, offset, content.ljust(nbytes, b"\0")))
        return nbytes

    with mock.patch.object(backend, "open_engine", open_twin), mock.patch.object(SwapFile, "write", write):
        yield


@contextmanager
def fence(passed: list[tuple[float, int]], *, is_there: bool) -> Iterator[None]:
    """Within the block the fence notes when it was passed; if it is not there everybody passes at once."""
    real = peers.Fence.wait

    def wait(fence: peers.Fence, generation: int, is_stopping: Callable[[], bool]) -> bool:
        is_passed = real(fence, generation, is_stopping) if is_there else True
        if is_passed:
            passed.append((time.monotonic(), generation))
        return is_passed

    with mock.patch.object(peers.Fence, "wait", wait):
        yield


def train(
    group: Any, rank: int, folder: Path, *, steps: int, has_fence: bool, slower: float, write_s: float, seed: int
) -> Record:
    """Train one rank's share; its files are left in `folder`."""
    torch.manual_seed(seed)
    writes: list[Write] = []
    passed: list[tuple[float, int]] = []
    own_s = write_s * slower if rank == NUM_RANKS - 1 else write_s
    with noted(writes, write_s=own_s, seed=seed + rank), fence(passed, is_there=has_fence):
        model = nvo.offload(
            Layers().to(torch.bfloat16),
            mesh=group,
            nvme_path=folder,
            device_budget=NUM_FRAMES * round_up(2 * WIDTH * (WIDTH + 1), ALIGN),
            buffer_size="64KiB",
            keep="always",
        )
        optimizer = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        begin_s = time.monotonic()
        for step in range(steps):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(NUM_RANKS * step + rank))
            model(x.to(torch.bfloat16)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.flush()
        train_s = time.monotonic() - begin_s
        layout, stats = model._nvoffload.layout, model.offload_stats()
        model.close()
    return Record(layout, writes, passed, stats, train_s)


def work(rank: int, folder: Path, how: list[dict[str, Any]]) -> None:
    """Be one of the processes: train in each of the ways `how`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS)
    for number, given in enumerate(how):
        files = folder / str(number)
        files.mkdir(exist_ok=True)
        record = train(dist.group.WORLD, rank, files, **given)
        (folder / f"{number}.{rank}").write_bytes(pickle.dumps(record))
    dist.destroy_process_group()


# ---- the files of a rank at an instant


Files = dict[str, bytearray]


class Replay:
    """A rank's files as they were at instants that come in order."""

    def __init__(self, record: Record, seed: int) -> None:
        self.files: Files = defaultdict(bytearray)
        self._writes = sorted(record.writes, key=lambda write: write.end_s)
        self._longest_s = max(write.end_s - write.begin_s for write in self._writes)
        self._num_done = 0
        self._random = np.random.default_rng(seed)

    def at(self, instant_s: float) -> Files:
        """Return the files that a kill at `instant_s` leaves: sectors on their way stand there or don't."""
        while self._num_done < len(self._writes) and self._writes[self._num_done].end_s <= instant_s:
            _land(self.files, self._writes[self._num_done])
            self._num_done += 1
        last = bisect.bisect(self._writes, instant_s + self._longest_s, key=lambda write: write.end_s)
        under_way = [write for write in self._writes[self._num_done : last] if write.begin_s <= instant_s]
        files = {name: bytearray(content) for name, content in self.files.items()}
        for write in under_way:
            coins = self._random.integers(0, 2, len(write.content) // SECTOR_BYTES, np.uint8)
            _land(files, write, sectors=coins.astype(bool))
        return files


def _land(files: Files, write: Write, *, sectors: np.ndarray | None = None) -> None:
    file = files.setdefault(write.file, bytearray())
    end = write.offset + len(write.content)
    file.extend(bytes(max(0, end - len(file))))
    if sectors is None:
        file[write.offset : end] = write.content
        return
    there = np.frombuffer(memoryview(file)[write.offset : end], np.uint8).reshape(-1, SECTOR_BYTES)
    there[sectors] = np.frombuffer(write.content, np.uint8).reshape(-1, SECTOR_BYTES)[sectors]


def manifests(files: Files) -> dict[int, Manifest]:
    """Return the valid manifests of a rank, by step."""
    found = {}
    for name, content in files.items():
        if ".manifest." in name:
            try:
                manifest = decode(bytes(content))
            except CorruptionError:
                continue
            found[manifest.generation.step] = manifest
    return found


def is_intact(files: Files, manifest: Manifest, layout: Layout) -> bool:
    """Do all bytes that a manifest names have the checksums that it says?"""
    (store,) = manifest.body["stores"]
    swap = memoryview(next(content for name, content in files.items() if name.endswith(".swap")))
    records = np.split(np.frombuffer(manifest.tables, RECORD), np.cumsum(manifest.body["tables"])[:-1])
    zone = layout.param_zone(ALIGN)
    for number, (tile, record) in enumerate(zip(layout.tiles, records[0], strict=True)):
        start = zone.place(number, int(record["working"]))
        end = start + tile.fetched_bytes
        if crc32c(swap[start:end]) != record["crc"][0]:
            return False
        if tile.remainder_bytes and crc32c(swap[end : end + tile.remainder_bytes]) != record["crc"][1]:
            return False
    for described, table in zip(store["state_zones"], records[1:], strict=True):
        num_words = described["num_words"]
        word_bytes = [layout.tiles[i].word_bytes for i in described["tiles"]]
        zone = pack_zone(zone.end, described["tiles"], [num_words * nbytes for nbytes in word_bytes])
        for position, (nbytes, record) in enumerate(zip(word_bytes, table, strict=True)):
            start = zone.place(position, int(record["working"]))
            words = [crc32c(swap[at : at + nbytes]) for at in range(start, start + num_words * nbytes, nbytes)]
            if crc32c(struct.pack(f"<{num_words}I", *words)) != record["crc"][2]:
                return False
    return True


def common_generation(everyone: list[Files], layouts: list[Layout]) -> int:
    """Return the newest generation that all ranks have, whole; -1 if there is none."""
    found = [manifests(files) for files in everyone]
    for step in sorted(set.intersection(*(set(each) for each in found)), reverse=True):
        if all(is_intact(*of_rank) for of_rank in zip(everyone, [f[step] for f in found], layouts, strict=True)):
            return step
    return -1


# ---- the campaign


@dataclass(frozen=True)
class Outcome:
    """What was found at all instants: at how many a generation was intact on all ranks, and how many there were.

    `apart`: the ranks' newest manifests were of different generations. `forgotten`: a rank had been let through
    the fence with a newer generation than was found.
    """

    cuts: int
    intact: int
    apart: int
    forgotten: int


def judge(records: list[Record], *, cuts: int, seed: int) -> Outcome:
    """Kill the ranks of one run at `cuts` instants."""
    replays = [Replay(record, seed + rank) for rank, record in enumerate(records)]
    layouts = [record.layout for record in records]
    first_s = max(next(at_s for at_s, g in record.passed if g == 1) for record in records)
    last_s = max(write.end_s for record in records for write in record.writes)
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    for instant_s in sorted(draw.uniform(first_s, last_s) for _ in range(cuts)):
        everyone = [replay.at(instant_s) for replay in replays]
        step = common_generation(everyone, layouts)
        told = max((g for record in records for at_s, g in record.passed if at_s <= instant_s))
        counts["intact"] += step >= 1
        counts["apart"] += len({max(manifests(files), default=-1) for files in everyone}) > 1
        counts["forgotten"] += step < told
    return Outcome(cuts, counts["intact"], counts["apart"], counts["forgotten"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path, help="a folder on a disk")
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    how = [
        {"has_fence": has_fence, "slower": slower, "steps": args.steps, "write_s": WRITE_S, "seed": args.seed}
        for slower in (SLOWER, 1)
        for has_fence in (True, False)
    ]
    print(f"{args.cuts} instants of {args.steps} steps, a write takes {WRITE_S * 1e3:g} ms, seed {args.seed}")
    print("fence    slower   intact     of  apart  forgotten  train s  waited for commits s")
    with tempfile.TemporaryDirectory(dir=args.dir, prefix=".nvoffload-fence-") as name:
        torch.multiprocessing.spawn(work, (Path(name), how), nprocs=NUM_RANKS)
        for number, given in enumerate(how):
            records = [pickle.loads((Path(name) / f"{number}.{rank}").read_bytes()) for rank in range(NUM_RANKS)]
            found = judge(records, cuts=args.cuts, seed=args.seed)
            what = "with" if given["has_fence"] else "without"
            row = f"{what:<9}{given['slower']:>6}{found.intact:>9}{found.cuts:>7}"
            waits = ", ".join(f"{record.stats.commit_wait_s:.2f}" for record in records)
            print(f"{row}{found.apart:>7}{found.forgotten:>11}{max(r.train_s for r in records):>9.2f}  {waits}")


if __name__ == "__main__":
    main()
