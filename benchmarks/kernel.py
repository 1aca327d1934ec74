"""The AdamW kernel against the memory and against torch.

In every round each contender runs once over the same arrays: the kernel, the same loads and stores
without arithmetic ("stream"), torch.optim.AdamW(fused=True) where it can (one dtype for all), and the
kernel once more. Printed are medians and the medians of the ratios within rounds; the kernel against itself
is the control: a difference inside its spread is not resolved.

    python benchmarks/kernel.py [--numel N] [--rounds N] [--threads 1 2] [--json FILE]
"""

import argparse
import itertools
import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nvoffload.native import ffi, lib

F32, BF16 = 0, 1  # enum nvo_dtype
GROUP = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
PAGE_BYTES = 2 << 20
BLOCK_NUMEL = 1 << 20  # values are made once and repeated
PAUSE_S = 0.02  # torch's threads spin for a while after a step and would take cores from the next
TARGETS = {1: 0.87, 2: 0.97}  # kernel / stream by number of threads


@dataclass(frozen=True)
class Case:
    """What is updated: `weight` and `grad` are 1D, uint16 where bf16; `low` is empty where fp32."""

    name: str
    weight: np.ndarray
    low: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    grad: np.ndarray

    @property
    def bytes_per_element(self) -> int:
        """Bytes read and written."""
        both = self.weight, self.exp_avg, self.exp_avg_sq, *([self.low] if self.low.size else [])
        return 2 * sum(array.itemsize for array in both) + self.grad.itemsize

    def span(self, start: int, stop: int):
        """Return the nvo_span of elements `start` to `stop`."""

        def at(array: np.ndarray, kind: str):
            return ffi.cast(kind, array.ctypes.data + start * array.itemsize)

        return ffi.new(
            "nvo_span *",
            {
                "weight_in": at(self.weight, "void *"),
                "weight_out": at(self.weight, "void *"),
                "low": at(self.low, "uint16_t *") if self.low.size else ffi.NULL,
                "exp_avg": at(self.exp_avg, "float *"),
                "exp_avg_sq": at(self.exp_avg_sq, "float *"),
                "grad": at(self.grad, "void *"),
                "numel": stop - start,
                "weight_dtype": BF16 if self.low.size else F32,
                "grad_dtype": BF16 if self.grad.itemsize == 2 else F32,
            },
        )


def repeated(values: np.ndarray, numel: int) -> np.ndarray:
    """Return `numel` elements that repeat `values`, on 2 MiB pages, as the pool's are."""
    arena = mmap.mmap(-1, numel * values.itemsize + 2 * PAGE_BYTES)
    arena.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(arena, np.uint8)  # keeps the mapping alive
    start = -whole.ctypes.data % PAGE_BYTES
    array = whole[start : start + numel * values.itemsize].view(values.dtype)
    for begin in range(0, numel, values.size):
        part = array[begin : begin + values.size]
        part[:] = values[: part.size]
    return array


def make_case(name: str, numel: int) -> Case:
    rng = np.random.default_rng(1)
    weight = rng.standard_normal(BLOCK_NUMEL, np.float32)
    grad = rng.standard_normal(BLOCK_NUMEL, np.float32) * np.float32(0.01)
    exp_avg = repeated(grad * np.float32(0.1), numel)
    exp_avg_sq = repeated(grad * grad + np.float32(1e-6), numel)
    low = np.empty(0, np.uint16)
    if name == "bf16":
        low = repeated(weight.view(np.uint32).astype(np.uint16), numel)
        weight, grad = ((array.view(np.uint32) >> 16).astype(np.uint16) for array in (weight, grad))
    return Case(name, repeated(weight, numel), low, exp_avg, exp_avg_sq, repeated(grad, numel))


def make_contenders(case: Case, pool: ThreadPoolExecutor, threads: int) -> dict[str, Callable[[], object]]:
    """Return what runs in a round, in order; each call is one pass over the whole case."""
    numel, simd = case.weight.size, lib.nvo_simd_best()
    bounds = [numel * k // threads // 64 * 64 for k in range(threads)] + [numel]
    spans = [case.span(*pair) for pair in itertools.pairwise(bounds)]
    adamw = ffi.new("nvo_adamw *")
    lib.nvo_adamw_prepare(adamw, ffi.new("nvo_group *", GROUP), 1.0, 100)

    def kernel() -> object:
        return list(pool.map(lambda span: lib.nvo_adamw_update(simd, adamw, span), spans))

    def stream() -> object:
        return list(pool.map(lambda span: lib.nvo_adamw_stream(simd, 0, span), spans))

    contenders = {"kernel": kernel, "stream": stream}
    if case.name == "fp32":
        contenders["torch"] = torch_step(case)
    contenders["again"] = kernel
    return contenders


def torch_step(case: Case) -> Callable[[], object]:
    """Return a step of torch.optim.AdamW on the arrays of `case` themselves."""
    weight = torch.nn.Parameter(torch.from_numpy(case.weight))
    weight.grad = torch.from_numpy(case.grad)
    peer = torch.optim.AdamW(
        [weight],
        lr=GROUP["lr"],
        betas=(GROUP["beta1"], GROUP["beta2"]),
        eps=GROUP["eps"],
        weight_decay=GROUP["weight_decay"],
        fused=True,
    )
    peer.state[weight] = {
        "step": torch.tensor(100.0),
        "exp_avg": torch.from_numpy(case.exp_avg),
        "exp_avg_sq": torch.from_numpy(case.exp_avg_sq),
    }
    return peer.step


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(case: Case, threads: int, rounds: int) -> dict[str, object]:
    """Return GB/s of each contender and the per-round ratios of speeds."""
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {}
    with ThreadPoolExecutor(threads) as pool:
        contenders = make_contenders(case, pool, threads)
        for round_index in range(rounds + 1):  # the first one warms up
            for name, run in contenders.items():
                time.sleep(PAUSE_S)
                start = time.perf_counter()
                run()
                if round_index:
                    seconds.setdefault(name, []).append(time.perf_counter() - start)
    moved = case.bytes_per_element * case.weight.size / 1e9
    ratios = {
        f"kernel/{other}": spread([b / a for a, b in zip(seconds["kernel"], times, strict=True)])
        for other, times in seconds.items()
        if other != "kernel"
    }
    return {
        "case": case.name,
        "threads": threads,
        "numel": case.weight.size,
        "bytes_per_element": case.bytes_per_element,
        "rounds": rounds,
        "gb_per_s": {name: spread([moved / value for value in times]) for name, times in seconds.items()},
        "ratios": ratios,
    }


def describe_machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "simd": lib.nvo_simd_best(),
        "load": os.getloadavg()[0],
    }


def show(result: dict) -> None:
    print(f"{result['case']}, {result['threads']} threads, {result['bytes_per_element']} bytes per element")
    for name, speed in result["gb_per_s"].items():
        print(f"  {name:14} {speed['median']:6.1f} GB/s  ({speed['min']:.1f}..{speed['max']:.1f})")
    for name, ratio in result["ratios"].items():
        target = TARGETS.get(result["threads"]) if name == "kernel/stream" else None
        note = f"  target {target}" if target else "  control" if name == "kernel/again" else ""
        print(f"  {name:14} {ratio['median']:6.3f}       ({ratio['min']:.3f}..{ratio['max']:.3f}){note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=64 << 20, help="elements (default 64 Mi)")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()

    machine = describe_machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    results = []
    for name in ("fp32", "bf16"):
        case = make_case(name, args.numel)
        for threads in args.threads:
            results.append(measure(case, threads, args.rounds))
            show(results[-1])
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
