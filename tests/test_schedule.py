"""Prediction and replacement: how many gathers a pass costs, against the fewest there can be."""

import math
from collections.abc import Iterable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvoffload import schedule
from nvoffload.schedule import Event, Schedule

pytestmark = pytest.mark.timeout(60)


class Frames:
    """Frames driven as a runtime would, every gather done at once; counts gathers."""

    def __init__(self, num_units: int, num_frames: int, forward_order: Sequence[int] | None = None) -> None:
        self.schedule = Schedule(num_units, range(num_units) if forward_order is None else forward_order)
        self.held: list[int | None] = [None] * num_frames
        self.num_gathers = 0
        self.num_demands = 0

    def run(self, kind: str | None, events: Iterable[Event]) -> int:
        """Run one pass, without a root forward if `kind` is None; return its gathers."""
        before = self.num_gathers
        if kind is not None:
            self.schedule.begin_pass(kind)
            self.prefetch(frozenset())
        for unit, is_backward in events:
            self.schedule.note(unit, is_backward)
            if unit not in self.held:
                frame = self.schedule.victim(self.held, {unit})
                assert frame is not None
                self.gather(unit, frame)
                self.num_demands += 1
            self.prefetch(frozenset({unit}))
        return self.num_gathers - before

    def prefetch(self, pinned: frozenset[int]) -> None:
        starts = self.schedule.prefetches(self.held, pinned)
        assert len({frame for _, frame in starts}) == len(starts)
        for unit, frame in starts:
            occupant = self.held[frame]
            assert occupant not in pinned
            assert occupant is None or self.schedule.next_use(occupant) > self.schedule.next_use(unit)
            self.gather(unit, frame)

    def gather(self, unit: int, frame: int) -> None:
        assert unit not in self.held
        self.held[frame] = unit
        self.num_gathers += 1


def forward(num_units: int) -> list[Event]:
    return [(unit, False) for unit in range(num_units)]


def training(num_units: int) -> list[Event]:
    return [*forward(num_units), *((unit, True) for unit in reversed(range(num_units)))]


def fewest_gathers(order: Sequence[int], held: frozenset[int], num_frames: int, *, is_ahead: bool = True) -> int:
    """Return the least number of gathers by which `order` can be served: tries every choice.

    With `is_ahead`, a unit is gathered while the one before it is in use.
    """

    @cache
    def cost(at: int, held: frozenset[int]) -> int:
        if at == len(order):
            return 0
        if order[at] in held:
            return cost(at + 1, held)
        if len(held) < num_frames:
            return 1 + cost(at + 1, held | {order[at]})
        stays = {order[at - 1]} if is_ahead and at else set()
        return 1 + min(cost(at + 1, held - {out} | {order[at]}) for out in held - stays)

    return cost(0, held)


@pytest.mark.parametrize("num_frames", [2, 3, 5])
@pytest.mark.parametrize("num_units", [6, 7, 12])
def test_a_training_pass_gathers_all_but_the_frames_each_way(num_units: int, num_frames: int) -> None:
    """The first units are there from the backward before, the last are kept over the turnaround.
    Forward and backward counted apart in steady state; the fewest possible, and none on demand."""
    frames = Frames(num_units, num_frames)
    assert frames.run("train", training(num_units)) == num_units + num_units - num_frames
    for _ in range(3):
        before = frames.num_gathers
        frames.schedule.begin_pass("train")
        assert frames.run(None, forward(num_units)) == num_units - num_frames
        assert set(frames.held) == set(range(num_units - num_frames, num_units))
        assert frames.run(None, training(num_units)[num_units:]) == num_units - num_frames
        assert set(frames.held) == set(range(num_frames))
        order = [unit for unit, _ in training(num_units)]
        for is_ahead in (True, False):
            fewest = fewest_gathers(order, frozenset(range(num_frames)), num_frames, is_ahead=is_ahead)
            assert frames.num_gathers - before == fewest
    assert frames.num_demands == 0


def test_units_that_all_fit_are_gathered_once() -> None:
    frames = Frames(4, 4)
    assert [frames.run("train", training(4)) for _ in range(3)] == [4, 0, 0]


