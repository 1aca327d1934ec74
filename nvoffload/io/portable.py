"""The puller on aiofiles, for systems and filesystems without kernel AIO.

Slower than a ring and never used silently. Short transfers and retries are the engine's business.
"""

import asyncio
import errno
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiofiles

from nvoffload.io.bridge import Block, Bridge

NUM_WORKERS_MAX = 16
TAKE_S = 5.0
KEPT_FLAGS = os.O_ACCMODE | os.O_SYNC | os.O_DSYNC | getattr(os, "O_DIRECT", 0)


class Portable:
    """Serves the bridge of one engine from an event loop on a thread of its own."""

    def __init__(self, handle: Any, queue_depth: int) -> None:
        self._bridge = Bridge(handle)
        self._num_workers = min(queue_depth, NUM_WORKERS_MAX)
        self._loop = asyncio.new_event_loop()
        self._drained = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        # Daemons: a process that ends without close() must not hang on them.
        self._threads = [
            threading.Thread(target=self._run_loop, name="nvoffload-portable-loop", daemon=True),
            threading.Thread(target=self._pull, name="nvoffload-portable-pull", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until the threads have gone. REQUIRES: the engine is drained."""
        for thread in self._threads:
            thread.join()

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        workers = ThreadPoolExecutor(self._num_workers, thread_name_prefix="nvoffload-portable")
        asyncio.get_running_loop().set_default_executor(workers)
        await self._drained.wait()
        await asyncio.gather(*self._tasks)

    def _pull(self) -> None:
        while not self._bridge.is_drained:
            block = self._bridge.take(TAKE_S)
            if block is not None:
                self._loop.call_soon_threadsafe(self._start, block)
        self._loop.call_soon_threadsafe(self._drained.set)

    def _start(self, block: Block) -> None:
        task = self._loop.create_task(self._answer(block))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, block: Block) -> None:
        result = -errno.EIO
        try:
            result = await move(block)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        except RuntimeError:  # the process ends without close(), and Python's workers went first
            result = -errno.ECANCELED
        finally:
            self._bridge.answer(block, result)


async def move(block: Block) -> int:
    """Move one block through a file object; return the bytes moved, which may be fewer.

    A file object has one cursor, and copies of a descriptor share it: so each block opens the file anew,
    through the descriptor, as the name may be gone. Nothing is kept, so nothing can be stale.
    """
    flags = fcntl.fcntl(block.fd, fcntl.F_GETFL) & KEPT_FLAGS

    def reopen(path: str, _mode_flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC)

    mode = "rb" if block.is_read else "r+b"
    async with aiofiles.open(f"/proc/self/fd/{block.fd}", mode, buffering=0, opener=reopen) as file:
        await file.seek(block.offset)
        moved = await (file.readinto(block.memory) if block.is_read else file.write(block.memory))
        return -errno.EAGAIN if moved is None else int(moved)
