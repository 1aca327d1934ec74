"""Faults of the disk: each is a typed error with its place; nothing hangs, no value is half-changed."""

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from stores import committed_steps, committed_values
from torch import nn

import nvoffload as nvo
from nvoffload.io.sim import Op
from nvoffload.swapfile import SwapFile, find_runs

pytestmark = pytest.mark.timeout(60)
Values = list[torch.Tensor]
UPDATES = ["deferred", "blocking"]


def offload(model: nn.Module, swap: Path, **options: Any) -> Any:
    options = {"param_offload": "none", "optimizer_offload": "nvme", "nvme_path": swap, **options}
    return nvo.offload(model, **options)


def one_step(model: nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
    models.tiny_loss(model, step).backward()
    opt.step()
    opt.zero_grad()


def values_of(model: nn.Module) -> Values:
    return [p.detach().clone() for p in model.parameters()]


def history(steps: int, make: Callable[[], nn.Module] = models.tiny, loss_of: Any = models.tiny_loss) -> list[Values]:
    """The values of a model after each step, in memory."""
    model = make()
    with nvo.offload(model, param_offload="none", optimizer_offload="cpu"):
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        found = [values_of(model)]
        for step in range(steps):
            loss_of(model, step).backward()
            opt.step()
            opt.zero_grad()
            found.append(values_of(model))
    return found


def is_equal(ours: Values, theirs: Values) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def small_stack() -> nn.Module:
    return models.stack(depth=4)


class Course:
    """A short training that may fail anywhere: what it was doing, and how many steps it has made."""

    NUM_STEPS = 2

    def __init__(self, model: Any, loss_of: Any) -> None:
        self.model = model
        self.loss_of = loss_of
        self.place = "offload"
        self.done = 0

    def run(self, swap: Path, **options: Any) -> None:
        """Two steps, a flush, a read, one step more, and the end."""
        model = self.model
        offload(model, swap, **options)
        self.place = "AdamW"
        self.opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(self.NUM_STEPS):
            self._step(step)
        self.place = "flush"
        model.flush()
        self.place = "read"
        self.values = values_of(model)
        self._step(self.NUM_STEPS)
        self.place = "flush"
        model.flush()

    def _step(self, step: int) -> None:
        self.place = "forward"
        loss = self.loss_of(self.model, step)
        self.place = "backward"
        loss.backward()
        self.place = "step"
        self.done += 1
        self.opt.step()
        self.opt.zero_grad()

    def check_stopped(self, first: nvo.StorageError) -> None:
        """Whatever is tried next raises the first error again."""
        calls = [
            lambda: self.loss_of(self.model, 0),
            lambda: next(self.model.parameters()).detach().clone(),
            self.model.flush,
        ]
        if self.place != "AdamW":
            calls.append(self.opt.step)
            for p in self.model.parameters():
                p.grad = torch.ones_like(p)
        for call in calls:
            with pytest.raises(nvo.StorageError) as again:
                call()
            assert str(again.value) == str(first)


STACK = (small_stack, models.stack_loss)
# The model, tiers, and where an error must have surfaced: with deferred updates, with blocking ones.
CASES = {
    "none-nvme": (models.tiny, models.tiny_loss, ["forward", "flush"], ["step"]),
    "cpu-nvme": (*STACK, ["forward", "flush"], ["step"]),
    "nvme-cpu": (*STACK, ["forward", "backward", "flush", "read"], ["forward", "backward", "step", "read"]),
    "nvme-nvme": (*STACK, ["forward", "backward", "flush", "read"], ["forward", "backward", "step", "read"]),
}


@pytest.mark.timeout(240)  # 50 to 120 trainings
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("case", CASES)
def test_every_io_fails(case: str, update: str, swap: Path, use_sim: Any, pools: list[bool]) -> None:
    """Whichever request fails, the error has its place, the pool is whole, values are old or new, the store stays.
    Steps, flush, read and the end with two frames, with EIO at request 1, 2, ... until none fails."""
    make, loss_of, *expected_places = CASES[case]
    param_offload, optimizer_offload = case.split("-")
    options = {"param_offload": param_offload, "optimizer_offload": optimizer_offload, "update": update}
    options["device_budget"] = models.stack_budget(2)
    known = history(Course.NUM_STEPS + 1, make, loss_of)
    places: set[str] = set()
    number = 0
    while True:
        number += 1
        start_s = time.monotonic()
        use_sim(fail={number: errno.EIO})
        course = Course(make(), loss_of)
        try:
            course.run(swap, **options)
        except nvo.StorageError as error:
            first = error
        else:
            course.model.close()
            break
        places.add(course.place)
        assert first.errno == errno.EIO
        assert str(first.filename).endswith(".swap")
        assert first.offset >= 4096
        assert first.nbytes > 0
        if course.place == "offload":
            assert is_equal(values_of(course.model), known[0])
            assert not hasattr(course.model, "_nvoffload")
        else:
            course.check_stopped(first)
            layout = course.model._nvoffload.layout
            course.model.close()
            check_end(course, known, layout, swap)
        assert all(pools)
        assert os.listdir(swap) == []
        assert time.monotonic() - start_s < 20
        assert number < 300
    assert len(pools) == number
    assert places >= {"offload", *expected_places[update == "blocking"]}
    assert ("AdamW" in places) is (optimizer_offload == "nvme")


def check_end(course: Course, known: list[Values], layout: Any, swap: Path) -> None:
    """A closed model has old or new values, or says why not; a kept store has exactly those of its step."""
    done = course.done
    try:
        values = values_of(course.model)
    except nvo.UsageError as error:
        assert "closed" in str(error)
    else:
        near = known[max(0, done - 1) : done + 1]
        assert all(any(torch.equal(v, k[i]) for k in near) for i, v in enumerate(values))
    steps = committed_steps(swap)
    assert steps == [] or 1 <= steps[0] <= done
    if steps:
        assert is_equal(committed_values(swap, layout), known[steps[0]])
    for run in find_runs(swap):
        run.remove()
        run.close()


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_a_torn_step_is_never_committed(tier: str, update: str, swap: Path, use_sim: Any) -> None:
    """A step that failed is no generation: the manifest stays at the step before.
    A write of the second step fails; then flush and a forward with gradients are tried."""
    failing = [False]
    use_sim(fail=lambda _, request: errno.EIO if failing[0] and request.op == Op.WRITE else 0)
    model = offload(models.tiny(), swap, param_offload=tier, update=update)
    opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
    one_step(model, opt, 0)
    model.flush()
    failing[0] = True
    if update == "blocking":
        with pytest.raises(nvo.StorageError):
            one_step(model, opt, 1)
    else:
        with contextlib.suppress(nvo.StorageError):  # of its first unit, while it starts the second
            one_step(model, opt, 1)
    for call in (model.flush, lambda: models.tiny_loss(model, 2)):
        with pytest.raises(nvo.StorageError):
            call()
    layout = model._nvoffload.layout
    model.close()
    assert committed_steps(swap) == [1]
    assert is_equal(committed_values(swap, layout), history(1)[1])


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])
@pytest.mark.parametrize("keep", ["on_error", "always", "never"])
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_an_error_that_nobody_saw_is_raised_by_close(
    tier: str, keep: str, op: Op, swap: Path, use_sim: Any, pools: list[bool]
) -> None:
    """What failed in the background is told at the end, once everything is freed; the store stays as documented.
    The update of the last step fails, then close(), twice."""
    model, layout = fail_last_step(swap, use_sim, op, param_offload=tier, keep=keep)
    while not has_failed_unseen(model):
        time.sleep(0.001)
    check_close(model, layout, swap, kept=keep != "never", pools=pools)


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])
@pytest.mark.parametrize(
    ("tier", "keep"), [("none", "never"), ("none", "on_error"), *((tier, "always") for tier in ("none", "cpu", "nvme"))]
)
def test_an_error_within_close_is_raised_by_close(
    tier: str, keep: str, op: Op, swap: Path, use_sim: Any, pools: list[bool]
) -> None:
    """Where close() itself must apply the last step, its failure is told, once everything is freed.
    The update of the last step waits for a slow disk and fails under close()."""
    model, layout = fail_last_step(swap, use_sim, op, param_offload=tier, keep=keep)
    check_close(model, layout, swap, kept=keep != "never", pools=pools)


