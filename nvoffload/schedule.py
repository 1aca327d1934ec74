"""From the recorded order, position and frames: what to gather and release next.

Pure: it never waits and does no I/O. A wrong prediction costs gathers, never correctness.

Note [Prediction]: A pass is the events, units entered forward or backward, from one root forward to the
next. The events of the last finished pass of a kind predict the next of that kind; before there is one,
the assumed order does. An event that is not the predicted one moves the position to where it next stands
in the prediction; if it stands nowhere ahead, nothing is predicted for the rest of the pass. Nothing is
ever predicted beyond the end of a pass.

Passes without a root forward (submodules called one by one) have no such mark. There an event that comes
again, and does not stand ahead, starts the next pass.

Note [Ranks]: several ranks have one order. A rank that comes to an event runs those predicted before it that
it has `skipped`, unseen. Beside entries the order then has closes, of a unit's visit in backward, and marks
(unit -1) where a forward of the root or a backward ends. What no rank has seen leaves the order: at once
if it was seen elsewhere in the same pass, else after 8 passes, so that a unit that is left out now and then
(LayerDrop) stays.

Note [Replacement]: A demanded unit takes the frame whose occupant is used farthest in future (Belady). A
unit gathered ahead takes the frame that it would take just before its use, while the unit before it is
in use; if the occupant of that frame is still needed, it waits. To take another frame at once would cost
a gather later. To wait for the frame of the unit before it as well would save one here and there, but
then nothing is read while that unit computes: a pass over units whose last ones lie in the frames would
go through a single frame.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

EVENTS_MAX = 1 << 20
UNUSED_PASSES_MAX = 8
FORWARD, BACKWARD, CLOSE = range(3)

Event = tuple[int, int]  # unit, kind
FORWARD_END: Event = (-1, FORWARD)
BACKWARD_END: Event = (-1, BACKWARD)


class Schedule:
    """Predicts the use of the units in `forward_order`, assumed so, and reversed in backward, until one is recorded."""

    def __init__(self, num_units: int, forward_order: Sequence[int], *, has_closes: bool = False) -> None:
        assert all(0 <= unit < num_units for unit in forward_order)
        assert len(set(forward_order)) == len(forward_order)
        self._forward_order = tuple(forward_order)
        forward: list[Event] = [(unit, FORWARD) for unit in forward_order]
        kinds = (BACKWARD, CLOSE) if has_closes else (BACKWARD,)
        backward: list[Event] = [(unit, kind) for unit in reversed(forward_order) for kind in kinds]
        if has_closes:
            forward.append(FORWARD_END)
            backward.append(BACKWARD_END)
        self._unused: Counter[tuple[str, Event]] = Counter()  # passes in a row in which no rank has seen it
        self._recorded = {"train": forward + backward, "eval": forward, "loose": forward + backward}
        self._last_uses = [0] * num_units  # a count of events
        self._events: list[Event] = []
        self._num_events = 0
        self.digest = 0  # of all events so far
        self._position = 0  # in what is expected, of the event predicted next
        self._start("loose")

    def begin_pass(self, kind: str, seen: Sequence[bool] | None = None) -> None:
        """Close the pass before, whose events now predict its kind, and start one of `kind`, "train" or "eval".

        `seen`: which events of the pass before some rank has seen; None: all.
        """
        assert kind in ("train", "eval"), kind
        if seen is not None:
            self._drop_unseen(seen)
        self._record()
        self._start(kind)

    def seen(self) -> list[bool]:
        """Return which events of this pass the program has seen; the others were caught up."""
        return list(self._seen_flags)

    def _drop_unseen(self, seen: Sequence[bool]) -> None:
        elsewhere = {event for event, is_seen in zip(self._events, seen, strict=True) if is_seen}
        kept = []
        for event, is_seen in zip(self._events, seen, strict=True):
            key = (self._kind, event)
            self._unused[key] = 0 if is_seen or event in elsewhere else self._unused[key] + 1
            if is_seen or event[0] < 0 or (event not in elsewhere and self._unused[key] < UNUSED_PASSES_MAX):
                kept.append(event)
        self._events = kept

    def skipped(self, event: Event) -> list[Event]:
        """Return what is predicted before the next place of `event`: nothing if that isn't, or passes have no mark."""
        if self._kind == "loose":
            return []
        try:
            return self._expected[self._position : self._expected.index(event, self._position)]
        except ValueError:
            return []

    def note(self, unit: int, kind: int, *, is_seen: bool = True) -> None:
        """Take down that the unit is entered, or closed, now, or that a mark is passed."""
        event = (unit, kind)
        if not self._advance(event) and self._kind == "loose" and event in self._seen:
            self._record()
            self._start("loose")
            self._advance(event)
        self._num_events += 1
        if unit >= 0 and kind != CLOSE:
            self._last_uses[unit] = self._num_events
        self._seen.add(event)
        self.digest = hash((self.digest, unit, kind))
        if len(self._events) < EVENTS_MAX:
            self._events.append(event)
            self._seen_flags.append(is_seen)

    def next_use(self, unit: int) -> float:
        """Return in how many events, at least 1, the unit is predicted to be used next; inf if not in this pass."""
        return self._use(unit, self._position) - self._position + 1

    def upcoming(self) -> Iterator[int]:
        """Yield the units that are predicted for the rest of this pass, in order, each once."""
        seen = set()
        for position in range(self._position, len(self._expected)):
            unit, kind = self._expected[position]
            if kind != CLOSE and unit >= 0 and unit not in seen:
                seen.add(unit)
                yield unit
            if len(seen) == len(self._uses):
                return

    def first_uses(self) -> list[int]:
        """Return every unit in the forward order that the next training pass is predicted to have."""
        events = self._events if self._kind == "train" and self._events else self._recorded["train"]
        forward = (unit for unit, kind in events if kind == FORWARD and unit >= 0)
        return list(dict.fromkeys([*forward, *self._forward_order]))

    def victim(self, frames: Sequence[int | None], pinned: Collection[int]) -> int | None:
        """Return the frame for a unit demanded now: an empty one, else by Note [Replacement]; None if all are pinned.

        `frames` holds the unit in each frame; `pinned` units stay. Of occupants without a predicted use
        the least recently used goes.
        """
        if None in frames:
            return frames.index(None)
        free = [frame for frame, unit in enumerate(frames) if unit not in pinned]
        return max(free, key=lambda frame: self._remoteness(frames[frame]), default=None)

    def prefetches(self, frames: Sequence[int | None], pinned: Collection[int]) -> list[tuple[int, int]]:
        """Return the (unit, frame) to start gathering now, soonest use first, each frame at most once.

        A unit in a frame is never sent away for one that is used later.
        """
        held, starts = list(frames), []
        for unit in self.upcoming():
            if unit in held:
                continue
            frame = held.index(None) if None in held else self._frame_ahead(unit, held, pinned)
            if frame is None:
                break
            held[frame] = unit
            starts.append((unit, frame))
        return starts

    def _frame_ahead(self, unit: int, held: Sequence[int | None], pinned: Collection[int]) -> int | None:
        start = self._use(unit, self._position)
        assert isinstance(start, int)
        busy = set(pinned)
        if start > self._position:
            # The unit in use now is done by then; how long others stay pinned isn't known.
            busy -= {event[0] for event in self._expected[max(0, self._position - 1) : self._position]}
            busy.add(self._expected[start - 1][0])
        later = {frame: self._use(occupant, start) for frame, occupant in enumerate(held) if occupant not in busy}
        farthest = max(later.values(), default=math.inf)
        free = [
            frame
            for frame, use in later.items()
            if use == farthest and held[frame] not in pinned and self._use(held[frame], self._position) == farthest
        ]
        return max(free, key=lambda frame: self._remoteness(held[frame]), default=None)

    def _remoteness(self, unit: int | None) -> tuple[float, int]:
        assert unit is not None
        return self._use(unit, self._position), -self._last_uses[unit]

    def _use(self, unit: int | None, start: int) -> float:
        """Return the first predicted position of the unit from `start` on."""
        assert unit is not None
        uses = self._uses.get(unit, ())
        index = bisect_left(uses, start)
        return uses[index] if index < len(uses) else math.inf

    def _advance(self, event: Event) -> bool:
        """Move behind the event where it stands ahead and return True; else to the end."""
        try:
            self._position = self._expected.index(event, self._position) + 1
        except ValueError:
            self._position = len(self._expected)
            return False
        return True

    def _record(self) -> None:
        if self._events:
            self._recorded[self._kind] = self._events

    def _start(self, kind: str) -> None:
        self._kind = kind
        self._expected = self._recorded[kind]
        self._position = 0
        self._events = []
        self._seen_flags: list[bool] = []
        self._seen: set[Event] = set()
        self._uses: dict[int, list[int]] = {}
        for position, (unit, use) in enumerate(self._expected):
            if use == CLOSE or unit < 0:
                continue
            self._uses.setdefault(unit, []).append(position)
