"""What each rank reads of a model's units: its own shards here, whole units where one rank owns each."""

import sys
from pathlib import Path
from typing import Any

import pytest
import ranks

from nvoffload.layout import ALIGN

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import scaling

NUM_UNITS, PASSES = 6, 2


def case_of(unit_bytes: int) -> scaling.Case:
    return scaling.Case(1e9, NUM_UNITS, unit_bytes, num_frames=2, passes=PASSES)


def sample(group: Any, rank: int, design: str, folder: Path, unit_bytes: int) -> scaling.Sample:
    return scaling.DESIGNS[design](group, rank, folder, case_of(unit_bytes))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("unit_bytes", [12 * ALIGN, 16 * ALIGN], ids=["even", "uneven"])
def test_each_rank_reads_its_part_of_every_unit(num_ranks: int, unit_bytes: int, swap: Path) -> None:
    """Goal: a rank reads 1/n of the parameters per pass, padded to ALIGN, and all of it is used by everybody.
    Method: bytes of the engine on the benchmark's own model, whose sum each pass checks."""
    samples = ranks.run(num_ranks, sample, "shards", swap, unit_bytes)
    total = PASSES * NUM_UNITS * unit_bytes
    for found in samples:
        assert 0 <= found.read_bytes - total / num_ranks < PASSES * NUM_UNITS * ALIGN


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("design", ["owner", "ahead"])
def test_of_the_baseline_the_owner_reads_a_whole_unit(design: str, num_ranks: int, swap: Path) -> None:
    """Goal: the benchmark compares with what it says. Method: bytes by unit and by rank."""
    unit_bytes = 12 * ALIGN
    samples = ranks.run(num_ranks, sample, design, swap, unit_bytes)
    for rank, found in enumerate(samples):
        own = [PASSES * unit_bytes * (unit % num_ranks == rank) for unit in range(NUM_UNITS)]
        assert list(found.by_unit) == own
        assert found.read_bytes == sum(own)