def test_an_error_at_the_end_of_a_with_block_is_raised_unless_another_is(swap: Path, use_sim: Any) -> None:
    """A clean end raises as close() does; an exception that leaves the block is the one that counts.
    The update of the last step fails unseen in both."""
    model, _ = fail_last_step(swap, use_sim, Op.WRITE, keep="never")
    with pytest.raises(nvo.StorageError), model:
        pass
    model, _ = fail_last_step(swap, use_sim, Op.WRITE, keep="never")
    with pytest.raises(ValueError), model:
        raise ValueError
    assert os.listdir(swap) == []


def fail_last_step(swap: Path, use_sim: Any, op: Op, **options: Any) -> tuple[Any, Any]:
    """Two steps of TINY, the first one committed; the second one's transfers of one kind will fail."""
    failing = [False]
    use_sim(fail=lambda _, request: errno.EIO if failing[0] and request.op == op else 0, latency_s=0.05)
    model = offload(models.tiny(), swap, **options)
    opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
    one_step(model, opt, 0)
    model.flush()
    failing[0] = True
    one_step(model, opt, 1)
    return model, model._nvoffload.layout


def has_failed_unseen(model: Any) -> bool:
    try:
        model._nvoffload.backend.mover.check()
    except nvo.StorageError:
        return True
    return False


