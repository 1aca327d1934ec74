"""Where units are: brings them where they are needed, makes room, waits, and books the waiting.

What to bring and what to give up is asked of `schedule`; what an update takes, of `update`.

Note [Same on all ranks]: with several ranks every decision follows from the order of events and steps, never
from what has arrived, for each starts a collective. An arrival is noted only where somebody waits for it.

Note [Turnaround]: nothing is released when a forward ends, only when its frame is wanted. So the last
units of forward are still there for the first of backward, and the first ones for the next forward.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from nvoffload.backend import Backend
from nvoffload.collectives import Collectives, Handle
from nvoffload.errors import UsageError
from nvoffload.interrupts import Held
from nvoffload.layout import UnitSpec
from nvoffload.mover import Job
from nvoffload.schedule import BACKWARD, FORWARD, Event, Schedule
from nvoffload.unit import Place, State, Unit
from nvoffload.update import Pending, Updates


@dataclass
class Stalls:
    """Seconds that the training thread waited for a unit: for the disk, a commit, kernels, or other ranks."""

    disk_s: float = 0.0
    commit_s: float = 0.0
    kernel_s: float = 0.0
    peer_s: float = 0.0


class Home(Protocol):
    """Whole values of framed units, elsewhere than in the backend."""

    def fetch(self, unit: Unit, values: Mapping[int, int], *, is_demand: bool) -> Job:
        """Start bringing a unit's values to `values`, addresses by parameter."""


