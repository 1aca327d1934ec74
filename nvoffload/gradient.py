"""Gradients on the host: an accumulator per parameter, and the handle that stands in `.grad`.

Keeps norm, finite flag and marks; folds what lands; never updates a parameter.
"""

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor

from nvoffload import shims
from nvoffload.errors import UsageError
from nvoffload.sums import LANDING_DTYPES, Peers, Sums, land

_aten: Any = torch.ops.aten
_TENSOR: Any = torch.Tensor
_FLOAT_MAX = torch.finfo(torch.float32).max


class Phase(Enum):
    """What the memory of an accumulator holds, and who has seen it.

    EMPTY -land-> LANDED -publish-> SHOWN -land-> ADDED -publish-> SHOWN. If the handle is gone from `.grad`,
    land goes to LANDED; if a plain tensor stands there, capture goes to EMPTY; both end the handle.
    """

    EMPTY = "nothing of this step"
    LANDED = "a gradient that nobody has seen"
    SHOWN = "what the handle says"
    ADDED = "what the handle says, and more since it was published"


class Accumulator:
    """One parameter's gradient on the host: float32, in the parameter's memory order; of several ranks, a piece.

    The gradient is `scale` times the memory, or zero if `is_zero`: edits are marks, folded by the next
    landing, so that they neither touch nor wait for memory that a pending update reads. Whatever
    writes the memory calls `before_write` first. Not thread-safe: calls come under the runtime's lock.
    """

    def __init__(
        self,
        memory: Tensor,  # 1D, float32, CPU, numel of the piece
        *,
        name: str,
        shape: Sequence[int],
        stride: Sequence[int],
        device: torch.device,
        before_write: Callable[[], None],
        piece: range | None = None,
        peers: Peers | None = None,
    ) -> None:
        """`piece`: which elements of the parameter, in memory order, are kept here; None: all."""
        assert memory.dtype is torch.float32 and memory.is_contiguous() and memory.dim() == 1
        self.piece = piece if piece is not None else range(math.prod(shape))
        assert memory.numel() == len(self.piece), f"{memory.numel()} elements for {self.piece}"
        self.name = name
        self.shape = tuple(shape)
        self.stride = tuple(stride)
        self.device = device
        self.scale = 1.0
        self.is_zero = False
        self.phase = Phase.EMPTY
        self.generation = 0  # of handles: those of an earlier one are gone
        self._sums = Sums()
        self._before_write = before_write
        self._memory = memory
        self._peers = peers
        self._handle: OffloadedGradient | None = None

    @property
    def address(self) -> int:
        """Where the memory of the parameter's first element is, or would be before that of the piece."""
        return self._memory.data_ptr() - self.piece.start * 4

    @property
    def sums(self) -> Sums:
        """Of the memory: of the piece until `total` is known."""
        return self._sums

    def set_sums(self, total: Sums) -> None:
        """Say what they are over all pieces."""
        self._sums = total

    @property
    def is_finite(self) -> bool:
        """Is every element of the gradient, marks included, a finite float32?"""
        return self.is_zero or (self._sums.is_finite and self._sums.largest * abs(self.scale) <= _FLOAT_MAX)

    @torch.no_grad()
    def land(self, grad: Tensor, current: Tensor | None) -> None:
        """Add `grad` to what `current`, the parameter's `.grad`, stands for; to nothing if it is None.

        Several landings before `publish` add up whatever `current` is.
        """
        self.land_piece(self._own(grad), current)

    @torch.no_grad()
    def land_piece(self, grad: Tensor, current: Tensor | None) -> None:
        """Do what `land` does with the piece alone: 1D, on the host, float32 or bfloat16; `sums` are its own then."""
        if self.phase is Phase.LANDED or self._is_ours(current):
            self._fold(grad, is_fresh=self.is_zero)
            self.phase = Phase.LANDED if self.phase is Phase.LANDED else Phase.ADDED
            return
        if current is not None:
            self._fold(self._own(current), is_fresh=True)
        self._fold(grad, is_fresh=current is None)
        self._end_handle(Phase.LANDED)

    def drop_landed(self) -> None:
        """What has landed was nothing, on any rank: `.grad` stays as it is."""
        if self.phase is Phase.LANDED:
            self.phase = Phase.EMPTY

    def publish(self) -> "OffloadedGradient | None":
        """Return the handle to set as `.grad`, or None if nothing has landed since the last call.

        None says: leave `.grad` as it is.
        """
        if self.phase not in (Phase.LANDED, Phase.ADDED):
            return None
        if self._handle is None:
            self._handle = _handle_of(self)
        self.phase = Phase.SHOWN
        return self._handle

    @torch.no_grad()
    def capture(self, current: Tensor | None) -> float | None:
        """Make the memory ready for an update; return what to multiply it by, None without a gradient."""
        if current is None:
            return None
        if not self._is_ours(current):
            self._fold(self._own(current), is_fresh=True)
            self._end_handle(Phase.EMPTY)
        elif self.is_zero:
            self._before_write()
            self._memory.zero_()
            self._reset(Sums())
        return self.scale

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return the gradient as a plain float32 tensor of the parameter's shape and stride, on its device."""
        flat = torch.zeros(math.prod(self.shape), dtype=torch.float32)
        if not self.is_zero:
            torch.mul(self._memory, self.scale, out=flat[self.piece.start : self.piece.stop])
            if self._peers is not None:
                flat = self._peers.whole(flat)
        return flat.as_strided(self.shape, self.stride).to(self.device)

    @torch.no_grad()
    def replace(self, values: Tensor) -> None:
        """Set the memory to a gradient from elsewhere; marks end."""
        self._fold(self._own(values), is_fresh=True)
        self.total_sums()

    def total_sums(self) -> None:
        """Let all ranks know the sums over all pieces: norms and the finite check are the same on all then."""
        if self._peers is not None:
            self._sums = self._peers.total(self._sums)

    def norm(self, order: float) -> float | None:
        """Return the norm of order 2 or inf without reading the memory, None if that is not possible."""
        if order not in (2.0, math.inf) or not self.is_finite:
            return None
        if self.is_zero:
            return 0.0
        return (math.sqrt(self._sums.squares) if order == 2.0 else self._sums.largest) * abs(self.scale)

    def close(self) -> None:
        """Let go of the handle, which lives on if somebody keeps it: each would keep the other's memory."""
        self._handle = None

    def _is_ours(self, current: Tensor | None) -> bool:
        return isinstance(current, OffloadedGradient) and current.stands_for(self)

    def _end_handle(self, phase: Phase) -> None:
        self.generation += 1
        self._handle = None
        self.phase = phase

    def _reset(self, sums: Sums) -> None:
        self.scale, self.is_zero, self._sums = 1.0, False, sums

    def _fold(self, grad: Tensor, *, is_fresh: bool) -> None:
        self._before_write()
        self._reset(land(self._memory, grad, is_fresh=is_fresh, scale=self.scale))

    def _own(self, grad: Tensor) -> Tensor:
        """Return the piece of `grad`, 1D."""
        flat = self._arranged(grad).as_strided((math.prod(self.shape),), (1,))
        return flat[self.piece.start : self.piece.stop]

    def check(self, grad: Tensor) -> None:
        """Raise UsageError for a gradient that can't be kept."""
        if grad.layout is not torch.strided:
            raise UsageError(f"{self.name} has a sparse gradient, which is not supported yet; use sparse=False.")
        assert tuple(grad.shape) == self.shape, f"{self.name}: a gradient of shape {tuple(grad.shape)}"

    def _arranged(self, grad: Tensor) -> Tensor:
        """Return `grad` on the host in the memory order of the parameter, float32 or bfloat16."""
        self.check(grad)
        dtype = grad.dtype if grad.dtype in LANDING_DTYPES else torch.float32
        is_plain = type(grad) in (Tensor, torch.nn.Parameter) and not grad.is_neg()
        if is_plain and grad.device.type == "cpu" and grad.dtype is dtype and grad.stride() == self.stride:
            return grad
        return torch.empty_strided(self.shape, self.stride, dtype=dtype).copy_(grad)


