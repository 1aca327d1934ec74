"""Optimizers over offloaded parameters: real torch.optim.Optimizer classes whose states live in tiles.

Also refuses stock optimizers on offloaded parameters, by torch's hook that sees every step.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from nvoffload.errors import ConfigError, UsageError
from nvoffload.interrupts import Held
from nvoffload.mover import Group, Work
from nvoffload.parameter import OffloadedParameter
from nvoffload.session import Session
from nvoffload.tiles import Tiles

STATE_NAMES = ("exp_avg", "exp_avg_sq")
log = logging.getLogger("nvoffload")


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, decoupled decay) with torch.optim.AdamW's arguments.

    Parameters must belong to models that `offload` has seen, float32 or bfloat16. bfloat16 weights
    have a 32-bit master of which the weight is the upper half. `step` captures the gradients; with
    update="deferred" it returns then, and whoever reads a parameter next, a forward above all, waits
    for its new value. An I/O error of an update is raised there, or at the next step, flush or close.
    `state[p]` has "step", and "exp_avg" and "exp_avg_sq" as tensors that are read when they are asked for,
    zero before the first step; of several ranks all must ask. foreach and fused are accepted and have no effect.
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
        self._zones: dict[int, tuple[Session, list[dict[int, Tiles]]]] = {}
        self._adopted: set[Tensor] = set()  # those that have states
        self._has_warned = False
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
            if session.backend.store is not None:
                session.backend.store.captures.append(_capture_of(self))
        for param in params:
            owner = owner_of(param)
            names = STATE_NAMES if param.requires_grad else ()
            self.state[param] = LazyState(names, partial(_read_state, weakref.ref(self), owner))
        self._adopted.update(param for param in params if param.requires_grad)

    def zones_of(self, session: Session) -> list[dict[int, Tiles]]:
        """Return what updates of a model's parameters visit, by unit; one for each time that some were added."""
        return self._zones[id(session)][1]

    def _owner(self, param: Tensor, position: int) -> tuple[Session, int]:
        owner = owner_of(param)
        if owner is None:
            raise UsageError(
                f"parameter {position} of shape {tuple(param.shape)} was not offloaded, or its model was closed. "
                "Call nvoffload.offload(model, ...) first, on a module that contains it, and build the "
                "optimizer after."
            )
        session, index = owner
        session.backend.check_open()
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
        with Held():  # a step is captured whole, or not at all
            sessions = [session for session, _ in self._zones.values()]
            for session in sessions:
                session.check_at_rest("step()")
            groups = [_group(group) for group in self.param_groups]
            num_works = 0
            for session, zones in self._zones.values():
                works, stepped = self._works_of(session)
                num_works += len(works)
                if works:
                    session.step(id(self), zones, works, groups)
                for param in stepped:
                    self.state[param]["step"] += 1
            for session in sessions:
                session.finish_step()
        if not num_works and not self._has_warned:
            self._has_warned = True
            log.warning(
                "step() found no gradient on any of its parameters and changed nothing. Was backward() called? "
                "backward(inputs=...) of offloaded parameters is not supported: it finds no graph that leads to them."
            )
        return loss

    def _works_of(self, session: Session) -> tuple[list[Work], list[Tensor]]:
        works: list[Work] = []
        stepped: list[Tensor] = []
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                owner = owner_of(param)
                if owner is None or owner[0] is not session or owner[1] not in session.accumulators:
                    continue
                accumulator = session.accumulators[owner[1]]
                scale = accumulator.capture(param.grad)
                if scale is None:
                    continue
                if param not in self._adopted:
                    raise UsageError(
                        f"{session.layout.specs[owner[1]].name} was frozen when this optimizer was built, and has a "
                        "gradient now. Build the optimizer when every parameter it will train needs gradients."
                    )
                stepped.append(param)
                works.append(
                    Work(
                        param=owner[1],
                        grad_address=accumulator.address,
                        step=int(self.state[param]["step"]) + 1,
                        group=number,
                        grad_scale=-scale if group["maximize"] else scale,
                    )
                )
        return works, stepped

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


class LazyState(dict[str, Any]):
    """What `state[p]` is: the step number, and names of states that `read` brings, by position, when asked for."""

    def __init__(self, names: Sequence[str], read: Callable[[int], Tensor]) -> None:
        super().__init__({"step": torch.tensor(0.0), **dict.fromkeys(names)})
        self._names = tuple(names)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        return self._read(self._names.index(name)) if name in self._names else super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._names:
            raise UsageError(f"state[p][{name!r}] is in the swap file or host memory; setting it is not supported yet.")
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a state, read now, or `default`."""
        return self[name] if name in self else default  # noqa: SIM401 - dict.get reads nothing

    def values(self) -> Any:
        """Read all states."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """Read all states."""
        return [(name, self[name]) for name in self]

    def __repr__(self) -> str:
        lazy = ", ".join(f"{name}: read when asked for" for name in self._names)
        return f"{{step: {super().__getitem__('step')}, {lazy}}}"


def _read_state(optimizer: "weakref.ref[AdamW]", owner: tuple[Session, int] | None, word: int) -> Tensor:
    alive = optimizer()
    if alive is None or owner is None:
        raise UsageError("the optimizer of this state, or its model, is gone.")
    session, index = owner
    return session.read_state(index, alive.zones_of(session), word)


def owner_of(param: Tensor) -> tuple[Session, int] | None:
    """Return (session, number) of an offloaded parameter, None for one nobody offloaded."""
    if isinstance(param, OffloadedParameter) and isinstance(param.home, Session):
        return param.home, param.index
    return None


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
    kind = type(optimizer).__name__
    params: Iterable[Tensor] = (p for group in optimizer.param_groups for p in group["params"])
    for param in params:
        owner = owner_of(param)
        if owner is not None and owner[0].is_open:
            raise UsageError(
                f"torch.optim.{kind} can't step offloaded parameters "
                f"({owner[0].layout.specs[owner[1]].name}): use nvoffload.optim.AdamW(model.parameters(), ...), "
                "built after offload()."
            )
        if hasattr(param, "offloaded_as"):
            raise UsageError(
                f"torch.optim.{kind} holds {param.offloaded_as} as it was before offload(), which no model uses any "
                "more: use an optimizer that is built after offload()."
            )


register_optimizer_step_pre_hook(_refuse_stock)
