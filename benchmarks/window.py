"""The update window on disk against the same window without arithmetic.

A window is one pass of the mover over all tiles of a model: read states and remainders, verify, AdamW,
checksum, write. In every round it runs with the kernel, with the null kernel (all else the same), and
with the kernel once more; the kernel against itself is the control: a difference inside its spread is
not resolved. Both slots are filled before anything is timed.

    python benchmarks/window.py DIR [--numel N] [--rounds N] [--threads N] [--json FILE]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from kernel import spread
from torch import nn

import nvoffload as nvo
from nvoffload.mover import Group, Job, Work

TARGET = 0.90  # seconds of the null window / of the kernel's
KERNELS = {"kernel": "NVO_KERNEL_ADAMW", "null": "NVO_KERNEL_NULL", "again": "NVO_KERNEL_ADAMW"}
ADAMW = Group(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)


class Window:
    """A model of one wide layer, its states in `folder`, and the means to run updates of it."""

    def __init__(self, folder: Path, numel: int, dtype: torch.dtype, threads: int) -> None:
        self.model = nn.Linear(1 << 12, max(1, numel >> 12), bias=False).to(dtype)
        self.numel = self.model.weight.numel()
        self.grad = torch.full((self.numel,), 0.01)
        self.offloaded = nvo.offload(
            self.model, param_offload="none", optimizer_offload="nvme", nvme_path=folder, update_threads=threads
        )
        self.session = self.offloaded._nvoffload
        (self.unit,) = self.session.units
        self.tiles = self.session.add_states(frozenset([0]))[self.unit.number]
        self.step = 0

    def run(self, kernel: str) -> float:
        """Run one window; return its seconds."""
        self.step += 1
        work = Work(param=0, grad_address=self.grad.data_ptr(), step=self.step, group=0, grad_scale=1.0)
        values = self.unit.values_in(self.unit.place)
        job = Job("NVO_UPDATE", self.tiles, values=values, works=[work], groups=[ADAMW])
        backend = self.session.backend
        generation = backend.committer.begin("window")
        backend.committer.wait(60)  # nothing of the window before is left to wait for
        backend.mover.expect(generation, 1)
        start_s = time.perf_counter()
        backend.mover.run(job, generation=generation, values_stand=True, kernel=KERNELS[kernel])
        return time.perf_counter() - start_s


def measure(folder: Path, numel: int, dtype: torch.dtype, threads: int, rounds: int) -> dict[str, object]:
    """Return GB/s of each contender and the per-round ratios of seconds."""
    window = Window(folder, numel, dtype, threads)
    with window.offloaded:
        seconds: dict[str, list[float]] = {name: [] for name in KERNELS}
        for round_index in range(rounds + 2):  # two windows fill both slots
            for name, times in seconds.items():
                passed_s = window.run(name)
                if round_index >= 2:
                    times.append(passed_s)
    per_element = 20 if dtype is torch.float32 else 22
    moved = per_element * window.numel / 1e9
    ratios = {
        f"{name}/kernel": spread([b / a for a, b in zip(seconds["kernel"], seconds[name], strict=True)])
        for name in ("null", "again")
    }
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "numel": window.numel,
        "threads": threads,
        "rounds": rounds,
        "gb_per_s": {name: spread([moved / value for value in times]) for name, times in seconds.items()},
        "ratios": ratios,
    }


def show(result: dict) -> None:
    print(f"{result['dtype']}, {result['numel'] / 1e6:.0f} M elements, {result['threads']} kernel threads")
    for name, speed in result["gb_per_s"].items():
        print(f"  {name:14} {speed['median']:6.2f} GB/s  ({speed['min']:.2f}..{speed['max']:.2f})")
    for name, ratio in result["ratios"].items():
        note = f"  target {TARGET}" if name == "null/kernel" else "  control"
        print(f"  {name:14} {ratio['median']:6.3f}       ({ratio['min']:.3f}..{ratio['max']:.3f}){note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--numel", type=int, default=64 << 20, help="elements (default 64 Mi)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()

    results = []
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory(dir=args.dir, prefix=".nvoffload-window-") as folder:
            results.append(measure(Path(folder), args.numel, dtype, args.threads, args.rounds))
        show(results[-1])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
