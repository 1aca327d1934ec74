"""Whole values: what the program reads and writes of parameters, outside of forwards and steps."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nvoffload.backend import Backend
from nvoffload.collectives import Collectives
from nvoffload.mover import Job
from nvoffload.residency import Residency
from nvoffload.tiles import Tiles
from nvoffload.unit import State, Unit


class Values:
    """Reads and writes parameters by number. Both wait for the unit's pending updates."""

    def __init__(
        self,
        backend: Backend,
        residency: Residency,
        device: torch.device,
        collectives: Collectives | None = None,
    ) -> None:
        self._collectives = collectives
        self._backend = backend
        self._residency = residency
        self._layout = backend.layout
        self._device = device
        self.read_bytes = 0  # of the disk
        self.write_bytes = 0

    def unit_of(self, index: int) -> Unit:
        """Return the unit of a parameter."""
        return self._residency.units[self._layout.place_of(index)[0]]

    @torch.no_grad()
    def read(self, index: int) -> Tensor:
        """Return the parameter's values after all steps made so far: a fresh tensor."""
        self._backend.check()
        unit, spec = self.unit_of(index), self._layout.specs[index]
        self._residency.settle(unit, is_ended=False)
        self._residency.wait_delivered(unit)
        # Of several ranks each reads its part, also if this one happens to have all: so that one can't go alone.
        is_here = unit.place is not None and unit.state is not State.GATHERING
        if is_here and (self._collectives is None or unit.is_standing):
            self._backend.device.synchronize()
            return unit.view(self.bytes_of(unit), index).clone(memory_format=torch.preserve_format)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        flat = torch.zeros(spec.numel, dtype=dtype, device=self._device)
        out = flat.as_strided(spec.shape, spec.stride)
        tiles = self._layout.tiles_with([index], unit.spec.tiles)
        self._backend.device.synchronize()
        if tiles:
            job = self._residency.updates.fetch(tiles, {index: out.data_ptr()}, [index], is_demand=True)
            with self._backend.guarded() as mover:
                mover.wait(job, is_ended=True)
        if self._collectives is not None:
            self._collectives.sum_bytes("read", unit.number, flat.view(torch.uint8))
        if self._backend.config.param_offload == "nvme":
            self.read_bytes += sum(self._layout.tiles[i].fetched_bytes for i in tiles)
        return out

    @torch.no_grad()
    def read_state(self, index: int, zones: Sequence[Mapping[int, Tiles]], word: int) -> Tensor:
        """Return a word of the optimizer's states after all steps made so far: float32, shaped as the parameter.

        `zones`: what the optimizer's updates visit, by unit. Read past engine and counters: for looking, not for
        training. Of several ranks all call this, and each reads its part.
        """
        self._backend.check()
        unit, spec = self.unit_of(index), self._layout.specs[index]
        self._residency.settle(unit, is_ended=True)
        flat, verify = torch.zeros(spec.numel, dtype=torch.float32), self._backend.config.verify
        for tiles in (zone[unit.number] for zone in zones if unit.number in zone):
            for position, tile in enumerate(tiles.indices if index in tiles.updates else ()):
                for s in (s for s in self._layout.tiles[tile].segments if s.param == index):
                    content = tiles.state_word(position, word, verify=verify)
                    words = torch.frombuffer(content, dtype=torch.float32)
                    flat[s.param_start : s.param_start + s.numel] = words[s.tile_start : s.tile_start + s.numel]
        if self._collectives is not None:
            self._collectives.sum_host_bytes("state", unit.number, flat.view(torch.uint8))
        return flat.as_strided(spec.shape, spec.stride).to(self._device)

    def bytes_of(self, unit: Unit) -> Tensor:
        """Return the memory that holds the unit's values now, as bytes. REQUIRES: it has a place."""
        assert unit.place is not None
        out = torch.empty(0, dtype=torch.uint8, device=self._device)
        return out.set_(unit.place.storage(unit.spec.nbytes))

    @torch.no_grad()
    def write(self, index: int, values: Tensor) -> None:
        """Replace a parameter's values. A bfloat16 master becomes exactly these."""
        self._backend.check()
        unit, spec = self.unit_of(index), self._layout.specs[index]
        self._residency.check_unwritten(unit)
        self._residency.settle(unit, is_ended=True)
        dense = torch.empty_strided(spec.shape, spec.stride, dtype=values.dtype, device=self._device)
        dense.copy_(values)
        if unit.place is not None:
            self._residency.wait_delivered(unit)
            unit.view(self.bytes_of(unit), index).copy_(dense)
        self._backend.device.synchronize()
        addresses = unit.values_in(unit.place) if unit.is_standing and unit.place else {index: dense.data_ptr()}
        self._store(unit, addresses, [index])
        with self._residency.lock:
            unit.advance([index])
        self._share(unit)

    def _share(self, unit: Unit) -> None:
        """Each rank has stored its part of values that may differ between ranks: all take those."""
        if self._collectives is None:
            return
        if unit.is_standing or unit.pins:
            self._residency.renew(unit)
        else:
            self._residency.forget(unit)

    def write_back(self, unit: Unit) -> None:
        """A forward changed stand-ins in place: their values are the parameters' from now on."""
        assert unit.place is not None
        self._residency.settle(unit, is_ended=True)
        self._backend.device.synchronize()
        self._store(unit, unit.values_in(unit.place), unit.written())
        with self._residency.lock:
            unit.take_writes()
        self._share(unit)

    def _store(self, unit: Unit, values: Mapping[int, int], params: Sequence[int]) -> None:
        """Bring `params` home from `values`, addresses by number."""
        tiles = self._layout.tiles_with(params, unit.spec.tiles)
        committer = self._backend.committer
        generation = committer.begin_write() if committer else 0
        if not tiles:
            return
        job = Job("NVO_STORE", self._backend.tiles(tiles), values=values, pending=params)
        verify = self._backend.config.verify
        with self._backend.guarded() as mover:
            before = mover.stats()
            mover.run(job, generation=generation, values_stand=unit.is_standing, verify=verify)
            after = mover.stats()
        self.read_bytes += after.read_bytes - before.read_bytes
        self.write_bytes += after.write_bytes - before.write_bytes
