"""AdamW over offloaded models: parity with torch, equal bits however bytes move, bytes equal to the ledger."""

import functools
import importlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

import nvoffload as nvo
from nvoffload import backend as backend_room
from nvoffload import device as device_room
from nvoffload.ledger import Traffic

# The package exposes the function under this name, so the room is asked for by path.
opening_room = importlib.import_module("nvoffload.opening")
CASES = {
    "tiny": (models.tiny, models.tiny_loss, 1e-2),
    "t2": (models.t2, models.t2_loss, 1e-3),
    "stack": (models.stack, models.stack_loss, 1e-2),
}
DTYPES = [torch.float32, torch.bfloat16]
TIERS = list(itertools.product(("none", "cpu", "nvme"), repeat=2))  # of parameters, of states
pytestmark = pytest.mark.timeout(60)
Values = dict[str, torch.Tensor]


def groups_of(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": lr / 2, "weight_decay": 0.0}]


def train(
    model: nn.Module, opt: torch.optim.Optimizer, loss_of: Callable[[nn.Module, int], torch.Tensor], steps: int = 10
) -> Values:
    """Clipping, a scheduler, and windows of 1, 3 and 2 backward passes; returns the values by name."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    batch = 0
    for step in range(steps):
        for _ in range((1, 3, 2)[step % 3]):
            loss_of(model, batch).backward()
            batch += 1
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        opt.step()
        scheduler.step()
        opt.zero_grad()
    return values_of(model)


def values_of(model: nn.Module) -> Values:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_offloaded(
    case: str, tiers: tuple[str, str], swap: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> Values:
    make, loss_of, lr = CASES[case]
    model = make(dtype)
    with offload(model, tiers, swap, **options):
        return train(model, nvo.optim.AdamW(groups_of(model, lr), lr=lr), loss_of)


def offload(model: nn.Module, tiers: tuple[str, str], swap: Path, **options: Any) -> Any:
    path = swap if "nvme" in tiers else None
    return nvo.offload(model, param_offload=tiers[0], optimizer_offload=tiers[1], nvme_path=path, **options)


@functools.cache
def torch_values(case: str) -> Values:
    """What plain torch AdamW makes of a case."""
    make, loss_of, lr = CASES[case]
    model = make()
    return train(model, torch.optim.AdamW(groups_of(model, lr), lr=lr), loss_of)


@functools.cache
def memory_values(case: str, dtype: torch.dtype) -> Values:
    """The bits of a case with everything in memory, each step waited for."""
    return train_offloaded(case, ("none", "cpu"), Path(), dtype, update="blocking")


def assert_equal_bits(ours: Values, theirs: Values) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different


@pytest.mark.parametrize("case", ["tiny", "t2"])
@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_ten_steps_equal_torch_within_1e6(case: str, tiers: tuple[str, str], swap: Path) -> None:
    """Every parameter, by name, is where plain torch AdamW puts it, on all tiers.
    Two groups, clipping, a scheduler, windows of several backward passes."""
    ours = train_offloaded(case, tiers, swap)
    expected = torch_values(case)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert (ours[name] - value).abs().max() <= 1e-6, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["tiny", "t2"])
@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_tiers_and_deferral_change_no_bit(case: str, tiers: tuple[str, str], dtype: torch.dtype, swap: Path) -> None:
    """Where parameters and states live, and when an update is applied, change no bit.
    The same seeded training, deferred and blocking, against memory."""
    for update in ("deferred", "blocking"):
        assert_equal_bits(train_offloaded(case, tiers, swap, dtype, update=update), memory_values(case, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiers", [("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_the_number_of_frames_changes_no_bit(tiers: tuple[str, str], dtype: torch.dtype, swap: Path) -> None:
    """Two frames, or one for every unit, are about speed only, deferred or not.
    A stack of six units against memory; the plan says how many frames there are."""
    for num_frames, update in ((2, "deferred"), (2, "blocking"), (6, "deferred")):
        budget = models.stack_budget(num_frames, dtype)
        with offload(models.stack(dtype), tiers, swap, device_budget=budget, update=update) as model:
            assert model.offload_plan.gathered_text.startswith(f"{num_frames} frames")
            opt = nvo.optim.AdamW(groups_of(model, 1e-2), lr=1e-2)
            assert_equal_bits(train(model, opt, models.stack_loss), memory_values("stack", dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"update_threads": 3},
        {"buffer_size": "64KiB", "buffer_count": 2},
        {"io": nvo.Io(engine="portable", block_size="4KiB", queue_depth=3)},
        {"io": nvo.Io(engine="libaio", block_size="8KiB", queue_depth=1)},
        {"verify": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("tiers", [("none", "nvme"), ("nvme", "nvme")], ids="-".join)
def test_how_bytes_move_changes_no_bit(options: dict[str, Any], tiers: tuple[str, str], swap: Path) -> None:
    """Threads, tile sizes, engines, blocks and depth are about speed only.
    T2 in bf16 against memory."""
    ours = train_offloaded("t2", tiers, swap, torch.bfloat16, **options)
    assert_equal_bits(ours, memory_values("t2", torch.bfloat16))


def test_simd_levels_give_equal_bits(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scalar kernel trains to the same bits as the best one.
    The mover is opened at the scalar level."""
    expected = memory_values("t2", torch.float32)
    real = backend_room.Mover
    monkeypatch.setattr(backend_room, "Mover", lambda **options: real(**options, simd=0))
    assert_equal_bits(train_offloaded("t2", ("none", "nvme"), swap), expected)


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_a_late_device_gives_equal_bits(tiers: tuple[str, str], swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies by a device whose streams run late are waited for at the right places.
    The device twin performs a copy only when its stream is waited for."""
    expected = memory_values("t2", torch.bfloat16)
    monkeypatch.setattr(opening_room, "open_device", lambda _, threads: device_room.SimDevice(threads))
    if "nvme" not in tiers:  # on a host alone such tiers need no pool
        make_plan = opening_room.make_plan
        monkeypatch.setattr(opening_room, "make_plan", lambda *args: (make_plan(*args)[0], 2))
    assert_equal_bits(train_offloaded("t2", tiers, swap, torch.bfloat16, update_threads=2), expected)


# The kernel books pages of libraries, and the page of a file's times when it becomes dirty anew, to whoever
# meets them: a count without any of these must come within so many tries.
KERNEL_TRIES = 6


def kernel_io() -> tuple[int, int]:
    """Bytes that the kernel booked to the pump threads of this process: the manifest is not theirs."""
    read = write = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "nvo-pump":
            found = dict(re.findall(r"(\w+): (\d+)", (task / "io").read_text()))
            read, write = read + int(found["read_bytes"]), write + int(found["write_bytes"])
    return read, write


@pytest.mark.parametrize(("dtype", "read_per_element"), [(torch.float32, 8), (torch.bfloat16, 10)])
def test_bytes_equal_the_ledger_by_our_counters_and_the_kernels(
    dtype: torch.dtype, read_per_element: int, swap: Path
) -> None:
    """With parameters in memory a step reads 8n (fp32) or 10n (bf16) and writes 12n, to the byte, plus alignment.
    Five steps of a model of odd size; /proc counts direct I/O by thread."""
    steps = 5
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 301), nn.Linear(301, 77)).to(dtype)
    numel = sum(p.numel() for p in model.parameters())
    seen = []
    with offload(model, ("none", "nvme"), swap, buffer_size="256KiB") as offloaded:
        opt = nvo.optim.AdamW(model.parameters())
        assert offloaded.offload_stats().is_direct
        ledger = offloaded.offload_ledger(steps=steps)
        for _ in range(KERNEL_TRIES):
            before, kernel_before = offloaded.offload_stats(), kernel_io()
            for _ in range(steps):
                model(torch.ones(2, 1000, dtype=dtype)).float().pow(2).mean().backward()
                opt.step()
            offloaded.flush()
            after, kernel_after = offloaded.offload_stats(), kernel_io()
            assert (after.manifest_bytes - before.manifest_bytes) % 4096 == 0
            assert after.read_bytes - before.read_bytes == ledger.read_bytes
            assert after.write_bytes - before.write_bytes == ledger.write_bytes
            seen.append((kernel_after[0] - kernel_before[0], kernel_after[1] - kernel_before[1]))
            if seen[-1] == (ledger.read_bytes, ledger.write_bytes):
                break
    assert seen[-1] == (ledger.read_bytes, ledger.write_bytes)
    padding = 2 * 4 * 4096 + 4 * 64 * 6  # at most a page per part of a unit's last tile, 64 bytes per parameter
    assert 0 <= ledger.read_bytes / steps - read_per_element * numel <= padding
    assert 0 <= ledger.write_bytes / steps - 12 * numel <= padding


def check_counters(
    tiers: tuple[str, str], dtype: torch.dtype, width: int, num_frames: int, passes: int, swap: Path
) -> Traffic:
    """Train three steps of a Stack from the start and flush: all counters equal the ledger, which is returned."""
    for _ in range(KERNEL_TRIES):
        ledger, seen = count(tiers, dtype, width, num_frames, passes, swap)
        if seen == (ledger.read_bytes, ledger.write_bytes):
            break
    assert seen == (ledger.read_bytes, ledger.write_bytes)
    return ledger


def count(
    tiers: tuple[str, str], dtype: torch.dtype, width: int, num_frames: int, passes: int, swap: Path
) -> tuple[Traffic, tuple[int, int]]:
    """Check our counters against the ledger; return it and what the kernel has counted."""
    budget = models.stack_budget(num_frames, dtype, width)
    with offload(models.stack(dtype, width=width), tiers, swap, buffer_size="64KiB", device_budget=budget) as model:
        opt = nvo.optim.AdamW(model.parameters())
        before = kernel_io()
        for step in range(3):
            for batch in range(passes):
                models.stack_loss(model, step * passes + batch).backward()
            opt.step()
            opt.zero_grad()
        model.flush()
        stats, after = model.offload_stats(), kernel_io()
        ledger = model.offload_ledger(steps=3, passes=passes)
    assert stats.is_direct
    assert stats.fetch_bytes + stats.update_read_bytes == ledger.read_bytes
    assert stats.update_write_bytes == ledger.write_bytes
    assert (stats.user_read_bytes, stats.user_write_bytes) == (0, 0)
    assert stats.read_bytes == ledger.read_bytes
    assert stats.write_bytes == stats.fill_bytes + ledger.write_bytes
    return ledger, (after[0] - before[0], after[1] - before[1])


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("num_frames", [2, 3])
@pytest.mark.parametrize("width", [37, 149])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_parameters_on_disk_equal_the_ledger(
    dtype: torch.dtype, width: int, num_frames: int, passes: int, swap: Path
) -> None:
    """An update reads and writes 12n; of each pass only the units that no frame kept are fetched.
    Three steps and a flush by our counters, the engine's and the kernel's, against the ledger and a formula."""
    ledger = check_counters(("nvme", "nvme"), dtype, width, num_frames, passes, swap)
    layer = width * width + width
    numel = 101 * width + 6 * layer
    fetched = numel + 3 * (2 * passes - 1) * (6 - num_frames) * layer
    padding = 4096 * 7  # per visit, of the last tiles of seven units, a page per part; 64 bytes per parameter
    assert 0 <= ledger.write_bytes - 3 * 12 * numel <= 3 * 4 * padding
    assert 0 <= ledger.read_bytes - 3 * 12 * numel - dtype.itemsize * fetched <= (3 * 4 + 1 + 3 * 2 * passes) * padding


@pytest.mark.parametrize("tiers", [("none", "nvme"), ("cpu", "nvme"), ("nvme", "cpu")], ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_mixed_tiers_equal_the_ledger(dtype: torch.dtype, tiers: tuple[str, str], swap: Path) -> None:
    """What has a copy in memory is not read from disk.
    Three steps of two passes and a flush, with two frames."""
    ledger = check_counters(tiers, dtype, 149, 2, 2, swap)
    numel = 101 * 149 + 6 * (149 * 149 + 149)
    padding = 4096 * 7 * 12
    written = 4 if tiers[1] == "cpu" else 12
    assert 0 <= ledger.write_bytes - 3 * written * numel <= padding
    if tiers[0] != "nvme":
        assert 0 <= ledger.read_bytes - 3 * (12 - dtype.itemsize) * numel <= padding


def test_memory_tiers_move_no_bytes_of_a_disk() -> None:
    """Without a disk all counters of one are zero, and so is the ledger.
    A step with everything in host memory."""
    with offload(models.stack(), ("cpu", "cpu"), Path()) as model:
        models.stack_loss(model, 0).backward()
        nvo.optim.AdamW(model.parameters()).step()
        model.flush()
        stats, ledger = model.offload_stats(), model.offload_ledger()
    assert (ledger.read_bytes, ledger.write_bytes) == (0, 0)
    assert (stats.read_bytes, stats.write_bytes, stats.fill_bytes, stats.manifest_bytes) == (0, 0, 0, 0)
    assert (stats.fetch_bytes, stats.update_read_bytes, stats.update_write_bytes) == (0, 0, 0)


class Half(nn.Module):
    """One unit, and two layers of which the forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64, bias=False), nn.Linear(64, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize(("tier", "read_pages"), [("none", 8), ("cpu", 8), ("nvme", 12)])
def test_a_tile_without_gradients_is_not_touched(tier: str, read_pages: int, swap: Path) -> None:
    """Tiles none of whose parameters has a gradient cost no bytes in an update.
    One of two large layers of a unit is left out of the loss."""
    torch.manual_seed(0)
    model = Half()
    kept = model.unused.weight.detach().clone()
    with offload(model, (tier, "nvme"), swap, buffer_size="64KiB") as offloaded:
        opt = nvo.optim.AdamW(model.parameters(), weight_decay=0.5)
        model(torch.ones(1, 64)).sum().backward()
        opt.step()
        model.flush()
        stats = offloaded.offload_stats()
        assert stats.update_read_bytes == read_pages * 4096
        assert stats.update_write_bytes == 12 * 4096
        assert stats.fetch_bytes == (12 * 4096 if tier == "nvme" else 0)
        assert torch.equal(model.unused.weight.detach(), kept)
        assert int(opt.state[model.unused.weight]["step"]) == 0
        assert int(opt.state[model.used.weight]["step"]) == 1


def test_a_tile_shared_with_a_parameter_without_gradient_is_rewritten(swap: Path) -> None:
    """A parameter that takes no part keeps its bits and its states, wherever its neighbours' updates go.
    Weight and bias of a layer in one tile; every second step only the bias has a gradient. Against memory."""

    def run(tiers: tuple[str, str]) -> Values:
        model = models.tiny()
        with offload(model, tiers, swap) as offloaded:
            opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(4):
                models.tiny_loss(model, step).backward()
                if step % 2:
                    model[0].weight.grad = model[2].weight.grad = None
                opt.step()
                opt.zero_grad()
            assert [int(opt.state[p]["step"]) for p in model.parameters()] == [2, 4, 2, 4]
            offloaded.flush()
            return values_of(model)

    expected = run(("none", "cpu"))
    for tiers in (("none", "nvme"), ("cpu", "nvme"), ("nvme", "cpu"), ("nvme", "nvme")):
        assert_equal_bits(run(tiers), expected)


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_weights_written_by_the_user_win(tiers: tuple[str, str], swap: Path) -> None:
    """A bf16 weight set between steps is trained on from there, without its old low half.
    A master of exactly 0.5 decays by 2^-10 to what rounds to 0.5."""
    model = models.tiny(torch.bfloat16)
    with offload(model, tiers, swap):
        opt = nvo.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        opt.param_groups[0]["lr"] = 1e-4
        models.tiny_loss(model, 0).backward()
        opt.step()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        opt.param_groups[0]["lr"] = 0.0
        models.tiny_loss(model, 1).backward()
        opt.step()
        assert all(bool((p == 0.5).all()) for p in model.parameters())
        opt.param_groups[0].update(lr=2**-10, weight_decay=1.0, betas=(0.0, 0.0), eps=1e30)
        models.tiny_loss(model, 2).backward()
        opt.step()
        # The master was exactly 0.5, so it is 0.5 * (1 - 2^-10) now, which rounds to 0.5 in bf16.
        assert all(bool((p == 0.5).all()) for p in model.parameters())


class Odd(nn.Module):
    """Transposed and channels-last weights, an empty one and a number; expanded gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(5, 3).t())
        self.b = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        self.c = nn.Parameter(torch.empty(0, 8))
        self.d = nn.Parameter(torch.randn(()))

    def forward(self) -> torch.Tensor:
        weights = torch.arange(15.0).view(3, 5)
        return (self.a * weights).sum() + self.b.sum() + self.c.sum() + self.d * 2 + (self.b[0] ** 2).sum()


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_odd_layouts_of_memory_train_as_in_torch(tiers: tuple[str, str], swap: Path) -> None:
    """Transposed and channels-last weights, expanded gradients and empty parameters are right.
    Compared with torch after three steps."""
    expected, ours = Odd(), Odd()
    stock = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    with offload(ours, tiers, swap):
        opt = nvo.optim.AdamW(ours.parameters(), lr=1e-2)
        for _ in range(3):
            for model, optimizer in ((expected, stock), (ours, opt)):
                optimizer.zero_grad()
                model().backward()
                optimizer.step()
        for (name, p), q in zip(expected.named_parameters(), ours.parameters(), strict=True):
            value = q.detach().clone()
            assert torch.allclose(p, value, rtol=0, atol=1e-6), name
            assert p.stride() == q.stride() == value.stride()


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_groups_added_later_and_two_optimizers_train_as_in_torch(tiers: tuple[str, str], swap: Path) -> None:
    """add_param_group after a step, and a second optimizer over other parameters of the same tiles.
    T2's parameters share tiles; bits against memory, values against torch."""

    def run(tiers: tuple[str, str] | None) -> Values:
        model = models.t2()
        if tiers:
            offload(model, tiers, swap)
        make = nvo.optim.AdamW if tiers else torch.optim.AdamW
        params = list(model.parameters())
        first, second = make(params[:4], lr=1e-3), make(params[8:], lr=5e-4)
        for step in range(4):
            if step == 2:
                first.add_param_group({"params": params[4:8], "lr": 2e-3})
            models.t2_loss(model, step).backward()
            for opt in (first, second):
                opt.step()
                opt.zero_grad()
            model.zero_grad()
        values = values_of(model)
        if tiers:
            model.close()
        return values

    ours = run(tiers)
    assert_equal_bits(ours, run(("none", "cpu")))
    for name, value in run(None).items():
        assert (ours[name] - value).abs().max() <= 1e-6, name


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_maximize_and_closure_work_as_in_torch(tiers: tuple[str, str], swap: Path) -> None:
    """maximize=True climbs, and step(closure) returns the loss.
    TINY against torch."""
    expected, ours = models.tiny(), models.tiny()
    stock = torch.optim.AdamW(expected.parameters(), lr=1e-2, maximize=True)
    with offload(ours, tiers, swap):
        opt = nvo.optim.AdamW(ours.parameters(), lr=1e-2, maximize=True)
        for step in range(3):
            losses = []
            for model, optimizer in ((expected, stock), (ours, opt)):

                def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = models.tiny_loss(model, step)  # noqa: B023
                    loss.backward()
                    return loss

                losses.append(float(optimizer.step(closure).detach()))
            assert losses[0] == pytest.approx(losses[1], abs=1e-5)
        for p, q in zip(expected.parameters(), ours.parameters(), strict=True):
            assert (p.detach() - q.detach()).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [16, 1040, 4096, 5136, 8192])
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_a_parameter_that_ends_with_its_tile_is_read_back(
    tier: str, numel: int, dtype: torch.dtype, swap: Path
) -> None:
    """Padding is in the checksum once, also when the last segment ends where the tile does.
    Sizes that are multiples of 64 bytes, pages or neither; the second step verifies the first's writes."""
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(numel, dtype=dtype))
    with offload(model, (tier, "nvme"), swap, buffer_size="64KiB"):
        opt = nvo.optim.AdamW(model.parameters())
        for _ in range(3):
            model.w.grad = torch.full_like(model.w, 0.5)
            opt.step()
        assert bool((model.w < 1).all())
