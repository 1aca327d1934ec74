"""Geometry: units of flats, flats cut into tiles and segments, zones with two slots, offsets in a file.

Pure arithmetic on sizes; the one place that rounds. Opens nothing, knows no torch.
"""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from nvoffload.config import format_bytes
from nvoffload.errors import ConfigError

ALIGN = 4096
TILE_NUMEL_MAX = 1 << 20
# A buffer holds 16 bytes per element of its tile: fp32 weight, two words, a staged fp32 gradient.
BUFFER_BYTES_PER_ELEMENT = 16
PARAMETER_START_BYTES = 64
NUM_FRAMES = 3
NUM_FRAMES_MIN = 2


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter as the store knows it. `stride` in elements; its bytes are in memory order."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class Flat:
    """A unit's parameters of one dtype and trainability end to end, each from a 64-byte boundary.

    `item_bytes` of the fetched part, `low_bytes` of the remainder, per element. Rank r owns the elements
    from r * shard_numel on, as far as there are some; gathered, it takes `gathered_bytes`.
    """

    unit: int
    dtype: str
    item_bytes: int
    low_bytes: int
    is_trainable: bool
    params: tuple[int, ...]
    starts: tuple[int, ...]
    numel: int
    shard_numel: int
    num_ranks: int = 1

    @classmethod
    def of(
        cls,
        specs: Sequence[ParameterSpec],
        params: Sequence[int],
        *,
        unit: int,
        item_bytes: int,
        is_trainable: bool,
        num_ranks: int = 1,
    ) -> "Flat":
        """Lay `params` (indices into `specs`, one dtype) end to end; shards end at 64-byte boundaries too."""
        step = max(1, PARAMETER_START_BYTES // item_bytes)
        starts, end = [], 0
        for index in params:
            starts.append(end)
            end += round_up(specs[index].numel, step)
        low_bytes = 2 if is_trainable and specs[params[0]].dtype == "bfloat16" else 0
        dtype = specs[params[0]].dtype
        shard = round_up(-(-end // num_ranks), step)
        return cls(
            unit, dtype, item_bytes, low_bytes, is_trainable, tuple(params), tuple(starts), end, shard, num_ranks
        )

    @property
    def gathered_bytes(self) -> int:
        """Length in gathered memory: the shards of all ranks, rounded up to ALIGN."""
        return round_up(self.shard_numel * self.num_ranks * self.item_bytes, ALIGN)

    @property
    def shard_bytes(self) -> int:
        """Length of one rank's shard in gathered memory."""
        return self.shard_numel * self.item_bytes

    def shard_of(self, rank: int) -> range:
        """Return the elements that a rank owns: fewer, or none, at the end of the flat."""
        start = min(self.numel, rank * self.shard_numel)
        return range(start, min(self.numel, start + self.shard_numel))

    def piece_of(self, param: int, numel: int, rank: int) -> range:
        """Return which of the `numel` elements of `param`, one of the flat's, a rank owns."""
        start = self.starts[self.params.index(param)]
        shard = self.shard_of(rank)
        low = min(max(0, shard.start - start), numel)
        return range(low, max(low, min(numel, shard.stop - start)))


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one parameter in one tile; all in elements."""

    param: int
    tile_start: int
    numel: int
    param_start: int


@dataclass(frozen=True, slots=True)
class Tile:
    """A piece of a flat's shard: the grain of updates, checksums and slots. Bytes are padded to align."""

    flat: int
    numel: int
    fetched_bytes: int
    remainder_bytes: int
    word_bytes: int
    segments: tuple[Segment, ...]

    @property
    def param_bytes(self) -> int:
        """Length of the parameter extent."""
        return self.fetched_bytes + self.remainder_bytes


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What is gathered together: flats end to end, each from an ALIGN boundary of gathered memory.

    `flats` and `tiles` index the layout's, `params` its specs; there is a flat offset in bytes per flat.
    `nbytes` of gathered memory, a multiple of ALIGN, are 0 for a unit of empty parameters. A unit that
    `is_kept` has its own memory, beside the frames, from first to last use.
    """

    name: str
    flats: tuple[int, ...]
    flat_offsets: tuple[int, ...]
    tiles: range
    params: tuple[int, ...]
    nbytes: int
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Zone:
    """Two equal halves of a file; tile i's place in slot s is base + s * half_bytes + offsets[i]."""

    base: int
    half_bytes: int
    tiles: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def end(self) -> int:
        """First byte after the zone."""
        return self.base + 2 * self.half_bytes

    def place(self, position: int, slot: int) -> int:
        """Return the offset of the extent of `tiles[position]` in `slot`."""
        return self.base + slot * self.half_bytes + self.offsets[position]


@dataclass(frozen=True)
class Layout:
    """How one rank's store cuts its parameters. Frozen by the first commit; never derived again.

    Flats stand in the order of units, tiles in that of flats. Specs, flats and gathered memory are the
    same on all ranks, tiles those of `rank` alone.
    """

    align: int
    tile_numel: int
    specs: tuple[ParameterSpec, ...]
    flats: tuple[Flat, ...]
    tiles: tuple[Tile, ...]
    units: tuple[UnitSpec, ...]
    rank: int = 0
    num_ranks: int = 1

    @cached_property
    def digest(self) -> str:
        """Hash of everything that decides where bytes are and what they mean.

        The cuts between units and ranks are in it: each flat names its unit and shards. So it is the same
        on all ranks.
        """
        facts = [
            self.align,
            self.tile_numel,
            [asdict(s) for s in self.specs],
            [asdict(f) for f in self.flats],
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """Hash of names, shapes and dtypes: the identity of the model, however it is cut."""
        facts = [[spec.name, spec.shape, spec.dtype] for spec in self.specs]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def place_of(self, param: int) -> tuple[int, int]:
        """Return the unit of a parameter and its byte offset in that unit's gathered memory."""
        return self._places[param]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            param: (index, offset + start * self.flats[flat].item_bytes)
            for index, unit in enumerate(self.units)
            for flat, offset in zip(unit.flats, unit.flat_offsets, strict=True)
            for param, start in zip(self.flats[flat].params, self.flats[flat].starts, strict=True)
        }

    def piece_of(self, param: int) -> range:
        """Return which elements of a parameter, in memory order, this rank owns."""
        return self._pieces[param]

    @cached_property
    def _pieces(self) -> dict[int, range]:
        return {
            param: flat.piece_of(param, self.specs[param].numel, self.rank)
            for flat in self.flats
            for param in flat.params
        }

    def param_zone(self, base: int) -> Zone:
        """Return the zone of all tiles' parameter extents, from `base` on."""
        return pack_zone(base, range(len(self.tiles)), [tile.param_bytes for tile in self.tiles])

    def tiles_with(self, params: Iterable[int], among: Iterable[int]) -> list[int]:
        """Return those tiles `among` some that hold any of `params`, in their order."""
        wanted = frozenset(params)
        return [i for i in among if any(s.param in wanted for s in self.tiles[i].segments)]

    def state_zone(self, base: int, params: frozenset[int], num_words: int) -> Zone:
        """Return the zone of the states of the tiles that hold any of `params`."""
        tiles = self.tiles_with(params, range(len(self.tiles)))
        return pack_zone(base, tiles, [num_words * self.tiles[i].word_bytes for i in tiles])


def pack_zone(base: int, tiles: Sequence[int], lengths: Sequence[int]) -> Zone:
    """Lay extents of `lengths` bytes end to end, twice."""
    offsets, end = [], 0
    for length in lengths:
        offsets.append(end)
        end += length
    return Zone(base, end, tuple(tiles), tuple(offsets))


def cut_tiles(
    flats: Sequence[Flat], specs: Sequence[ParameterSpec], tile_numel: int, rank: int = 0
) -> tuple[Tile, ...]:
    """Cut a rank's shard of each flat into tiles of `tile_numel` elements, the last one shorter."""
    tiles = []
    for index, flat in enumerate(flats):
        shard = flat.shard_of(rank)
        for start in shard[::tile_numel]:
            end = min(start + tile_numel, shard.stop)
            tiles.append(_tile(index, flat, end - start, _segments(flat, specs, start, end)))
    return tuple(tiles)


def _tile(index: int, flat: Flat, numel: int, segments: tuple[Segment, ...]) -> Tile:
    return Tile(
        flat=index,
        numel=numel,
        fetched_bytes=round_up(numel * flat.item_bytes, ALIGN),
        remainder_bytes=round_up(numel * flat.low_bytes, ALIGN),
        word_bytes=round_up(numel * 4, ALIGN) if flat.is_trainable else 0,
        segments=segments,
    )


def _segments(flat: Flat, specs: Sequence[ParameterSpec], start: int, end: int) -> tuple[Segment, ...]:
    """Return what lies in the elements [start, end) of a flat."""
    found = []
    for position in range(max(0, bisect_right(flat.starts, start) - 1), bisect_left(flat.starts, end)):
        param, begin = flat.params[position], flat.starts[position]
        low, high = max(start, begin), min(end, begin + specs[param].numel)
        if low < high:
            found.append(Segment(param, low - start, high - low, low - begin))
    return tuple(found)


def lay_units(
    names: Sequence[str], kept: Sequence[bool], flats: Sequence[Flat], tiles: Sequence[Tile]
) -> tuple[UnitSpec, ...]:
    """Return one unit per name, over the flats that carry its index; flats stand in the order of units."""
    num_tiles = Counter(tile.flat for tile in tiles)
    assert [flat.unit for flat in flats] == sorted(flat.unit for flat in flats)
    units, end_tile = [], 0
    for index, (name, is_kept) in enumerate(zip(names, kept, strict=True)):
        mine = [i for i, flat in enumerate(flats) if flat.unit == index]
        offsets, nbytes, first_tile = [], 0, end_tile
        for flat in (flats[i] for i in mine):
            offsets.append(nbytes)
            nbytes += flat.gathered_bytes
        end_tile += sum(num_tiles[i] for i in mine)
        params = sorted(param for i in mine for param in flats[i].params)
        own = range(first_tile, end_tile)
        units.append(UnitSpec(name, tuple(mine), tuple(offsets), own, tuple(params), nbytes, is_kept))
    return tuple(units)


def choose_tile_numel(flats: Sequence[Flat], buffer_bytes: int | None) -> int:
    """Return elements per tile: a multiple of align, at most buffer_bytes / 16 and 1 Mi."""
    if buffer_bytes is None:
        largest = max((flat.shard_numel for flat in flats), default=0)
        return min(TILE_NUMEL_MAX, max(ALIGN, round_up(largest, ALIGN)))
    least = BUFFER_BYTES_PER_ELEMENT * ALIGN
    if buffer_bytes < least:
        raise ConfigError(
            f"buffer_size={buffer_bytes} bytes is too small: a buffer holds a tile of at least {ALIGN} "
            f"elements at {BUFFER_BYTES_PER_ELEMENT} bytes. The least is {least} (64KiB)."
        )
    return buffer_bytes // least * ALIGN


def choose_buffer_count(
    tile_numel: int, num_tiles: int, in_flight_bytes: int, memory_bytes: int, fetched_unit_bytes: int = 0
) -> int:
    """Return how many buffers keep `in_flight_bytes` of the disk's queue full both ways.

    W + F: W = 1 + 2 ceil(in flight / 12 bytes per element of a tile) for updates, and
    F = 1 + ceil(two units of `fetched_unit_bytes`, the largest one's / buffer) for fetches; at most
    one more than there are tiles and a quarter of `memory_bytes`; at least 2.
    """
    buffer_bytes = BUFFER_BYTES_PER_ELEMENT * tile_numel
    for_updates = 1 + 2 * -(-in_flight_bytes // (12 * tile_numel))
    for_fetches = 1 + -(-2 * fetched_unit_bytes // buffer_bytes)
    affordable = memory_bytes // 4 // buffer_bytes
    return max(2, min(for_updates + for_fetches, num_tiles + 1, affordable))


def choose_frames(largest_unit_bytes: int, kept_bytes: int, num_frame_units: int, budget_bytes: int | None) -> int:
    """Return how many frames of `largest_unit_bytes` the `num_frame_units` units that need one share.

    Without a budget 3; with one, as many as fit beside the kept units; never more than there are
    units. Raise ConfigError with the least budget if fewer than 2 fit (1 for a single unit).
    """
    if budget_bytes is None:
        return min(NUM_FRAMES, num_frame_units)
    num_least = min(NUM_FRAMES_MIN, num_frame_units)
    least_bytes = kept_bytes + num_least * largest_unit_bytes
    if budget_bytes < least_bytes:
        raise ConfigError(
            f"device_budget={budget_bytes} bytes is too small: kept units take {format_bytes(kept_bytes)} and "
            f"the frames {num_least} x {format_bytes(largest_unit_bytes)}, the largest unit. "
            f"The least is {least_bytes} bytes; or cut smaller units with units=..."
        )
    if num_frame_units == 0:
        return 0
    return min(num_frame_units, (budget_bytes - kept_bytes) // largest_unit_bytes)
