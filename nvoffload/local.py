"""Forwards of a rank's own: a whole copy of what is gathered in parts, so that no other rank has to take part.

Fills the copy, lends it to `residency`, and takes it back; keeps nothing afterwards.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from nvoffload.backend import Backend
from nvoffload.buffers import available_memory_bytes
from nvoffload.collectives import LOCAL_PASS, Collectives
from nvoffload.config import format_bytes
from nvoffload.errors import MachineError
from nvoffload.layout import ALIGN, Layout, cut_tiles, lay_units, pack_zone
from nvoffload.mover import Job
from nvoffload.residency import Residency
from nvoffload.store import new_table
from nvoffload.swapfile import SwapFile, check_space
from nvoffload.tiles import Busy, HostParams, Tiles
from nvoffload.unit import Unit


class LocalCopy:
    """The whole parameters of some units in this rank's own folder, or in host memory if they live there."""

    def __init__(self, backend: Backend, numbers: frozenset[int]) -> None:
        self._backend = backend
        self._layout = _whole(backend.layout, numbers)
        self._busy = Busy(self._layout)
        self._file: SwapFile | None = None
        self._hosts: list[HostParams] = []
        self._tiles: dict[int, Tiles] = {}
        try:
            self._place(numbers)
        except BaseException:
            self.close()
            raise

    def _place(self, numbers: frozenset[int]) -> None:
        nbytes = sum(tile.fetched_bytes for tile in self._layout.tiles)
        run, store = self._backend.run, self._backend.store
        table = new_table(len(self._layout.tiles))
        if self._backend.config.param_offload == "nvme":
            assert run is not None and store is not None
            check_space(run.folder.path, nbytes, "local_forward(), a copy of all parameters on every rank,")
            self._file = SwapFile(run.folder, f"{store.name}-local.r{run.rank}.f0.swap")
            self._file.extend(max(ALIGN, nbytes))
        elif nbytes > available_memory_bytes() * 9 // 10:
            raise MachineError(
                f"local_forward() copies all parameters to host memory on every rank: {format_bytes(nbytes)}, and "
                f'{format_bytes(available_memory_bytes())} are available. Use param_offload="nvme".'
            )
        zone = pack_zone(0, range(len(self._layout.tiles)), [tile.fetched_bytes for tile in self._layout.tiles])
        for number in numbers:
            indices = self._layout.units[number].tiles
            tiles = self._tiles[number] = Tiles(self._layout, indices, self._busy)
            if self._file is not None:
                tiles.put_params_at(self._file.fd, table, zone.offsets)
            else:
                self._hosts.append(HostParams(self._layout, indices, has_fetched=True, has_remainders=False))
                tiles.put_params_on_host(self._hosts[-1])

    def fill(self, unit: Unit, values: Mapping[int, int]) -> None:
        """Copy a unit's values from `values`, addresses by parameter."""
        tiles = self._tiles[unit.number]
        job = Job("NVO_FILL_PARAM", tiles, values=values, pending=unit.spec.params)
        with self._backend.guarded() as mover:
            mover.run(job, verify=self._backend.config.verify)
        if self._file is not None:
            self._backend.fill_bytes += sum(self._layout.tiles[i].fetched_bytes for i in tiles.indices)

    def fetch(self, unit: Unit, values: Mapping[int, int], *, is_demand: bool) -> Job:
        """Start bringing a unit's values to `values`."""
        job = Job("NVO_FETCH", self._tiles[unit.number], values=values, pending=unit.spec.params)
        with self._backend.guarded() as mover:
            return mover.submit(job, is_demand=is_demand, verify=self._backend.config.verify)

    def close(self) -> None:
        """Remove it. REQUIRES: no fetch runs."""
        if self._file is not None:
            self._file.close(remove=True)
        for host in self._hosts:
            host.arena.close()


def _whole(layout: Layout, numbers: frozenset[int]) -> Layout:
    """Return a layout of the units' compute weights as one rank would have them, and nothing else."""
    flats = tuple(
        replace(flat, low_bytes=0, is_trainable=False, shard_numel=flat.numel, num_ranks=1)
        for flat in layout.flats
        if flat.unit in numbers
    )
    tiles = cut_tiles(flats, layout.specs, layout.tile_numel)
    names, kept = [unit.name for unit in layout.units], [unit.is_kept for unit in layout.units]
    return Layout(layout.align, layout.tile_numel, layout.specs, flats, tiles, lay_units(names, kept, flats, tiles))


@contextmanager
def local_forward(backend: Backend, residency: Residency, collectives: Collectives | None) -> Iterator[None]:
    """Run the block without other ranks. All ranks enter together, and leave when they like.

    REQUIRES: at rest, everything stepped is written. One rank needs no copy.
    """
    numbers = frozenset(unit.number for unit in residency.units if residency.is_framed(unit.spec))
    if collectives is None:
        with residency.alone(None):
            yield
        return
    with collectives.agreeing("local"):
        copy = LocalCopy(backend, numbers)
    try:
        collectives.enter_pass(LOCAL_PASS)
        for unit in residency.units:
            residency.need(unit, is_backward=False)
            try:
                if unit.number in numbers:
                    assert unit.place is not None
                    backend.device.synchronize()
                    copy.fill(unit, unit.values_in(unit.place))
            finally:
                residency.unneed(unit)
        with residency.alone(copy):
            yield
    finally:
        copy.close()