def check_close(model: Any, layout: Any, swap: Path, *, kept: bool, pools: list[bool]) -> None:
    known = history(2)
    is_standing = model._nvoffload.config.param_offload == "none"
    with pytest.raises(nvo.StorageError) as caught:
        model.close()
    assert caught.value.errno == errno.EIO
    assert caught.value.offset >= 4096
    model.close()
    assert pools == [True]
    assert committed_steps(swap) == ([1] if kept else [])
    if kept:
        assert is_equal(committed_values(swap, layout), known[1])
    if is_standing:
        for i, value in enumerate(values_of(model)):
            assert torch.equal(value, known[1][i]) or torch.equal(value, known[2][i])


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_a_flipped_bit_is_found_before_it_is_used(tier: str, update: str, swap: Path, use_sim: Any) -> None:
    """A wrong read is a CorruptionError naming file, place and parameter; no value changes.
    The first read of all, of a forward or of an update, comes with one bit wrong."""
    use_sim(flip_bit=1)
    with offload(models.tiny(), swap, param_offload=tier, update=update) as model:
        opt = nvo.optim.AdamW(model.parameters())
        with pytest.raises(nvo.CorruptionError, match=r"0\.weight") as caught:
            one_step(model, opt, 0)
            assert update == "deferred"
            models.tiny_loss(model, 1)
        assert caught.value.errno == errno.EBADMSG
        assert str(caught.value.filename).endswith(".swap")
        assert caught.value.offset >= 4096
        assert caught.value.nbytes > 0
    if tier == "none":
        assert torch.equal(model[0].weight, models.tiny()[0].weight)


def test_a_flipped_bit_of_a_read_parameter_is_found(swap: Path, use_sim: Any) -> None:
    """What a program reads by hand is checked too.
    The first read of a parameter that is on disk."""
    use_sim(flip_bit=1)
    with (
        offload(models.tiny(), swap, param_offload="nvme") as model,
        pytest.raises(nvo.CorruptionError, match=r"2\.bias"),
    ):
        model[2].bias.detach().clone()


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_without_verify_nothing_is_checked(tier: str, swap: Path, use_sim: Any) -> None:
    """verify=False is what it says.
    The same flipped bit passes."""
    use_sim(flip_bit=1)
    with offload(models.tiny(), swap, param_offload=tier, verify=False) as model:
        one_step(model, nvo.optim.AdamW(model.parameters(), lr=1e-2), 0)
        model.flush()


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize(
    "behaviour", [{"short_every": 2}, {"reorder": True, "latency_s": (0.0, 0.01)}, {"latency_s": 0.005}], ids=str
)
def test_a_slow_or_odd_disk_changes_no_bit(behaviour: dict[str, Any], tier: str, swap: Path, use_sim: Any) -> None:
    """Short transfers, other orders and latency are about time only.
    Three steps of a stack with two frames against memory."""
    use_sim(**behaviour)
    with offload(small_stack(), swap, param_offload=tier, device_budget=models.stack_budget(2)) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            models.stack_loss(model, step).backward()
            opt.step()
            opt.zero_grad()
        model.flush()
        assert is_equal(values_of(model), history(3, *STACK)[-1])


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_a_silent_disk_is_an_error_in_time(tier: str, swap: Path, use_sim: Any) -> None:
    """A request that never completes is a StorageError within the limit, again at the next call.
    Everything after the first step is held; later it is let go."""
    held: set[int] = set()
    sim = use_sim(never=held)
    model = offload(models.tiny(), swap, param_offload=tier, io=nvo.Io(stall_limit_s=1))
    opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
    one_step(model, opt, 0)
    model.flush()
    held.update(range(len(sim.log) + 1, len(sim.log) + 1000))
    try:
        start_s = time.monotonic()
        for _ in range(2):
            with pytest.raises(nvo.StorageError) as caught:
                for step in (1, 2):
                    one_step(model, opt, step)
            assert caught.value.errno == errno.ETIMEDOUT
            assert caught.value.filename
        assert time.monotonic() - start_s < 5
    finally:
        sim.release()
        model.close()


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("size", [0, 4096])
def test_a_truncated_file_is_named(size: int, tier: str, swap: Path) -> None:
    """Missing bytes are an error, never zeros.
    The swap file is cut between two steps."""
    with (
        pytest.raises(nvo.StorageError, match=r"\.swap") as caught,
        offload(models.tiny(), swap, param_offload=tier) as model,
    ):
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        one_step(model, opt, 0)
        model.flush()
        after = values_of(model)
        os.truncate(next(swap.rglob("*.swap")), size)
        one_step(model, opt, 1)
        model.flush()
    assert caught.value.errno == errno.ENODATA
    if tier == "none":
        assert is_equal(values_of(model), after)


def test_a_manifest_without_space_is_an_error(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that fails is told at the next step or flush; the last committed step is kept.
    ENOSPC for manifests after the first step; close() without `with`."""
    model = offload(models.tiny(), swap)
    opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
    one_step(model, opt, 0)
    model.flush()
    real = SwapFile.write

    def write(self: SwapFile, content: bytes, offset: int) -> int:
        if "manifest" in self.path.name:
            raise self._error("write", errno.ENOSPC, offset, len(content))
        return real(self, content, offset)

    monkeypatch.setattr(SwapFile, "write", write)
    with pytest.raises(nvo.StorageError, match=r"No space") as caught:
        for step in range(1, 4):
            one_step(model, opt, step)
        model.flush()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(nvo.StorageError, match=r"No space"):
        model.flush()
    model.close()
    assert committed_steps(swap) == [1]
