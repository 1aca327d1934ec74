"""Shared fixtures: a swap folder on a real disk, a simulated one, what pools were like when they closed."""

import gc
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nvoffload import backend as backend_room
from nvoffload.buffers import Pool
from nvoffload.io.sim import Sim, open_sim_engine
from nvoffload.swapfile import filesystem_of

# The models are tiny: a second thread would wait at every operation for longer than it works.
torch.set_num_threads(1)
# Torch's own objects stay: a gc.collect() of a test need not walk through them.
gc.freeze()


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[Path]:
    """A fresh folder on a disk: under NVO_TEST_PATH, else pytest's own, else beside the tests."""
    base = Path(os.environ.get("NVO_TEST_PATH", tmp_path))
    if filesystem_of(base) in ("tmpfs", "ramfs"):
        base = Path(__file__).parent.parent / ".swap-tests"
    folder = base / uuid.uuid4().hex
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def use_sim(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the next models use the engine's twin; return it."""

    def use(*, seed: int = 5, **behaviour: Any) -> Sim:
        sim = Sim(seed=seed, **behaviour)

        def open_twin(kind: str, *, block_bytes: int, queue_depth: int) -> Any:
            return open_sim_engine(sim, block_bytes=block_bytes, queue_depth=queue_depth)

        monkeypatch.setattr(backend_room, "open_engine", open_twin)
        return sim

    return use


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For every pool that was closed: was it whole?"""
    found: list[bool] = []
    real = Pool.close

    def close(self: Pool) -> None:
        found.append(self.num_free == self.buffer_count)
        real(self)

    monkeypatch.setattr(Pool, "close", close)
    yield found