class OffloadedGradient(torch.Tensor):
    """What stands in `.grad` of an offloaded parameter: the gradient of one step, float32, kept on the host.

    Norms of order 2 and inf come from sums; multiplying by one number and zeroing are marks; other
    whole-tensor operations read the values, or read them and write them back. Views and memory are
    refused by name, and so is every use after a newer gradient has taken the memory.
    """

    accumulator: Accumulator
    generation: int = -1

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what is no aten operation; let the rest pass to __torch_dispatch__."""
        if func in shims.MEMORY_ACCESS:
            handle = next(a for a in args if isinstance(a, cls))
            _refuse(handle, f"{func.__name__} needs memory or a copy; use clone() first.")
        if func == _TENSOR.tolist:
            return _alive(args[0]).values().tolist()
        if func == _TENSOR.data.__set__:
            return _set_data(*args)
        return shims.call_plainly(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer from sums and marks where that is possible, else from the values."""
        answer = _ANSWERS.get(func.overloadpacket, _by_values)
        return answer(func, args, kwargs or {})

    def stands_for(self, accumulator: Accumulator) -> bool:
        """Is this, or was it detached from, the handle of what `accumulator` holds now?"""
        return self.accumulator is accumulator and self.generation == accumulator.generation

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is without reading it."""
        accumulator = self.accumulator
        scale = 0.0 if accumulator.is_zero else accumulator.scale
        mark = f"scale={scale:g}" if self.stands_for(accumulator) else "gone"
        return f"OffloadedGradient({accumulator.name}, {tuple(self.shape)}, {mark})"


def _handle_of(accumulator: Accumulator) -> OffloadedGradient:
    handle = shims.make_wrapper(
        OffloadedGradient,
        shape=accumulator.shape,
        stride=accumulator.stride,
        dtype=torch.float32,
        device=accumulator.device,
        requires_grad=False,
    )
    handle.accumulator, handle.generation = accumulator, accumulator.generation
    return handle


def _alive(handle: OffloadedGradient) -> Accumulator:
    """Return what the handle stands for; raise UsageError if that is gone."""
    accumulator = handle.accumulator
    if not handle.stands_for(accumulator):
        raise UsageError(
            f"the gradient of {accumulator.name} of an earlier step is gone; clone() it to keep it over zero_grad()."
        )
    return accumulator


def _refuse(handle: OffloadedGradient, why: str) -> NoReturn:
    raise UsageError(f"the gradient of {handle.accumulator.name}: {why}")


def _set_data(handle: OffloadedGradient, values: Tensor) -> None:
    if isinstance(values, OffloadedGradient) and values.accumulator is _alive(handle):
        return
    if values.shape != handle.shape or values.dtype != handle.dtype:
        _refuse(handle, f".data can't become {tuple(values.shape)} {values.dtype}.")
    with torch.no_grad():
        handle.copy_(values)


# Answers to aten operations.


def _by_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run any whole-tensor operation on the values; put back those that it writes."""
    values: dict[int, Tensor] = {}

    def plain(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, OffloadedGradient):
            return tensor
        if shims.is_view(func):
            _refuse(tensor, f"{func} needs memory to look at; use clone() first.")
        accumulator = _alive(tensor)
        if id(accumulator) not in values:
            values[id(accumulator)] = accumulator.values()
        return values[id(accumulator)]

    result = shims.run_with(plain, func, args, kwargs)
    for tensor in shims.written_by(func, args, kwargs):
        if isinstance(tensor, OffloadedGradient):
            tensor.accumulator.replace(values[id(tensor.accumulator)])
    return result


