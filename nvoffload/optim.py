"""Optimizers over offloaded parameters: real torch.optim.Optimizer classes whose states live in tiles.

Also refuses stock optimizers on offloaded parameters, by torch's hook that sees every step.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from nvoffload.errors import ConfigError, UsageError
from nvoffload.parameter import owner_of
from nvoffload.partition import is_dense
from nvoffload.runtime import Session
from nvoffload.update import Group, Tiles, Work

_GRAD_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, decoupled decay) with torch.optim.AdamW's arguments.

    Parameters must belong to models that `offload` has seen, float32 or bfloat16. bfloat16 weights
    have a 32-bit master of which the weight is the upper half. `step` returns when the parameters are
    new and all states are written; it raises StorageError when a transfer fails. `state[p]` holds the
    step number only. foreach and fused are accepted and have no effect.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        for name, value in (
            ("amsgrad", amsgrad),
            ("capturable", capturable),
            ("differentiable", differentiable),
        ):
            if value:
                raise ConfigError(f"AdamW({name}=True) is not supported yet; leave it out.")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        self._zones: dict[int, tuple[Session, list[Tiles]]] = {}
        self._marks: dict[int, tuple[int, int]] = {}
        self._is_built = False
        super().__init__(params, defaults)
        self._is_built = True
        self._adopt([p for group in self.param_groups for p in group["params"]])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group at a step boundary; its states are appended to the store."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
            if self._is_built:
                self._adopt(group["params"])
        except BaseException:
            self.param_groups.pop()
            raise

    def _adopt(self, params: list[Tensor]) -> None:
        """Check every parameter, then make states for all of them."""
        found: dict[int, tuple[Session, set[int]]] = {}
        for position, param in enumerate(params):
            if param.requires_grad:
                session, index = self._owner(param, position)
                found.setdefault(id(session), (session, set()))[1].add(index)
        for key, (session, indices) in found.items():
            tiles = session.add_states(frozenset(indices))
            self._zones.setdefault(key, (session, []))[1].append(tiles)
            for index in indices:
                session.optimizers[index] = weakref.ref(self)
            if session.store is not None:
                session.store.captures.append(_capture_of(self))
        for param in params:
            self.state[param] = {"step": torch.tensor(0.0)}

    def _owner(self, param: Tensor, position: int) -> tuple[Session, int]:
        owner = owner_of(param)
        if owner is None:
            raise UsageError(
                f"parameter {position} of shape {tuple(param.shape)} was not offloaded, or its model was closed. "
                "Call nvoffload.offload(model, ...) first, on a module that contains it, and build the "
                "optimizer after."
            )
        session, index = owner
        session.check_open()
        spec = session.layout.specs[index]
        other = session.optimizers.get(index)
        if other is not None and other() is not None:
            gc.collect()  # an optimizer is part of a cycle; one that was deleted may still be about
        if other is not None and other() is not None and other() is not self:
            raise UsageError(
                f"{spec.name} already belongs to another optimizer, which is still alive. "
                "Use one, with several param groups, or delete the first."
            )
        if not any(index in flat.params for flat in session.layout.flats if flat.is_trainable):
            raise UsageError(
                f"{spec.name} was frozen when offload() saw it. Call requires_grad_(True) before offload()."
            )
        return session, index

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [_group(group) for group in self.param_groups]
        for session, _ in self._zones.values():
            session.check_open()
        interrupts = [self._step_session(session, zones, groups) for session, zones in self._zones.values()]
        for interrupt in interrupts:
            if interrupt is not None:
                raise interrupt
        return loss

    def _step_session(self, session: Session, zones: list[Tiles], groups: list[Group]) -> KeyboardInterrupt | None:
        works: list[Work] = []
        stepped: list[Tensor] = []
        addresses: dict[int, int] = {}
        gradients: list[Tensor] = []  # kept until the update has read them
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                owner = owner_of(param)
                if owner is None or owner[0] is not session:
                    continue
                index = owner[1]
                _check_unchanged(param, session, index)
                addresses[index] = param.data_ptr()
                if param.grad is None:
                    continue
                grad = _dense_gradient(param, session.layout.specs[index].name)
                gradients.append(grad)
                stepped.append(param)
                works.append(
                    Work(
                        param=index,
                        value_address=param.data_ptr(),
                        grad_address=grad.data_ptr(),
                        grad_dtype=_GRAD_DTYPES[grad.dtype],
                        step=int(self.state[param]["step"]) + 1,
                        group=number,
                        grad_scale=-1.0 if group["maximize"] else 1.0,
                        is_fresh=self._marks.get(id(param), _mark(param)) != _mark(param),
                    )
                )
        if not works:
            return None
        addresses |= _other_addresses(session, zones, addresses)
        interrupt = session.update(id(self), zones, works, groups, addresses)
        increment_version(stepped)
        for param in stepped:
            self.state[param]["step"] += 1
            self._marks[id(param)] = _mark(param)
        return interrupt

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("AdamW can't be pickled or copied: its states are in the swap file.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UsageError("AdamW can't be copied: its states are in the swap file.")

    def state_dict(self) -> dict[str, Any]:
        """Raise: saving half a state would be worse than none."""
        raise UsageError("AdamW.state_dict() is not supported yet: the states are in the swap file.")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise, as `state_dict` does."""
        raise UsageError("AdamW.load_state_dict() is not supported yet: the states are in the swap file.")


