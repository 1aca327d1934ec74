"""Three processes that play the ranks of a group: functions run on them, and what they return comes back.

The processes start with the first call and serve all tests of a session. A call that hangs, or a process that
dies, ends them; the next call starts fresh ones.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NUM_WORKERS = 3
LIMIT_S = 20.0  # of the groups, unless a call asks for short ones
SHORT_LIMIT_S = 3.0
CALL_LIMIT_S = 60.0


class RankError(Exception):
    """What a function raised on a rank: `kind` is the name of its class, `trace` the text of its traceback."""

    def __init__(self, rank: int, kind: str, message: str, trace: str = "") -> None:
        super().__init__(rank, kind, message, trace)
        self.rank, self.kind, self.message, self.trace = rank, kind, message, trace

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}: {self.message}\n{self.trace}"


def run(num_ranks: int, function: Callable[..., Any], *args: Any, **switches: bool) -> list[Any]:
    """Return what `function(group, rank, *args)` returned on each of so many ranks; raise RankError if one failed.

    `function` belongs to a module; arguments and results travel by pickle. Of several errors the first that
    is no PeerError is raised. Switches: those of `outcomes`.
    """
    found = outcomes(num_ranks, function, *args, **switches)
    errors = [outcome for outcome in found if isinstance(outcome, RankError)]
    if errors:
        raise next((error for error in errors if error.kind != "PeerError"), errors[0])
    return found


def outcomes(
    num_ranks: int, function: Callable[..., Any], *args: Any, is_late: bool = False, is_short: bool = False
) -> list[Any]:
    """Do what `run` does, and return a RankError in the place of a rank that failed.

    `is_late`: collectives and the device's copies run only when somebody waits for them. `is_short`: the
    group's limit is SHORT_LIMIT_S. Ends the processes and raises RankError after CALL_LIMIT_S.
    """
    assert 1 <= num_ranks <= NUM_WORKERS
    if not _pools:
        _pools.append(_Pool())
    try:
        return _pools[0].call(num_ranks, (function, args, is_late, is_short))
    except BaseException:
        close()
        raise


def close() -> None:
    """End the processes, if there are any."""
    while _pools:
        _pools.pop().close()


_pools: list["_Pool"] = []  # one at most
atexit.register(close)


class _Pool:
    """The processes, and a pipe to each."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = Path(tempfile.mkdtemp(prefix="nvoffload-ranks-"))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(NUM_WORKERS):
            ours, theirs = context.Pipe()
            stacks = str(self._folder / f"stacks{rank}")
            process = context.Process(target=_serve, args=(rank, self._store.port, theirs, stacks), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, num_ranks: int, task: Any) -> list[Any]:
        content = pickle.dumps((num_ranks, *task))
        for pipe in self._pipes[:num_ranks]:
            pipe.send_bytes(content)
        end_s = time.monotonic() + CALL_LIMIT_S
        return [self._answer(rank, end_s) for rank in range(num_ranks)]

    def _answer(self, rank: int, end_s: float) -> Any:
        if not self._pipes[rank].poll(max(0.0, end_s - time.monotonic())):
            raise RankError(rank, "TimeoutError", f"no answer within {CALL_LIMIT_S:g} s", self._stacks())
        try:
            is_error, answer = pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            self._processes[rank].join(1.0)
            code = self._processes[rank].exitcode
            raise RankError(rank, "EOFError", f"its process ended, code {code}", self._stacks()) from None
        return RankError(rank, *answer) if is_error else answer

    def _stacks(self) -> str:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self._folder.glob("stacks*")))

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.kill()
            process.join()
            process.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(rank: int, port: int, pipe: Connection, stacks: str) -> None:
    """Run what comes through the pipe until it is closed."""
    torch.set_num_threads(1)
    with open(stacks, "w") as file, contextlib.suppress(EOFError, KeyboardInterrupt):
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=NUM_WORKERS, timeout=timedelta(seconds=LIMIT_S)
        )
        groups = {
            (num_ranks, limit_s): dist.new_group(list(range(num_ranks)), timeout=timedelta(seconds=limit_s))
            for num_ranks in range(1, NUM_WORKERS + 1)
            for limit_s in (LIMIT_S, SHORT_LIMIT_S)
        }
        gc.freeze()
        while True:
            num_ranks, function, args, is_late, is_short = pickle.loads(pipe.recv_bytes())
            group = groups[num_ranks, SHORT_LIMIT_S if is_short else LIMIT_S]
            with _lateness(is_late):
                pipe.send_bytes(pickle.dumps(_outcome(function, group, rank, args)))


def _outcome(function: Callable[..., Any], group: Any, rank: int, args: Any) -> tuple[bool, Any]:
    """Run a function; leave nothing of what it made behind."""
    try:
        return False, function(group, rank, *args)
    except Exception as error:  # noqa: BLE001 - it is raised where the function was asked for
        traceback.clear_frames(error.__traceback__)
        return True, (type(error).__name__, str(error), "".join(traceback.format_exception(error)))
    finally:
        gc.collect()


@contextlib.contextmanager
def _lateness(is_late: bool) -> Iterator[None]:
    if not is_late:
        yield
        return
    collectives, device, opening = (
        importlib.import_module(f"nvoffload.{room}") for room in ("collectives", "device", "opening")
    )
    real, make_plan = opening.open_device, opening.make_plan

    def plan_a_pool(*args: Any) -> Any:
        plan, count = make_plan(*args)
        return plan, max(count, 2)  # on a host alone tiers without a disk need no pool

    collectives.IS_LATE = True
    opening.open_device = lambda _, threads: device.SimDevice(threads)
    opening.make_plan = plan_a_pool
    try:
        yield
    finally:
        collectives.IS_LATE, opening.open_device, opening.make_plan = False, real, make_plan
