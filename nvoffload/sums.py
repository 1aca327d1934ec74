"""The one pass over memory in which a gradient lands: adds it, and sums what is there then.

Knows neither parameters nor who keeps the memory.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nvoffload import native

_C_DTYPES = {torch.float32: "NVO_F32", torch.bfloat16: "NVO_BF16"}
LANDING_DTYPES = tuple(_C_DTYPES)


@dataclass(frozen=True, slots=True)
class Sums:
    """Of an accumulator's memory: sum of squares in double, largest magnitude, is every element finite?"""

    squares: float = 0.0
    largest: float = 0.0
    is_finite: bool = True


class Peers(Protocol):
    """The ranks that share a gradient, each with a piece of it. Both calls are made by all of them."""

    def whole(self, values: Tensor) -> Tensor:
        """Return `values` with the pieces of all ranks, zero elsewhere, on each of them."""

    def total(self, sums: Sums) -> Sums:
        """Return the sums over all pieces."""


def land(memory: Tensor, grad: Tensor, *, is_fresh: bool, scale: float) -> Sums:
    """Write `grad`, or `scale` times the memory plus `grad`, to the memory in one pass; return its sums."""
    if memory.numel() == 0:
        return Sums()
    sums = native.ffi.new("nvo_sums *")
    code = native.lib.nvo_land(
        native.ffi.cast("float *", memory.data_ptr()),
        native.ffi.cast("void *", grad.data_ptr()),
        getattr(native.lib, _C_DTYPES[grad.dtype]),
        memory.numel(),
        int(is_fresh),
        scale,
        sums,
    )
    native.check(code, "landing a gradient")
    return Sums(sums.squares, sums.largest, bool(sums.finite))
