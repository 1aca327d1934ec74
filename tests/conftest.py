"""Shared fixtures: a swap folder on a real disk."""

import gc
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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
