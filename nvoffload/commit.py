"""Generations: when one opens and closes, and the thread that writes its manifest.

Knows nothing of tiles; tells the movers what is committed.
"""

import errno
import threading
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from nvoffload.errors import NvoffloadError, StorageError
from nvoffload.mover import Mover
from nvoffload.store import Run

WAIT_TIMEOUT_S = 600.0
_POLL_S = 0.2


class Fence(Protocol):
    """The other ranks of a run, as its commits see them."""

    def wait(self, generation: int, is_stopping: Callable[[], bool]) -> bool:
        """Return True once all ranks have come here with `generation`; False when told to stop before."""

    def fail(self, error: Exception) -> None:
        """Tell the others."""

    def close(self) -> None:
        """Free it."""


class Committer:
    """Opens and closes the generations of a run; its thread writes their manifests.

    A generation opens with the first step or user write after the last close and closes at the next
    forward with gradients, at a second step of the same optimizer, at flush or at close. Its manifest
    is written once all its tiles are. Writes of g+1 wait for the manifest of g (in the mover); the
    first step asks for that of generation 0, the fill.

    Note [Fence]: of several ranks each writes its own manifest, and one may be killed before another has. So
    nobody overwrites what generation g - 1 has before all have committed g: with two manifest files and two
    slots every rank can go back to the last generation that all have.

    Note [No hang]: that manifest needs every update captured in g, and some may wait for their unit to be
    used. So whoever begins a write of g+1, or waits for g, has all of them started first, in every model
    of the run: each has joined with the function that does so.
    """

    def __init__(self, run: Run, fence: Fence | None = None) -> None:
        self._run = run
        self._fence = fence
        self._movers: dict[Mover, Callable[[int], None]] = {}  # with what starts updates captured before a generation
        self._stepped: set[Hashable] = set()
        self._passed = run.committed  # newest generation that is committed, on every rank
        self._closed = -1  # newest generation handed to the thread
        self._queue: list[tuple[int, dict[str, Any]]] = []
        self._error: NvoffloadError | None = None
        self._changed = threading.Condition()
        self._is_stopping = False
        self.is_ending = False  # a model is closing, and its ranks with it: a fence that breaks is no error
        self._waited: Mover | None = None  # the thread is in it
        self._thread = threading.Thread(target=self._work, name="nvoffload-commit", daemon=True)
        self._thread.start()

    def join(self, mover: Mover, start_before: Callable[[int], None]) -> None:
        """Let `mover` know of commits from now on; `start_before` as in Note [No hang]."""
        with self._changed:
            self._movers[mover] = start_before
            mover.commit(max(0, self._run.committed))

    def leave(self, mover: Mover) -> None:
        """Forget a mover, which may be closed then; the last one stops the thread."""
        with self._changed:
            del self._movers[mover]
            self._is_stopping = not self._movers
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waited is not mover)
        if self._is_stopping:
            self._thread.join(timeout=60)
            _committers.pop(self._run.folder.run_id, None)
            if self._fence is not None and self._error is None:
                self._fence.close()

    @property
    def error(self) -> NvoffloadError | None:
        """The first error; nothing is committed after it."""
        return self._error

    def poison(self, error: NvoffloadError) -> None:
        """Commit nothing any more: a step failed half way, or a manifest could not be written."""
        with self._changed:
            self._stepped.clear()
            self._error = self._error or error
            for mover in self._movers:
                mover.fail(error)
            self._changed.notify_all()

    def begin(self, optimizer: Hashable) -> int:
        """Return the generation that a step of `optimizer` belongs to."""
        self.check()
        with self._changed:
            if self._closed < 0:
                self._hand_over(0)
            if optimizer in self._stepped:
                self.close_generation()
            self._stepped.add(optimizer)
            generation = self._closed + 1
        self._start_before(generation)
        return generation

    def begin_write(self) -> int:
        """Return the generation that a user write belongs to; before the first step it is the fill's."""
        self.check()
        with self._changed:
            if self._closed < 0:
                return 0
            self._stepped.add(None)
            generation = self._closed + 1
        self._start_before(generation)
        return generation

    def _start_before(self, generation: int) -> None:
        for start_before in list(self._movers.values()):
            start_before(generation)

    def close_generation(self) -> None:
        """End the open generation, if a step was made in it, and have it committed."""
        self.check()
        with self._changed:
            if self._stepped:
                self._stepped.clear()
                self._hand_over(self._closed + 1)

    def _hand_over(self, generation: int) -> None:
        with self._changed:
            self._queue.append((generation, self._run.snapshot()))
            self._closed = generation
            self._changed.notify_all()

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Return once every closed generation is committed; raise what went wrong."""
        self.wait_for(self._closed, timeout_s)

    def wait_for(self, generation: int, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Return once `generation` is committed; raise what went wrong."""
        self._start_before(generation + 1)
        with self._changed:
            done = self._changed.wait_for(lambda: self._error or self._passed >= generation, timeout_s)
        self.check()
        if not done:
            raise StorageError(f"generation {generation} was not committed within {timeout_s:g} s.")

    def check(self) -> None:
        """Raise the first error of the thread, if there is one."""
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_stopping)
                if not self._queue:
                    return
                generation, body = self._queue.pop(0)
            try:
                if not self._wait_written(generation):
                    return
            except NvoffloadError as error:
                self.poison(error)
                return
            try:
                self._run.commit(generation, body)
            except (NvoffloadError, OSError, ValueError) as error:
                self._give_up(generation, error)
                return
            try:
                if self._fence is not None and not self._fence.wait(generation, lambda: self._is_stopping):
                    return
            except NvoffloadError as error:
                if not self.is_ending:
                    self.poison(error)
                return
            with self._changed:
                for mover in self._movers:
                    mover.commit(generation)
                self._passed = generation
                self._changed.notify_all()

    def _wait_written(self, generation: int) -> bool:
        """Wait for all tiles of `generation`; False when told to stop before."""
        for mover in list(self._movers):
            while not self._has_written(mover, generation):
                if self._is_stopping:
                    return False
        return True

    def _has_written(self, mover: Mover, generation: int) -> bool:
        """Wait a while for the tiles of one mover; there are none of one that has left."""
        with self._changed:
            if mover not in self._movers:
                return True
            self._waited = mover
        try:
            return mover.wait_written(generation, _POLL_S)
        finally:
            with self._changed:
                self._waited = None
                self._changed.notify_all()

    def _give_up(self, generation: int, error: Exception) -> None:
        text = f"committing generation {generation} failed: {error} The last committed one stays valid."
        code = getattr(error, "errno", None) or errno.EIO
        if self._fence is not None:
            self._fence.fail(error)
        self.poison(StorageError(text, errno=code, path=str(self._run.folder.path)))


_committers: dict[str, Committer] = {}
_committers_lock = threading.Lock()


def committer_of(run: Run, make_fence: Callable[[], Fence] | None = None) -> Committer:
    """Return the run's committer; there is one per run. `make_fence` for a run of several ranks."""
    with _committers_lock:
        if run.folder.run_id not in _committers:
            _committers[run.folder.run_id] = Committer(run, make_fence() if make_fence else None)
        return _committers[run.folder.run_id]
