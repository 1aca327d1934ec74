"""The private torch APIs we rely on, one test each.

A torch release that moves one of them fails here by name. Holds no policy and no state.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from nvoffload.errors import MachineError

_TENSOR: Any = torch.Tensor
DEFAULT_TIMEOUT_S = 600.0
_Made = TypeVar("_Made", bound=Tensor)

# What reaches behind a tensor to its memory; a tensor without memory refuses these through __torch_function__.
MEMORY_ACCESS = {
    *(_TENSOR.data_ptr, _TENSOR.untyped_storage, _TENSOR.storage, _TENSOR.share_memory_),
    *(_TENSOR.numpy, _TENSOR.__array__, _TENSOR.__dlpack__, _TENSOR.apply_),
    *(_TENSOR.__deepcopy__, _TENSOR.__reduce_ex__),
}


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage over memory that somebody else owns and keeps longer than every tensor on it."""
    make = _named(torch._C, "_construct_storage_from_data_pointer")
    storage: torch.UntypedStorage = make(address, device, nbytes)
    return storage


def swap_storages(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages of equal size; views and saved tensors of each follow it."""
    assert a.nbytes() == b.nbytes(), f"{a.nbytes()} and {b.nbytes()} bytes"
    swap = _named(a, "_swap_data_ptr_")
    swap(b)


def set_version(tensor: Tensor, version: int) -> None:
    """Set the version counter that `tensor` shares with its base and all views of it."""
    set_versions = _named(torch._C._autograd, "_unsafe_set_version_counter")
    set_versions((tensor,), (version,))


def graph_task_id() -> int:
    """Return the number of the backward that runs on this thread, -1 outside of one."""
    current = _named(torch._C, "_current_graph_task_id")
    return int(current())


def next_sequence_number() -> int:
    """Return the number that the next node of a graph made on this thread will get."""
    number = _named(torch._C._autograd, "_get_sequence_nr")
    return int(number())


def sequence_number(node: Node) -> int:
    """Return the number of a node: backward runs ready nodes of high numbers first; that of a leaf is the highest."""
    number = _named(node, "_sequence_nr")
    return int(number())


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that runs now has done everything else. REQUIRES: one runs."""
    engine: Any = _named(torch.autograd.Variable, "_execution_engine")
    engine.queue_callback(callback)


def make_wrapper(
    cls: type[_Made],
    *,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> _Made:
    """Return a tensor of class `cls` that has this metadata and no memory; no inference tensor in any mode."""
    make = _named(_TENSOR, "_make_wrapper_subclass")
    with torch.inference_mode(False):
        made: _Made = make(
            cls, tuple(shape), strides=tuple(stride), dtype=dtype, device=device, requires_grad=requires_grad
        )
    return made


def set_grad_dtype(tensor: Tensor, dtype: torch.dtype | None) -> None:
    """Let `tensor`, a leaf, have gradients of another dtype than its own; None: of any."""
    if hasattr(tensor, "grad_dtype"):
        tensor.grad_dtype = dtype
    elif dtype is not tensor.dtype:
        _missing("Tensor.grad_dtype")


def call_plainly(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Call `function` with __torch_function__ of subclasses off, so that one can call what it overrides."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **(kwargs or {}))


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that this call of an aten op writes, as its schema says."""
    written: list[Tensor] = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written.extend([value] if isinstance(value, Tensor) else value or ())
    return written


def run_with(plain: Callable[[Tensor], Tensor], op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an aten op with plain(t) for every tensor t. Where it returns plain(t) itself, return t."""
    origins: dict[int, Tensor] = {}

    def change(tensor: Tensor) -> Tensor:
        changed = plain(tensor)
        origins[id(changed)] = tensor
        return changed

    result = op(*map_tensors(change, args), **map_tensors(change, kwargs))
    return map_tensors(lambda tensor: origins.get(id(tensor), tensor), result)


def is_view(op: Any) -> bool:
    """May the aten op return an alias of an argument, or change a tensor's shape?"""
    if torch.Tag.inplace_view in op.tags:
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def prefixed(store: Any, name: str) -> Any:
    """Return a part of a store of torch.distributed, in which keys are those of `name`."""
    return _named(dist, "PrefixStore")(name, store)


_GROUPS = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}
GRACE_S = 10.0  # more than the limit that we keep ourselves


class RankGroup:
    """Gloo or NCCL between the ranks of `store`, apart from torch.distributed's own groups.

    Those are named after the state of each process, which must then be the same everywhere; a group of a
    model that is made and collected at other moments on other ranks can't rely on it.
    """

    def __init__(self, store: Any, name: str, backend: str, rank: int, num_ranks: int, limit_s: float) -> None:
        make = _named(dist, _GROUPS[backend])
        prefix = prefixed(store, name)
        prefix.set_timeout(timedelta(seconds=limit_s))
        self._group = make(prefix, rank, num_ranks, timedelta(seconds=limit_s + GRACE_S))

    def gather(self, out: Tensor, own: Tensor) -> Any:
        """Start an all-gather."""
        return _first_named(self._group, "_allgather_base", "all_gather_single")(out, own)

    def reduce(self, out: Tensor, given: Tensor) -> Any:
        """Start a reduce-scatter."""
        return _first_named(self._group, "_reduce_scatter_base", "reduce_scatter_single")(out, given)

    def sum(self, tensor: Tensor) -> Any:
        """Start an all-reduce."""
        return self._group.allreduce([tensor])

    def broadcast(self, tensor: Tensor) -> Any:
        """Start a broadcast from rank 0."""
        return self._group.broadcast(tensor, 0)


def _first_named(owner: Any, name: str, newer: str) -> Any:
    return getattr(owner, name, None) or _named(owner, newer)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds after which the group gives a collective up."""
    for kind in (device, torch.device("cpu"), torch.device("cuda")):
        try:
            backend = _named(group, "_get_backend")(kind)
        except RuntimeError:
            continue  # it has none for this device
        return float(backend.options._timeout.total_seconds())
    return DEFAULT_TIMEOUT_S


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return arguments or results of an aten op with every tensor in them changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(change, item) for item in value)
    if isinstance(value, dict):
        return {name: map_tensors(change, item) for name, item in value.items()}
    return value


def _named(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    return found if found is not None else _missing(name)


def _missing(name: str) -> Any:
    raise MachineError(f"torch {torch.__version__} has no {name}, which nvoffload needs; use torch 2.12 to 2.14.")
