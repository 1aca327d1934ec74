"""What a folder holds of committed runs, looked at from outside."""

from pathlib import Path

from nvoffload.store import read_newest
from nvoffload.swapfile import find_runs


def committed_steps(swap: Path) -> list[int]:
    """The newest committed step of every run in the folder, -1 for none."""
    found = []
    for run in find_runs(swap):
        manifest = read_newest(run)
        found.append(manifest.generation.step if manifest else -1)
        run.close()
    return found
