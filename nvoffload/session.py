"""One offloaded model: its units, wrappers and gradients, over its backend. What a wrapper asks of above.

Steps, reads, writes, flushes and ends; registers no hooks.
"""

import logging
import sys
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from nvoffload.backend import Backend
from nvoffload.collectives import Collectives
from nvoffload.config import OffloadConfig
from nvoffload.device import Device, Memory, Poison
from nvoffload.errors import NvoffloadError, UsageError
from nvoffload.landing import Landing
from nvoffload.layout import Layout, UnitSpec
from nvoffload.ledger import NUM_ADAMW_WORDS, Traffic, homes_of, training_traffic
from nvoffload.local import local_forward
from nvoffload.mover import Group, Work
from nvoffload.order import Order
from nvoffload.parameter import OffloadedParameter, wrap
from nvoffload.peers import Peers
from nvoffload.residency import Residency
from nvoffload.shims import graph_task_id
from nvoffload.stats import OffloadStats, collect
from nvoffload.tiles import Tiles
from nvoffload.unit import Binding, Place, Unit, is_framed
from nvoffload.update import Pending
from nvoffload.values import Values

log = logging.getLogger("nvoffload")
RUN_AHEAD = 3  # generations that may be uncommitted when a step begins


class Session:
    """Opened by `offload`, ended once by close, the end of a `with` block, or the interpreter's exit."""

    def __init__(
        self,
        config: OffloadConfig,
        layout: Layout,
        *,
        folder: Path | None,
        buffer_count: int,
        num_frames: int,
        device: Device,
        torch_device: torch.device,
        peers: Peers | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.torch_device = torch_device
        self.optimizers: dict[int, Any] = {}  # weak references, by parameter
        self.wrappers: dict[int, OffloadedParameter] = {}
        self._device = device
        self._steps = 0
        self._num_frames = num_frames
        self._step_s = 0.0
        self._last_stats: OffloadStats | None = None
        self._memory: list[Memory] = []
        self._standing: dict[int, Memory] = {}  # of those, by unit
        self.backend = Backend(config, layout, folder=folder, buffer_count=buffer_count, device=device, peers=peers)
        self.collectives: Collectives | None = None
        try:
            if peers is not None:
                self.collectives = Collectives(peers, [spec.name for spec in layout.units], device)
                self.backend.on_error, self.collectives.on_error = self.collectives.fail, self.backend.fail
            self._open(num_frames)
        except BaseException:
            self.backend.close(keep=False)
            raise

    def _open(self, num_frames: int) -> None:
        self._poison = Poison(self.torch_device, max((spec.nbytes for spec in self.layout.units), default=0))
        self.units = [Unit(self.layout, spec, number, self._poison) for number, spec in enumerate(self.layout.units)]
        frame_bytes = max((spec.nbytes for spec in self.layout.units if self._is_framed(spec)), default=0)
        frames: list[Place] = []
        if num_frames and frame_bytes:
            memory = self._allocate(num_frames * frame_bytes)
            frames = [Place(memory, index * frame_bytes) for index in range(num_frames)]
        for unit in self.units:
            if not self._is_framed(unit.spec) and self.config.param_offload != "none":
                unit.own_place = Place(self._allocate(max(1, unit.spec.nbytes)), 0)
        self.residency = Residency(
            self.backend,
            self.units,
            frames,
            is_framed=self._is_framed,
            synchronize=self._device.synchronize,
            collectives=self.collectives,
        )
        self.values = Values(self.backend, self.residency, self.torch_device, self.collectives)
        self.order = Order(self.residency)
        self.landing = Landing(
            self.residency,
            self.order,
            self.layout,
            self.wrappers,
            device=self.torch_device,
            collectives=self.collectives,
            reduce_dtype=self.config.reduce_dtype,
        )
        self.accumulators = self.landing.accumulators

    def _is_framed(self, spec: UnitSpec) -> bool:
        return is_framed(spec, self.config)

    def _allocate(self, nbytes: int) -> Memory:
        self._memory.append(Memory(self.torch_device, nbytes))
        return self._memory[-1]

    # ---- birth

    def fill(self, unit: Unit, values: Mapping[int, Tensor]) -> None:
        """Write a unit's values home, of several ranks those of the first: dense parameters, by number."""
        if self.collectives is not None:
            flats = [values[param].detach().as_strided((values[param].numel(),), (1,)) for param in unit.spec.params]
            self.collectives.broadcast(unit.number, [flat.view(torch.uint8) for flat in flats if flat.numel()])
        self.backend.fill(unit.number, unit.spec, {param: tensor.data_ptr() for param, tensor in values.items()})

    def adopt(self, unit: Unit, bindings: Sequence[Binding], values: Mapping[int, Tensor]) -> None:
        """Take the unit over: wrappers and stand-ins from now on, and, if it stands in memory, a place of its own."""
        unit.bindings = list(bindings)
        unit.make_stand_ins()
        if self.config.param_offload == "none":
            unit.is_standing = True
            self._standing[unit.number] = self._allocate(max(1, unit.spec.nbytes))
            unit.own_place = Place(self._standing[unit.number], 0)
            unit.gather(unit.own_place, [])
            unit.arrive()
            unit.show()
            with torch.no_grad():
                for param in unit.spec.params:
                    unit.shown(param).copy_(values[param])
            unit.take_writes()
        self.landing.make(unit)
        unit.register_wrappers(is_first=True)

    def wrapper_of(self, index: int, *, requires_grad: bool) -> OffloadedParameter:
        """Return the wrapper of parameter `index`, made on the first call."""
        if index not in self.wrappers:
            spec = self.layout.specs[index]
            self.wrappers[index] = wrap(
                self,
                index,
                name=spec.name,
                tier=self.config.param_offload,
                shape=spec.shape,
                stride=spec.stride,
                dtype=getattr(torch, spec.dtype),
                device=self.torch_device,
                requires_grad=requires_grad,
                blank=self._poison.storage,
            )
        return self.wrappers[index]

    # ---- what a wrapper asks

    @property
    def is_open(self) -> bool:
        """False once ended, and in a forked child."""
        return self.backend.is_open

    def read(self, index: int) -> Tensor:
        """Return the parameter's values after all steps made so far: a fresh tensor."""
        self._check_together("reading a parameter")
        return self.values.read(index)

    def read_state(self, index: int, zones: Sequence[Mapping[int, Tiles]], word: int) -> Tensor:
        """Return a word of the optimizer's states, after all steps made so far: a fresh float32 tensor."""
        self.check_at_rest("reading an optimizer state")
        return self.values.read_state(index, zones, word)

    def write(self, index: int, values: Tensor) -> None:
        """Replace a parameter's values. A bfloat16 master becomes exactly these."""
        self._check_together("writing a parameter")
        self.values.write(index, values)
        increment_version([self.wrappers[index]])

    @contextmanager
    def local_forward(self) -> Iterator[None]:
        """Let the block run forwards without other ranks."""
        self.check_at_rest("local_forward()")
        if self.residency.is_alone:
            raise UsageError("local_forward() was called inside local_forward().")
        self.flush()
        with local_forward(self.backend, self.residency, self.collectives):
            yield

    def _check_together(self, what: str) -> None:
        if self.residency.is_alone:
            raise UsageError(f"{what} was called inside local_forward(): do it before or after, on all ranks.")

    # ---- steps

    def add_states(self, params: frozenset[int]) -> dict[int, Tiles]:
        """Make zeroed states for `params`; return what updates of them visit, by unit."""
        return self.backend.add_states(params)

    def step(
        self, optimizer: Hashable, zones: Sequence[Mapping[int, Tiles]], works: Sequence[Work], groups: Sequence[Group]
    ) -> None:
        """Capture one step of `works`; `finish_step` follows. Values read from now on are those after it.

        REQUIRES: check_at_rest.
        """
        start_s = time.perf_counter()
        committer = self.backend.committer
        generation = committer.begin(optimizer) if committer else 0
        self.backend.has_stepped = True
        if committer is not None and generation > RUN_AHEAD:
            committer.wait_for(generation - RUN_AHEAD)
        self._device.synchronize()
        by_unit: dict[int, list[Work]] = {}
        for work in works:
            by_unit.setdefault(self.layout.place_of(work.param)[0], []).append(work)
        for zone in zones:
            for number, tiles in zone.items():
                mine = tuple(work for work in by_unit.get(number, ()) if work.param in tiles.updates)
                if mine:
                    self.residency.capture(self.units[number], Pending(tiles, mine, tuple(groups), generation))
        increment_version([self.wrappers[work.param] for work in works])
        self._steps += 1
        if self.collectives is not None:
            self.collectives.position.steps = self._steps
        self._step_s += time.perf_counter() - start_s

    def finish_step(self) -> None:
        """Start what has a place to go to; with update="blocking" wait until all of it is written."""
        start_s = time.perf_counter()
        try:
            if self.config.update == "blocking":
                self.residency.finish()
            else:
                self.residency.start_updates(self.residency.updates.units())
        finally:
            self._step_s += time.perf_counter() - start_s

    def check_at_rest(self, what: str) -> None:
        """Raise UsageError inside a forward or backward, and what went wrong before."""
        self.backend.check()
        self._check_together(what)
        running = next((unit.spec.name for unit in self.units if unit.depth), None)
        if graph_task_id() != -1 or running is not None:
            where = f"the forward of {running}" if running else "a backward"
            raise UsageError(f"{what} was called inside {where}; call it after backward() has returned.")
        for unit in self.units:
            self.residency.check_unwritten(unit)

    def flush(self) -> None:
        """Return when every step made so far is written and committed."""
        self.check_at_rest("flush()")
        self.residency.finish()
        self.backend.close_generation()
        self.backend.wait_committed()

    def close_generation(self) -> None:
        """The loop has moved on: what was stepped so far may be committed."""
        self.backend.close_generation()

    # ---- whole values

    @contextmanager
    def gathered(self, indices: Sequence[int], *, write: bool) -> Iterator[dict[int, Tensor]]:
        """Give whole values by number; with `write` store what they are at the end."""
        values = {index: self.read(index) for index in indices}
        yield values
        if write:
            for index, value in values.items():
                self.write(index, value)

    # ---- figures and end

    def synchronize(self) -> None:
        """Wait for what the device still does."""
        self._device.synchronize()

    def ledger(self, *, steps: int, passes: int) -> Traffic:
        """Return the bytes that so many steps and a flush must move."""
        store = self.backend.store
        every = frozenset(self.accumulators)
        zones = [z.zone for z in store.state_zones] if store else []
        if not zones:
            zones = [self.layout.state_zone(0, every, NUM_ADAMW_WORDS)] if every else []
        homes = homes_of(self.config)
        framed = [unit.number for unit in self.units if self._is_framed(unit.spec)]
        return training_traffic(self.layout, zones, homes, framed, self._num_frames, steps=steps, passes=passes)

    def summary(self) -> list[str]:
        """Return what is where and where the time went, for people."""
        stats = self.stats()
        lines = [f"{unit!r}" for unit in self.units]
        lines.append(
            f"{stats.steps} steps; read {stats.read_bytes / 1e9:.3g} GB, wrote {stats.write_bytes / 1e9:.3g} GB; "
            f"waited {stats.wait_s:.3g} s: disk {stats.disk_wait_s:.3g}, commit {stats.commit_wait_s:.3g}, "
            f"kernels {stats.kernel_wait_s:.3g}, ranks {stats.peer_wait_s:.3g}; "
            f"{stats.overlap:.0%} of the disk's time ran under compute"
        )
        return lines

    def stats(self) -> OffloadStats:
        """Return the counters; those of the end once closed."""
        if self._last_stats:
            return self._last_stats
        return collect(self.backend, self.residency.stalls, self.values, steps=self._steps, step_s=self._step_s)

    def end(self, *, is_clean: bool) -> None:
        """Commit if the store stays, free everything, remove or keep the files. Idempotent."""
        if not self.backend.is_open:
            return
        backend, failed = self.backend, self.backend.has_failed
        keep = self.config.keep
        wants = backend.run is not None and (keep == "always" or (keep == "on_error" and (failed or not is_clean)))
        is_standing = self.config.param_offload == "none"
        if (wants or is_standing) and not failed:
            try:
                self.residency.finish()
                if wants:
                    backend.close_generation()
                    backend.wait_committed()
            except NvoffloadError as error:
                log.error("the last step could not be committed: %s", error)
                wants = backend.run is not None and keep != "never"
        step, where = backend.committed_step, backend.run.folder.path if backend.run else None
        kept = wants and step >= 1
        self._last_stats = self.stats()
        if self.collectives is not None:
            self._part(is_clean=is_clean)
        if is_standing:
            if backend.has_failed:
                backend.mover.stop()  # returns when no kernel runs
            self.landing.forget()
            self._restore()
        if backend.close(keep=kept):
            self.landing.forget()
            self._free_memory()
        if kept:
            log.warning("kept %s at committed step %d. To delete it: rm -r %s", where, step, where)

    def _part(self, *, is_clean: bool) -> None:
        """Leave the other ranks: if all is well once they have come here too."""
        assert self.collectives is not None
        self.collectives.is_ending = True
        if self.backend.committer is not None:
            self.backend.committer.is_ending = True
        if is_clean and not self.backend.has_failed:
            self.collectives.meet()
        elif not is_clean:
            self.collectives.peers.fail(UsageError("its program has left the model by an exception."))
        self.collectives.close()

    def _restore(self) -> None:
        """Give a model whose parameters stayed in memory ordinary ones again."""
        with torch.no_grad():
            for unit in self.units:
                if unit.place is None:
                    continue
                values = self.values.bytes_of(unit)
                plain = {
                    param: torch.nn.Parameter(
                        unit.view(values, param).clone(memory_format=torch.preserve_format),
                        requires_grad=self.wrappers[param].requires_grad,
                    )
                    for param in unit.spec.params
                }
                for binding in unit.bindings:
                    binding.register(plain[binding.wrapper.index])
                unit.end()
                self._standing[unit.number].close()  # so that there is one unit's worth of both at most

    def _free_memory(self) -> None:
        """Give gathered memory back; what views were kept of it read NaN from now on."""
        for unit in self.units:
            unit.end()
        for memory in self._memory:
            memory.close()

    def end_at_exit(self) -> None:
        """End when the module is gone or the interpreter exits; an uncaught exception keeps the store."""
        self.end(is_clean=getattr(sys, "last_value", None) is None)