def _zero(func: Any, args: Any, kwargs: Any) -> Tensor:
    _alive(args[0]).is_zero = True
    return args[0]  # type: ignore[no-any-return]


def _scale(func: Any, args: Any, kwargs: Any) -> Any:
    """mul_ and div_: by one finite number a mark, by anything else through the values."""
    tensor, value = args
    factor = None if kwargs else _factor(value, is_division=func.overloadpacket is _aten.div_)
    if factor is None or not isinstance(tensor, OffloadedGradient):
        return _by_values(func, args, kwargs)
    _alive(tensor).scale *= factor
    return tensor


def _factor(value: Any, *, is_division: bool) -> float | None:
    """Return what a mark multiplies by, rounded to float32 as torch rounds it; None if no mark can say it."""
    if isinstance(value, complex) or (isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex())):
        return None
    number = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64).float().item()
    if not math.isfinite(number) or (is_division and number == 0.0):
        return None
    return 1.0 / number if is_division else number


def _foreach_scale(func: Any, args: Any, kwargs: Any) -> None:
    tensors, values = args
    values = values if isinstance(values, list | tuple) else [values] * len(tensors)
    for tensor, value in zip(tensors, values, strict=True):
        if func.overloadpacket is _aten._foreach_div_:
            tensor.div_(value)
        else:
            tensor.mul_(value)


def _foreach_zero(func: Any, args: Any, kwargs: Any) -> None:
    for tensor in args[0]:
        tensor.zero_()


def _vector_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """The norm of the whole gradient from its sums where they say it, else through the values."""
    handle, given = args[0], list(args[1:])
    defaults: tuple[Any, ...] = (2, None, False)
    order, dim, keepdim = (*given, *defaults[len(given) :])
    is_whole = dim is None or len({d % max(1, handle.dim()) for d in dim}) == handle.dim()
    norm = _alive(handle).norm(float(order)) if is_whole else None
    if norm is None:
        return _by_values(func, args, kwargs)
    shape = (1,) * handle.dim() if keepdim else ()
    return torch.full(shape, norm, dtype=torch.float32, device=handle.device).to(kwargs.get("dtype"))


def _foreach_norm(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, *args[1:], **kwargs) for tensor in args[0]]


_ANSWERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    _aten.detach: lambda func, args, kwargs: _handle_of(_alive(args[0])),
    _aten.alias: lambda func, args, kwargs: _handle_of(_alive(args[0])),
    _aten.detach_: lambda func, args, kwargs: args[0],
    _aten.zero_: _zero,
    _aten.mul_: _scale,
    _aten.div_: _scale,
    _aten._foreach_mul_: _foreach_scale,
    _aten._foreach_div_: _foreach_scale,
    _aten._foreach_zero_: _foreach_zero,
    _aten.linalg_vector_norm: _vector_norm,
    _aten._foreach_norm: _foreach_norm,
}
