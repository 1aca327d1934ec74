"""Updates: jobs for the mover, the arrays they need, and what went wrong with them.

Registers no hooks, holds no tensors.
"""

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nvoffload import native
from nvoffload.buffers import Arena, Pool
from nvoffload.errors import CorruptionError, MachineError, NvoffloadError, StorageError
from nvoffload.io.engine import Engine, storage_error
from nvoffload.layout import Layout
from nvoffload.store import StateZone, Store

DTYPES = {"float32": "NVO_F32", "bfloat16": "NVO_BF16"}
_PARTS = ("fetched part", "remainder", "state")
_WAIT_SLICE_MS = 200


@dataclass(frozen=True, slots=True)
class Work:
    """One parameter's part in an update: addresses of dense memory, its step number and group."""

    param: int
    value_address: int
    grad_address: int
    grad_dtype: str
    step: int
    group: int
    grad_scale: float
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class Group:
    """AdamW's hyper-parameters of one param group at one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class Tiles:
    """The C arrays of the tiles that one job visits. Keeps everything they point to alive.

    `params` are those whose states these tiles hold; a tile may carry others, which another job updates.
    """

    def __init__(self, layout: Layout, indices: Sequence[int], params: frozenset[int] = frozenset()) -> None:
        ffi = native.ffi
        self.params = params
        self.layout = layout
        self.indices = tuple(indices)
        segments = [s for i in indices for s in layout.tiles[i].segments]
        self.segments = ffi.new("nvo_segment[]", max(1, len(segments)))
        for at, s in zip(self.segments, segments, strict=False):
            at.tile_start, at.numel, at.param_start, at.param = s.tile_start, s.numel, s.param_start, s.param
        self.array = ffi.new("nvo_tile[]", max(1, len(indices)))
        self._kept: list[Any] = []
        first = 0
        for at, index in zip(self.array, indices, strict=False):
            tile = layout.tiles[index]
            flat = layout.flats[tile.flat]
            at.numel, at.item_bytes = tile.numel, flat.item_bytes
            at.dtype = getattr(native.lib, DTYPES.get(flat.dtype, "NVO_RAW"))
            at.fetched_bytes, at.remainder_bytes = tile.fetched_bytes, tile.remainder_bytes
            at.word_bytes = tile.word_bytes
            at.first_segment, at.num_segments = first, len(tile.segments)
            first += len(tile.segments)

    def names(self, position: int) -> str:
        """Return the parameters of the tile at `position`, for messages."""
        tile = self.layout.tiles[self.indices[position]]
        names = [self.layout.specs[s.param].name for s in tile.segments]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"tile {self.indices[position]} ({', '.join(names[:3])}{more})"

    def put_params_on_disk(self, store: Store) -> None:
        """Give every tile its parameter extent."""
        records = self._records(store.param_table)
        for at, index in zip(self.array, self.indices, strict=False):
            at.fd = store.file.fd
            at.param = records + index
            at.param_offset = [store.param_zone.place(index, slot) for slot in (0, 1)]

    def put_state_on_disk(self, store: Store, state: StateZone) -> None:
        """Give every tile its state extent. REQUIRES: the zone's tiles are these."""
        records = self._records(state.table)
        for position, at in enumerate(self.array[0 : len(self.indices)]):
            at.fd = store.file.fd
            at.num_words = state.num_words
            at.state = records + position
            at.state_offset = [state.zone.place(position, slot) for slot in (0, 1)]

    def put_on_host(self, num_words: int) -> Arena:
        """Give every tile remainder and state in memory, zeroed; return the arena that holds them."""
        tiles = [self.layout.tiles[i] for i in self.indices]
        arena = Arena(max(1, sum(t.remainder_bytes + num_words * t.word_bytes for t in tiles)))
        self._kept.append(arena)
        address = arena.address
        for at, tile in zip(self.array, tiles, strict=False):
            at.num_words = num_words
            at.host_remainder = native.ffi.cast("void *", address)
            at.host_state = native.ffi.cast("void *", address + tile.remainder_bytes)
            address += tile.remainder_bytes + num_words * tile.word_bytes
        return arena

    def _records(self, table: Any) -> Any:
        self._kept.append(table)
        return native.ffi.cast("nvo_record *", native.ffi.from_buffer(table))


@dataclass(frozen=True, slots=True)
class MoverStats:
    """Seconds since the mover opened: run_s, disk_wait_s, gate_wait_s wall; the others thread time."""

    run_s: float
    verify_s: float
    kernel_s: float
    disk_wait_s: float
    gate_wait_s: float
    tiles: int


