"""AdamW over offloaded states: parity with torch, equal bits over tiers, bytes equal to the ledger."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

import nvoffload as nvo
from nvoffload import device as device_room
from nvoffload import runtime

# The package exposes the function under this name, so the room is asked for by path.
offload_room = importlib.import_module("nvoffload.offload")
CASES = {"tiny": (models.tiny, models.tiny_loss, 1e-2), "t2": (models.t2, models.t2_loss, 1e-3)}
pytestmark = pytest.mark.timeout(60)


def groups_of(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": lr / 2, "weight_decay": 0.0}]


def train(
    model: nn.Module, opt: torch.optim.Optimizer, loss_of: Callable[[nn.Module, int], torch.Tensor], steps: int = 10
) -> dict[str, torch.Tensor]:
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
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_offloaded(case: str, tier: str, swap: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    make, loss_of, lr = CASES[case]
    model = make(dtype)
    path = swap if tier == "nvme" else None
    with nvo.offload(model, param_offload="none", optimizer_offload=tier, nvme_path=path, **options):
        return train(model, nvo.optim.AdamW(groups_of(model, lr), lr=lr), loss_of)


def assert_equal_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_ten_steps_equal_torch_within_1e6(case: str, tier: str, swap: Path) -> None:
    """Every parameter, by name, is where plain torch AdamW puts it.
    Two groups, clipping, a scheduler, windows of several backward passes."""
    make, loss_of, lr = CASES[case]
    reference = make()
    expected = train(reference, torch.optim.AdamW(groups_of(reference, lr), lr=lr), loss_of)
    ours = train_offloaded(case, tier, swap)
    for name, value in expected.items():
        assert (ours[name] - value).abs().max() <= 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_tiers_give_equal_bits(case: str, dtype: torch.dtype, swap: Path) -> None:
    """States in memory, on disk, or "none" change no bit.
    The same seeded training on each tier."""
    on_host = train_offloaded(case, "cpu", swap, dtype)
    assert_equal_bits(train_offloaded(case, "nvme", swap, dtype), on_host)
    assert_equal_bits(train_offloaded(case, "none", swap, dtype), on_host)


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
def test_how_bytes_move_changes_no_bit(options: dict[str, Any], swap: Path) -> None:
    """Threads, tile sizes, engines, blocks and depth are about speed only.
    T2 in bf16 against the default settings."""
    expected = train_offloaded("t2", "nvme", swap, torch.bfloat16)
    assert_equal_bits(train_offloaded("t2", "nvme", swap, torch.bfloat16, **options), expected)


def test_simd_levels_give_equal_bits(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scalar kernel trains to the same bits as the best one.
    The mover is opened at the scalar level."""
    expected = train_offloaded("t2", "nvme", swap)
    real = runtime.Mover
    monkeypatch.setattr(runtime, "Mover", lambda **options: real(**options, simd=0))
    assert_equal_bits(train_offloaded("t2", "nvme", swap), expected)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_late_device_gives_equal_bits(tier: str, swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies by a device whose streams run late are waited for at the right places.
    The device twin performs a copy only when its stream is waited for."""
    expected = train_offloaded("t2", tier, swap, torch.bfloat16)
    monkeypatch.setattr(offload_room, "open_device", lambda _, threads: device_room.SimDevice(threads))
    if tier == "cpu":
        plan = offload_room._plan
        monkeypatch.setattr(offload_room, "_plan", lambda *args: (plan(*args)[0], 2))
    assert_equal_bits(train_offloaded("t2", tier, swap, torch.bfloat16, update_threads=2), expected)


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
    """A step reads 8n (fp32) or 10n (bf16) and writes 12n, to the byte, plus alignment.
    Five steps of a model of odd size; /proc counts direct I/O by thread."""
    steps = 5
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 301), nn.Linear(301, 77)).to(dtype)
    numel = sum(p.numel() for p in model.parameters())
    with nvo.offload(
        model, param_offload="none", optimizer_offload="nvme", nvme_path=swap, buffer_size="256KiB"
    ) as offloaded:
        opt = nvo.optim.AdamW(model.parameters())
        assert offloaded.offload_stats().is_direct
        for step in range(steps + 1):
            if step == 1:  # the first loads pages of libraries
                offloaded.flush()
                before, kernel_before = offloaded.offload_stats(), kernel_io()
            model(torch.ones(2, 1000, dtype=dtype)).float().pow(2).mean().backward()
            opt.step()
        offloaded.flush()
        after, kernel_after = offloaded.offload_stats(), kernel_io()
        ledger = offloaded.offload_ledger().times(steps)
    assert (after.manifest_bytes - before.manifest_bytes) % 4096 == 0
    assert after.read_bytes - before.read_bytes == ledger.read_bytes
    assert after.write_bytes - before.write_bytes == ledger.write_bytes
    assert kernel_after[0] - kernel_before[0] == ledger.read_bytes
    assert kernel_after[1] - kernel_before[1] == ledger.write_bytes
    padding = 4 * 4096 * 3  # at most a page per part of the last tile, 64 bytes per parameter
    assert 0 <= ledger.read_bytes / steps - read_per_element * numel <= padding
    assert 0 <= ledger.write_bytes / steps - 12 * numel <= padding


def test_a_tile_without_gradients_is_not_touched(swap: Path) -> None:
    """Tiles none of whose parameters has a gradient cost no bytes; a shared tile is rewritten.
    One of two large layers is left out of the loss."""
    torch.manual_seed(0)
    used, unused = nn.Linear(64, 64, bias=False), nn.Linear(64, 128, bias=False)
    model = nn.ModuleList([used, unused])
    kept = unused.weight.detach().clone()
    with nvo.offload(
        model, param_offload="none", optimizer_offload="nvme", nvme_path=swap, buffer_size="64KiB"
    ) as offloaded:
        opt = nvo.optim.AdamW(model.parameters(), weight_decay=0.5)
        before = offloaded.offload_stats()
        used(torch.ones(1, 64)).sum().backward()
        opt.step()
        after = offloaded.offload_stats()
    assert after.read_bytes - before.read_bytes == 8 * 4096
    assert after.write_bytes - before.write_bytes == 12 * 4096
    assert torch.equal(unused.weight, kept)
    assert int(opt.state[unused.weight]["step"]) == 0


def test_weights_written_by_the_user_win(swap: Path) -> None:
    """A bf16 weight set between steps is trained on from there, without its old low half.
    Against the states on the host and a fresh value whose master has a zero low half."""
    model = models.tiny(torch.bfloat16)
    with nvo.offload(model, param_offload="none", optimizer_offload="nvme", nvme_path=swap):
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


def test_odd_layouts_of_memory_train_as_in_torch(swap: Path) -> None:
    """Transposed and channels-last weights, expanded gradients and empty parameters are right.
    Compared with torch after three steps."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Module()
        model.a = nn.Parameter(torch.randn(5, 3).t())
        model.b = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        model.c = nn.Parameter(torch.empty(0, 8))
        model.d = nn.Parameter(torch.randn(()))
        return model

    def loss_of(model: Any) -> torch.Tensor:
        weights = torch.arange(15.0).view(3, 5)
        return (model.a * weights).sum() + model.b.sum() + model.c.sum() + model.d * 2 + (model.b[0] ** 2).sum()

    expected, ours = make(), make()
    stock = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    with nvo.offload(ours, param_offload="none", optimizer_offload="nvme", nvme_path=swap):
        opt = nvo.optim.AdamW(ours.parameters(), lr=1e-2)
        for _ in range(3):
            for model, optimizer in ((expected, stock), (ours, opt)):
                optimizer.zero_grad()
                loss_of(model).backward()
                optimizer.step()
    for (name, p), q in zip(expected.named_parameters(), ours.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6), name
        assert p.stride() == q.stride()


def test_groups_added_later_and_two_optimizers_train_as_in_torch(swap: Path) -> None:
    """add_param_group after a step, and a second optimizer over other parameters of the same tiles.
    T2's parameters share tiles; bits against the host tier, values against torch."""

    def run(kind: str) -> dict[str, torch.Tensor]:
        model = models.t2()
        if kind != "torch":
            path = swap if kind == "nvme" else None
            nvo.offload(model, param_offload="none", optimizer_offload=kind, nvme_path=path)
        make = torch.optim.AdamW if kind == "torch" else nvo.optim.AdamW
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
        if kind != "torch":
            model.close()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    on_disk = run("nvme")
    assert_equal_bits(on_disk, run("cpu"))
    for name, value in run("torch").items():
        assert (on_disk[name] - value).abs().max() <= 1e-6, name


def test_maximize_and_closure_work_as_in_torch(swap: Path) -> None:
    """maximize=True climbs, and step(closure) returns the loss.
    TINY against torch."""
    expected, ours = models.tiny(), models.tiny()
    stock = torch.optim.AdamW(expected.parameters(), lr=1e-2, maximize=True)
    with nvo.offload(ours, param_offload="none", optimizer_offload="nvme", nvme_path=swap):
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
        assert (p - q).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [16, 1040, 4096, 5136, 8192])
def test_a_parameter_that_ends_with_its_tile_is_read_back(numel: int, dtype: torch.dtype, swap: Path) -> None:
    """Padding is in the checksum once, also when the last segment ends where the tile does.
    Sizes that are multiples of 64 bytes, pages or neither; the second step verifies the first's writes."""
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(numel, dtype=dtype))
    with nvo.offload(model, param_offload="none", optimizer_offload="nvme", nvme_path=swap, buffer_size="64KiB"):
        opt = nvo.optim.AdamW(model.parameters())
        for _ in range(3):
            model.w.grad = torch.full_like(model.w, 0.5)
            opt.step()
        assert bool((model.w < 1).all())
