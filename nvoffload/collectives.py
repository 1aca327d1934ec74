"""Collectives of one model: issued in one order, and checked against the other ranks'.

Knows units by number; decides neither what nor when.

Note [Order]: a thread runs them one by one, in the order in which the training thread asked for them.
That order follows from the schedule alone, so it is the same on all ranks. To see that it is, every
collective is preceded by an exchange of tags of fixed size, which say what each rank is about to do. If
they differ, no data is exchanged, and every rank raises the same PeerError.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nvoffload.device import Device
from nvoffload.errors import PeerError, Stopped
from nvoffload.peers import ADVICE, SLICE_S, Peers, judge, text_of

# The twin of late streams: an operation begins when somebody waits for it, and till then its output is NaN.
IS_LATE = False
MEET_S = 30.0
NUM_RECENT = 4

PASSES = ("a forward of parts", "training forward", "evaluation forward", "local_forward()")
TRAIN_PASS, EVAL_PASS, LOCAL_PASS = 1, 2, 3
KINDS = {
    "gather": "gather the parameters of {unit}",
    "reduce": "reduce the gradients of {unit}",
    "read": "read a parameter of {unit}",
    "fill": "take the initial values of {unit}",
    "pass": "begin a forward",
    "gradients": "end a backward",
    "sums": "edit a gradient",
    "local": "enter local_forward()",
    "end": "close the model",
    "state": "read an optimizer state of {unit}",
}
_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


@dataclass
class Position:
    """Where a rank's program is: pass kind (an index into PASSES), passes, steps and events so far."""

    pass_kind: int = 0
    passes: int = 0
    steps: int = 0
    events: int = 0  # a hash
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))


class Handle:
    """One collective that was asked for."""

    def __init__(self, number: int, tag: list[int], before: Callable[[], None], run: Callable[[], None]) -> None:
        self.number = number
        self.tag = tag
        self.before = before
        self.run: Callable[[], None] | None = run
        self.is_done = False


