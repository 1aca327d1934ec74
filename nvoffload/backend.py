"""The storage machinery of one model, from offload to close: store, engine, pool, mover, committer.

Opens them in order and closes them in reverse. Knows units only as ranges of tiles; no torch modules.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from nvoffload.buffers import Arena, Pool
from nvoffload.commit import Committer, committer_of
from nvoffload.config import OffloadConfig
from nvoffload.device import Device
from nvoffload.errors import NvoffloadError, PeerError, StorageError, UsageError
from nvoffload.io.engine import Engine, EngineStats, open_engine
from nvoffload.layout import BUFFER_BYTES_PER_ELEMENT, Layout, UnitSpec
from nvoffload.ledger import NUM_ADAMW_WORDS
from nvoffload.mover import Job, Mover
from nvoffload.peers import Peers
from nvoffload.store import Run, StateZone, Store, create_store
from nvoffload.tiles import Busy, HostParams, Tiles

log = logging.getLogger("nvoffload")


class Backend:
    """Where a model's parameters and states live. `close` ends it; until then it owns every byte below."""

    def __init__(
        self,
        config: OffloadConfig,
        layout: Layout,
        *,
        folder: Path | None,
        buffer_count: int,
        device: Device,
        peers: Peers | None = None,
    ) -> None:
        self.config = config
        self._peers = peers
        self.layout = layout
        self.device = device
        self.fill_bytes = 0
        self.has_stepped = False  # from then on an error spoils the run's next generation
        self.on_error: Callable[[NvoffloadError], object] = lambda error: None  # tell other ranks
        self.start_before: Callable[[int], Any] = lambda generation: None  # start updates captured before it
        self._pid = os.getpid()
        self._is_open = True
        self._error: NvoffloadError | None = None  # the first one; nothing is moved after it
        self.is_told = False  # has it been raised?
        self._busy = Busy(layout)
        self._host: dict[int, HostParams] = {}  # by unit
        self._tiles: dict[tuple[int, ...], Tiles] = {}
        self._arenas: list[Arena] = []  # of what lives on the host
        # In order of birth; `_free` closes in reverse.
        self.run: Run | None = None
        self.store: Store | None = None
        self.engine: Engine | None = None
        self.pool: Pool | None = None
        self._mover: Mover | None = None
        self.committer: Committer | None = None
        try:
            self._open(folder, buffer_count)
        except BaseException:
            self._free(keep=False)
            raise

    def _open(self, folder: Path | None, buffer_count: int) -> None:
        io = self.config.io
        if folder is not None:
            self.run, self.store = self._create_store(folder)
            kind = io.engine
            if kind == "auto" and not self.store.file.is_direct:
                log.warning("%s has no direct I/O: transfers go through the page cache", folder)
                kind = "portable"
            self.engine = open_engine(kind, block_bytes=io.block_bytes, queue_depth=io.queue_depth)
        with self._peers.agreeing() if self._peers else nullcontext():
            self._open_mover(buffer_count)
        if self.run is not None:
            self.committer = committer_of(self.run, self._peers.new_fence if self._peers else None)
            self.committer.join(self.mover, self._start_before)

    def _open_mover(self, buffer_count: int) -> None:
        if buffer_count:
            buffer_bytes = BUFFER_BYTES_PER_ELEMENT * self.layout.tile_numel
            self.pool = Pool(buffer_count=buffer_count, buffer_bytes=buffer_bytes, register=self.device.register)
        self._mover = Mover(
            engine=self.engine,
            pool=self.pool,
            device_handle=self.device.handle,
            num_threads=threads_of(self.config, self._peers),
            path=str(self.store.file.path) if self.store else "memory",
            stall_limit_s=self.config.io.stall_limit_s,
        )

    def _create_store(self, folder: Path) -> tuple[Run, Store]:
        """Rank 0 makes the run, under a lock; the others join it, each under its own path."""
        peers, name = self._peers, self.config.name
        if peers is None:
            return create_store(folder, name, self.layout)
        ranks = tuple(peers.global_ranks)
        run_id = ""
        if peers.rank == 0:
            with peers.agreeing():
                made = create_store(folder, name, self.layout, ranks=ranks)
            run_id = made[0].folder.run_id
        else:
            peers.agree(None)
        run_id = peers.control.texts(run_id)[0]
        with peers.agreeing():
            if peers.rank != 0:
                made = create_store(folder, name, self.layout, ranks=ranks, run_id=run_id)
        return made

    def _start_before(self, generation: int) -> None:
        self.start_before(generation)

    @property
    def is_open(self) -> bool:
        """False once closed, and in a forked child."""
        return self._is_open and self._pid == os.getpid()

    @property
    def error(self) -> NvoffloadError | None:
        """The first error of a job or a commit, whether or not anybody was told."""
        if self._error is None and self.is_open:
            try:
                self.mover.check()
            except NvoffloadError as error:
                self._remember(error)
        return self._error or (self.committer.error if self.committer else None)

    @property
    def has_failed(self) -> bool:
        """Did a job or a commit fail?"""
        return self.error is not None

    @property
    def mover(self) -> Mover:
        """The mover of an open backend."""
        assert self._mover is not None
        return self._mover

    def check_open(self) -> None:
        """Raise UsageError unless things can be moved here and now."""
        if self._pid != os.getpid():
            raise UsageError(f"this model was offloaded in process {self._pid}; a forked process can't use it.")
        if not self._is_open:
            raise UsageError("this model was closed, and its parameters with it: read or save values before close().")

    def check(self) -> None:
        """Raise what `check_open` does, and the first error again: after it, memory and disk may disagree."""
        self.check_open()
        error = self._error or (self.committer.error if self.committer else None)
        if error is not None:
            self.is_told = True
            raise error

    # ---- homes

    def tiles(self, indices: Sequence[int]) -> Tiles:
        """Return the parameters' side of some tiles of one unit, without states."""
        key = tuple(indices)
        if key not in self._tiles:
            found = Tiles(self.layout, key, self._busy)
            self._place_params(found)
            self._tiles[key] = found
        return self._tiles[key]

    def _place_params(self, tiles: Tiles) -> None:
        if self.store is not None:
            tiles.put_params_on_disk(self.store)
        if tiles.lane in self._host:
            tiles.put_params_on_host(self._host[tiles.lane])

    def fill(self, unit: int, spec: UnitSpec, values: Mapping[int, int]) -> None:
        """Bring the values of a unit home: all of them, from `values`, addresses by parameter."""
        has_fetched = self.config.param_offload == "cpu"
        if has_fetched or self.store is None:
            self._host[unit] = HostParams(
                self.layout, spec.tiles, has_fetched=has_fetched, has_remainders=self.store is None
            )
            self._arenas.append(self._host[unit].arena)
        if not spec.tiles:
            return
        job = Job("NVO_FILL_PARAM", self.tiles(spec.tiles), values=values, pending=spec.params)
        with self.guarded() as mover:
            mover.run(job)
        if self.store is not None:
            self.fill_bytes += sum(self.layout.tiles[i].param_bytes for i in spec.tiles)

    def add_states(self, params: frozenset[int]) -> dict[int, Tiles]:
        """Make zeroed states for the tiles that hold `params`; return what updates visit, by unit."""
        self.check()
        zone: StateZone | None = None
        if self.store is not None and self.config.state_tier == "nvme":
            zone = self.store.append_state_zone(params, NUM_ADAMW_WORDS)
        indices = zone.zone.tiles if zone else self.layout.state_zone(0, params, NUM_ADAMW_WORDS).tiles
        found: dict[int, Tiles] = {}
        for number, spec in enumerate(self.layout.units):
            mine = [i for i in indices if i in spec.tiles]
            if mine or not params.isdisjoint(spec.params):  # of which this rank may own nothing
                found[number] = Tiles(self.layout, mine, self._busy, params)
                self._place_params(found[number])
        for tiles in found.values():
            if not tiles.indices:
                continue
            if zone is not None and self.store is not None:
                tiles.put_state_on_disk(self.store, zone)
                with self.guarded() as mover:
                    mover.run(Job("NVO_FILL_STATE", tiles, values={}))
            else:
                nbytes = sum(NUM_ADAMW_WORDS * self.layout.tiles[i].word_bytes for i in tiles.indices)
                arena = Arena(max(1, nbytes))
                self._arenas.append(arena)
                tiles.put_state_on_host(arena, NUM_ADAMW_WORDS)
        if zone is not None and self.store is not None:
            self.store.adopt(zone)
            self.fill_bytes += zone.zone.half_bytes
        return found

    # ---- jobs

    @contextmanager
    def guarded(self) -> Iterator[Mover]:
        """Use the mover; an error of it is the backend's from then on."""
        try:
            yield self.mover
        except NvoffloadError as error:
            self.is_told = True
            raise self._remember(error) from None

    def fail(self, error: Exception) -> None:
        """Another rank has failed, or is lost: nothing is moved or committed any more. There, or here, it is told."""
        self.is_told = True
        self._remember(error if isinstance(error, NvoffloadError) else PeerError(f"{type(error).__name__}: {error}"))

    def _remember(self, error: NvoffloadError) -> NvoffloadError:
        """Keep the first error. A failed commit fails the mover: then the commit's reason is the first."""
        if isinstance(error, UsageError):
            return error
        if self._error is None:
            self._error = (self.committer.error if self.committer else None) or error
            self.on_error(self._error)
            if self.committer is not None and self.has_stepped:
                self.committer.poison(self._error)
        return self._error

    def check_jobs(self) -> None:
        """Raise the first error of a job."""
        with self.guarded() as mover:
            mover.check()

    # ---- generations

    def close_generation(self) -> None:
        """The loop has moved on: what was stepped so far belongs together and may be committed."""
        self.check()
        if self.committer is not None:
            self.committer.close_generation()

    def wait_committed(self) -> None:
        """Return when every closed generation is committed."""
        if self.committer is not None:
            try:
                self.committer.wait()
            except NvoffloadError:
                self.is_told = True
                raise

    # ---- end

    @property
    def committed_step(self) -> int:
        """Newest step that a manifest names; 0 if none."""
        return max(0, self.run.committed) if self.run else 0

    def engine_stats(self) -> EngineStats | None:
        """Return the engine's counters."""
        return self.engine.stats() if self.engine else None

    def close(self, *, keep: bool) -> bool:
        """Free everything; remove the files unless `keep`. True: nothing is in flight any more. Idempotent."""
        if not self._is_open:
            return True
        self._is_open = False
        return self._free(keep=keep)

    def _free(self, *, keep: bool) -> bool:
        """Close in reverse order of birth. An engine that can't be drained keeps its memory for good."""
        is_drained = True
        if self.run is not None and self.store is not None and not keep:
            self.run.withdraw(self.store)
        if self.committer is not None and self._mover is not None:
            self.committer.leave(self._mover)
        if self._mover is not None:
            self._mover.stop()  # a kernel that ends must find no engine to write with
        try:
            if self.engine is not None:
                self.engine.close(timeout_s=min(30.0, self.config.io.stall_limit_s))
        except StorageError as error:
            log.error("%s", error)
            is_drained = False
        else:
            if self._mover is not None:
                self._mover.close()
            if self.pool is not None:
                self.pool.close()
            for arena in self._arenas:
                arena.close()
            self.device.close()
        if self.run is not None and self.store is not None:
            self.run.leave(self.store, keep=keep)
        return is_drained


def threads_of(config: OffloadConfig, peers: Peers | None = None) -> int:
    """Return how many kernel threads: unless told half of the cores, shared by the ranks of this machine."""
    return config.update_threads or max(1, (os.cpu_count() or 2) // 2 // (peers.num_local if peers else 1))
