"""Pending updates: gradients that a step has captured and no job has applied yet, by unit.

Says which jobs a unit's update takes and hands them to the mover; knows neither hooks nor frames.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nvoffload.backend import Backend
from nvoffload.layout import UnitSpec
from nvoffload.mover import Group, Job, Work
from nvoffload.tiles import Tiles


@dataclass(frozen=True, slots=True)
class Pending:
    """One step's share of one unit: what to do to the tiles that hold its states."""

    tiles: Tiles
    works: tuple[Work, ...]
    groups: tuple[Group, ...]
    generation: int

    def touched(self) -> set[int]:
        """Return the tiles that have a pending parameter: only those are read and written."""
        return set(self.tiles.layout.tiles_with((work.param for work in self.works), self.tiles.indices))


class Updates:
    """What is pending. A unit's steps are applied in call order."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pending: dict[int, list[Pending]] = {}

    def units(self) -> list[int]:
        """Return the units that have something pending, oldest first."""
        return list(self._pending)

    def before(self, generation: int) -> list[int]:
        """Return the units that have something pending of an earlier generation."""
        return [unit for unit, found in self._pending.items() if any(p.generation < generation for p in found)]

    def is_pending(self, unit: int) -> bool:
        """Has the unit a captured gradient that no job applies yet?"""
        return unit in self._pending

    def add(self, unit: int, pending: Pending) -> None:
        """Capture one more step of a unit."""
        if pending.tiles.indices:  # a rank may own nothing of a unit
            self._backend.mover.expect(pending.generation, 1)
        self._pending.setdefault(unit, []).append(pending)

    def submit(self, unit: int, values: Mapping[int, int], *, values_stand: bool, is_demand: bool) -> list[Job]:
        """Hand a unit's pending steps to the mover; new values go to `values`, addresses by parameter."""
        jobs = []
        for pending in self._pending.pop(unit, []):
            if not pending.tiles.indices:
                continue
            job = Job("NVO_UPDATE", pending.tiles, values=values, works=pending.works, groups=pending.groups)
            with self._backend.guarded() as mover:
                mover.submit(
                    job,
                    generation=pending.generation,
                    is_demand=is_demand,
                    values_stand=values_stand,
                    verify=self._backend.config.verify,
                )
            jobs.append(job)
        return jobs

    def untouched(self, unit: int, spec: UnitSpec) -> list[int]:
        """Return the tiles of a unit that its pending steps neither read nor write."""
        touched: set[int] = set()
        for pending in self._pending.get(unit, []):
            touched |= pending.touched()
        return [i for i in spec.tiles if i not in touched]

    def fetch(self, tiles: Sequence[int], values: Mapping[int, int], params: Iterable[int], *, is_demand: bool) -> Job:
        """Bring the values of `params` in some tiles of one unit to `values`."""
        job = Job("NVO_FETCH", self._backend.tiles(tiles), values=values, pending=params)
        with self._backend.guarded() as mover:
            return mover.submit(job, is_demand=is_demand, verify=self._backend.config.verify)
