"""The traveller: one unit's flats, where they are, and its legal moves. Chooses nothing.

A unit's storage is made once. While its bytes are in gathered memory and it is shown, the storage
points there; else it points at poison, so that a view somebody kept reads NaN.

Note [Versions]: each parameter has a version counter, which all its stand-ins share. While the unit is
hidden it stands one higher than while it is shown. So a tensor that autograd saved is refused while its
unit is hidden, and is right again once that is shown as it was. A step or a user write moves the counter
for good: what was saved before it stays refused. A counter that stands elsewhere tells of a write
through a stand-in, or a view of one.
"""

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from nvoffload.config import OffloadConfig
from nvoffload.device import Memory, Poison
from nvoffload.errors import UsageError
from nvoffload.layout import Layout, UnitSpec
from nvoffload.parameter import OffloadedParameter
from nvoffload.shims import set_version, swap_storages


class State(Enum):
    """Where the values of a unit are, as the program sees it."""

    AWAY = "away"  # at home only
    GATHERING = "gathering"  # a job brings them into gathered memory
    GATHERED = "gathered"  # they are there, and the storage shows poison
    SHOWN = "shown"  # the storage points at them


MOVES = {
    (State.AWAY, State.GATHERING),
    (State.GATHERING, State.GATHERED),
    (State.GATHERED, State.SHOWN),
    (State.SHOWN, State.GATHERED),
    (State.GATHERED, State.GATHERING),  # an update in place
    (State.GATHERED, State.AWAY),
}


