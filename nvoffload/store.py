"""Which extent and slot holds what: the swap file's zones, the tile tables, the manifest of a run.

Knows nothing of parameters beyond their layout, nothing of torch.

Note [Two slots]: every extent has two places. Readers use `working`; a writer fills the place that
`committed` does not name, and the mover then moves `working`. A manifest, written whole to the
older of two files, names all working slots at once: that is the commit.
"""

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvoffload.errors import ConfigError, CorruptionError, MachineError
from nvoffload.layout import ALIGN, Layout, Zone
from nvoffload.manifest import Generation, Manifest, decode, encode
from nvoffload.swapfile import (
    MANIFEST_NAME,
    Header,
    RunFolder,
    SwapFile,
    boot_id,
    find_runs,
    locked_if_dead,
    read_aligned,
)

log = logging.getLogger("nvoffload.store")
RECORD = np.dtype([("generation", "<u8"), ("crc", "<u4", 3), ("working", "<u2"), ("committed", "<u2")])
NO_COMMIT = 0xFFFF
Table = npt.NDArray[Any]


def new_table(num_extents: int) -> Table:
    """Return records of extents that no manifest names yet; laid out as nvo_record in C."""
    table = np.zeros(num_extents, RECORD)
    table["committed"] = NO_COMMIT
    return table


@dataclass(frozen=True)
class StateZone:
    """Where the optimizer's words of some tiles live, `num_words` per element."""

    zone: Zone
    table: Table
    num_words: int


class Store:
    """One model's swap file: a page of header, the parameter zone, appended state zones.

    Owns the file from creation to `Run.leave`. `captures` are asked, when a generation closes, for
    what belongs to it beside the tiles.
    """

    def __init__(self, folder: RunFolder, name: str, layout: Layout, *, wants_direct: bool = True) -> None:
        self.name = name
        self.layout = layout
        self.file = SwapFile(folder, f"{name}.r{layout.rank}.f0.swap", wants_direct=wants_direct)
        try:
            self.file.extend(ALIGN)
            header = Header(run_id=folder.run_id, rank=layout.rank, folder=0, digest=layout.digest)
            self.file.write(header.encode(), 0)
            self.param_zone = layout.param_zone(self.file.size)
            self._reserve(self.param_zone)
        except BaseException:
            self.file.close(remove=True)
            raise
        self.param_table = new_table(len(layout.tiles))
        self.state_zones: list[StateZone] = []
        self.captures: list[Callable[[], dict[str, Any]]] = []

    def append_state_zone(self, params: frozenset[int], num_words: int) -> StateZone:
        """Reserve room for the states of the tiles that hold `params`; `adopt` it once filled."""
        zone = self.layout.state_zone(self.file.size, params, num_words)
        self._reserve(zone)
        return StateZone(zone, new_table(len(zone.tiles)), num_words)

    def adopt(self, zone: StateZone) -> None:
        """Let the next manifest name a zone whose extents have all been written."""
        self.state_zones.append(zone)

    def tables(self) -> list[Table]:
        """Return the tile tables in the order of the manifest."""
        return [self.param_table, *(zone.table for zone in self.state_zones)]

    def describe(self) -> dict[str, Any]:
        """Return what the manifest says of this store."""
        specs = [[s.name, s.shape, s.stride, s.dtype] for s in self.layout.specs]
        zones = [{"tiles": list(z.zone.tiles), "num_words": z.num_words} for z in self.state_zones]
        return {
            "name": self.name,
            "align": self.layout.align,
            "tile_numel": self.layout.tile_numel,
            "digest": self.layout.digest,
            "fingerprint": self.layout.fingerprint,
            "parameters": specs,
            "trainable": [i for flat in self.layout.flats if flat.is_trainable for i in flat.params],
            "state_zones": zones,
            "captured": [capture() for capture in self.captures],
        }

    def _reserve(self, zone: Zone) -> None:
        if zone.half_bytes:
            self.file.extend(2 * zone.half_bytes)


