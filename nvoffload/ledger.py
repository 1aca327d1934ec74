"""What training must cost in bytes of disk traffic, from the layout alone. Tests hold the counters to it.

Measures nothing; knows no engine.

Per element and update (AdamW, two fp32 words), by where the compute weights are:

| dtype | weights        | read                              | written                        |
|-------|----------------|-----------------------------------|--------------------------------|
| bf16  | on disk        | 2 weight + 2 remainder + 8 state  | 2 weight + 2 remainder + 8 state |
| bf16  | in memory      | 2 remainder + 8 state             | the same                       |
| fp32  | on disk        | 4 weight + 8 state                | 4 weight + 8 state             |
| fp32  | in memory      | 8 state                           | the same                       |

An update delivers the new weights, so a forward after a step fetches nothing. Beside it a backward
fetches the weights of every unit that is not kept over the turnaround, and so does each forward that
follows a backward without a step between.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from nvoffload.config import OffloadConfig
from nvoffload.layout import ALIGN, Layout, Tile, UnitSpec, Zone, round_up

NUM_ADAMW_WORDS = 2


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read from and written to disk."""

    read_bytes: int
    write_bytes: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.read_bytes + other.read_bytes, self.write_bytes + other.write_bytes)

    def times(self, count: int) -> "Traffic":
        """Return the traffic of `count` such passes."""
        return Traffic(self.read_bytes * count, self.write_bytes * count)


@dataclass(frozen=True, slots=True)
class Homes:
    """What is on disk: parameters at all, their compute weights as the only copy, states."""

    has_params: bool
    fetches: bool
    has_states: bool


def homes_of(config: OffloadConfig) -> Homes:
    """Return what the tiers put on disk."""
    return Homes(
        has_params=config.uses_disk,
        fetches=config.param_offload == "nvme",
        has_states=config.state_tier == "nvme",
    )


def update_traffic(layout: Layout, state_zone: Zone, homes: Homes, pending: Iterable[int] | None = None) -> Traffic:
    """Return the bytes of one update whose gradients are those of parameters `pending` (None: all).

    A tile none of whose parameters is pending is not touched.
    """
    read = write = 0
    for index in state_zone.tiles if pending is None else layout.tiles_with(pending, state_zone.tiles):
        tile = layout.tiles[index]
        state = homes.has_states * NUM_ADAMW_WORDS * tile.word_bytes
        read += homes.has_params * tile.remainder_bytes + homes.fetches * tile.fetched_bytes + state
        write += homes.has_params * tile.param_bytes + state
    return Traffic(read, write)


def training_traffic(
    layout: Layout,
    state_zones: Sequence[Zone],
    homes: Homes,
    framed: Sequence[int],
    num_frames: int,
    *,
    steps: int,
    passes: int = 1,
) -> Traffic:
    """Return the bytes of `steps` steps, of `passes` forwards and backwards each, and a flush at the end.

    From the start, with all units used in order in every pass; `framed` are those that share
    `num_frames` frames. Every parameter that some zone in `state_zones` has gets a gradient.
    """
    updated = {tile for zone in state_zones for tile in zone.tiles}
    kept_last = framed[len(framed) - num_frames :] if num_frames < len(framed) else framed
    backward = sum(_fetched(layout, layout.units[u]) for u in framed if u not in kept_last)
    later = [layout.units[u] for u in framed[num_frames:]]
    forward = sum(_fetched(layout, unit) for unit in later)
    rest = sum(_fetched(layout, unit, updated) for unit in later)
    first = sum(_fetched(layout, unit) for unit in layout.units)
    fetched = first + steps * passes * backward + steps * (passes - 1) * forward + (steps - 1) * rest
    total = Traffic(homes.fetches * fetched, 0)
    for zone in state_zones:
        total += update_traffic(layout, zone, homes).times(steps)
    return total


def _fetched(layout: Layout, unit: UnitSpec, besides: Collection[int] = frozenset()) -> int:
    return sum(layout.tiles[i].fetched_bytes for i in unit.tiles if i not in besides)


def host_param_bytes(layout: Layout, *, has_fetched: bool, has_remainders: bool) -> int:
    """Return what fetched parts and remainders take in host memory."""
    return sum(has_fetched * tile.fetched_bytes + has_remainders * tile.remainder_bytes for tile in layout.tiles)


def state_bytes(layout: Layout) -> int:
    """Return what AdamW's states take, on disk one slot of them."""
    return sum(NUM_ADAMW_WORDS * tile.word_bytes for tile in _trainable(layout))


def _trainable(layout: Layout) -> list[Tile]:
    return [tile for tile in layout.tiles if layout.flats[tile.flat].is_trainable]


def gradient_bytes(layout: Layout) -> int:
    """Return what float32 accumulators of everything trainable that a rank owns take."""
    return sum(4 * len(layout.piece_of(p)) for flat in layout.flats if flat.is_trainable for p in flat.params)


def local_copy_bytes(layout: Layout, framed: Iterable[int]) -> int:
    """Return what local_forward() writes on every rank, and reads in each forward: whole compute weights."""
    flats = [layout.flats[flat] for unit in framed for flat in layout.units[unit].flats]
    tiles = layout.tile_numel
    return sum(
        round_up(min(tiles, f.numel - at) * f.item_bytes, ALIGN) for f in flats for at in range(0, f.numel, tiles)
    )


def largest_gradient_bytes(layout: Layout) -> int:
    """Return the gradients of one unit, the largest, in its own dtype: what a backward holds of them at once."""
    return max(
        (
            sum(layout.flats[f].numel * layout.flats[f].item_bytes for f in unit.flats if layout.flats[f].is_trainable)
            for unit in layout.units
        ),
        default=0,
    )


def store_bytes(layout: Layout, homes: Homes) -> int:
    """Return the size of a store to which AdamW comes: two slots of everything on disk."""
    return 2 * (layout.param_zone(0).half_bytes + homes.has_states * state_bytes(layout))
