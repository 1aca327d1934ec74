"""python -m nvoffload.demo: train a byte-level transformer on real text, parameters and AdamW states on disk.

Says what it will take, holds itself to a memory budget, and reports what it took.
"""

import argparse
import contextlib
import json
import math
import platform
import re
import resource
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nvoffload.config import format_bytes, parse_size
from nvoffload.demo_model import SIZES, ByteTransformer, Size, activation_bytes
from nvoffload.demo_report import Report
from nvoffload.errors import MachineError, NvoffloadError
from nvoffload.interrupts import interrupt_behind, interrupt_once
from nvoffload.offload import offload
from nvoffload.optim import AdamW
from nvoffload.plan import resident_bytes

TEXT_BYTES_MAX = 8 << 20
WARMUP_STEPS = 3
SLOWER_BY = 1.5  # bf16 counts as usable if it is at most this much slower than fp32
ALLOWANCE_BYTES = 736 << 20  # of the default budget: pool, frames, poison, the heap's holes, stacks and pages of torch
PROGRESS_S = 10.0  # between lines where stderr is no terminal


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        prog="python -m nvoffload.demo",
        description=__doc__.splitlines()[0],
        epilog="examples:\n  python -m nvoffload.demo\n"
        "  python -m nvoffload.demo --size 30M --steps 50 --path /mnt/ssd\n"
        "  python -m nvoffload.demo --text book.txt letters.txt --budget 4GB\n"
        "exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="350M", help="parameters, by name (350M)")
    parser.add_argument(
        "--params", choices=("nvme", "cpu", "none"), default="nvme", help="where parameters are at home (nvme)"
    )
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (10)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per step (2)")
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence, at most 1024 (128)")
    parser.add_argument("--lr", type=float, help="peak learning rate (1 / width / blocks)")
    parser.add_argument("--path", type=Path, help="folder on a disk for the swap file (a temporary one here)")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="what to learn (Python's own sources)")
    parser.add_argument("--budget", help='host memory, such as "3.6GiB" (just enough)')
    parser.add_argument(
        "--enforce", choices=("auto", "off"), default="auto", help="hold to the budget by RLIMIT_DATA (on a CPU)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report's figures")
    chosen = parser.parse_args(arguments)
    if not (chosen.steps >= 1 and chosen.batch >= 1 and 2 <= chosen.length <= 1024):
        parser.error("--steps and --batch must be at least 1, --length from 2 to 1024")
    return chosen


def read_text(files: list[Path] | None) -> Tensor:
    """Return up to 8 MiB of bytes as uint8, from `files` or the Python standard library."""
    chosen = files or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = bytearray()
    for path in chosen:
        with path.open("rb") as file:
            content += file.read(TEXT_BYTES_MAX - len(content))
        if len(content) == TEXT_BYTES_MAX:
            break
    if len(content) < 4096:
        raise NvoffloadError(f"{len(content)} bytes of text are too few; pass files with at least 4096.")
    return torch.frombuffer(content, dtype=torch.uint8)


def choose_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """Return bf16 if the device computes it about as fast as fp32, and what decided.

    Timed are a layer's forward and its gradient for the input: without bf16 units that one is the slowest.
    """
    if device.type != "cpu":
        return torch.bfloat16, "bf16: an accelerator"
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(64, 1024, dtype=dtype, requires_grad=True), torch.ones(1024, 1024, dtype=dtype)
        torch.autograd.backward((x @ weight.T).sum())
        start_s = time.perf_counter()
        torch.autograd.backward((x @ weight.T).sum())
        seconds[dtype] = time.perf_counter() - start_s
    ratio = seconds[torch.bfloat16] / seconds[torch.float32]
    if ratio > SLOWER_BY:
        return torch.float32, f"fp32: bf16 takes {ratio:.1f} times as long on this processor"
    return torch.bfloat16, f"bf16: it takes {ratio:.1f} times fp32's time here"