def test_an_eval_pass_predicts_forward_only() -> None:
    """Goal: eval has its own order, and what training left in the frames is used.
    Method: train, eval, eval, train."""
    frames = Frames(8, 3)
    frames.run("train", training(8))
    assert frames.run("eval", forward(8)) == 5
    assert frames.run("eval", forward(8)) == fewest_gathers(range(8), frozenset({5, 6, 7}), 3)
    assert frames.num_demands == 0
    frames.run("train", training(8))
    assert frames.run("train", training(8)) == 10


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_a_recorded_order_costs_the_fewest_gathers(data: st.DataObject) -> None:
    """Goal: gathering ahead costs no gather that overlap doesn't need, and nothing is left to demand.
    Method: any order, seen once, against every possible choice."""
    num_units, num_frames = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 4))
    event = st.tuples(st.integers(0, num_units - 1), st.booleans())
    events = data.draw(st.lists(event, min_size=1, max_size=16))
    frames = Frames(num_units, num_frames)
    order = [unit for unit, _ in events]
    frames.run("train", events)
    frames.num_demands = 0
    for _ in range(2):
        held = frozenset(unit for unit in frames.held if unit is not None)
        assert frames.run("train", events) == fewest_gathers(order, held, num_frames)
    assert frames.num_demands == 0


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=16), st.integers(1, 4))
def test_demands_alone_cost_the_fewest_gathers(order: list[int], num_frames: int) -> None:
    """Goal: the victim is Belady's. Method: a recorded order without gathering ahead, against every choice."""
    planned, held = Schedule(6, range(6)), list[int | None]([None] * num_frames)
    for _ in range(2):
        planned.begin_pass("eval")
        fewest = fewest_gathers(order, frozenset(u for u in held if u is not None), num_frames, is_ahead=False)
        num_gathers = 0
        for unit in order:
            planned.note(unit, False)
            if unit not in held:
                frame = planned.victim(held, ())
                assert frame is not None
                held[frame] = unit
                num_gathers += 1
    assert num_gathers == fewest


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_a_changed_order_costs_gathers_and_never_raises(data: st.DataObject) -> None:
    """Goal: any history of passes is served. Method: random passes of all kinds, none of them announced right."""
    num_units, num_frames = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    event = st.tuples(st.integers(0, num_units - 1), st.booleans())
    kind = st.sampled_from(["train", "eval", None])
    frames = Frames(num_units, num_frames, data.draw(st.permutations(range(num_units))))
    for chosen, events in data.draw(st.lists(st.tuples(kind, st.lists(event, max_size=12)), max_size=5)):
        frames.run(chosen, events)
        assert sorted(frames.schedule.first_uses()) == list(range(num_units))


def test_a_skipped_unit_is_jumped_over() -> None:
    """Goal: after a layer that is dropped, the rest is still predicted. Method: leave out unit 2."""
    frames = Frames(6, 2)
    frames.run("train", training(6))
    frames.schedule.begin_pass("train")
    for unit in (0, 1, 3):
        frames.schedule.note(unit, False)
    assert frames.schedule.next_use(4) == 1
    assert list(frames.schedule.upcoming()) == [4, 5, 3, 2, 1, 0]


def test_after_an_unknown_event_nothing_is_predicted_until_the_next_pass() -> None:
    planned = Schedule(4, range(4))
    planned.begin_pass("train")
    planned.note(3, True)
    planned.note(0, False)
    assert planned.next_use(1) == math.inf
    assert list(planned.upcoming()) == []
    assert planned.prefetches([None, None], ()) == []
    planned.begin_pass("train")
    assert list(planned.upcoming()) == [3, 0]


def test_nothing_is_predicted_beyond_the_end_of_a_pass() -> None:
    planned = Schedule(2, range(2))
    planned.begin_pass("eval")
    assert (planned.next_use(0), planned.next_use(1)) == (1, 2)
    planned.note(0, False)
    assert (planned.next_use(0), planned.next_use(1)) == (math.inf, 1)
    planned.note(1, False)
    assert list(planned.upcoming()) == []


