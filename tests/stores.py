"""What a folder holds of committed runs, looked at from outside."""

from pathlib import Path

import numpy as np
import torch

from nvoffload.layout import ALIGN, Layout
from nvoffload.store import RECORD, read_newest
from nvoffload.swapfile import find_runs


def committed_steps(swap: Path) -> list[int]:
    """The newest committed step of every run in the folder, -1 for none."""
    found = []
    for run in find_runs(swap):
        manifest = read_newest(run)
        found.append(manifest.generation.step if manifest else -1)
        run.close()
    return found


def committed_values(swap: Path, layout: Layout) -> list[torch.Tensor]:
    """The float32 values that the newest manifest of the only run names, by number; one swap file."""
    (run,) = find_runs(swap)
    manifest = read_newest(run)
    run.close()
    assert manifest is not None
    table = np.frombuffer(manifest.tables, RECORD)[: len(layout.tiles)]
    content = next(swap.rglob("*.swap")).read_bytes()
    zone = layout.param_zone(ALIGN)
    values = [torch.zeros(spec.numel) for spec in layout.specs]
    for number, tile in enumerate(layout.tiles):
        start = zone.place(number, int(table[number]["working"]))
        fetched = torch.frombuffer(bytearray(content[start : start + 4 * tile.numel]), dtype=torch.float32)
        for s in tile.segments:
            values[s.param][s.param_start : s.param_start + s.numel] = fetched[s.tile_start : s.tile_start + s.numel]
    return [v.view(spec.shape) for v, spec in zip(values, layout.specs, strict=True)]
