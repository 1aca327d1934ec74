"""Which parameters travel together: flats by dtype and trainability, from the module tree.

Checks that every parameter is one that can be stored; touches no value.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from nvoffload.errors import ConfigError
from nvoffload.layout import ALIGN, Flat, Layout, ParameterSpec, choose_tile_numel, cut_tiles

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16)


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name, tied ones once."""
    return dict(module.named_parameters())


def is_dense(tensor: torch.Tensor) -> bool:
    """Do the elements fill one run of memory, each once, in any order?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def build_layout(params: dict[str, nn.Parameter], buffer_bytes: int | None) -> Layout:
    """Return the layout of `params`; raise ConfigError naming a parameter that cannot be stored."""
    for name, param in params.items():
        _check(name, param)
    _check_overlap(params)
    specs = [
        ParameterSpec(name, tuple(p.shape), tuple(p.stride()), _dtype_name(p), p.numel()) for name, p in params.items()
    ]
    flats = _flats(list(params.values()), specs)
    tile_numel = choose_tile_numel(flats, buffer_bytes)
    return Layout(ALIGN, tile_numel, tuple(specs), tuple(flats), cut_tiles(flats, specs, tile_numel))


def _flats(params: Sequence[nn.Parameter], specs: Sequence[ParameterSpec]) -> list[Flat]:
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, param in enumerate(params):
        groups.setdefault((param.dtype, param.requires_grad), []).append(index)
    return [
        Flat.of(specs, indices, item_bytes=params[indices[0]].element_size(), is_trainable=is_trainable)
        for (_, is_trainable), indices in groups.items()
    ]


def _dtype_name(param: nn.Parameter) -> str:
    return str(param.dtype).removeprefix("torch.")


def _check(name: str, param: nn.Parameter) -> None:
    if param.is_meta:
        raise ConfigError(f"{name} is on the meta device and has no values; give it values before offload().")
    if param.layout is not torch.strided or param.is_quantized:
        raise ConfigError(f"{name} is not an ordinary strided tensor ({param.layout}); it can't be offloaded.")
    if not is_dense(param):
        raise ConfigError(
            f"{name} has strides {tuple(param.stride())} for shape {tuple(param.shape)}: its elements overlap or "
            "leave gaps (an expanded or sliced tensor). Replace it by nn.Parameter(p.detach().clone())."
        )
    if param.requires_grad and param.dtype not in TRAINABLE_DTYPES:
        raise ConfigError(
            f"{name} is trainable in {_dtype_name(param)}, which is not supported yet: float32 and bfloat16 are. "
            "Convert it, or freeze it with requires_grad_(False) before offload()."
        )


def _check_overlap(params: dict[str, nn.Parameter]) -> None:
    spans = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in params.items()
        if p.numel()
    )
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            raise ConfigError(
                f"{name} and {other} share memory but are two Parameters; both would be updated. "
                "Tie them by assigning one Parameter object to both modules."
            )
