"""From a model and a configuration to an open session: device, layout, plan, and what ranks must agree on.

Changes nothing of the model. What fails here fails on all ranks and leaves nothing behind.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from nvoffload.backend import threads_of
from nvoffload.config import OffloadConfig, parse_size
from nvoffload.device import numa_node_of, open_device
from nvoffload.errors import ConfigError
from nvoffload.layout import Layout
from nvoffload.ledger import homes_of, store_bytes
from nvoffload.partition import Cut, build_layout, cut_units, named_parameters
from nvoffload.peers import Peers, find_group
from nvoffload.plan import Plan, choose_memory, make_plan
from nvoffload.session import Session
from nvoffload.store import sweep
from nvoffload.swapfile import check_folder, check_space

# Of these each rank may have its own.
OWN_FIELDS = ("nvme_path", "device", "mesh", "update_threads", "units", "io", "mp_policy")


@dataclass
class Prepared:
    """What a session is opened with."""

    config: OffloadConfig
    folder: Path | None
    params: dict[str, nn.Parameter]
    cuts: Sequence[Cut]
    layout: Layout
    num_frames: int
    torch_device: torch.device


def find_peers(module: Any, mesh: Any, device: Any) -> Peers | None:
    """Meet the other ranks; None if there are none. All ranks call this before anything can fail on one."""
    group = find_group(mesh)
    if group is None:
        return None
    kind = str(device or next((p.device for p in module.parameters()), "cpu")) if isinstance(module, nn.Module) else ""
    return Peers(group, torch.device("cuda" if kind.startswith("cuda") else "cpu"))


def prepare(module: nn.Module, config: OffloadConfig, peers: Peers | None) -> Prepared:
    """Check everything that one rank can check alone."""
    if peers is not None and config.param_offload == "none" and config.is_sharded:
        # Whole parameters come and go, so they need homes: shards in host memory.
        config = replace(config, param_offload="cpu", optimizer_offload=config.optimizer_offload or "cpu")
    if config.uses_disk:
        folder: Path | None = check_folder(cast("Path | None", config.nvme_path))
    else:
        folder = None
    if config.device is not None:
        module.to(_usable_device(config.device))
    params = named_parameters(module)
    torch_device = _device_of(params)
    if config.optimizer_offload == "none" and torch_device.type != "cpu":
        raise ConfigError('optimizer_offload="none" on a CUDA device is not supported yet; use "cpu" or "nvme".')
    buffer_bytes = None if config.buffer_size is None else parse_size(config.buffer_size, "buffer_size")
    cuts = cut_units(module, params, config.units)
    rank, num_ranks = (peers.rank, peers.num_ranks) if peers else (0, 1)
    layout = build_layout(params, buffer_bytes, cuts, rank=rank, num_ranks=num_ranks)
    return Prepared(config, folder, params, cuts, layout, choose_memory(config, layout), torch_device)


def open_session(prepared: Prepared, peers: Peers | None) -> tuple[Session, Plan]:
    """Agree with the other ranks, make room on disk, open the store and what moves it."""
    config, layout, folder = prepared.config, prepared.layout, prepared.folder
    needed = store_bytes(layout, homes_of(config))
    if peers is not None:
        _agree(prepared, peers)
        everyone = _everyone(prepared, peers, needed)
        prepared.num_frames = min(other["frames"] for other in everyone)
    num_local = peers.num_local if peers else 1
    with peers.agreeing() if peers else nullcontext():
        plan, count = make_plan(config, layout, prepared.num_frames, prepared.torch_device, num_local)
        plan = replace(plan, rank_text=_place_text(prepared, peers))
        if folder is not None:
            sharers = [(rank, other["bytes"]) for rank, other in _sharers(everyone, peers)] if peers else [(0, needed)]
            if peers is None or sharers[0][0] == peers.rank:  # one of those that share a disk cleans up
                sweep(folder, config.name, layout, resume=config.resume)
            of = f" for {len(sharers)} ranks that share the disk" if len(sharers) > 1 else ""
            check_space(folder, sum(nbytes for _, nbytes in sharers), f"this model with AdamW states{of}")
    session = Session(
        config,
        layout,
        folder=folder,
        buffer_count=count,
        num_frames=prepared.num_frames,
        device=open_device(prepared.torch_device, threads_of(config, peers)),
        torch_device=prepared.torch_device,
        peers=peers,
    )
    return session, plan


def _place_text(prepared: Prepared, peers: Peers | None) -> str:
    """Return which rank this is, and the NUMA nodes of its disk and device: far ones share a link."""
    disk = numa_node_of_disk(prepared.folder) if prepared.folder is not None else None
    nodes = [("disk", disk), ("device", numa_node_of(prepared.torch_device))]
    words = [f"rank {peers.rank} of {peers.num_ranks}, {peers.num_local} on this machine"] if peers else []
    words += [f"{what} on NUMA node {node}" for what, node in nodes if node is not None]
    return f" ({', '.join(words)})" if words else ""


def numa_node_of_disk(folder: Path) -> int | None:
    """Return the NUMA node of the controller of the disk under `folder`; None if the kernel does not say."""
    number = os.stat(folder).st_dev
    place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    for parent in place.parents:
        file = parent / "numa_node"
        if file.exists():
            node = int(file.read_text())
            return node if node >= 0 else None
    return None


def _agree(prepared: Prepared, peers: Peers) -> None:
    """Raise ConfigError on all ranks if they have different models or arguments."""
    config, layout = prepared.config, prepared.layout
    names = [field.name for field in fields(config) if field.name not in OWN_FIELDS]
    facts = {name: repr(getattr(config, name)) for name in names}
    facts["reduce_dtype"] = repr(config.reduce_dtype)
    facts["the number of parameters"] = str(len(layout.specs))
    facts["the parameters' names and shapes"] = layout.fingerprint[:12]
    facts["the cut into units"] = str([unit.name for unit in layout.units])[:200]
    facts["what is trainable, and the units' cut"] = layout.digest[:12]
    peers.agree_on(facts)


def _everyone(prepared: Prepared, peers: Peers, needed_bytes: int) -> list[dict[str, Any]]:
    folder = prepared.folder
    disk = f"{os.stat(folder).st_dev} {peers.hosts[peers.rank]}" if folder is not None else ""
    facts = {"frames": prepared.num_frames, "bytes": needed_bytes, "disk": disk, "folder": str(folder)}
    return [json.loads(text) for text in peers.control.texts(json.dumps(facts))]


def _sharers(everyone: Sequence[Mapping[str, Any]], peers: Peers) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the ranks whose files are on the same disk as this one's, with what they told."""
    mine = everyone[peers.rank]["disk"]
    return [(rank, other) for rank, other in enumerate(everyone) if other["disk"] == mine]


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
