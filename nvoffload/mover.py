"""The Python face of the mover in C: jobs over tiles, the arrays they need, what went wrong.

Decides nothing: not what is updated, not when. Holds no tensors.
"""

import errno
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvoffload import native
from nvoffload.buffers import Pool
from nvoffload.errors import CorruptionError, MachineError, NvoffloadError, StorageError
from nvoffload.io.engine import Engine, storage_error
from nvoffload.tiles import Tiles

_PARTS = ("fetched part", "remainder", "state")
_WAIT_SLICE_MS = 200


@dataclass(frozen=True, slots=True)
class Work:
    """One parameter's part in an update: its gradient (float32, on the host), step number, group."""

    param: int
    grad_address: int
    step: int
    group: int
    grad_scale: float


@dataclass(frozen=True, slots=True)
class Group:
    """AdamW's hyper-parameters of one param group at one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class Job:
    """One pass over tiles that the mover has been given. Owns its C arrays until it is over."""

    def __init__(
        self,
        kind: str,
        tiles: Tiles,
        *,
        values: Mapping[int, int],
        works: Sequence[Work] = (),
        groups: Sequence[Group] = (),
        pending: Iterable[int] = (),
    ) -> None:
        """Describe a job. `values`: addresses by parameter; `pending`: what it is about beside `works`."""
        ffi, lib = native.ffi, native.lib
        self.tiles = tiles
        self._params = ffi.new("nvo_param[]", max(1, len(tiles.params)))
        self._groups = ffi.new("nvo_group[]", [(g.lr, g.beta1, g.beta2, g.eps, g.weight_decay) for g in groups] or 1)
        local = {param: self._params[position] for position, param in enumerate(tiles.params)}
        for param, at in local.items():
            at.value = ffi.cast("void *", values.get(param, 0))
        for param in pending:
            if param in local:
                local[param].pending = 1
        for work in works:
            if work.param in local:
                at = local[work.param]
                at.grad, at.grad_dtype = ffi.cast("void *", work.grad_address), lib.NVO_F32
                at.step, at.group, at.pending, at.scale = work.step, work.group, 1, work.grad_scale
        self.c = ffi.new("nvo_job *")
        self.c.kind = getattr(lib, kind)
        self.c.num_tiles, self.c.lane = len(tiles.indices), tiles.lane
        self.c.tiles, self.c.segments, self.c.params, self.c.groups = (
            tiles.array,
            tiles.segments,
            self._params,
            self._groups,
        )


@dataclass(frozen=True, slots=True)
class MoverStats:
    """Totals since the mover opened. run_s, disk_wait_s, gate_wait_s are wall time, the others thread time."""

    run_s: float
    verify_s: float
    kernel_s: float
    disk_wait_s: float
    gate_wait_s: float
    tiles: int
    read_bytes: int
    write_bytes: int
    fetch_bytes: int


class Mover:
    """Runs jobs side by side, and names what went wrong with them."""

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
        self._cause: NvoffloadError | None = None  # of a failure that is no job's
        self._jobs: dict[int, Job] = {}  # by address, until over: the mover in C points into them

    def submit(
        self,
        job: Job,
        *,
        generation: int = 0,
        is_demand: bool = False,
        values_stand: bool = False,
        verify: bool = True,
        kernel: str = "NVO_KERNEL_ADAMW",
    ) -> Job:
        """Queue a job; return it. Raises the first error of any job."""
        lib = native.lib
        job.c.generation, job.c.verify, job.c.values_stand = generation, verify, values_stand
        job.c.priority = lib.NVO_DEMAND if is_demand else lib.NVO_SHARED
        job.c.kernel = getattr(lib, kernel)
        self._jobs[_address(job)] = job
        if lib.nvo_mover_submit(self.handle, job.c) < 0:
            del self._jobs[_address(job)]
            self.check()
        self._forget_ended()
        return job

    def _forget_ended(self) -> None:
        jobs = list(self._jobs.items())  # another thread may submit meanwhile
        ended = [key for key, job in jobs if self.has_come_to(job, is_ended=True)]
        if native.lib.nvo_mover_error(self.handle, native.ffi.new("nvo_error *")) == 0:  # else one is to be named
            for key in ended:
                self._jobs.pop(key, None)

    def has_come_to(self, job: Job, *, is_ended: bool) -> bool:
        """Are all values of `job` delivered, or is all of it done? True too once an error has ended it."""
        stage = native.lib.NVO_ENDED if is_ended else native.lib.NVO_DELIVERED
        return bool(native.lib.nvo_mover_wait(self.handle, job.c, stage, 0))

    def promote(self, job: Job) -> None:
        """Let `job` go first: somebody waits for it."""
        native.lib.nvo_mover_promote(self.handle, job.c)

    def wait(self, job: Job, *, is_ended: bool) -> None:
        """Wait until values are delivered or all is done. A Ctrl-C is kept until then: half is no state to be in."""
        lib = native.lib
        stage = lib.NVO_ENDED if is_ended else lib.NVO_DELIVERED
        interrupt: KeyboardInterrupt | None = None
        start_s = time.monotonic()
        while True:
            try:
                if lib.nvo_mover_wait(self.handle, job.c, stage, _WAIT_SLICE_MS):
                    break
                self._check_stall(start_s)
            except KeyboardInterrupt as error:
                interrupt = error
        self.check()
        if interrupt:
            raise interrupt

    def run(self, job: Job, **how: Any) -> None:
        """Submit `job` as a demand and wait for its end."""
        self.wait(self.submit(job, is_demand=True, **how), is_ended=True)

    def _check_stall(self, start_s: float) -> None:
        if self._engine is None:
            return
        stats = self._engine.stats()
        quiet_s = time.monotonic() - max(start_s, stats.last_progress_s)
        if stats.inflight and quiet_s > self._stall_limit_s:
            stall = StorageError(
                f"{stats.inflight} requests on {self._path} have not completed for {quiet_s:.0f} s "
                f"(Io.stall_limit_s={self._stall_limit_s:g}). Likely cause: a drive that no longer answers; "
                "see the kernel log.",
                errno=errno.ETIMEDOUT,
                path=self._path,
            )
            self.fail(stall)
            raise stall

    def check(self) -> None:
        """Raise the first error of any job."""
        error = native.ffi.new("nvo_error *")
        if native.lib.nvo_mover_error(self.handle, error) == 0:
            return
        job = self._jobs.get(int(native.ffi.cast("intptr_t", error.job)))
        where = ""
        if job is not None and 0 <= error.tile < len(job.tiles.indices):
            where = f" While moving {job.tiles.names(error.tile)}, generation {error.generation}."
        if error.tile < 0 and self._cause is not None:
            raise self._cause
        raise error_from(error, self._path, where)

    def fail(self, cause: NvoffloadError) -> None:
        """Make all jobs fail, by `cause` unless one has failed before."""
        self._cause = self._cause or cause
        native.lib.nvo_mover_fail(self.handle, -(getattr(cause, "errno", None) or errno.EIO))

    def stop(self) -> None:
        """Make all jobs end. From then on nothing touches values, and no transfer begins."""
        native.lib.nvo_mover_fail(self.handle, -errno.ESHUTDOWN)

    def expect(self, generation: int, count: int) -> None:
        """Say that `count` updates of `generation` will be submitted."""
        native.lib.nvo_mover_expect(self.handle, generation, count)

    def wait_written(self, generation: int, timeout_s: float) -> bool:
        """Return whether all expected updates up to `generation` are written, waiting up to `timeout_s`."""
        code = native.lib.nvo_mover_wait_written(self.handle, generation, int(timeout_s * 1000))
        if code < 0:
            self.check()
        return bool(code)

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
            read_bytes=out.read_bytes,
            write_bytes=out.write_bytes,
            fetch_bytes=out.fetch_bytes,
        )

    def close(self) -> None:
        """End what still runs, and stop the kernel threads. REQUIRES: failed, the engine drained. Idempotent."""
        if self.handle is not None:
            for job in self._jobs.values():
                while not native.lib.nvo_mover_wait(self.handle, job.c, native.lib.NVO_ENDED, _WAIT_SLICE_MS):
                    continue
            native.check(native.lib.nvo_mover_close(self.handle), "closing the mover")
            self.handle = None


def _address(job: Job) -> int:
    return int(native.ffi.cast("intptr_t", job.c))


def error_from(error: Any, path: str, where: str) -> NvoffloadError:
    """Return the exception for an nvo_error."""
    if error.code == -errno.EBADMSG:
        return CorruptionError(
            f"the {_PARTS[error.part]} read from {path} at {error.offset} ({error.nbytes} bytes, slot "
            f"{error.slot}, generation {error.generation}) does not match its checksum.{where} "
            "Likely cause: a failing drive, or somebody wrote to the file. Nothing was taken from it.",
            errno=errno.EBADMSG,
            path=path,
            offset=error.offset,
            nbytes=error.nbytes,
        )
    if error.tile < 0 or error.nbytes == 0:
        return MachineError(f"a job was stopped: {native.describe(error.code)}.{where}")
    found = storage_error(error.op, path, offset=error.offset, nbytes=error.nbytes, code=error.code)
    found.args = (f"{found}{where}",)
    return found