def warm_up() -> None:
    """Train a tiny model for one step: what torch loads for that then stands in the plan as resident."""
    model = ByteTransformer(Size(64, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.autograd.backward(model(torch.zeros(2, 64, dtype=torch.long)).sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()


@contextlib.contextmanager
def memory_budget(budget_bytes: int) -> Iterator[None]:
    """Let private memory grow by no more than what the budget leaves.

    RLIMIT_DATA counts every private writable mapping, touched or not, so what the process holds can't
    pass the budget but by pages of files (code), which the kernel can drop.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    match = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    limit = (int(match[1]) * 1024 if match else 0) + budget_bytes - resident_bytes()
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


class Progress:
    """Shows how far the run is: one changing line on a terminal, else a line every 10 s."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self._settings = settings
        self._start_s = time.perf_counter()
        self._shown_s = -PROGRESS_S

    def show(self, model: Any, step: int, loss: float) -> None:
        """Show `step` steps done, the last with `loss`."""
        passed_s = time.perf_counter() - self._start_s
        steps, is_terminal = self._settings.steps, sys.stderr.isatty()
        if not is_terminal and step < steps and passed_s < self._shown_s + PROGRESS_S:
            return
        self._shown_s = passed_s
        stats = model.offload_stats()
        rate = (stats.read_bytes + stats.write_bytes - stats.fill_bytes) / max(stats.disk_busy_s, 1e-9)
        line = (
            f"step {step}/{steps}  loss {loss:.3f}  "
            f"{step * self._settings.batch * self._settings.length / passed_s:.0f} tokens/s  "
            f"disk {rate / 1e9:.2f} GB/s  stalled {stats.wait_s / passed_s:.0%}"
        )
        end = "" if is_terminal and step < steps else "\n"
        print(f"\r{line:<90}" if is_terminal else line, end=end, file=sys.stderr, flush=True)


def train(model: Any, text: Tensor, settings: argparse.Namespace, device: torch.device) -> list[float]:
    """Run the loop; return the losses. From here on it is plain PyTorch."""
    opt = AdamW(model.parameters(), lr=settings.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    draw = torch.Generator().manual_seed(1)
    losses: list[float] = []
    progress = Progress(settings)
    for step in range(settings.steps):
        starts = torch.randint(0, len(text) - settings.length, (settings.batch,), generator=draw)
        rows = torch.stack([text[i : i + settings.length + 1] for i in starts.tolist()]).long().to(device)
        loss = F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise NvoffloadError(f"the loss is {losses[-1]} at step {step + 1}; try a smaller --lr.")
        torch.autograd.backward(loss)
        del loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        scheduler.step()
        opt.zero_grad()
        progress.show(model, step + 1, losses[-1])
    model.flush()
    return losses


def make_report(model: Any, settings: argparse.Namespace, losses: list[float], **known: Any) -> Report:
    """Collect the figures of a finished run."""
    stats, ledger = model.offload_stats(), model.offload_ledger(steps=settings.steps)
    seconds: float = known["seconds"]
    moved = stats.read_bytes + stats.write_bytes - stats.fill_bytes
    return Report(
        size=settings.size,
        parameters=SIZES[settings.size].numel,
        steps=settings.steps,
        engine=stats.engine,
        is_direct=stats.is_direct,
        loss_first=losses[0],
        loss_last=losses[-1],
        tokens_per_s=settings.batch * settings.length * len(losses) / seconds,
        step_read_bytes=(stats.fetch_bytes + stats.update_read_bytes) / stats.steps,
        step_write_bytes=stats.update_write_bytes / stats.steps,
        ledger_read_bytes=ledger.read_bytes / stats.steps,
        ledger_write_bytes=ledger.write_bytes / stats.steps,
        fill_bytes=stats.fill_bytes,
        manifest_bytes=stats.manifest_bytes,
        disk_bytes_per_s=moved / max(stats.disk_busy_s - known.pop("fill_s"), 1e-9),
        peak_bytes=resident_bytes("VmHWM"),
        plan_bytes=model.offload_plan.host_bytes,
        stall_disk_share=stats.disk_wait_s / seconds,
        stall_commit_share=stats.commit_wait_s / seconds,
        stall_kernel_share=stats.kernel_wait_s / seconds,
        overlap=stats.overlap,
        **known,
    )


def build(size: Size, dtype: torch.dtype) -> ByteTransformer:
    """Return the model with seeded weights, made in `dtype` at once."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return ByteTransformer(size)
    finally:
        torch.set_default_dtype(before)


def run(settings: argparse.Namespace, folder: Path) -> Report:
    """Build, offload, train; return the report. Nothing stays in `folder`."""
    begin_s = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_cpu = device.type == "cpu"
    dtype, why = choose_dtype(device)
    size = SIZES[settings.size]
    settings.lr = settings.lr or 1 / (size.width * size.num_blocks)
    text = read_text(settings.text)
    warm_up()
    base = resident_bytes()
    activations = activation_bytes(size, settings.batch * settings.length, dtype.itemsize)
    # Built in memory first; then gradients are there, in float32, and parameters only if they stay.
    kept = dtype.itemsize * (settings.params != "nvme")
    need = size.numel * max(dtype.itemsize, 4 + kept) + activations if is_cpu else 0
    budget = parse_size(settings.budget or base + need + ALLOWANCE_BYTES, "--budget")
    is_held = settings.enforce == "auto" and (is_cpu or settings.budget is not None)
    holder = "held by RLIMIT_DATA" if is_held else "not enforced"
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, {device}, {why}")
    print(f"{settings.size}: {size.numel / 1e6:.0f} M parameters; with AdamW states {12 * size.numel / 1e9:.2f} GB")
    print(f"host memory budget {format_bytes(budget)}, {holder}; swap file in {folder}")
    with memory_budget(budget) if is_held else contextlib.nullcontext():
        torch.manual_seed(0)
        with device:
            model = build(size, dtype)
        offloaded: Any = offload(
            model, param_offload=settings.params, optimizer_offload="nvme", nvme_path=folder, keep="never"
        )
        with offloaded:
            print("\n".join(offloaded.offload_plan.lines()))
            print(f"  {'activations':<14}{format_bytes(activations):>12}  this demo's estimate, on top", flush=True)
            start_s, fill_s = time.perf_counter(), offloaded.offload_stats().disk_busy_s
            losses = train(model, text, settings, device)
            end_s = time.perf_counter()
            return make_report(
                offloaded,
                settings,
                losses,
                device=str(device),
                dtype=str(dtype).removeprefix("torch."),
                seconds=end_s - start_s,
                fill_s=fill_s,
                total_seconds=end_s - begin_s,
                activation_bytes=activations if is_cpu else 0,
                budget_bytes=budget,
                enforced_by=holder,
                in_memory_bytes=base + 16 * size.numel + activation_bytes(size, settings.batch * settings.length, 4),
            )


def explain(error: BaseException) -> str:
    """Return what a user should read about `error`; raise it if it is a bug."""
    if isinstance(error, MachineError):
        return f"{error} If the budget is too tight, raise --budget."
    if isinstance(error, (NvoffloadError, OSError)):
        return str(error)
    if isinstance(error, MemoryError) or re.search("memory|alloc|thread", str(error)):
        return f"out of memory: {error}\nRaise --budget or choose a smaller --size."
    raise error


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return its exit status."""
    settings = parse(arguments)
    signal.signal(signal.SIGINT, interrupt_once)
    signal.signal(signal.SIGTERM, interrupt_once)
    try:
        with contextlib.ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(prefix=".nvoffload-demo-", dir=".") if not settings.path else None
            report = run(settings, Path(stack.enter_context(temporary)) if temporary else settings.path)
        print("\n".join(report.lines()))
        if settings.json:
            settings.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    except (KeyboardInterrupt, OSError, MemoryError, RuntimeError) as error:
        stop = interrupt_behind(error)
        text = explain(error) if stop is None else "interrupted; the swap file is removed."
        print(f"\n{text}", file=sys.stderr)
        return 1 if stop is None else 128 + int(stop.args[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