def test_passes_without_a_root_forward_are_predicted() -> None:
    """Goal: a loop over submodules is gathered ahead too. Method: the training loop, no pass ever begun."""
    frames = Frames(8, 3)
    for _ in range(3):
        cost = frames.run(None, training(8))
    assert cost == 2 * (8 - 3) + 0
    assert frames.num_demands <= 3
    frames.schedule.begin_pass("train")
    assert list(frames.schedule.upcoming()) == list(range(8))


def test_a_unit_entered_often_is_kept() -> None:
    """Goal: every entry is recorded. Method: unit 0 between all others; after one pass it stays."""
    frames = Frames(5, 3)
    events = [event for unit in range(1, 5) for event in ((0, False), (unit, False))]
    frames.run("eval", events)
    frames.run("eval", events)
    assert frames.run("eval", events) <= 3
    assert 0 in frames.held


def test_first_uses_follow_the_last_training_pass() -> None:
    """Goal: updates run in the order of the next forward. Method: another order than assumed, one unit unused."""
    planned = Schedule(4, [0, 1, 2, 3])
    assert planned.first_uses() == [0, 1, 2, 3]
    planned.begin_pass("train")
    assert planned.first_uses() == [0, 1, 2, 3]
    for unit, is_backward in ((2, False), (0, False), (2, False), (0, True), (2, True)):
        planned.note(unit, is_backward)
    assert planned.first_uses() == [2, 0, 1, 3]
    planned.begin_pass("eval")
    planned.note(3, False)
    assert planned.first_uses() == [2, 0, 1, 3]


def test_a_victim_is_empty_or_farthest_or_least_recent() -> None:
    planned = Schedule(5, range(5))
    assert planned.victim([0, None, 1], ()) == 1
    planned.begin_pass("eval")
    assert planned.victim([2, 4, 3], ()) == 1
    assert planned.victim([2, 4, 3], {4}) == 2
    for unit in (1, 0, 2):  # out of order: nothing more is known, unit 1 was used longest ago
        planned.note(unit, False)
    planned.note(1, True)
    assert planned.victim([1, 2, 0], ()) == 2


def test_pinned_units_stay() -> None:
    planned = Schedule(4, range(4))
    planned.begin_pass("eval")
    assert planned.victim([0, 1], {0, 1}) is None
    assert planned.victim([], ()) is None
    assert planned.prefetches([2, 3], {2, 3}) == []
    assert planned.prefetches([2, 3], ()) == [(0, 1), (1, 0)]


def test_a_prefetch_waits_for_the_frame_that_costs_nothing() -> None:
    """Goal: unit 2, needed soon, isn't sent away because unit 0 is still in use.
    Method: 0, 1, 3, 2 in three frames; 3 takes the frame of 0 as soon as that is free."""
    planned = Schedule(4, [0, 1, 3, 2])
    planned.begin_pass("eval")
    planned.note(0, False)
    assert planned.prefetches([0, 1, 2], {0}) == []
    assert planned.prefetches([0, 1, 2], ()) == [(3, 0)]
    planned.note(1, False)
    assert planned.prefetches([0, 1, 2], {1}) == [(3, 0)]


def test_a_prefetch_does_not_wait_for_what_stays_pinned() -> None:
    """Goal: something is always read while a unit computes. Method: 0 is pinned though its turn is over."""
    planned = Schedule(4, [0, 1, 3, 2])
    planned.begin_pass("eval")
    planned.note(0, False)
    planned.note(1, False)
    assert planned.prefetches([0, 1, 2], {0, 1}) == [(3, 2)]


def test_recorded_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a pass without end needs bounded memory. Method: a small bound; beyond it nothing is predicted."""
    monkeypatch.setattr(schedule, "EVENTS_MAX", 4)
    frames = Frames(4, 2)
    frames.run("train", training(4) * 3)
    frames.schedule.begin_pass("train")
    assert list(frames.schedule.upcoming()) == [0, 1, 2, 3]
    frames.run(None, training(4))
    assert list(frames.schedule.upcoming()) == []
