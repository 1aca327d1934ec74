"""Faults of the disk: each is a typed error with its place; nothing hangs, no value is half-changed."""

import errno
import os
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from stores import committed_steps
from torch import nn

import nvoffload as nvo
from nvoffload import runtime
from nvoffload.io.sim import Op, Sim, open_sim_engine
from nvoffload.swapfile import SwapFile, find_runs

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def use_sim(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the next models use the engine's twin; return it."""

    def use(**behaviour: Any) -> Sim:
        sim = Sim(seed=5, **behaviour)

        def open_twin(kind: str, *, block_bytes: int, queue_depth: int) -> Any:
            return open_sim_engine(sim, block_bytes=block_bytes, queue_depth=queue_depth)

        monkeypatch.setattr(runtime, "open_engine", open_twin)
        return sim

    return use


def offload(model: nn.Module, swap: Path, **options: Any) -> Any:
    options = {"param_offload": "none", "optimizer_offload": "nvme", "nvme_path": swap, **options}
    return nvo.offload(model, **options)


def one_step(model: nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
    models.tiny_loss(model, step).backward()
    opt.step()
    opt.zero_grad()


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def history(steps: int) -> list[list[torch.Tensor]]:
    """The values of TINY after each step, in memory."""
    model = models.tiny()
    with nvo.offload(model, param_offload="none", optimizer_offload="cpu"):
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        found = [values_of(model)]
        for step in range(steps):
            one_step(model, opt, step)
            found.append(values_of(model))
    return found


def is_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_every_io_fails(swap: Path, use_sim: Any) -> None:
    """Whichever request fails, the error has its place, the pool is whole, values are old or new, the store stays.
    Three steps of TINY, flush and close, with EIO at request 1, 2, ... until none fails."""
    known = history(3)
    number = 0
    while True:
        number += 1
        use_sim(fail={number: errno.EIO})
        model, done = models.tiny(), 0
        try:
            offload(model, swap)
            opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(3):
                one_step(model, opt, step)
                done += 1
            model.flush()
        except nvo.StorageError as error:
            first = error
        else:
            model.close()
            break
        assert first.errno == errno.EIO
        assert str(first.filename).endswith(".swap")
        assert first.offset >= 4096
        assert first.nbytes > 0
        assert is_equal(values_of(model), known[done]) or is_equal(values_of(model), known[min(done + 1, 3)])
        if hasattr(model, "_nvoffload"):
            pool = model._nvoffload.pool
            assert pool.num_free == pool.buffer_count
            for call in (opt.step if done else model.flush, model.flush):
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                with pytest.raises(nvo.StorageError) as again:
                    call()
                assert str(again.value) == str(first)
            model.close()
            assert committed_steps(swap) in ([], [done - 1], [done])
            if done >= 2:
                assert committed_steps(swap)[0] >= 1
            for run in find_runs(swap):
                run.remove()
                run.close()
        assert os.listdir(swap) == []
        assert number < 100
    assert number > 6


def test_a_torn_step_is_never_committed(swap: Path, use_sim: Any) -> None:
    """A step that failed is no generation: the manifest stays at the step before.
    A write of the second step fails; then flush and a forward with gradients are tried."""
    failing = [False]
    use_sim(fail=lambda _, request: errno.EIO if failing[0] and request.op == Op.WRITE else 0)
    model = offload(models.tiny(), swap)
    opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
    one_step(model, opt, 0)
    model.flush()
    failing[0] = True
    with pytest.raises(nvo.StorageError):
        one_step(model, opt, 1)
    for call in (model.flush, lambda: models.tiny_loss(model, 2)):
        with pytest.raises(nvo.StorageError):
            call()
    model.close()
    assert committed_steps(swap) == [1]


def test_a_flipped_bit_is_found_before_it_is_used(swap: Path, use_sim: Any) -> None:
    """A wrong read is a CorruptionError naming file, place and parameter; no value changes.
    The first read of the first step comes with one bit wrong."""
    use_sim(flip_bit=1)
    with offload(models.tiny(), swap) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        before = values_of(model)
        with pytest.raises(nvo.CorruptionError, match=r"0\.weight") as caught:
            one_step(model, opt, 0)
        assert str(caught.value.filename).endswith(".swap")
        assert caught.value.offset >= 4096
        assert is_equal(values_of(model), before)


def test_without_verify_nothing_is_checked(swap: Path, use_sim: Any) -> None:
    """verify=False is what it says.
    The same flipped bit passes."""
    use_sim(flip_bit=1)
    with offload(models.tiny(), swap, verify=False) as model:
        one_step(model, nvo.optim.AdamW(model.parameters(), lr=1e-2), 0)


@pytest.mark.parametrize(
    "behaviour", [{"short_every": 2}, {"reorder": True, "latency_s": (0.0, 0.01)}, {"latency_s": 0.005}], ids=str
)
def test_a_slow_or_odd_disk_changes_no_bit(behaviour: dict[str, Any], swap: Path, use_sim: Any) -> None:
    """Short transfers, other orders and latency are about time only.
    Three steps against memory."""
    use_sim(**behaviour)
    with offload(models.tiny(), swap) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            one_step(model, opt, step)
        model.flush()
        assert is_equal(values_of(model), history(3)[-1])


def test_a_silent_disk_is_an_error_in_time(swap: Path, use_sim: Any) -> None:
    """A request that never completes is a StorageError within the limit, again at the next call.
    Everything after the first step is held; later it is let go."""
    held: set[int] = set()
    sim = use_sim(never=held)
    model = offload(models.tiny(), swap, io=nvo.Io(stall_limit_s=1))
    opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
    one_step(model, opt, 0)
    held.update(range(len(sim.log) + 1, len(sim.log) + 1000))
    try:
        for _ in range(2):
            with pytest.raises(nvo.StorageError) as caught:
                one_step(model, opt, 1)
            assert caught.value.errno == errno.ETIMEDOUT
            assert caught.value.filename
    finally:
        sim.release()
        model.close()


@pytest.mark.parametrize("size", [0, 4096])
def test_a_truncated_file_is_named(size: int, swap: Path) -> None:
    """Missing bytes are an error, never zeros.
    The swap file is cut between two steps."""
    with pytest.raises(nvo.StorageError, match=r"\.swap") as caught, offload(models.tiny(), swap) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        one_step(model, opt, 0)
        model.flush()
        after = values_of(model)
        os.truncate(next(swap.rglob("*.swap")), size)
        one_step(model, opt, 1)
    assert caught.value.errno == errno.ENODATA
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
