"""The plan: what a run will take of host memory and disk, said before it is taken."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from nvoffload import ledger
from nvoffload.buffers import available_memory_bytes, check_affordable
from nvoffload.config import OffloadConfig, format_bytes, parse_size
from nvoffload.layout import BUFFER_BYTES_PER_ELEMENT, Layout, choose_buffer_count, choose_frames
from nvoffload.unit import is_framed


def resident_bytes(field: str = "VmRSS") -> int:
    """Return this process's resident memory now, or its peak with field="VmHWM"."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes by kind. `host_bytes` is what the process should peak at, activations aside.

    freed_bytes: parameters that leave memory in offload(), of `resident_bytes`. full_gradient_bytes: what
    a backward holds before it lands. On an accelerator gathered memory is the device's, not the host's.
    """

    resident_bytes: int
    freed_bytes: int
    pool_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    full_gradient_bytes: int
    host_param_bytes: int
    host_state_bytes: int
    disk_bytes: int
    is_host: bool
    pool_text: str
    gathered_text: str
    rank_text: str = ""  # of several ranks: what this one is, and where its disk is

    @property
    def start_bytes(self) -> int:
        """What the process takes in offload(), with parameters still there."""
        return self.resident_bytes + self.pool_bytes + self.host_param_bytes + self.is_host * self.gathered_bytes

    @property
    def training_bytes(self) -> int:
        """What it takes in training, activations aside."""
        gradients = self.gradient_bytes + self.full_gradient_bytes
        return self.start_bytes - self.freed_bytes + gradients + self.host_state_bytes

    @property
    def host_bytes(self) -> int:
        """What the process peaks at: in offload(), or in training."""
        return max(self.start_bytes, self.training_bytes)

    def lines(self) -> list[str]:
        """Return the plan for people, one part per line."""
        parts = [
            ("gradients", self.gradient_bytes, "float32, one per trainable element, in host memory"),
            ("landing", self.full_gradient_bytes, "of one unit, before they are added to those"),
            ("resident now", self.resident_bytes, "the process at offload(), with its parameters"),
            ("freed", -self.freed_bytes, "parameters that leave memory then"),
            ("buffer pool", self.pool_bytes, self.pool_text),
            ("gathered", self.gathered_bytes, self.gathered_text),
            ("parameters", self.host_param_bytes, "and remainders kept in host memory"),
            ("states", self.host_state_bytes, "of the optimizer, in host memory"),
        ]
        rows = [f"  {name:<14}{format_bytes(nbytes):>12}  {why}" for name, nbytes, why in parts if nbytes]
        return [
            f"plan{self.rank_text}",
            *rows,
            f"  {'host memory':<14}{format_bytes(self.host_bytes):>12}  plus activations",
            f"  {'disk':<14}{format_bytes(self.disk_bytes):>12}  two slots of every tile",
        ]


def choose_memory(config: OffloadConfig, layout: Layout) -> int:
    """Return the number of frames; raise ConfigError if device_budget holds too few."""
    framed = [unit.nbytes for unit in layout.units if is_framed(unit, config)]
    kept_bytes = sum(unit.nbytes for unit in layout.units) - sum(framed)
    budget = None if config.device_budget is None else parse_size(config.device_budget, "device_budget")
    if config.param_offload == "none":
        return 0
    return choose_frames(max(framed, default=0), kept_bytes, len(framed), budget)


def make_plan(
    config: OffloadConfig, layout: Layout, num_frames: int, device: torch.device, num_local: int = 1
) -> tuple[Plan, int]:
    """Return the plan and the buffer count (0: no pool); raise ConfigError if they can't fit.

    `num_local` ranks share this machine's memory.
    """
    buffer_bytes = BUFFER_BYTES_PER_ELEMENT * layout.tile_numel
    count = 0
    framed = [unit.nbytes for unit in layout.units if is_framed(unit, config)]
    if config.uses_disk or device.type != "cpu":
        count = config.buffer_count or choose_buffer_count(
            layout.tile_numel,
            len(layout.tiles),
            config.io.queue_depth * config.io.block_bytes,
            available_memory_bytes() // num_local,
            max(framed, default=0) if config.param_offload == "nvme" else 0,
        )
        check_affordable(count * num_local, buffer_bytes)
    frame_bytes = max(framed, default=0)
    gathered = sum(unit.nbytes for unit in layout.units) - sum(framed) + num_frames * frame_bytes
    host = ledger.host_param_bytes(
        layout, has_fetched=config.param_offload == "cpu", has_remainders=not config.uses_disk
    )
    is_host = device.type == "cpu"
    plan = Plan(
        resident_bytes=resident_bytes(),
        freed_bytes=sum(spec.numel * getattr(torch, spec.dtype).itemsize for spec in layout.specs) * is_host,
        pool_bytes=count * buffer_bytes,
        gathered_bytes=gathered,
        gradient_bytes=ledger.gradient_bytes(layout),
        full_gradient_bytes=ledger.largest_gradient_bytes(layout) * is_host,
        host_param_bytes=host,
        host_state_bytes=0 if config.state_tier == "nvme" else ledger.state_bytes(layout),
        disk_bytes=ledger.store_bytes(layout, ledger.homes_of(config)) if config.uses_disk else 0,
        is_host=is_host,
        pool_text=f"{count} buffers of {format_bytes(buffer_bytes)}",
        gathered_text=f"{num_frames} frames of {format_bytes(frame_bytes)}, and what is kept beside them",
    )
    return plan, count
