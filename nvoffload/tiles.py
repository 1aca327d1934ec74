"""The C arrays that say where tiles live: on disk, in host memory, and what they hold.

Moves nothing. Keeps alive what the arrays point to.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from nvoffload import native
from nvoffload.buffers import Arena
from nvoffload.errors import CorruptionError
from nvoffload.layout import Layout
from nvoffload.store import StateZone, Store
from nvoffload.swapfile import crc32c, read_aligned

DTYPES = {"float32": "NVO_F32", "bfloat16": "NVO_BF16"}


class Busy:
    """One flag per tile of a layout: a visit is on it. Shared by all Tiles of the layout."""

    def __init__(self, layout: Layout) -> None:
        self.array = native.ffi.new("int32_t[]", max(1, len(layout.tiles)))


class Tiles:
    """The C arrays of some tiles of one unit, for jobs to visit. Keeps what they point to alive.

    `updates` are the parameters whose states these tiles hold: a tile may carry others.
    """

    def __init__(self, layout: Layout, indices: Sequence[int], busy: Busy, updates: Iterable[int] = ()) -> None:
        ffi = native.ffi
        self.layout = layout
        self.indices = tuple(indices)
        self.updates = frozenset(updates)
        self.lane = layout.flats[layout.tiles[self.indices[0]].flat].unit if self.indices else -1
        segments = [s for i in self.indices for s in layout.tiles[i].segments]
        self.params = tuple(dict.fromkeys(s.param for s in segments))
        local = {param: position for position, param in enumerate(self.params)}
        self.segments = ffi.new("nvo_segment[]", max(1, len(segments)))
        for at, s in zip(self.segments, segments, strict=False):
            at.tile_start, at.numel, at.param_start, at.param = s.tile_start, s.numel, s.param_start, local[s.param]
        self.array = ffi.new("nvo_tile[]", max(1, len(self.indices)))
        self._kept: list[Any] = [busy]
        first = 0
        for at, index in zip(self.array, self.indices, strict=False):
            tile = layout.tiles[index]
            flat = layout.flats[tile.flat]
            at.numel, at.item_bytes = tile.numel, flat.item_bytes
            at.dtype = getattr(native.lib, DTYPES.get(flat.dtype, "NVO_RAW"))
            at.fetched_bytes, at.remainder_bytes = tile.fetched_bytes, tile.remainder_bytes
            at.word_bytes = tile.word_bytes
            at.first_segment, at.num_segments = first, len(tile.segments)
            at.busy = busy.array + index
            first += len(tile.segments)

    def names(self, position: int) -> str:
        """Return the parameters of the tile at `position`, for messages."""
        tile = self.layout.tiles[self.indices[position]]
        names = [self.layout.specs[s.param].name for s in tile.segments]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"tile {self.indices[position]} ({', '.join(names[:3])}{more})"

    def put_params_on_disk(self, store: Store) -> None:
        """Give every tile its parameter extent."""
        records = self._records(store.param_table)
        for at, index in zip(self.array, self.indices, strict=False):
            at.fd = store.file.fd
            at.param = records + index
            at.param_offset = [store.param_zone.place(index, slot) for slot in (0, 1)]

    def put_params_at(self, fd: int, table: Any, offsets: Sequence[int]) -> None:
        """Give every tile a parameter extent of one slot."""
        records = self._records(table)
        for at, index in zip(self.array, self.indices, strict=False):
            at.fd, at.param, at.param_offset = fd, records + index, [offsets[index]] * 2

    def put_state_on_disk(self, store: Store, state: StateZone) -> None:
        """Give every tile its state extent. REQUIRES: they are all in the zone."""
        records = self._records(state.table)
        positions = {tile: position for position, tile in enumerate(state.zone.tiles)}
        for at, index in zip(self.array, self.indices, strict=False):
            position = positions[index]
            at.fd = store.file.fd
            at.num_words = state.num_words
            at.state = records + position
            at.state_offset = [state.zone.place(position, slot) for slot in (0, 1)]

    def put_state_on_host(self, arena: Arena, num_words: int) -> None:
        """Let states live in an arena of zeros, just large enough."""
        self._kept.append(arena)
        address = arena.address
        for at in self.array[0 : len(self.indices)]:
            at.num_words = num_words
            at.host_state = native.ffi.cast("void *", address)
            address += num_words * at.word_bytes

    def state_word(self, position: int, word: int, *, verify: bool) -> bytearray:
        """Return one word of the states of the tile at `position`, float32.

        Raises CorruptionError if `verify` and what comes from disk has another checksum than it was written with.
        REQUIRES: no job is on the tile.
        """
        at = self.array[position]
        nbytes = at.word_bytes
        if at.host_state:
            return bytearray(
                native.ffi.buffer(at.host_state, at.num_words * nbytes)[word * nbytes : (word + 1) * nbytes]
            )
        offset = at.state_offset[at.state.working]
        content = memoryview(read_aligned(at.fd, offset, at.num_words * nbytes))
        words = [content[i * nbytes : (i + 1) * nbytes] for i in range(at.num_words)]
        if verify and crc32c(b"".join(crc32c(w).to_bytes(4, sys.byteorder) for w in words)) != at.state.crc[2]:
            raise CorruptionError(
                f"checksum mismatch in the state of {self.names(position)} at offset {offset}: the disk returned other "
                "bytes than were written.",
                offset=offset,
                nbytes=at.num_words * nbytes,
            )
        return bytearray(words[word])

    def put_params_on_host(self, home: "HostParams") -> None:
        """Let remainders, and fetched parts if `home` has them, live in host memory."""
        self._kept.append(home)
        for at, index in zip(self.array, self.indices, strict=False):
            at.host_fetched = native.ffi.cast("void *", home.fetched.get(index, 0))
            at.host_remainder = native.ffi.cast("void *", home.remainders.get(index, 0))

    def _records(self, table: Any) -> Any:
        self._kept.append(table)
        return native.ffi.cast("nvo_record *", native.ffi.from_buffer(table))


class HostParams:
    """Host memory for fetched parts (home or standing copy) and remainders of some tiles, by tile."""

    def __init__(self, layout: Layout, indices: Sequence[int], *, has_fetched: bool, has_remainders: bool) -> None:
        sizes = [
            (i, has_fetched * layout.tiles[i].fetched_bytes, has_remainders * layout.tiles[i].remainder_bytes)
            for i in indices
        ]
        self.nbytes = sum(fetched + remainder for _, fetched, remainder in sizes)
        self.arena = Arena(max(1, self.nbytes))
        self.fetched: dict[int, int] = {}
        self.remainders: dict[int, int] = {}
        address = self.arena.address
        for index, fetched, remainder in sizes:
            if fetched:
                self.fetched[index] = address
            if remainder:
                self.remainders[index] = address + fetched
            address += fetched + remainder
