"""What a program does with its units, as events: entries, closes, ends. With several ranks the same on all.

Sits between hooks and `residency`, which brings what an event needs; decides nothing about memory.

Note [Skipped]: several ranks have one order (`schedule`, Note [Ranks]). A program that comes to an event
first runs here, unseen, those predicted before it: the unit is brought as if used, and closing it adds
zeros to the average of its gradients. What is left at the end of a forward of the root, or of a backward,
is run then.
"""

from collections.abc import Callable

from nvoffload.collectives import EVAL_PASS, TRAIN_PASS
from nvoffload.residency import Residency
from nvoffload.schedule import BACKWARD, CLOSE, FORWARD, Event
from nvoffload.unit import Unit


class Order:
    """The events of one model. Called on the training thread, or autograd's, one at a time."""

    def __init__(self, residency: Residency) -> None:
        self.reduce: Callable[[Unit], None] = lambda unit: None  # a unit's backward is over on every rank
        self._residency = residency

    def begin_pass(self, kind: str) -> None:
        """A forward of the root begins, "train" or "eval"."""
        seen, collectives, schedule = None, self._residency.collectives, self._residency.schedule
        if collectives is not None:
            collectives.enter_pass(TRAIN_PASS if kind == "train" else EVAL_PASS)
            seen = collectives.any_of("pass", schedule.seen())
        with self._residency.lock:
            schedule.begin_pass(kind, seen)

    def enter(self, unit: Unit, *, is_backward: bool) -> None:
        """Return with the unit shown and pinned; `leave` takes the pin back."""
        if self._residency.is_noted(unit.spec):
            self._catch_up((unit.number, BACKWARD if is_backward else FORWARD))
        self._residency.need(unit, is_backward=is_backward)

    def leave(self, unit: Unit) -> None:
        """One user of the unit less."""
        self._residency.unneed(unit)

    def has_visits(self, unit: Unit) -> bool:
        """Do visits in backward bring the unit or average its gradients? Kept ones stay, and come last."""
        return unit.own_place is None or self._residency.is_noted(unit.spec)

    def close(self, unit: Unit) -> None:
        """A visit of the unit in backward is over; its gradients are there."""
        if self._residency.collectives is not None and self._residency.is_noted(unit.spec):
            self._catch_up((unit.number, CLOSE))
            self._close(unit, is_seen=True)

    def end(self, mark: Event) -> None:
        """A forward of the root, or a backward, ends: what it has skipped can't come any more."""
        if self._residency.collectives is not None:
            self._catch_up(mark)
            self._residency.note(mark, is_seen=True)

    def _close(self, unit: Unit, *, is_seen: bool) -> None:
        self._residency.note((unit.number, CLOSE), is_seen=is_seen)
        self.reduce(unit)

    def _catch_up(self, event: Event) -> None:
        if self._residency.collectives is None:
            return
        for number, kind in self._residency.schedule.skipped(event):
            unit = self._residency.units[number]
            if number < 0:
                self._residency.note((number, kind), is_seen=False)
            elif kind != CLOSE:
                self._residency.need(unit, is_backward=kind == BACKWARD, is_seen=False)
                self._residency.unneed(unit)
            elif not unit.pins:
                self._close(unit, is_seen=False)
