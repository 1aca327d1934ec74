"""A model's gradients: the way from the hooks that find them to what stands in `.grad`.

Owns accumulators and their memory; with several ranks has them reduced first.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nvoffload.buffers import Arena, Trimmer
from nvoffload.collectives import Collectives
from nvoffload.errors import UsageError
from nvoffload.gradient import Accumulator
from nvoffload.layout import Layout, round_up
from nvoffload.ledger import largest_gradient_bytes
from nvoffload.order import Order
from nvoffload.parameter import OffloadedParameter
from nvoffload.reduction import GradientPeers, Reducer
from nvoffload.residency import Residency
from nvoffload.schedule import BACKWARD_END
from nvoffload.unit import Unit

GRADIENT_START = 16  # elements: each accumulator starts on a 64-byte boundary
TRIM_SLACK_BYTES = 32 << 20  # at least
TRIM_FROM_BYTES = 256 << 10  # what malloc takes from holes that small gradients leave


class Landing:
    """Gradients of one model, from one backward to the next."""

    def __init__(
        self,
        residency: Residency,
        order: Order,
        layout: Layout,
        wrappers: Mapping[int, OffloadedParameter],
        *,
        device: torch.device,
        collectives: Collectives | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.accumulators: dict[int, Accumulator] = {}
        self._residency = residency
        self._order = order
        self._layout = layout
        self._wrappers = wrappers
        self._device = device
        self._collectives = collectives
        self._landed: list[int] = []
        self._arenas: list[Arena] = []  # freed with their last handle
        self._trimmer = Trimmer(max(TRIM_SLACK_BYTES, largest_gradient_bytes(layout)))
        self._reducer: Reducer | None = None
        if collectives is not None:
            self._reducer = Reducer(
                layout,
                collectives,
                residency,
                self.accumulators,
                wrappers,
                device=device,
                dtype=reduce_dtype,
                trim=self._trimmer.trim,
            )
            order.reduce = self._reducer.reduce

    def make(self, unit: Unit) -> None:
        """Make the accumulators of a unit's trainable parameters, or of the pieces that this rank owns."""
        trainable = [p for p in unit.spec.params if self._wrappers[p].requires_grad]
        sizes = [round_up(len(self._layout.piece_of(p)), GRADIENT_START) for p in trainable]
        peers = GradientPeers(self._collectives, unit.number) if self._collectives is not None else None
        # Of its own mapping: in malloc's heap it would sit among parameters that are about to be freed.
        arena = Arena(4 * max(1, sum(sizes)), is_forkable=True, is_touched=False)
        memory = torch.frombuffer(arena.view(), dtype=torch.float32)
        self._arenas.append(arena)
        start = 0
        for param, size in zip(trainable, sizes, strict=True):
            spec, piece = self._layout.specs[param], self._layout.piece_of(param)
            self.accumulators[param] = Accumulator(
                memory[start : start + len(piece)],
                name=spec.name,
                shape=spec.shape,
                stride=spec.stride,
                device=self._device,
                before_write=lambda: self._residency.settle(unit, is_ended=False),
                piece=piece,
                peers=peers,
            )
            start += size

    def land(self, index: int, grad: Tensor) -> None:
        """Add a gradient to the parameter's accumulator, or to what its unit reduces; `publish` makes it visible."""
        if self._residency.is_alone:
            raise UsageError("a backward ran inside local_forward(), where no other rank could add its gradients.")
        if self._reducer is not None:
            self._reducer.add(index, grad)
            return
        self.accumulators[index].land(grad, self._wrappers[index].grad)
        self._landed.append(index)
        if grad.nbytes >= TRIM_FROM_BYTES:
            self._trimmer.trim()

    def adopt(self, index: int, grad: Tensor) -> None:
        """Take over what stood in `.grad` before; of several ranks it is the same on all."""
        self.accumulators[index].land(grad, None)
        self.accumulators[index].total_sums()
        self._wrappers[index].grad = self.accumulators[index].publish()

    def publish(self, *, is_complete: bool = True) -> None:
        """A backward has ended, by an exception if not complete: let `.grad` show what has landed."""
        landed, self._landed = self._landed, []
        if self._reducer is not None and (not is_complete or self._residency.is_alone):
            self._reducer.drop()  # the other ranks may not have come so far
        elif self._reducer is not None:
            self._order.end(BACKWARD_END)
            landed = self._reducer.finish()
        for index in dict.fromkeys(landed):
            handle = self.accumulators[index].publish()
            if handle is not None:
                self._wrappers[index].grad = handle

    def forget(self) -> None:
        """Let go of the accumulators; a handle that somebody keeps lives on."""
        for wrapper in self._wrappers.values():
            wrapper.grad = None
        for accumulator in self.accumulators.values():
            accumulator.close()
        self.accumulators.clear()
        self._arenas.clear()
