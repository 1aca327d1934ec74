"""One offloaded model at run time: owns its store, engine, pool and mover, and hooks its forward.

The only room that registers hooks. Keeps no tensor alive.
"""

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvoffload import native
from nvoffload.buffers import Pool
from nvoffload.commit import Committer, committer_of
from nvoffload.config import OffloadConfig
from nvoffload.device import Device
from nvoffload.errors import NvoffloadError, StorageError, UsageError
from nvoffload.io.engine import Engine, open_engine
from nvoffload.layout import BUFFER_BYTES_PER_ELEMENT, Layout
from nvoffload.ledger import NUM_ADAMW_WORDS, Traffic, update_traffic
from nvoffload.parameter import disown
from nvoffload.store import Run, Store, create_store
from nvoffload.update import Group, Mover, Tiles, Work, fill_params, group_array

log = logging.getLogger("nvoffload")
COMMIT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Totals since offload(). Seconds are wall time but kernel_s and verify_s, which are thread time.

    step_s: in step(); disk_wait_s and commit_wait_s: of it, nothing could be computed because bytes
    were on their way, or because the generation before was not committed yet.
    """

    steps: int
    read_bytes: int
    write_bytes: int
    fill_bytes: int
    update_read_bytes: int
    update_write_bytes: int
    manifest_bytes: int
    requests: int
    step_s: float
    kernel_s: float
    verify_s: float
    disk_wait_s: float
    commit_wait_s: float
    disk_busy_s: float
    engine: str
    is_direct: bool


class Session:
    """Opened by `offload`, ended once by close, the end of a `with` block, or the interpreter's exit."""

    def __init__(
        self,
        config: OffloadConfig,
        layout: Layout,
        *,
        folder: Path | None,
        buffer_count: int,
        device: Device,
        torch_device: torch.device,
    ) -> None:
        self.config = config
        self.torch_device = torch_device
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self.layout = layout
        self.device = device
        self.optimizers: dict[int, weakref.ref[Any]] = {}
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._is_open = True
        self._error: NvoffloadError | None = None  # the first one; nothing is updated after it
        self._params = native.ffi.new("nvo_param[]", max(1, len(layout.specs)))
        self._steps = 0
        self._steps_begun = 0
        self._fill_bytes = 0
        self._step_s = 0.0
        self._disk_wait_s = self._gate_wait_s = self._kernel_s = self._verify_s = 0.0
        self._last_stats: OffloadStats | None = None
        # In order of birth; `_free` closes in reverse.
        self._run: Run | None = None
        self._store: Store | None = None
        self._engine: Engine | None = None
        self._pool: Pool | None = None
        self._mover: Mover | None = None
        self._committer: Committer | None = None
        try:
            self._open(folder, buffer_count)
        except BaseException:
            self._free(keep=False)
            raise

    def _open(self, folder: Path | None, buffer_count: int) -> None:
        io = self.config.io
        if folder is not None:
            self._run, self._store = create_store(folder, self.config.name, self.layout)
            kind = io.engine
            if kind == "auto" and not self._store.file.is_direct:
                log.warning("%s has no direct I/O: transfers go through the page cache", folder)
                kind = "portable"
            self._engine = open_engine(kind, block_bytes=io.block_bytes, queue_depth=io.queue_depth)
        if buffer_count:
            buffer_bytes = BUFFER_BYTES_PER_ELEMENT * self.layout.tile_numel
            self._pool = Pool(buffer_count=buffer_count, buffer_bytes=buffer_bytes, register=self.device.register)
        self._mover = Mover(
            engine=self._engine,
            pool=self._pool,
            device_handle=self.device.handle,
            num_threads=self.threads_of(self.config),
            path=str(self._store.file.path) if self._store else "memory",
            stall_limit_s=io.stall_limit_s,
        )
        if self._run is not None:
            self._committer = committer_of(self._run)
            self._committer.join(self._mover)

    @staticmethod
    def threads_of(config: OffloadConfig) -> int:
        """Return how many kernel threads: half of the cores unless told."""
        return config.update_threads or max(1, (os.cpu_count() or 2) // 2)

    def remember(self, index: int, param: torch.Tensor) -> None:
        """Know where parameter `index` is, as long as it lives."""
        self._tensors[index] = weakref.ref(param)

    def address_of(self, index: int) -> int:
        """Return where the values of parameter `index` are."""
        param = self._tensors[index]()
        if param is None:
            raise UsageError(f"parameter {self.layout.specs[index].name} is gone; the model was taken apart.")
        return param.data_ptr()

    @property
    def is_open(self) -> bool:
        """False once ended, and in a forked child."""
        return self._is_open and self._pid == os.getpid()

    @property
    def store(self) -> Store | None:
        """The store, None when states are in host memory."""
        return self._store

    @property
    def pool(self) -> Pool | None:
        """The buffer pool, None when nothing moves."""
        return self._pool

    def check_open(self) -> None:
        """Raise UsageError unless updates can be made here and now."""
        if self._pid != os.getpid():
            raise UsageError(f"this model was offloaded in process {self._pid}; a forked process can't update it.")
        if not self._is_open:
            raise UsageError("this model was closed; call nvoffload.offload(model, ...) again to train on.")

    def fill(self, addresses: Mapping[int, int], on_progress: Callable[[int, int], None] | None = None) -> None:
        """Write all values into slot 0. `addresses` of dense parameters, by number."""
        if self._store is None or self._mover is None:
            return
        tiles = Tiles(self.layout, range(len(self.layout.tiles)))
        tiles.put_params_on_disk(self._store)
        self._place_values(addresses)
        self._guarded(lambda mover: mover.run("NVO_FILL_PARAM", tiles, self._params, on_progress=on_progress))
        self._fill_bytes += self._store.param_zone.half_bytes

    def add_states(self, params: frozenset[int], on_progress: Callable[[int, int], None] | None = None) -> Tiles:
        """Make zeroed states for the tiles that hold `params`; return what an update of them visits."""
        self.check_open()
        if self._store is None:
            indices = self.layout.state_zone(0, params, NUM_ADAMW_WORDS).tiles
            tiles = Tiles(self.layout, indices, params)
            tiles.put_on_host(NUM_ADAMW_WORDS)
            return tiles
        zone = self._store.append_state_zone(params, NUM_ADAMW_WORDS)
        tiles = Tiles(self.layout, zone.zone.tiles, params)
        tiles.put_params_on_disk(self._store)
        tiles.put_state_on_disk(self._store, zone)
        self._guarded(lambda mover: mover.run("NVO_FILL_STATE", tiles, self._params, on_progress=on_progress))
        self._store.adopt(zone)
        self._fill_bytes += zone.zone.half_bytes
        return tiles

    def update(
        self,
        optimizer: Hashable,
        zones: Sequence[Tiles],
        works: Sequence[Work],
        groups: Sequence[Group],
        addresses: Mapping[int, int],
    ) -> KeyboardInterrupt | None:
        """Apply one step to `works`; return when parameters are new and all tiles are written.

        A Ctrl-C in between is returned, to be raised once the step's bookkeeping is done too.
        """
        self.check_open()
        self._check_error()
        interrupt: KeyboardInterrupt | None = None
        start_s = time.perf_counter()
        with self._lock:
            self.device.synchronize()
            generation = self._committer.begin(optimizer) if self._committer else 0
            self._steps_begun += 1
            array = group_array(groups)
            for tiles in zones:
                self._place_values(addresses)
                if not fill_params(self._params, [work for work in works if work.param in tiles.params]):
                    continue
                try:
                    self._guarded(partial(self._run_update, tiles, array, generation))
                except KeyboardInterrupt as error:
                    interrupt = error  # the mover raises it only after the job has ended
            self._steps += 1
        self._step_s += time.perf_counter() - start_s
        return interrupt

    def _run_update(self, tiles: Tiles, groups: Any, generation: int, mover: Mover) -> None:
        mover.run("NVO_UPDATE", tiles, self._params, groups=groups, generation=generation, verify=self.config.verify)

    def _place_values(self, addresses: Mapping[int, int]) -> None:
        for at in self._params:
            at.pending = at.fresh = 0
        for param, address in addresses.items():
            self._params[param].value = native.ffi.cast("void *", address)

    def _guarded(self, action: Callable[[Mover], None]) -> None:
        """Run a job; book its time, and remember that the session failed."""
        assert self._mover is not None
        self._check_error()
        before = self._mover.stats()
        try:
            action(self._mover)
        except NvoffloadError as error:
            self._error = self._cause(error)
            if self._committer is not None and self._steps_begun:
                self._committer.poison(self._error)
            raise self._error from None
        after = self._mover.stats()
        self._disk_wait_s += after.disk_wait_s - before.disk_wait_s
        self._gate_wait_s += after.gate_wait_s - before.gate_wait_s
        self._kernel_s += after.kernel_s - before.kernel_s
        self._verify_s += after.verify_s - before.verify_s

    def _cause(self, error: NvoffloadError) -> NvoffloadError:
        """A job that was stopped because a commit failed failed for the commit's reason."""
        committed = self._committer.error if self._committer else None
        return committed or error

    def _check_error(self) -> None:
        """Raise the first error again: after it, memory and disk may disagree."""
        if self._error is not None:
            raise self._error
        if self._committer is not None:
            self._committer.check()

    def close_generation(self) -> None:
        """The loop has moved on: what was stepped so far belongs together and may be committed."""
        if self.is_open:
            self._check_error()
            if self._committer is not None:
                with self._lock:
                    self._committer.close_generation()

    def flush(self) -> None:
        """Return when every step made so far is committed."""
        self.check_open()
        self.close_generation()
        if self._committer is not None:
            self._committer.wait(COMMIT_TIMEOUT_S)

    def ledger(self) -> Traffic:
        """Return the bytes one update of everything must move."""
        total = Traffic(0, 0)
        if self._store is not None:
            for state in self._store.state_zones:
                total += update_traffic(self.layout, state.zone)
        return total

    def stats(self) -> OffloadStats:
        """Return the counters; those of the end once closed."""
        if self._last_stats is not None:
            return self._last_stats
        engine = self._engine.stats() if self._engine else None
        return OffloadStats(
            steps=self._steps,
            read_bytes=engine.read_bytes if engine else 0,
            write_bytes=engine.write_bytes if engine else 0,
            fill_bytes=self._fill_bytes,
            update_read_bytes=engine.read_bytes if engine else 0,
            update_write_bytes=engine.write_bytes - self._fill_bytes if engine else 0,
            manifest_bytes=self._run.manifest_bytes if self._run else 0,
            requests=engine.read_requests + engine.write_requests if engine else 0,
            step_s=self._step_s,
            kernel_s=self._kernel_s,
            verify_s=self._verify_s,
            disk_wait_s=self._disk_wait_s,
            commit_wait_s=self._gate_wait_s,
            disk_busy_s=engine.busy_s if engine else 0.0,
            engine=self._engine.name if self._engine else "none",
            is_direct=bool(self._store and self._store.file.is_direct),
        )

    def end(self, *, is_clean: bool) -> None:
        """Commit if the store stays, free everything, remove or keep the files. Idempotent."""
        if not self.is_open:
            return
        self._is_open = False
        disown(self)
        has_failed = self._error is not None or (self._committer is not None and self._committer.error is not None)
        wants = self.config.keep == "always" or (self.config.keep == "on_error" and (has_failed or not is_clean))
        if wants and self._committer is not None and not has_failed:
            try:
                self._committer.close_generation()
                self._committer.wait(COMMIT_TIMEOUT_S)
            except StorageError as error:
                log.error("the last step could not be committed: %s", error)
        keep = bool(wants and self._run and self._run.committed >= 1)
        where = self._run.folder.path if self._run else None
        step = self._run.committed if self._run else 0
        self._last_stats = self.stats()
        self._free(keep=keep)
        if keep:
            log.warning("kept %s at committed step %d. To delete it: rm -r %s", where, step, where)

    def end_at_exit(self) -> None:
        """End when the module is gone or the interpreter exits; an uncaught exception keeps the store."""
        self.end(is_clean=getattr(sys, "last_value", None) is None)

    def _free(self, *, keep: bool) -> None:
        """Close in reverse order of birth. An engine that can't be drained keeps its memory for good."""
        if self._committer is not None and self._mover is not None:
            self._committer.leave(self._mover)
        try:
            if self._engine is not None:
                self._engine.close(timeout_s=min(30.0, self.config.io.stall_limit_s))
        except StorageError as error:
            log.error("%s", error)
        else:
            if self._mover is not None:
                self._mover.close()
            if self._pool is not None:
                self._pool.close()
            self.device.close()
        if self._run is not None and self._store is not None:
            self._run.leave(self._store, keep=keep)


def hook_forward(module: nn.Module, session: Session) -> Any:
    """Close the open generation at each forward that records gradients. Returns the hook's handle."""

    def before_forward(_module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled():
            session.close_generation()

    return module.register_forward_pre_hook(before_forward, prepend=True)
