"""The bridge's other end: takes blocks from an engine in C and answers them.

All waiting is done in C, without the GIL.
"""

import errno
from typing import Any, NamedTuple

from nvoffload import native
from nvoffload.io.ring import open_ring


class Block(NamedTuple):
    """One request, as the kernel would get it. `memory` is writable and `nbytes` long."""

    token: int
    is_read: bool
    fd: int
    offset: int
    nbytes: int
    memory: memoryview


class Bridge:
    """The pullers' view of an engine. Make no call once `is_drained`."""

    def __init__(self, handle: Any) -> None:
        self.is_drained = False
        self._handle = handle
        self._out = native.ffi.new("nvo_block *")

    def take(self, timeout_s: float) -> Block | None:
        """Return the oldest block, or None if none came in time or none will come any more.

        For one thread only.
        """
        code = native.lib.nvo_bridge_take(self._handle, self._out, int(timeout_s * 1000))
        if code == -errno.ESHUTDOWN:
            self.is_drained = True
        if code <= 0:
            return None
        out = self._out
        return Block(
            token=out.token,
            is_read=out.op == native.lib.NVO_READ,
            fd=out.fd,
            offset=out.offset,
            nbytes=out.nbytes,
            memory=memoryview(native.ffi.buffer(out.addr, out.nbytes)),
        )

    def answer(self, block: Block, result: int) -> None:
        """Answer a taken block, once: bytes moved or a negative errno. From any thread."""
        native.check(native.lib.nvo_bridge_done(self._handle, block.token, result), "answering a block")


def open_bridge(*, queue_depth: int, block_bytes: int, align: int) -> Any:
    """Return an open engine in C whose blocks wait to be taken."""
    handle, code = open_ring(native.lib.NVO_RING_BRIDGE, queue_depth=queue_depth, block_bytes=block_bytes, align=align)
    native.check(code, "opening an engine on the bridge")
    return handle
