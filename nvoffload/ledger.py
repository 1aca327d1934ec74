"""What a step must cost in bytes, from the layout alone. Tests hold the counters to it.

Measures nothing; knows no engine.

Per element and update, with the parameters on the device (AdamW, two fp32 words):

| dtype | read                     | written                            |
|-------|--------------------------|------------------------------------|
| bf16  | 2 remainder + 8 state    | 2 weight + 2 remainder + 8 state   |
| fp32  | 8 state                  | 4 weight + 8 state                 |
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nvoffload.layout import Layout, Zone

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


def update_traffic(layout: Layout, state_zone: Zone, pending: Iterable[int] | None = None) -> Traffic:
    """Return the bytes of one update whose gradients are those of parameters `pending` (None: all).

    A tile none of whose parameters is pending is not touched.
    """
    wanted = None if pending is None else set(pending)
    read = write = 0
    for position in state_zone.tiles:
        tile = layout.tiles[position]
        if wanted is not None and not any(s.param in wanted for s in tile.segments):
            continue
        state = NUM_ADAMW_WORDS * tile.word_bytes
        read += tile.remainder_bytes + state
        write += tile.param_bytes + state
    return Traffic(read, write)


def fill_traffic(layout: Layout, state_zones: Iterable[Zone]) -> Traffic:
    """Return the bytes of writing all values and zero states once."""
    return Traffic(0, layout.param_zone(0).half_bytes + sum(zone.half_bytes for zone in state_zones))


def host_state_bytes(layout: Layout) -> int:
    """Return what remainders and AdamW states take when they live in host memory."""
    return sum(
        tile.remainder_bytes + NUM_ADAMW_WORDS * tile.word_bytes
        for tile in layout.tiles
        if layout.flats[tile.flat].is_trainable
    )


def expected_store_bytes(layout: Layout) -> int:
    """Return the size of a store to which AdamW comes: two slots of everything."""
    state = sum(NUM_ADAMW_WORDS * tile.word_bytes for tile in layout.tiles)
    return 2 * (layout.param_zone(0).half_bytes + state)