class Mover:
    """The Python face of the mover in C: runs one job at a time and names what went wrong."""

    def __init__(
        self,
        *,
        engine: Engine | None,
        pool: Pool | None,
        device_handle: Any,
        num_threads: int,
        path: str,
        stall_limit_s: float,
        simd: int | None = None,
    ) -> None:
        lib, ffi = native.lib, native.ffi
        out = ffi.new("nvo_mover **")
        level = lib.nvo_simd_best() if simd is None else simd
        engine_handle = engine.handle if engine else ffi.NULL
        pool_handle = pool.handle if pool else ffi.NULL
        code = lib.nvo_mover_open(out, engine_handle, pool_handle, device_handle, num_threads, level)
        native.check(code, "opening the mover")
        self.handle: Any = out[0]
        self._engine = engine
        self._path = path
        self._stall_limit_s = stall_limit_s
        self._kept: tuple[Any, ...] = (device_handle,)

    def run(
        self,
        kind: str,
        tiles: Tiles,
        params: Any,
        *,
        groups: Any = None,
        generation: int = 0,
        verify: bool = True,
        kernel: str = "NVO_KERNEL_ADAMW",
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Run a job to its end. A Ctrl-C is kept until then: half an update is no state to be in."""
        lib, ffi = native.lib, native.ffi
        job = ffi.new("nvo_job *")
        job.kind, job.kernel = getattr(lib, kind), getattr(lib, kernel)
        job.num_tiles, job.verify, job.generation = len(tiles.indices), verify, generation
        job.tiles, job.segments, job.params = tiles.array, tiles.segments, params
        job.groups = groups if groups is not None else ffi.NULL
        self._raise_error(tiles)
        native.check(lib.nvo_mover_start(self.handle, job), "starting an update")
        interrupt: KeyboardInterrupt | None = None
        start_s = time.monotonic()
        while True:
            try:
                if lib.nvo_mover_wait(self.handle, _WAIT_SLICE_MS):
                    break
                if on_progress:
                    on_progress(lib.nvo_mover_progress(self.handle), len(tiles.indices))
                self._check_stall(start_s)
            except KeyboardInterrupt as error:
                interrupt = error
        self._raise_error(tiles)
        if interrupt:
            raise interrupt

    def _check_stall(self, start_s: float) -> None:
        if self._engine is None:
            return
        stats = self._engine.stats()
        quiet_s = time.monotonic() - max(start_s, stats.last_progress_s)
        if stats.inflight and quiet_s > self._stall_limit_s:
            native.lib.nvo_mover_fail(self.handle, -errno.ETIMEDOUT)
            raise StorageError(
                f"{stats.inflight} requests on {self._path} have not completed for {quiet_s:.0f} s "
                f"(Io.stall_limit_s={self._stall_limit_s:g}). Likely cause: a drive that no longer answers; "
                "see the kernel log.",
                errno=errno.ETIMEDOUT,
                path=self._path,
            )

    def _raise_error(self, tiles: Tiles) -> None:
        error = native.ffi.new("nvo_error *")
        if native.lib.nvo_mover_error(self.handle, error) == 0:
            return
        where = ""
        if 0 <= error.tile < len(tiles.indices):
            where = f" While updating {tiles.names(error.tile)}, generation {error.generation}."
        raise error_from(error, self._path, where)

    def fail(self, code: int) -> None:
        """Make the running job and all later ones fail."""
        native.lib.nvo_mover_fail(self.handle, code)

    def commit(self, generation: int) -> None:
        """Say that a manifest names `generation`: the next one may overwrite the one before."""
        native.lib.nvo_mover_commit(self.handle, generation)

    def stats(self) -> MoverStats:
        """Return where the time of jobs went."""
        out = native.ffi.new("nvo_mover_stats *")
        native.lib.nvo_mover_stats_read(self.handle, out)
        return MoverStats(
            run_s=out.run_ns / 1e9,
            verify_s=out.verify_ns / 1e9,
            kernel_s=out.kernel_ns / 1e9,
            disk_wait_s=out.disk_wait_ns / 1e9,
            gate_wait_s=out.gate_wait_ns / 1e9,
            tiles=out.tiles,
        )

    def close(self) -> None:
        """Stop the kernel threads. Idempotent."""
        if self.handle is not None:
            native.check(native.lib.nvo_mover_close(self.handle), "closing the mover")
            self.handle = None


def error_from(error: Any, path: str, where: str) -> NvoffloadError:
    """Return the exception for an nvo_error."""
    if error.code == -errno.EBADMSG:
        return CorruptionError(
            f"the {_PARTS[error.part]} read from {path} at {error.offset} ({error.nbytes} bytes, slot "
            f"{error.slot}, generation {error.generation}) does not match its checksum.{where} "
            "Likely cause: a failing drive, or somebody wrote to the file. Nothing was updated from it.",
            errno=errno.EBADMSG,
            path=path,
            offset=error.offset,
            nbytes=error.nbytes,
        )
    if error.tile < 0 or error.nbytes == 0:
        return MachineError(f"an update was stopped: {native.describe(error.code)}.{where}")
    found = storage_error(error.op, path, offset=error.offset, nbytes=error.nbytes, code=error.code)
    found.args = (f"{found}{where}",)
    return found


def fill_params(array: Any, works: Sequence[Work]) -> int:
    """Mark the parameters of `works` as pending in an nvo_param array; return how many."""
    for work in works:
        at = array[work.param]
        at.value = native.ffi.cast("void *", work.value_address)
        at.grad = native.ffi.cast("void *", work.grad_address)
        at.grad_dtype = getattr(native.lib, DTYPES[work.grad_dtype])
        at.step, at.group, at.pending, at.scale = work.step, work.group, 1, work.grad_scale
        at.fresh = work.is_fresh
    return len(works)


def group_array(groups: Sequence[Group]) -> Any:
    """Return an nvo_group array."""
    fields = [(g.lr, g.beta1, g.beta2, g.eps, g.weight_decay) for g in groups]
    return native.ffi.new("nvo_group[]", fields or 1)