class Place:
    """A piece of gathered memory, large enough for its unit or, as a frame, for any."""

    def __init__(self, memory: Memory, offset: int) -> None:
        self._memory = memory
        self._offset = offset
        self.address = memory.address + offset

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return a storage over the first `nbytes`."""
        return self._memory.storage(self._offset, nbytes)


class Binding:
    """One name under which a module has a parameter: the wrapper and the stand-in that take turns there."""

    def __init__(self, module: Callable[[], nn.Module | None], name: str, wrapper: OffloadedParameter) -> None:
        self._module = module  # a weak reference: a unit must not keep its model alive
        self.name = name
        self.wrapper = wrapper
        self.stand_in: nn.Parameter | None = None

    def has(self, expected: Tensor) -> bool:
        """Is `expected` what the module has there?"""
        module = self._module()
        return module is None or module._parameters.get(self.name) is expected

    def register(self, wanted: Tensor) -> None:
        """Put `wanted` there."""
        module = self._module()
        if module is None:
            return
        if type(module).__setattr__ is nn.Module.__setattr__:
            module._parameters[self.name] = wanted  # type: ignore[assignment]
        else:
            setattr(module, self.name, wanted)  # RNNs keep lists of their weights

    def refuse(self) -> UsageError:
        """Return the error for a tensor that neither wrapper nor stand-in is."""
        module = self._module()
        found = module._parameters.get(self.name) if module is not None else None
        return UsageError(
            f"{self.wrapper.name} was replaced by a foreign tensor of shape {tuple(getattr(found, 'shape', ()))} "
            "after offload(), or its forward runs on two threads at once. Set values in place (load_state_dict, "
            "copy_), change modules before offload(), and run one forward at a time; functional_call is not supported."
        )


class Unit:
    """One unit. `place` is where its values are or are coming; `pins` counts who needs them there."""

    def __init__(self, layout: Layout, spec: UnitSpec, number: int, poison: Poison) -> None:
        self.spec = spec
        self.number = number
        self.state = State.AWAY
        self.place: Place | None = None
        self.own_place: Place | None = None  # of a kept or standing unit
        self.is_standing = False  # its own place is its home: never hidden, never away
        self.pins = 0
        self.depth = 0  # forwards of its modules that are running, nested
        self.bindings: list[Binding] = []
        self.deliveries: list[Any] = []  # jobs whose values the unit waits for
        self.collective: Any = None  # what brings the other ranks' parts, once those have delivered
        self.jobs: list[Any] = []  # all its jobs that may not have ended
        self._layout = layout
        self._poison = poison
        self._storage = poison.storage(spec.nbytes)
        self._hidden: torch.UntypedStorage | None = None  # what the place's memory is swapped with
        self._bytes = {param: self._bytes_of_storage() for param in spec.params}  # each with a version counter
        self._versions = dict.fromkeys(spec.params, 0)  # while shown
        self._replaced: set[int] = set()  # by a forward, and not yet at home
        self._set_versions()

    def __repr__(self) -> str:
        return f"<Unit {self.spec.name} {self.state.value.upper()} {self.spec.nbytes} B>"

    def _move(self, state: State) -> None:
        assert (self.state, state) in MOVES, f"{self!r}: {self.state} -> {state}"
        self.state = state

    def values_in(self, place: Place) -> dict[int, int]:
        """Return the address of every parameter in `place`."""
        return {param: place.address + self._layout.place_of(param)[1] for param in self.spec.params}

    def pieces_in(self, place: Place) -> list[tuple[Tensor, int]]:
        """Return, per flat, the bytes of all ranks' shards in `place` and the length of one."""
        base = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        base.set_(place.storage(self.spec.nbytes))
        flats = [self._layout.flats[flat] for flat in self.spec.flats]
        return [
            (base[offset : offset + flat.num_ranks * flat.shard_bytes], flat.shard_bytes)
            for flat, offset in zip(flats, self.spec.flat_offsets, strict=True)
            if flat.shard_bytes
        ]

    def _bytes_of_storage(self) -> Tensor:
        out = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        return out.set_(self._storage)

    def view(self, base: Tensor, param: int) -> Tensor:
        """Return the parameter's values in `base`, bytes laid out as the unit's gathered memory."""
        spec = self._layout.specs[param]
        offset = self._layout.place_of(param)[1]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        flat = base[offset : offset + spec.numel * dtype.itemsize].view(dtype)
        return flat.as_strided(spec.shape, spec.stride)

    def shown(self, param: int) -> Tensor:
        """Return the parameter's values as a plain tensor that its stand-ins share version and memory with."""
        return self.view(self._bytes[param], param).detach()

    def owns(self, tensor: Tensor) -> bool:
        """Is a tensor the unit's memory?"""
        return bool(tensor.untyped_storage()._cdata == self._storage._cdata)

    def make_stand_ins(self) -> None:
        """Make one leaf per binding, over the unit's storage."""
        for binding in self.bindings:
            wrapper = binding.wrapper
            binding.stand_in = nn.Parameter(self.shown(wrapper.index), requires_grad=wrapper.requires_grad)

    def gather(self, place: Place, jobs: list[Any]) -> None:
        """`jobs` bring the values into `place`."""
        assert self.pins == 0 or self.state is State.AWAY or place is self.place
        self._move(State.GATHERING)
        self.place = place
        self.deliveries = jobs

    def arrive(self) -> None:
        """All jobs have delivered."""
        self._move(State.GATHERED)
        self.deliveries, self.collective = [], None

    def show(self) -> None:
        """Point the storage at the values."""
        assert self.place is not None
        self._move(State.SHOWN)
        if self._hidden is None:
            self._hidden = self.place.storage(self.spec.nbytes)
            swap_storages(self._storage, self._hidden)
        self._set_versions()

    def hide(self) -> None:
        """Point the storage at poison; the values of a standing unit stay in sight."""
        self._move(State.GATHERED)
        if not self.is_standing and self._hidden is not None:
            swap_storages(self._storage, self._hidden)
            self._hidden = None
        self._set_versions()

    def _set_versions(self) -> None:
        is_hidden = self.state is not State.SHOWN
        for param, tensor in self._bytes.items():
            set_version(tensor, self._versions[param] + is_hidden)

    def written(self) -> list[int]:
        """Return the parameters that somebody has changed through a stand-in since the last move or `take_writes`."""
        is_hidden = self.state is not State.SHOWN
        return [
            param
            for param, tensor in self._bytes.items()
            if param in self._replaced or tensor._version != self._versions[param] + is_hidden
        ]

    def take_replaced(self) -> None:
        """Copy what a forward has put in place of a stand-in's memory (`p.data = ...`) to where it belongs.

        It counts as written. As in torch no version moves: what was saved of the stand-in is still good.
        """
        for binding in self.bindings:
            stand_in = binding.stand_in
            assert stand_in is not None
            if not self.owns(stand_in):
                param = binding.wrapper.index
                values, version = self.shown(param), self._bytes[param]._version
                if stand_in.shape != values.shape or stand_in.dtype != values.dtype:
                    raise binding.refuse()
                with torch.no_grad():
                    values.copy_(stand_in)
                stand_in.data = values
                set_version(values, version)
                self._replaced.add(param)

    def take_writes(self) -> None:
        """What was written is the parameters' value from now on; what a forward saved since is good."""
        assert self.state is State.SHOWN
        self._replaced.clear()
        self._versions = {param: tensor._version for param, tensor in self._bytes.items()}

    def undo_writes(self) -> None:
        """Forget what was written. The values of a unit that is shown are spoilt: give its place up."""
        if self.state is not State.SHOWN:
            self._poison.clean()
        self.advance(self.spec.params)

    def advance(self, params: Iterable[int]) -> None:
        """The values are, or will be, others: what autograd saved is refused from now on."""
        for param in params:
            self._versions[param] += 2
        self._set_versions()

    def blank(self, param: int) -> Tensor:
        """Return NaNs in the shape of a parameter, in no memory of their own."""
        spec = self._layout.specs[param]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        out = torch.empty(0, dtype=dtype, device=self._storage.device)
        return out.set_(self._poison.storage(spec.numel * dtype.itemsize), 0, spec.shape, spec.stride)

    def release(self) -> None:
        """Give the place up."""
        assert self.pins == 0
        if self.state is State.SHOWN:
            self.hide()
        self._move(State.AWAY)
        self.place = None

    def register_stand_ins(self) -> None:
        """Let the modules see stand-ins; raise UsageError, and change nothing, where a foreign tensor is."""
        for binding in self.bindings:
            if not binding.has(binding.wrapper):
                raise binding.refuse()
        for binding in self.bindings:
            assert binding.stand_in is not None
            if binding.stand_in.requires_grad != binding.wrapper.requires_grad:
                binding.stand_in.requires_grad_(binding.wrapper.requires_grad)
            binding.register(binding.stand_in)

    def register_wrappers(self, *, is_first: bool = False) -> None:
        """Let the modules see wrappers; raise UsageError if a foreign tensor is somewhere, which stays."""
        foreign = None
        for binding in self.bindings:
            assert binding.stand_in is not None
            if is_first or binding.has(binding.stand_in):
                binding.register(binding.wrapper)
            else:
                foreign = foreign or binding
        if foreign is not None:
            raise foreign.refuse()

    def end(self) -> None:
        """Point the storage at poison for good: gathered memory is about to go."""
        if self._hidden is not None:
            swap_storages(self._storage, self._hidden)
            self._hidden = None
        self.advance(self.spec.params)


def is_framed(spec: UnitSpec, config: OffloadConfig) -> bool:
    """Does the unit share frames with others, rather than have memory of its own?"""
    return config.param_offload != "none" and not spec.is_kept and spec.nbytes > 0
