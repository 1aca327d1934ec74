"""offload(): check everything that can be checked, then bring a model's states to their tier."""

import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn

from nvoffload.buffers import available_memory_bytes, check_affordable
from nvoffload.config import Io, OffloadConfig, PathLike, Size, format_bytes, nearest, parse_size, resolve
from nvoffload.device import open_device
from nvoffload.errors import ConfigError, UsageError
from nvoffload.layout import BUFFER_BYTES_PER_ELEMENT, Layout, choose_buffer_count
from nvoffload.ledger import Traffic, expected_store_bytes, host_state_bytes
from nvoffload.parameter import claim, owner_of
from nvoffload.partition import build_layout, named_parameters
from nvoffload.plan import Plan, resident_bytes
from nvoffload.runtime import OffloadStats, Session, hook_forward
from nvoffload.store import sweep
from nvoffload.swapfile import check_folder, check_space

log = logging.getLogger("nvoffload")
M = TypeVar("M", bound=nn.Module)
PROGRESS_AFTER_S = 2.0


class OffloadedModule:
    """What `offload` adds to a module: flush, close, stats, and `with`."""

    _nvoffload: Session
    offload_plan: Plan

    def flush(self) -> None:
        """Return when every step made so far is written and committed."""
        self._nvoffload.flush()

    def close(self) -> None:
        """End the offload: free the pool, remove the store unless keep="always". Idempotent."""
        self._nvoffload.end(is_clean=True)

    def offload_stats(self) -> OffloadStats:
        """Return bytes and seconds since offload()."""
        return self._nvoffload.stats()

    def offload_ledger(self) -> Traffic:
        """Return the bytes that one update of all parameters must read and write."""
        return self._nvoffload.ledger()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nvoffload.end(is_clean=error is None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise UsageError("an offloaded model can't be deep-copied; copy it before offload().")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("an offloaded model can't be pickled; save model.state_dict().")


def offload(
    module: M,
    *,
    param_offload: str | None = None,
    optimizer_offload: str | None = None,
    nvme_path: PathLike | None = None,
    buffer_count: int | None = None,
    buffer_size: Size | None = None,
    io: Io | None = None,
    keep: str | None = None,
    resume: bool | str | None = None,
    update: str | None = None,
    update_threads: int | None = None,
    name: str | None = None,
    device: torch.device | str | None = None,
    verify: bool | None = None,
    config: OffloadConfig | Mapping[str, Any] | PathLike | None = None,
    **others: Any,
) -> M:
    """Offload a module in place and return it, now also an OffloadedModule.

    With optimizer_offload="nvme" the values (and, from the optimizer's constructor on, its states)
    live in a swap file in `nvme_path`; parameters stay on their device as plain tensors. Build the
    optimizer after this call, with nvoffload.optim.

    Raises ConfigError for arguments and models that can't work, MachineError for too little space or
    memory, UsageError for a module that is offloaded already; nothing is left behind then.
    """
    known = [*OffloadConfig.__dataclass_fields__, "config"]
    for key in others:
        if key not in known:
            raise ConfigError(f"offload() has no argument {key!r}.{nearest(key, known)}")
    chosen = resolve(
        config,
        param_offload=param_offload,
        optimizer_offload=optimizer_offload,
        nvme_path=nvme_path,
        buffer_count=buffer_count,
        buffer_size=buffer_size,
        io=io,
        keep=keep,
        resume=resume,
        update=update,
        update_threads=update_threads,
        name=name,
        device=device,
        verify=verify,
        **others,
    )
    folder = check_folder(cast("Path | None", chosen.nvme_path)) if chosen.state_tier == "nvme" else None
    if not isinstance(module, nn.Module):
        raise ConfigError(f"offload() takes an nn.Module, not {type(module).__name__}.")
    _check_unowned(module)
    if chosen.device is not None:
        module.to(_usable_device(chosen.device))
    params = named_parameters(module)
    torch_device = _device_of(params)
    if chosen.optimizer_offload == "none" and torch_device.type != "cpu":
        raise ConfigError('optimizer_offload="none" on a CUDA device is not supported yet; use "cpu" or "nvme".')
    buffer_bytes = None if chosen.buffer_size is None else parse_size(chosen.buffer_size, "buffer_size")
    layout = build_layout(params, buffer_bytes)
    plan, count = _plan(chosen, layout, params, torch_device)
    if folder is not None:
        sweep(folder, chosen.name, layout, resume=chosen.resume)
        check_space(folder, expected_store_bytes(layout), "this model with AdamW states")
    threads = Session.threads_of(chosen)
    session = Session(
        chosen,
        layout,
        folder=folder,
        buffer_count=count,
        device=open_device(torch_device, threads),
        torch_device=torch_device,
    )
    try:
        _attach(module, params, session, plan)
    except BaseException:
        session.end(is_clean=True)
        raise
    for line in plan.lines():
        log.info("%s", line)
    return module


def _attach(module: nn.Module, params: Mapping[str, nn.Parameter], session: Session, plan: Plan) -> None:
    for index, param in enumerate(params.values()):
        claim(param, session, index)
        session.remember(index, param)
    session.device.synchronize()
    session.fill({i: p.data_ptr() for i, p in enumerate(params.values())}, progress("writing parameters"))
    if not isinstance(module, OffloadedModule):
        base = type(module)
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        module.__class__ = type(f"Offloaded{base.__name__}", (OffloadedModule, base), names)
    else:
        cast(Any, module._nvoffload_hook).remove()
    module._nvoffload = session  # type: ignore[assignment]
    module.offload_plan = plan  # type: ignore[assignment]
    module._nvoffload_hook = hook_forward(module, session)
    # Also runs at the interpreter's exit, before daemon threads are stopped.
    weakref.finalize(module, session.end_at_exit)


def _check_unowned(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        owner = owner_of(param)
        if owner is not None and owner[0].is_open:
            raise UsageError(
                f"{name} is offloaded already. Close the first: model.close(); or offload once, at the top."
            )


def _usable_device(device: Any) -> torch.device:
    try:
        usable = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is unknown: {error}") from None
    if usable.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r} is not supported; parameters must be on a CPU or a CUDA device.")
    return usable


def _device_of(params: Mapping[str, nn.Parameter]) -> torch.device:
    devices = {param.device: name for name, param in params.items()}
    if len(devices) > 1:
        (first, a), (second, b) = list(devices.items())[:2]
        raise ConfigError(
            f"{a} is on {first} and {b} on {second}; offload() needs one device. Pass device=... or call .to()."
        )
    return next(iter(devices), torch.device("cpu"))


def _plan(
    config: OffloadConfig, layout: Layout, params: Mapping[str, nn.Parameter], device: torch.device
) -> tuple[Plan, int]:
    """Return the plan and the buffer count (0: no pool); raise ConfigError if the pool can't fit."""
    is_disk = config.state_tier == "nvme"
    buffer_bytes = BUFFER_BYTES_PER_ELEMENT * layout.tile_numel
    count = 0
    if is_disk or device.type != "cpu":
        in_flight = config.io.queue_depth * config.io.block_bytes
        count = config.buffer_count or choose_buffer_count(
            layout.tile_numel, len(layout.tiles), in_flight, available_memory_bytes()
        )
        check_affordable(count, buffer_bytes)
    grads = sum(p.numel() * p.element_size() for p in params.values() if p.requires_grad)
    plan = Plan(
        resident_bytes=resident_bytes(),
        pool_bytes=count * buffer_bytes,
        gradient_bytes=grads if device.type == "cpu" else 0,
        host_state_bytes=0 if is_disk else host_state_bytes(layout),
        disk_bytes=expected_store_bytes(layout) if is_disk else 0,
        pool_text=f"{count} buffers of {format_bytes(buffer_bytes)}",
    )
    return plan, count


def progress(what: str) -> Callable[[int, int], None]:
    """Return a callback that shows, after a while and only on a terminal, how far a job is."""
    start_s = time.monotonic()

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty() and time.monotonic() - start_s > PROGRESS_AFTER_S:
            end = "\n" if done == total else ""
            print(f"\rnvoffload: {what} {100 * done // max(1, total)} %", end=end, file=sys.stderr)

    return show