@dataclass
class Run:
    """The run folder of this process under one nvme_path: its stores share one manifest.

    `ranks` share the run, each with its own files.
    """

    parent: Path
    folder: RunFolder
    pid: int
    stores: list[Store] = field(default_factory=list)
    incarnation: int = 1
    committed: int = -1
    manifest_bytes: int = 0
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    _files: list[SwapFile] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def snapshot(self) -> dict[str, Any]:
        """Return the manifest's body as of now, on the training thread."""
        return {
            "format": 1,
            "durability": "process",
            "boot": boot_id(),
            "pid": self.pid,
            "stores": [store.describe() for store in self.stores],
        }

    def commit(self, step: int, body: dict[str, Any]) -> None:
        """Write the manifest of generation `step`; then its slots are the committed ones.

        REQUIRES: all tiles of `step` are written and no later one is.
        """
        with self._lock:
            self._commit(step, body)

    def _commit(self, step: int, body: dict[str, Any]) -> None:
        """REQUIRES: lock. A store that left since the snapshot is named no more."""
        stores = {store.name for store in self.stores}
        body["stores"] = [described for described in body["stores"] if described["name"] in stores]
        named = {store["name"]: len(store["state_zones"]) + 1 for store in body["stores"]}
        tables = [table for s in self.stores if s.name in named for table in s.tables()[: named[s.name]]]
        body["tables"] = [len(table) for table in tables]
        content = encode(
            Manifest(Generation(self.incarnation, step), body, b"".join(table.tobytes() for table in tables))
        )
        self.manifest_bytes += self._place(step).write(content, 0)
        for table in tables:
            table["committed"] = table["working"]
        self.committed = step

    def _place(self, step: int) -> SwapFile:
        while len(self._files) < 2:
            self._files.append(SwapFile(self.folder, f"r{self.rank}.manifest.{len(self._files)}"))
        return self._files[step % 2]

    def withdraw(self, store: Store) -> None:
        """Name a store in no later manifest: it is about to go, and its tiles may be incomplete."""
        with self._lock:
            if store in self.stores:
                self.stores.remove(store)

    def leave(self, store: Store, *, keep: bool) -> None:
        """Close one store. The last one takes the folder with it unless it is kept."""
        self.withdraw(store)
        is_last = not self.stores
        if is_last:
            for file in self._files:
                file.close(remove=not keep)
        store.file.close(remove=not keep)
        if is_last:
            with _registering():
                _runs.pop((self.parent, self.ranks), None)
            if not keep:
                self.folder.remove(of_rank=self.rank if len(self.ranks) > 1 else None)
            self.folder.close()


# One run per folder and process: the manifest is shared, so the run must be found again.
_runs: dict[tuple[Path, tuple[int, ...]], Run] = {}
_runs_lock = threading.Lock()


@contextmanager
def _registering() -> Iterator[None]:
    """Hold the lock, without garbage collection: that may end another model here, which takes the lock too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with _runs_lock:
            yield
    finally:
        if was_enabled:
            gc.enable()


def create_store(
    parent: Path, name: str | None, layout: Layout, *, ranks: tuple[int, ...] = (0,), run_id: str | None = None
) -> tuple[Run, Store]:
    """Make a store in this process's run under `parent`; the name defaults to the least free one.

    A run may be shared by `ranks`: the first of them makes it, and the others join it by its `run_id`.
    """
    with _registering():
        run = _runs.get((parent, ranks))
        if run is not None and run.pid != os.getpid():
            run = None  # a forked child starts its own
        taken = {store.name for store in run.stores} if run else set()
        chosen = name or next(f"m{i}" for i in range(len(taken) + 1) if f"m{i}" not in taken)
        if chosen in taken:
            raise ConfigError(f"name={chosen!r} is taken by another open model; names in use: {sorted(taken)}.")
        if run is None:
            run, store = _create_run(parent, chosen, layout, ranks, run_id)
            _runs[parent, ranks] = run
        else:
            store = Store(run.folder, chosen, layout)
        run.stores.append(store)
    return run, store


def _create_run(
    parent: Path, name: str, layout: Layout, ranks: tuple[int, ...], run_id: str | None
) -> tuple[Run, Store]:
    for _ in range(8):
        folder = RunFolder.create(parent) if run_id is None else RunFolder.join(parent, run_id)
        try:
            store = Store(folder, name, layout)
            return Run(parent, folder, os.getpid(), rank=layout.rank, ranks=ranks), store
        except (FileNotFoundError, BlockingIOError):
            # Somebody who cleans up dead runs saw the folder before its lock: take a new one.
            folder.close()
        except BaseException:
            folder.remove(of_rank=layout.rank if len(ranks) > 1 else None)
            folder.close()
            raise
    raise MachineError(f"a run folder in {parent} was removed 8 times while it was made; who cleans there?")


def sweep(parent: Path, name: str | None, layout: Layout, *, resume: bool | str | None) -> None:
    """Remove dead runs that never committed a step; refuse or remove a resumable one of this model.

    Live runs, other people's files and resumable runs of other models are left alone.
    """
    for folder in find_runs(parent):
        try:
            with locked_if_dead(folder) as is_dead:
                if is_dead:
                    _settle(folder, name, layout, resume=resume)
        finally:
            folder.close()


def _settle(folder: RunFolder, name: str | None, layout: Layout, *, resume: bool | str | None) -> None:
    manifest = read_newest(folder)
    if manifest is None or manifest.generation.step < 1:
        folder.remove()
        log.info("removed %s: a dead run without a committed step", folder.path)
        return
    stores = manifest.body.get("stores", [])
    same = [s for s in stores if s.get("fingerprint") == layout.fingerprint and name in (None, s.get("name"))]
    if same and resume is False:
        folder.remove()
        log.warning("removed %s at step %d: resume=False", folder.path, manifest.generation.step)
    elif same:
        raise ConfigError(
            f"{folder.path} holds this model at committed step {manifest.generation.step}. "
            "resume=True would continue there (not supported yet); resume=False removes it and starts anew."
        )


def read_newest(folder: RunFolder) -> Manifest | None:
    """Return the newest valid manifest of a run, None if there is none."""
    found: list[Manifest] = []
    for name in folder.names(MANIFEST_NAME):
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder.fd)
        try:
            found.append(decode(read_aligned(fd, 0, os.fstat(fd).st_size)))
        except CorruptionError:
            continue
        finally:
            os.close(fd)
    return max(found, key=lambda m: (m.generation.incarnation, m.generation.step), default=None)
