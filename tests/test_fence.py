"""The fence between the commits of ranks: a common generation after every kill, and no wait that nothing needs."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import ranks

import nvoffload as nvo
from nvoffload import backend as backend_room
from nvoffload.commit import committer_of
from nvoffload.io.sim import Op

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import fence

CUTS, STEPS, SEED = 200, 12, 3
pytestmark = pytest.mark.timeout(120)


def test_whenever_ranks_are_killed_all_have_one_generation(swap: Path) -> None:
    """Goal: a common intact generation at every instant with the fence, not without: else nothing was tested.
    Method: writes of one rank take 6 times as long; a replay of all writes. Where computing is so slow that
    the fast rank can't get ahead, writes are made slower."""
    for write_s in (0.006, 0.03, 0.15):
        fenced = campaign(swap / f"with-{write_s}", write_s, has_fence=True)
        print(f"seed {SEED}", write_s, fenced)
        assert fenced.intact == CUTS
        assert fenced.forgotten == 0
        assert fenced.apart > 0
        unfenced = campaign(swap / f"without-{write_s}", write_s, has_fence=False)
        if unfenced.intact < CUTS:
            return
    pytest.fail(f"the campaign finds no harm without a fence: {unfenced}")


def campaign(folder: Path, write_s: float, *, has_fence: bool) -> fence.Outcome:
    folder.mkdir()
    records = ranks.run(fence.NUM_RANKS, train, folder, write_s, has_fence)
    check_replay(folder, records)
    for record in records:
        assert [generation for _, generation in record.passed] == list(range(STEPS + 1))
    return fence.judge(records, cuts=CUTS, seed=SEED)


def train(group: Any, rank: int, folder: Path, write_s: float, has_fence: bool) -> fence.Record:
    return fence.train(
        group, rank, folder, steps=STEPS, has_fence=has_fence, slower=fence.SLOWER, write_s=write_s, seed=SEED
    )


def check_replay(folder: Path, records: list[Any]) -> None:
    """What was noted of the writes makes the files that stand there."""
    files: fence.Files = {}
    for record in records:
        files |= fence.Replay(record, 0).at(float("inf"))
    paths = {path.name: path for path in folder.rglob("r*") if path.is_file()}
    paths |= {path.name: path for path in folder.rglob("*.swap")}
    assert files.keys() == paths.keys()
    for name, path in paths.items():
        there = path.read_bytes()
        assert there[: len(files[name])] == files[name], name
        assert not any(there[len(files[name]) :]), name


class Held:
    """A fence whose other ranks come when the test says so."""

    def __init__(self) -> None:
        self.generations: list[int] = []  # that came here
        self._allowed = -1
        self._changed = threading.Condition()

    def wait(self, generation: int, is_stopping: Callable[[], bool]) -> bool:
        with self._changed:
            self.generations.append(generation)
            self._changed.notify_all()
            while self._allowed < generation:
                if is_stopping():
                    return False
                self._changed.wait(0.05)
        return True

    def let(self, generation: int) -> None:
        with self._changed:
            self._allowed = generation
            self._changed.notify_all()

    def await_arrival(self, generation: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: generation in self.generations)

    def fail(self, error: Exception) -> None:
        raise AssertionError(error)

    def close(self) -> None:
        pass


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """The next model has a fence although it has one rank only."""
    made = Held()
    monkeypatch.setattr(backend_room, "committer_of", lambda run, make: committer_of(run, lambda: made))
    yield made
    made.let(1 << 20)  # a test that failed leaves nobody behind it


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_fence_that_is_late_holds_up_only_writes(tier: str, swap: Path, use_sim: Any, held: Held) -> None:
    """Goal: while other ranks commit generation g, this one makes step g + 1 and the forward after it; only its
    writes come later. Method: one process with a fence that opens by hand, which is asked once per generation."""
    sim = use_sim()
    options = {"param_offload": tier, "optimizer_offload": "nvme", "device_budget": models.stack_budget(2)}
    model = nvo.offload(models.stack(), nvme_path=swap, **options)
    opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
    held.let(0)
    num_written = 0
    loss = models.stack_loss(model, 0)
    for step in range(1, 5):
        loss.backward()
        opt.step()
        opt.zero_grad()
        loss = models.stack_loss(model, step)  # has the values of this step, and closes its generation
        if step > 1:
            assert held.generations == list(range(step))
            assert num_writes(sim) == num_written
            held.let(step - 1)
        held.await_arrival(step)
        num_written = num_writes(sim)
    held.let(4)
    loss.backward()
    model.close()
    assert held.generations == [0, 1, 2, 3, 4]


def num_writes(sim: Any) -> int:
    return sum(request.op == Op.WRITE for request in sim.log)