class Residency:
    """Moves units between their homes and gathered memory. Its lock guards all units and the schedule.

    Hooks may run on any thread, one at a time; the lock is never held while waiting, so a unit that is
    waited for is pinned first.
    """

    def __init__(
        self,
        backend: Backend,
        units: Sequence[Unit],
        frames: Sequence[Place],
        *,
        is_framed: Callable[[UnitSpec], bool],
        synchronize: Callable[[], None],
        collectives: Collectives | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.units = units
        self.updates = Updates(backend)
        self.stalls = Stalls()
        self._backend = backend
        self._frames = frames
        self._occupants: list[int | None] = [None] * len(frames)
        self._synchronize = synchronize
        self.is_framed = is_framed
        self.collectives = collectives
        self._home: Home | None = None  # of values, if not the backend
        self.is_alone = False  # does this rank run without the others?
        backend.start_before = self._start_before
        self.schedule = self._new_schedule()

    def _new_schedule(self) -> Schedule:
        order = [unit.number for unit in self.units if self.is_noted(unit.spec)]
        return Schedule(len(self.units), order, has_closes=self.collectives is not None)

    def is_noted(self, spec: UnitSpec) -> bool:
        """Is the unit's use an event? Kept ones are there all the time, and so is, with one rank, what stands."""
        if self.collectives is None:
            return self.is_framed(spec)
        return not spec.is_kept and spec.nbytes > 0

    # ---- needs

    def need(self, unit: Unit, *, is_backward: bool, is_seen: bool = True) -> None:
        """Return with the unit shown and pinned; `unneed` takes the pin back. `is_seen`: by the program itself."""
        with self.lock:
            self.check()
            if unit.pins == 0:
                self.check_unwritten(unit)
            if self.is_noted(unit.spec):
                self.note((unit.number, BACKWARD if is_backward else FORWARD), is_seen=is_seen)
            unit.pins += 1
        try:
            self._bring(unit)
        except BaseException:
            self.unneed(unit)
            raise

    def note(self, event: Event, *, is_seen: bool) -> None:
        """Take an event down."""
        with self.lock:
            self.schedule.note(*event, is_seen=is_seen)
            if self.collectives is not None:
                self.collectives.position.events = self.schedule.digest
                self.collectives.position.recent.append(event)

    def unneed(self, unit: Unit) -> None:
        """One user of the unit less; its memory stays as it is until it is wanted."""
        with self.lock:
            assert unit.pins > 0
            unit.pins -= 1

    def check(self) -> None:
        """Raise the first error, of this rank or another."""
        self._backend.check()
        if self.collectives is not None:
            self.collectives.check()

    @contextmanager
    def alone(self, home: Home | None) -> Iterator[None]:
        """Let the block bring units from `home`, without other ranks; framed ones are gone before and after."""
        together = self.collectives, self.schedule
        self._give_up_frames()
        self.collectives, self._home, self.is_alone = None, home, True
        self.schedule = self._new_schedule()
        try:
            yield
        finally:
            self._give_up_frames()
            (self.collectives, self.schedule), self._home, self.is_alone = together, None, False

    def _give_up_frames(self) -> None:
        for unit in self.units:
            self.settle(unit, is_ended=True)
            self.wait_delivered(unit)
            if self.is_framed(unit.spec):
                self.forget(unit)

    def _bring(self, unit: Unit) -> None:
        if self.collectives is not None:
            self._start_own()
        blocker: Unit | None = unit
        while blocker is not None:
            with self.lock:
                blocker = self._start(unit, is_demand=True)
                if blocker is None:
                    for job in unit.deliveries:
                        self._backend.mover.promote(job)
                    self.prefetch()
            self.wait_delivered(blocker or unit)
        with self.lock:
            if unit.state is State.GATHERED:
                self.check_unwritten(unit)
                unit.show()

    def check_unwritten(self, unit: Unit) -> None:
        """Raise UsageError if somebody has written through a stand-in outside of a forward, and undo that."""
        names = [self._backend.layout.specs[param].name for param in unit.written()]
        if not names:
            return
        is_spoilt = unit.state is State.SHOWN and not unit.is_standing and not unit.pins
        unit.undo_writes()
        if is_spoilt:
            self._release(unit)
        raise UsageError(
            f"{', '.join(names)} changed in place through a tensor kept from a forward, after that forward: the "
            "change is lost. Change the parameter itself, under torch.no_grad(): p.copy_(...), p.mul_(...)."
        )

    def _release(self, unit: Unit) -> None:
        self._occupants = [None if number == unit.number else number for number in self._occupants]
        unit.release()
        self._synchronize()  # what still computes with the old values

    def prefetch(self) -> None:
        """Start what will be needed next, as far as frames allow."""
        with self.lock:
            self._start_own()
            for number, frame in self.schedule.prefetches(self._occupants, self._pinned()):
                occupant = self._occupants[frame]
                if occupant is None or self._has_arrived(self.units[occupant]):
                    self._gather_into(self.units[number], frame, is_demand=False)

    def _start_own(self) -> None:
        """Start units that have a place of their own, all at the first chance: in whatever order they are used."""
        with self.lock:
            for unit in self.units:
                if unit.own_place is not None and unit.state is State.AWAY:
                    self._start(unit, is_demand=False)

    def _pinned(self) -> set[int]:
        return {unit.number for unit in self.units if unit.pins}

    def _start(self, unit: Unit, *, is_demand: bool) -> Unit | None:
        """See that the unit is on its way or there; return another one whose arrival must be awaited first."""
        if unit.state is not State.AWAY:
            return None
        if unit.own_place is not None:
            with Held():
                self._gather(unit, unit.own_place, is_demand=is_demand)
            return None
        frame = self.schedule.victim(self._occupants, self._pinned() - {unit.number})
        if frame is None:
            raise self._too_many()
        occupant = self._occupants[frame]
        if occupant is not None and not self._has_arrived(self.units[occupant]):
            return self.units[occupant]
        self._gather_into(unit, frame, is_demand=is_demand)
        return None

    def _too_many(self) -> UsageError:
        framed = [unit for unit in self.units if self.is_framed(unit.spec)]
        names = ", ".join(unit.spec.name for unit in framed if unit.pins)
        return UsageError(
            f"{names} are needed at once, and device_budget holds {len(self._frames)} units of "
            f"{max((unit.spec.nbytes for unit in framed), default=0)} bytes. Raise device_budget, or put what runs "
            "inside each other into one unit with units=..."
        )

    def _has_arrived(self, unit: Unit) -> bool:
        """Note an arrival nobody waited for; False while it is on its way. See Note [Same on all ranks]."""
        mover = self._backend.mover
        if (
            self.collectives is None
            and unit.state is State.GATHERING
            and all(mover.has_come_to(job, is_ended=False) for job in unit.deliveries)
        ):
            self._backend.check()
            unit.arrive()
        return unit.state is not State.GATHERING

    def _gather_into(self, unit: Unit, frame: int, *, is_demand: bool) -> None:
        occupant = self._occupants[frame]
        if occupant is not None:
            self.check_unwritten(self.units[occupant])
            self._release(self.units[occupant])
        with Held():
            self._occupants[frame] = unit.number
            self._gather(unit, self._frames[frame], is_demand=is_demand)

    def _gather(self, unit: Unit, place: Place, *, is_demand: bool) -> None:
        """REQUIRES: signals are held, for a job without a booking is an update that nobody waits for."""
        values = unit.values_in(place)
        rest = self.updates.untouched(unit.number, unit.spec)
        jobs = self.updates.submit(unit.number, values, values_stand=False, is_demand=is_demand)
        if self._home is not None:
            jobs.append(self._home.fetch(unit, values, is_demand=is_demand))
        elif rest:
            jobs.append(self.updates.fetch(rest, values, unit.spec.params, is_demand=is_demand))
        unit.gather(place, jobs)
        self._exchange(unit)
        self._keep_jobs(unit, jobs)

    def _exchange(self, unit: Unit) -> None:
        """Ask for the other ranks' parts of a unit that is on its way; ours come first."""
        if self.collectives is None:
            return
        jobs, mover = list(unit.deliveries), self._backend.mover

        def before() -> None:
            for job in jobs:
                mover.wait(job, is_ended=False)

        assert unit.place is not None
        unit.collective = self.collectives.gather(unit.number, unit.pieces_in(unit.place), before)

    def _keep_jobs(self, unit: Unit, jobs: Iterable[Job]) -> None:
        mover = self._backend.mover
        unit.jobs = [job for job in unit.jobs if not mover.has_come_to(job, is_ended=True)] + list(jobs)

    # ---- waiting

    def wait_delivered(self, unit: Unit) -> None:
        """Wait until the unit's values are where its jobs, and the other ranks', bring them."""
        self._wait(list(unit.deliveries), is_ended=False)
        if unit.collective is not None:
            self.wait_for(unit.collective)
        with self.lock:
            if unit.state is State.GATHERING:
                unit.arrive()

    def wait_for(self, handle: Handle) -> None:
        """Wait for a collective."""
        assert self.collectives is not None
        start_s = time.perf_counter()
        try:
            self.collectives.wait(handle)
        finally:
            self.stalls.peer_s += time.perf_counter() - start_s

    def _wait(self, jobs: Sequence[Job], *, is_ended: bool) -> None:
        mover = self._backend.mover
        if all(mover.has_come_to(job, is_ended=is_ended) for job in jobs):
            self._backend.check_jobs()
            return
        before, start_s = mover.stats(), time.perf_counter()
        try:
            for job in jobs:
                mover.promote(job)
            with self._backend.guarded():
                for job in jobs:
                    mover.wait(job, is_ended=is_ended)
        finally:
            passed_s, after = time.perf_counter() - start_s, mover.stats()
            disk_s = min(passed_s, after.disk_wait_s - before.disk_wait_s)
            commit_s = min(passed_s - disk_s, after.gate_wait_s - before.gate_wait_s)
            self.stalls.disk_s += disk_s
            self.stalls.commit_s += commit_s
            self.stalls.kernel_s += passed_s - disk_s - commit_s

    # ---- updates

    def capture(self, unit: Unit, pending: Pending) -> None:
        """A step has captured gradients of the unit: what it shows is old from now on."""
        with self.lock:
            unit.advance(work.param for work in pending.works)
            self.updates.add(unit.number, pending)

    def start_updates(self, numbers: Iterable[int], *, is_everywhere: bool = False) -> None:
        """Start the pending updates of units that have a place to go to, or of all of them; in forward order."""
        with self.lock:
            order = {number: position for position, number in enumerate(self.schedule.first_uses())}
            for number in sorted(numbers, key=lambda n: order.get(n, -1)):
                unit = self.units[number]
                if unit.place is not None or is_everywhere:
                    self._update(unit)

    def _start_before(self, generation: int) -> None:
        with self.lock:
            self.start_updates(self.updates.before(generation), is_everywhere=True)

    def _update(self, unit: Unit) -> None:
        values = unit.values_in(unit.place) if unit.place is not None else {}
        if unit.state is State.SHOWN:
            unit.hide()
        with Held():
            jobs = self.updates.submit(unit.number, values, values_stand=unit.is_standing, is_demand=False)
            self._renew(unit, jobs)
            self._keep_jobs(unit, jobs)

    def _renew(self, unit: Unit, jobs: list[Job]) -> None:
        """`jobs`, and those of other ranks, bring new values to where the unit is, if it has a place."""
        if unit.place is None or (self.collectives is None and not jobs):
            return
        if unit.state is State.GATHERED:
            unit.gather(unit.place, jobs)
        else:
            unit.deliveries = [*unit.deliveries, *jobs]
        self._exchange(unit)

    def renew(self, unit: Unit) -> None:
        """This rank's part of a unit was written at home; let every rank have it where the unit is."""
        with self.lock, Held():
            if unit.state is State.SHOWN:
                unit.hide()
            self._renew(unit, [])

    def forget(self, unit: Unit) -> None:
        """Give up the copy of a framed unit whose values were written at home."""
        with self.lock:
            if unit.state is not State.AWAY and not unit.pins:
                self._release(unit)

    def settle(self, unit: Unit, *, is_ended: bool) -> None:
        """Return once no job reads the unit's gradients any more, or, if `is_ended`, none of its jobs runs."""
        with self.lock:
            if self.updates.is_pending(unit.number):
                self._update(unit)
            jobs = list(unit.jobs)
        self._wait(jobs, is_ended=is_ended)
        with self.lock:
            self._has_arrived(unit)

    def finish(self) -> None:
        """Apply everything pending and wait until it is written."""
        self.start_updates(self.updates.units(), is_everywhere=True)
        self._wait([job for unit in self.units for job in unit.jobs], is_ended=True)
        with self.lock:
            for unit in self.units:
                self._has_arrived(unit)