class Collectives:
    """Runs a model's collectives on a thread of its own, in the order of the calls."""

    def __init__(self, peers: Peers, names: Sequence[str], device: Device) -> None:
        self.peers = peers
        self.position = Position()
        self.is_ending = False  # the model closes: what others do now is no error of ours
        self.on_error: Callable[[Exception], object] = lambda error: None
        self._names = names
        self._device = device
        self._queue: deque[Handle] = deque()
        self._changed = threading.Condition()
        self._number = 0
        self._allowed = 0  # handles up to this number may run, if late
        self._error: Exception | None = None
        self._is_closing = False
        self._is_late = IS_LATE
        peers.control.is_stopping = lambda: self._is_closing
        self._thread = threading.Thread(target=self._work, name="nvoffload-collectives", daemon=True)
        self._thread.start()

    @property
    def rank(self) -> int:
        """This process's place among those that share the model."""
        return self.peers.rank

    @property
    def num_ranks(self) -> int:
        """How many share it."""
        return self.peers.num_ranks

    def enter_pass(self, kind: int) -> None:
        """Note where the program is: a forward of a kind, an index into PASSES, begins."""
        self.position.pass_kind = kind
        self.position.passes += 1

    # ---- operations

    def gather(self, unit: int, pieces: Sequence[tuple[Tensor, int]], before: Callable[[], None]) -> Handle:
        """Fill each of `pieces`, (bytes of all ranks, bytes per rank), from the ranks' own parts, once `before` is.

        `before` returns when the own parts are there.
        """
        for whole, nbytes in pieces:
            self._spoil(whole[: self.rank * nbytes])
            self._spoil(whole[(self.rank + 1) * nbytes :])

        def run() -> None:
            for whole, nbytes in pieces:
                self.peers.data.gather(whole, whole[self.rank * nbytes : (self.rank + 1) * nbytes])

        return self._submit("gather", unit, run, before)

    def reduce(self, unit: int, pieces: Sequence[tuple[Tensor, Tensor]]) -> Handle:
        """Fill the first of each of `pieces`, (own part, whole), with its part of the average over ranks."""
        for out, _ in pieces:
            self._spoil(out.view(torch.uint8))

        def run() -> None:
            for out, whole in pieces:
                self.peers.data.reduce(out, whole)
                out.div_(self.num_ranks)
                self._spoil(whole.view(torch.uint8))

        return self._submit("reduce", unit, run)

    def sum_bytes(self, kind: str, unit: int, content: Tensor) -> None:
        """Replace `content`, zero where other ranks have something, by everybody's."""
        if content.numel():
            self.wait(self._submit(kind, unit, lambda: self.peers.data.sum(content)))

    def sum_host_bytes(self, kind: str, unit: int, content: Tensor) -> None:
        """Do what `sum_bytes` does with bytes in host memory."""
        if content.numel():
            self.wait(self._submit(kind, unit, lambda: self.peers.control.sum(content)))

    def broadcast(self, unit: int, contents: Sequence[Tensor]) -> None:
        """Replace contents by those of rank 0."""

        def run() -> None:
            for content in contents:
                self.peers.data.broadcast(content)

        self.wait(self._submit("fill", unit, run))

    def any_of(self, kind: str, flags: Sequence[bool]) -> list[bool]:
        """Return, for each of as many flags on all ranks, whether one has it."""
        return [bool(n) for n in self.exchange(kind, torch.tensor([len(flags), *flags])).amax(0)[1:].tolist()]

    def exchange(self, kind: str, own: Tensor) -> Tensor:
        """Return every rank's `own`, a host tensor of one shape, stacked."""
        if not own.numel():
            return own.new_zeros((self.num_ranks, *own.shape))
        found: list[Tensor] = []
        self.wait(self._submit(kind, -1, lambda: found.append(self.peers.control.exchange(own))))
        return found[0]

    @contextmanager
    def agreeing(self, kind: str) -> Iterator[None]:
        """Run the block on every rank; an error of one is raised on all, and ends nothing else."""
        error: Exception | None = None
        try:
            yield
        except (RuntimeError, OSError, ValueError) as own:
            error = own
        texts: list[str] = []
        self.wait(self._submit(kind, -1, lambda: texts.extend(self.peers.control.texts(text_of(error)))))
        judge(error, texts)

    def _spoil(self, content: Tensor) -> None:
        if self._is_late:
            content.fill_(255)  # NaN in every floating dtype

    def _submit(
        self, kind: str, unit: int, run: Callable[[], None], before: Callable[[], None] = lambda: None
    ) -> Handle:
        is_queued = self._device.mark()

        def ready() -> None:
            before()
            is_queued()

        at = self.position
        tag = [_KIND_NUMBERS[kind], unit, at.pass_kind, at.passes, at.steps, at.events]
        with self._changed:
            self.check()
            self._number += 1
            handle = Handle(self._number, tag, ready, run)
            self._queue.append(handle)
            self._changed.notify_all()
        return handle

    def check(self) -> None:
        """Raise the first error."""
        if self._error is not None:
            raise self._error

    def wait(self, handle: Handle) -> None:
        """Return once it is done; raise the first error. A Ctrl-C is kept until then."""
        interrupt: KeyboardInterrupt | None = None
        while not handle.is_done:
            try:
                with self._changed:
                    if handle.number > self._allowed:
                        self._allowed = handle.number
                        self._changed.notify_all()
                    self._changed.wait_for(lambda: handle.is_done or self._error is not None, SLICE_S)
                    if not handle.is_done:
                        self.check()
                        assert self._thread.is_alive()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt:
            raise interrupt

    # ---- the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._may_run())
                if self._is_closing:
                    return
                handle = self._queue.popleft()
            try:
                with self._device.background():
                    self._run(handle)
            except (RuntimeError, OSError, ValueError, TypeError) as error:
                self._fail(error)
                return
            with self._changed:
                handle.is_done, handle.run = True, None
                self._changed.notify_all()
            del handle

    def _may_run(self) -> bool:
        return bool(self._queue) and (not self._is_late or self._queue[0].number <= self._allowed)

    def _run(self, handle: Handle) -> None:
        handle.before()
        control = self.peers.control
        control.waits_for = self.describe(handle.tag)
        tags = control.exchange(torch.tensor(handle.tag)).tolist()
        if any(tag != tags[0] for tag in tags):
            befores = control.texts(self._recent())
            pairs = zip(tags, befores, strict=True)
            wants = "; ".join(
                f"rank {rank} wants to {self.describe(tag)}{before}" for rank, (tag, before) in enumerate(pairs)
            )
            raise PeerError(f"the ranks are in different places: {wants}. {ADVICE}")
        assert handle.run is not None
        handle.run()

    def describe(self, tag: Sequence[int]) -> str:
        """Return what a tag says, for people: `gather the parameters of blocks.3, in training forward 2`."""
        kind, unit, pass_kind, passes, steps, _ = tag
        name = self._names[unit] if 0 <= unit < len(self._names) else "?"
        what = list(KINDS.values())[kind].format(unit=name)
        return f"{what}, in {PASSES[pass_kind]} {passes}, after step {steps}"

    def _recent(self) -> str:
        """Return what the program has just done, for people."""
        words = ("used", "used in backward", "left in backward")
        done = [f"{self._names[unit]} {words[kind]}" for unit, kind in list(self.position.recent) if unit >= 0]
        return f" ({', '.join(done)} before)" if done else ""

    def fail(self, error: Exception) -> None:
        """Nothing is exchanged any more; the other ranks learn why."""
        if self._error is None:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, Stopped):
            self.peers.fail(error)
        with self._changed:
            is_first, self._error = self._error is None, self._error or error
            self._changed.notify_all()
        if is_first and not self.is_ending and not isinstance(error, Stopped):
            self.on_error(error)

    def meet(self) -> None:
        """Return once all ranks are here, having done all they were asked for; after a while without an error."""
        with self._changed:
            if self._error is not None:
                return
            self._allowed = self._number + 1
            handle = self._submit("end", -1, lambda: None)
            self._changed.wait_for(lambda: handle.is_done or self._error is not None, MEET_S)

    def close(self) -> None:
        """Stop the thread and give the groups back."""
        with self._changed:
            self._is_closing = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(timeout=60)
        self.peers.close()
