"""Gradients of several ranks: collected by unit, averaged over ranks, landed as the pieces this rank owns.

Decides no order: `reduce` is called where it is the same on all ranks.
"""

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nvoffload.collectives import Collectives, Handle
from nvoffload.gradient import Accumulator
from nvoffload.layout import Flat, Layout
from nvoffload.parameter import OffloadedParameter
from nvoffload.residency import Residency
from nvoffload.sums import LANDING_DTYPES, Sums
from nvoffload.unit import Unit


class Reducer:
    """One backward's gradients, from the hooks that find them to the accumulators.

    At most one unit's are under way while those of the next are collected. Whether a parameter has a
    gradient at all is what the ranks agree on at the end: one that had none anywhere keeps its `.grad`.
    """

    def __init__(
        self,
        layout: Layout,
        collectives: Collectives,
        residency: Residency,
        accumulators: Mapping[int, Accumulator],
        wrappers: Mapping[int, OffloadedParameter],
        *,
        device: torch.device,
        dtype: torch.dtype | None,
        trim: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._collectives = collectives
        self._residency = residency
        self._accumulators = accumulators
        self._wrappers = wrappers
        self._device = device
        self._dtype = dtype  # of the reduction; None: that of the gradients
        self._trim = trim
        self._found: dict[int, Tensor] = {}  # not yet reduced, by parameter
        self._had: set[int] = set()  # parameters with a gradient on this rank
        self._landed: set[int] = set()
        self._flying: tuple[list[tuple[Flat, Tensor, Tensor]], Handle] | None = None

    def add(self, index: int, grad: Tensor) -> None:
        """Collect a gradient of this rank."""
        self._accumulators[index].check(grad)
        before = self._found.get(index)
        self._found[index] = grad if before is None else before + grad
        self._had.add(index)

    @torch.no_grad()
    def reduce(self, unit: Unit) -> None:
        """Start averaging what was collected of a unit, zeros where nothing was; land the unit before it."""
        self._land()
        flats = [self._layout.flats[flat] for flat in unit.spec.flats]
        pieces = []
        for flat in flats:
            if flat.is_trainable and not flat.shard_numel:
                self._packed(flat)
                self._land_shard(flat, torch.empty(0))
            elif flat.is_trainable:
                whole = self._packed(flat)
                pieces.append((flat, whole.new_empty(flat.shard_numel), whole))
        if pieces:
            handle = self._collectives.reduce(unit.number, [(out, whole) for _, out, whole in pieces])
            self._flying = pieces, handle

    def _packed(self, flat: Flat) -> Tensor:
        dtype = self._dtype or getattr(torch, flat.dtype)
        whole = torch.zeros(flat.num_ranks * flat.shard_numel, dtype=dtype, device=self._device)
        for param, start in zip(flat.params, flat.starts, strict=True):
            grad, spec = self._found.pop(param, None), self._layout.specs[param]
            if grad is not None:
                whole[start : start + spec.numel].as_strided(spec.shape, spec.stride).copy_(grad)
        return whole

    @torch.no_grad()
    def _land(self) -> None:
        if self._flying is None:
            return
        (pieces, handle), self._flying = self._flying, None
        self._residency.wait_for(handle)
        for flat, out, _ in pieces:
            self._land_shard(flat, out.cpu() if out.dtype in LANDING_DTYPES else out.float().cpu())
        self._trim()

    def _land_shard(self, flat: Flat, shard: Tensor) -> None:
        for param, start in zip(flat.params, flat.starts, strict=True):
            accumulator = self._accumulators[param]
            piece = accumulator.piece
            begin = start + piece.start - self._layout.rank * flat.shard_numel if piece else 0
            accumulator.land_piece(shard[begin : begin + len(piece)], self._wrappers[param].grad)
            self._landed.add(param)

    @torch.no_grad()
    def finish(self) -> list[int]:
        """A backward has ended: reduce what is left, agree on sums; return who has a gradient of it on any rank."""
        units = self._residency.units
        left = torch.zeros(len(units), dtype=torch.int64)
        for param in self._found:
            left[self._layout.place_of(param)[0]] = 1
        for number in self._collectives.exchange("gradients", left).amax(0).nonzero()[:, 0].tolist():
            self.reduce(units[number])
        self._land()
        params = sorted(self._landed)
        rows = torch.zeros(len(params), 4, dtype=torch.float64)
        for row, param in zip(rows, params, strict=True):
            sums = self._accumulators[param].sums
            row[:] = torch.tensor([sums.squares, sums.largest, not sums.is_finite, param in self._had])
        every = self._collectives.exchange("gradients", rows)
        squares, most = every[:, :, 0].sum(0).tolist(), every.amax(0).tolist()
        found = []
        for param, square, (_, largest, is_infinite, has) in zip(params, squares, most, strict=True):
            self._accumulators[param].set_sums(Sums(square, largest, not is_infinite))
            if has:
                found.append(param)
            else:
                self._accumulators[param].drop_landed()
        self.drop()
        return found

    def drop(self) -> None:
        """Forget what a backward has found: it is over, or has failed."""
        self._found.clear()
        self._had.clear()
        self._landed.clear()
        self._flying = None


class GradientPeers:
    """What an accumulator asks of the other ranks that have a piece of its gradient."""

    def __init__(self, collectives: Collectives, unit: int) -> None:
        self._collectives = weakref.ref(collectives)
        self._unit = unit

    def whole(self, values: Tensor) -> Tensor:
        """Return `values`, float32 on the host with the pieces of all ranks filled in."""
        collectives = self._collectives()
        assert collectives is not None
        collectives.sum_host_bytes("read", self._unit, values.view(torch.uint8))
        return values

    def total(self, sums: Sums) -> Sums:
        """Return the sums over all pieces."""
        collectives = self._collectives()
        assert collectives is not None
        own = torch.tensor([sums.squares, sums.largest, float(not sums.is_finite)], dtype=torch.float64)
        every = collectives.exchange("sums", own)
        return Sums(float(every[:, 0].sum()), float(every[:, 1].max()), not bool(every[:, 2].any()))
