"""The wrapper: what stands in a module for a parameter whose values are elsewhere.

Answers by a closed table, asking its home for values and handing new ones back; keeps none.
"""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from nvoffload import shims
from nvoffload.errors import UsageError

READ_BYTES_MAX = 1 << 30  # of one call; what is larger is read on purpose, by gathered()

_TENSOR: Any = torch.Tensor
_aten: Any = torch.ops.aten


class Home(Protocol):
    """Where values live. Reads and writes are of whole parameters, named by index."""

    @property
    def is_open(self) -> bool:
        """False once the values are gone."""

    def read(self, index: int) -> Tensor:
        """Return the current values: a fresh plain tensor of the parameter's shape, stride, dtype and device."""

    def write(self, index: int, values: Tensor) -> None:
        """Replace the values by a plain tensor of the same shape, stride, dtype and device, which home may keep."""


class OffloadedParameter(torch.Tensor):
    """An nn.Parameter without memory: true name, shape, stride, dtype, device, requires_grad and grad.

    Whole-tensor reads fetch, whole-tensor in-place operations fetch and write back, both outside of
    graphs; `detach()` and `.data` are lazy and name the same values. Everything else raises UsageError
    with the name: views, graphs, conversions, memory, copies and pickles.
    """

    home: Home
    index: int = -1  # type: ignore[assignment]
    name: str = ""
    tier: str = ""
    is_trainable: bool = False  # as offload() saw it; `requires_grad` may be switched off and on again
    blank: "Blank | None" = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what is no aten operation; let the rest pass to __torch_dispatch__."""
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(func, args, kwargs or {})
        if _is_inplace_method(func) and isinstance(args[0], cls) and args[0].requires_grad and torch.is_grad_enabled():
            _refuse(args[0], f"{func.__name__} changes a leaf that needs gradients; do it under torch.no_grad().")
        return shims.call_plainly(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an aten operation on the values, if the table allows it."""
        kwargs = kwargs or {}
        op = func.overloadpacket
        if op is _aten.detach:
            return _detached(args[0])
        if op is _aten.detach_:
            return args[0]
        if op in _CREATIONS:
            return _create(func, args, kwargs)
        _check(func, list(_params_in((args, kwargs))))
        if op is _aten.alias:
            return _detached(args[0])
        return _run(func, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is without reading it."""
        kind = "" if isinstance(self, torch.nn.Parameter) else ", detached"
        return f"OffloadedParameter({self.name}, {tuple(self.shape)}, {_dtype(self)}, tier={self.tier}{kind})"


Blank = Callable[[int], torch.UntypedStorage]


def wrap(
    home: Home,
    index: int,
    *,
    name: str,
    tier: str,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    blank: Blank | None = None,
) -> OffloadedParameter:
    """Return the wrapper of parameter `index` of `home`; its gradients may be of any dtype; ours are float32.

    `blank` gives storages of NaN: what a plain tensor shows after `plain.data = param`, which nobody can catch.
    """
    param = shims.make_wrapper(
        OffloadedParameter, shape=shape, stride=stride, dtype=dtype, device=device, requires_grad=requires_grad
    )
    _name(param, home, index, name, tier, requires_grad, blank)
    param._is_param = True  # what isinstance(..., nn.Parameter) asks for
    if requires_grad:
        shims.set_grad_dtype(param, None)  # ours are float32; a program may assign its own
    return param


def _name(
    param: OffloadedParameter,
    home: Home,
    index: int,
    name: str,
    tier: str,
    is_trainable: bool,
    blank: Blank | None,
) -> None:
    param.home, param.index, param.name, param.tier, param.is_trainable = home, index, name, tier, is_trainable
    param.blank = blank
    if blank is not None:
        shims.swap_storages(shims.call_plainly(_TENSOR.untyped_storage, (param,), None), blank(param.nbytes))


def _detached(param: OffloadedParameter) -> OffloadedParameter:
    """Return another wrapper of the same values, outside of every graph and module."""
    other = shims.make_wrapper(
        OffloadedParameter,
        shape=param.shape,
        stride=param.stride(),
        dtype=param.dtype,
        device=param.device,
        requires_grad=False,
    )
    _name(other, param.home, param.index, param.name, param.tier, param.is_trainable, param.blank)
    return other


def _is_inplace_method(func: Any) -> bool:
    if not isinstance(func, types.MethodDescriptorType) or func == _TENSOR.detach_:
        return False
    return func.__name__.endswith("_") and not func.__name__.endswith("__")


def _params_in(value: Any) -> Iterable[OffloadedParameter]:
    if isinstance(value, OffloadedParameter):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _params_in(item)
    elif isinstance(value, dict):
        yield from _params_in(list(value.values()))


# What the table allows.

# They make a new tensor from the metadata of one.
_CREATIONS = {
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like),
    *(_aten.rand_like, _aten.randn_like, _aten.randint_like),
    *(_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided),
}
# In-place operations that don't look at what was there: nothing to fetch.
_OVERWRITES = {
    *(_aten.copy_, _aten.fill_, _aten.zero_),
    *(_aten.normal_, _aten.uniform_, _aten.bernoulli_, _aten.random_, _aten.exponential_, _aten.log_normal_),
}
_CONVERSIONS = {_aten._to_copy, _aten.to}


def _check(func: Any, params: Sequence[OffloadedParameter]) -> None:
    """Raise UsageError unless the operation may run on the values of `params`."""
    for param in params:
        if torch.is_grad_enabled() and param.requires_grad:
            _refuse(
                param,
                f"it was used outside the forward of its unit, by {func}, in what could be a graph. Use it in the "
                "module that owns it, or read it by p.detach() or under torch.no_grad().",
            )
        if func.overloadpacket in _CONVERSIONS and isinstance(param, torch.nn.Parameter):
            _refuse(
                param,
                f"it is offloaded as {_dtype(param)} on {param.device} and can't be converted. Convert the model "
                "before offload(); for converted values use p.detach().to(...).",
            )
        if shims.is_view(func) and func.overloadpacket not in (*_CONVERSIONS, _aten.alias):
            _refuse(
                param,
                f"{func} needs memory to look at, and its values are elsewhere. "
                "Read it whole: p.detach().clone(), or with nvoffload.gathered(...).",
            )
        if not param.home.is_open:
            _refuse(param, "the model was closed, or offloaded in another process: read or save values before.")


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation on values and write back what it changed."""
    params = list(_params_in((args, kwargs)))
    reads = {_key(p): p for p in params}
    written = {_key(p): p for p in shims.written_by(func, args, kwargs) if isinstance(p, OffloadedParameter)}
    if func.overloadpacket in _OVERWRITES and len(reads) == len(params):
        reads = {key: p for key, p in reads.items() if key not in written}
    _check_size(func, list(reads.values()))
    with torch.inference_mode(False):  # home may keep what it makes, or is given
        values = {key: p.home.read(p.index) for key, p in reads.items()}
        values |= {key: _empty_like(p) for key, p in written.items() if key not in values}

    def plain(tensor: Tensor) -> Tensor:
        return values[_key(tensor)] if isinstance(tensor, OffloadedParameter) else tensor

    result = shims.run_with(plain, func, args, kwargs)
    with torch.inference_mode(False):
        for key, param in written.items():
            param.home.write(param.index, values[key])
    return result


def _create(func: Any, args: Any, kwargs: Any) -> Any:
    """Make a new tensor from the metadata of a wrapper."""
    device = next(iter(_params_in(args))).device
    meta = torch.device("meta")
    metas = shims.map_tensors(lambda t: _empty_like(t, meta) if isinstance(t, OffloadedParameter) else t, args)
    return func(*metas, **{**kwargs, "device": kwargs.get("device") or device})


def _empty_like(param: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device or param.device)


def _key(param: OffloadedParameter) -> tuple[int, int]:
    return id(param.home), param.index


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_size(func: Any, params: Sequence[OffloadedParameter]) -> None:
    read_bytes = sum(p.nbytes for p in params)
    if read_bytes > READ_BYTES_MAX:
        _refuse(
            max(params, key=lambda p: p.nbytes),
            f"{func} would read {read_bytes} bytes, more than the {READ_BYTES_MAX} of one call. "
            "Use nvoffload.gathered(...), or read fewer or smaller parameters at a time.",
        )


def _refuse(param: OffloadedParameter, why: str) -> NoReturn:
    raise UsageError(f"{param.name}: {why}")


# What is no aten operation: from torch's function to our answer.

_Answer = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


def _refusal(why: str) -> _Answer:
    def answer(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        _refuse(next(iter(_params_in((args, kwargs)))), f"{getattr(func, '__name__', func)} {why}")

    return answer


def _set_requires_grad(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    param: OffloadedParameter = args[0]
    if args[1] if len(args) > 1 else kwargs.get("requires_grad", True):
        if not isinstance(param, torch.nn.Parameter):
            _refuse(param, "what detach() returned is no parameter of its own; clone it: p.detach().clone().")
        if not param.is_trainable:
            _refuse(param, "it was frozen when offload() saw it. Call requires_grad_(True) before offload().")
    return shims.call_plainly(func, args, kwargs)


def _set_data(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    param, values = args
    if isinstance(values, OffloadedParameter) and _key(values) == _key(param):
        return
    if values.shape != param.shape or values.dtype != param.dtype or values.device != param.device:
        _refuse(
            param,
            f".data can't become {tuple(values.shape)} {_dtype(values)} on {values.device}: it was offloaded as "
            f"{tuple(param.shape)} {_dtype(param)} on {param.device}. Convert or reshape before offload().",
        )
    with torch.no_grad():
        param.copy_(values)


def _without_graph(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with torch.no_grad():
        return shims.call_plainly(func, args, kwargs)


# Their results are in no graph, so they may be asked with gradients on.
_GRAPHLESS = [
    *(getattr(_TENSOR, name) for name in ("item", "__bool__", "__float__", "__int__", "__eq__", "__ne__")),
    *(getattr(_TENSOR, name) for name in ("__lt__", "__le__", "__gt__", "__ge__", "lt", "le", "gt", "ge")),
    *(getattr(_TENSOR, name) for name in ("eq", "ne", "equal", "allclose", "isclose", "isfinite", "isnan", "isinf")),
    *(getattr(torch, name) for name in ("eq", "ne", "equal", "allclose", "isclose", "isfinite", "isnan", "isinf")),
]
_ANSWERS: dict[Any, _Answer] = {
    **dict.fromkeys(
        shims.MEMORY_ACCESS,
        _refusal("needs memory or a copy, and its values are elsewhere. Use p.detach().clone() first."),
    ),
    torch.autograd.grad: _refusal("of an offloaded parameter is not supported yet; call backward() and read p.grad."),
    _TENSOR.register_hook: _refusal("is not supported yet on an offloaded parameter."),
    _TENSOR.register_post_accumulate_grad_hook: _refusal("is not supported on an offloaded parameter."),
    _TENSOR.requires_grad_: _set_requires_grad,
    _TENSOR.requires_grad.__set__: _set_requires_grad,
    _TENSOR.data.__set__: _set_data,
    _TENSOR.tolist: lambda func, args, kwargs: args[0].detach().clone().tolist(),
    **dict.fromkeys(_GRAPHLESS, _without_graph),
}
