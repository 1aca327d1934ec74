"""Which parameters are managed, and by whom. One weak table; the parameters stay plain tensors."""

import weakref
from typing import Any

from torch import Tensor

_owners: dict[int, tuple["weakref.ref[Tensor]", Any, int]] = {}


def claim(param: Tensor, owner: Any, index: int) -> None:
    """Record that `param` is number `index` of `owner`, as long as it lives."""
    key = id(param)
    _owners[key] = (weakref.ref(param, lambda _: _owners.pop(key, None)), owner, index)


def owner_of(param: Tensor) -> tuple[Any, int] | None:
    """Return (owner, index), None for a parameter nobody offloaded."""
    found = _owners.get(id(param))
    return (found[1], found[2]) if found and found[0]() is param else None


def disown(owner: Any) -> None:
    """Forget the parameters of `owner`."""
    for key in [key for key, (_, other, _) in _owners.items() if other is owner]:
        del _owners[key]