def _other_addresses(session: Session, zones: list[Tiles], known: dict[int, int]) -> dict[int, int]:
    """Addresses of parameters of other optimizers that share a tile with ours."""
    missing = {s.param for tiles in zones for i in tiles.indices for s in session.layout.tiles[i].segments} - set(known)
    return {index: session.address_of(index) for index in missing}


def _mark(param: Tensor) -> tuple[int, int]:
    """Changes when somebody else writes the parameter: then a bf16 master has lost its low half."""
    return param._version, param.data_ptr()


def _check_unchanged(param: Tensor, session: Session, index: int) -> None:
    spec = session.layout.specs[index]
    dtype = str(param.dtype).removeprefix("torch.")
    if tuple(param.stride()) != spec.stride or tuple(param.shape) != spec.shape or dtype != spec.dtype:
        raise UsageError(
            f"{spec.name} is now {tuple(param.shape)} {dtype} with strides {tuple(param.stride())}; offload() saw "
            f"{spec.shape} {spec.dtype} with {spec.stride}. Convert or reshape before offload()."
        )
    if param.device != session.torch_device:
        raise UsageError(
            f"{spec.name} moved to {param.device}; offload() saw it on {session.torch_device}. Move before offload()."
        )


def _dense_gradient(param: Tensor, name: str) -> Tensor:
    """Return the gradient in the memory order of the parameter, as float32 or bfloat16."""
    grad = param.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise UsageError(f"{name} has a sparse gradient, which is not supported yet; use sparse=False.")
    if grad.device != param.device:
        raise UsageError(f"the gradient of {name} is on {grad.device}, the parameter on {param.device}.")
    dtype = grad.dtype if grad.dtype in _GRAD_DTYPES else torch.float32
    if grad.dtype is dtype and grad.stride() == param.stride() and is_dense(grad):
        return grad
    return torch.empty_strided(param.shape, param.stride(), dtype=dtype, device=param.device).copy_(grad)


def _group(group: dict[str, Any]) -> Group:
    beta1, beta2 = group["betas"]
    return Group(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )


def _check_group(group: dict[str, Any]) -> None:
    values = _group(group)
    if not values.lr >= 0 or not values.eps >= 0 or not values.weight_decay >= 0:
        raise ConfigError(
            f"lr={values.lr}, eps={values.eps}, weight_decay={values.weight_decay}: none may be negative."
        )
    if not (0 <= values.beta1 < 1 and 0 <= values.beta2 < 1):
        raise ConfigError(f"betas=({values.beta1}, {values.beta2}): both must be at least 0 and below 1.")


def _capture_of(optimizer: AdamW) -> Callable[[], dict[str, Any]]:
    """Return what asks for the group fields and step numbers, as long as the optimizer lives."""
    reference = weakref.ref(optimizer)

    def capture() -> dict[str, Any]:
        alive = reference()
        if alive is None:
            return {}
        groups = []
        for group in alive.param_groups:
            fields = {k: v for k, v in group.items() if isinstance(v, int | float | str | bool | tuple)}
            owners = [owner_of(param) for param in group["params"]]
            numbers = [owner[1] if owner else -1 for owner in owners]
            steps = [int(alive.state[param].get("step", 0)) for param in group["params"]]
            groups.append({"fields": fields, "params": numbers, "steps": steps})
        return {"optimizer": type(alive).__name__, "groups": groups}

    return capture


def _refuse_stock(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if isinstance(optimizer, AdamW):
        return
    params: Iterable[Tensor] = (p for group in optimizer.param_groups for p in group["params"])
    for param in params:
        owner = owner_of(param)
        if owner is not None and owner[0].is_open:
            name = type(optimizer).__name__
            raise UsageError(
                f"torch.optim.{name} can't step offloaded parameters "
                f"({owner[0].layout.specs[owner[1]].name}): use nvoffload.optim.AdamW(model.parameters(), ...), "
                "built after offload()."
            )


register_optimizer_step_pre_hook(_refuse_stock)
