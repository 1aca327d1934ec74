"""The storage half without torch: geometry, pool, pages, swap files, manifests."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvoffload import native
from nvoffload.buffers import HUGE_PAGE_BYTES, Arena, Pool
from nvoffload.errors import ConfigError, CorruptionError, MachineError, UsageError
from nvoffload.layout import ALIGN, Flat, Layout, ParameterSpec, cut_tiles, lay_units
from nvoffload.manifest import Generation, Manifest, decode, encode
from nvoffload.swapfile import RunFolder, SwapFile

pytestmark = pytest.mark.timeout(30)


def layout_of(sizes: list[int], tile_numel: int, dtype: str = "bfloat16") -> Layout:
    specs = tuple(ParameterSpec(f"p{i}", (n,), (1,), dtype, n) for i, n in enumerate(sizes))
    item_bytes = 2 if dtype == "bfloat16" else 4
    flats = (Flat.of(specs, range(len(sizes)), unit=0, item_bytes=item_bytes, is_trainable=True),)
    tiles = cut_tiles(flats, specs, tile_numel)
    return Layout(ALIGN, tile_numel, specs, flats, tiles, lay_units(["all"], [False], flats, tiles))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 20000), min_size=1, max_size=12),
    st.sampled_from([4096, 8192]),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_every_element_has_one_place_and_extents_are_aligned(sizes: list[int], tile: int, dtype: str) -> None:
    """Segments cover each parameter once, in order, without overlap; offsets are multiples of align.
    Random sizes, zero included."""
    layout = layout_of(sizes, tile, dtype)
    covered = [0] * len(sizes)
    for at in layout.tiles:
        end = 0
        for segment in at.segments:
            assert segment.param_start == covered[segment.param]
            assert end <= segment.tile_start
            end = segment.tile_start + segment.numel
            covered[segment.param] += segment.numel
        assert end <= at.numel <= tile
    assert covered == sizes
    zone = layout.state_zone(ALIGN, frozenset(range(len(sizes))), 2)
    places = [zone.place(i, slot) for slot in (0, 1) for i in range(len(zone.tiles))]
    assert places == sorted(set(places))
    assert all(place % ALIGN == 0 for place in places)


def test_parameters_start_on_64_bytes() -> None:
    """Matrix libraries promise equal bits only on 64-byte boundaries.
    Odd sizes in both dtypes."""
    for dtype, item in (("bfloat16", 2), ("float32", 4)):
        flat = layout_of([1, 17, 33, 0, 5], 4096, dtype).flats[0]
        assert all(start * item % 64 == 0 for start in flat.starts)


def test_pool_lends_whole_buffers_and_pieces_apart() -> None:
    """Pieces share a buffer with pieces only; a buffer is free when its last lease is back.
    Two buffers of 64 KiB."""
    pool = Pool(buffer_count=2, buffer_bytes=65536)
    whole = pool.acquire(65536)
    pieces = [pool.acquire(16384) for _ in range(4)]
    assert pool.num_free == 0
    assert len({p.address for p in pieces}) == 4
    with pytest.raises(UsageError, match="no lease of 4096"):
        pool.acquire(4096, timeout_s=0.01)
    for piece in pieces:
        pool.release(piece)
    assert pool.num_free == 1
    with pytest.raises(MachineError, match="Invalid argument"):
        pool.release(pieces[0])
    with pytest.raises(MachineError, match="busy"):
        pool.close()
    pool.release(whole)
    pool.close()


def test_pool_larger_than_memory_is_refused_with_the_number_that_fits() -> None:
    """The error says what was asked, what is there, and a buffer_count that would do.
    A pool of 4 TiB."""
    with pytest.raises(ConfigError, match=r"asks 4096 GiB .* buffer_count=\d+ would fit"):
        Pool(buffer_count=4096, buffer_bytes=1 << 30)


def test_huge_pages_are_real_and_survive_a_fork() -> None:
    """The arena stands on 2 MiB pages by smaps, before and after a fork.
    A pool of 16 MiB; skipped where the kernel gives none to anybody."""
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not mode.exists() or "[never]" in mode.read_text():
        pytest.skip("this kernel gives no transparent huge pages")
    pool = Pool(buffer_count=8, buffer_bytes=HUGE_PAGE_BYTES)
    assert pool.huge_bytes() == pool.nbytes
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert pool.huge_bytes() == pool.nbytes
    pool.close()
    plain = Arena(8 * HUGE_PAGE_BYTES, is_huge=False)
    assert plain.huge_bytes() == 0
    plain.close()


def test_manifest_survives_the_round_trip_and_nothing_else() -> None:
    """What was encoded is decoded; any changed byte or cut is refused.
    One byte after another is flipped."""
    manifest = Manifest(Generation(1, 7), {"stores": []}, b"tables")
    content = encode(manifest)
    assert decode(content) == manifest
    assert decode(content + b"\0" * 100) == manifest
    for position in range(len(content)):
        broken = bytearray(content)
        broken[position] ^= 1
        with pytest.raises(CorruptionError):
            decode(bytes(broken))
        with pytest.raises(CorruptionError):
            decode(content[:position])


def test_swap_file_is_private_direct_and_locked(swap: Path) -> None:
    """A swap file is 0600 in a 0700 folder, direct, preallocated, and nobody else can lock it.
    Looked at from outside."""
    import fcntl

    folder = RunFolder.create(swap)
    file = SwapFile(folder, "m0.r0.f0.swap")
    file.extend(1 << 20)
    facts = file.path.stat()
    assert facts.st_mode & 0o777 == 0o600
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert facts.st_blocks * 512 >= 1 << 20
    assert file.is_direct
    with open(file.path, "rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder.path / "somebody-elses.txt").write_text("kept")
    file.close(remove=True)
    folder.remove()
    assert [entry.name for entry in folder.path.iterdir()] == ["somebody-elses.txt"]
    folder.close()


def test_a_missing_c_core_says_so_at_use() -> None:
    """Without the built module, import works and a use names the remedy.
    The stand-in that native puts in its place."""
    with pytest.raises(MachineError, match="make build"):
        native._Missing("no such file").nvo_crc32c(0)
