"""The kernel's ring: opens it, or says in words why this machine gives none."""

import errno
from pathlib import Path
from typing import Any

from nvoffload import native
from nvoffload.errors import MachineError

HINTS = {
    errno.EAGAIN: "the requests of all processes together have reached the limit fs.aio-max-nr: raise it",
    errno.ENOSYS: "this kernel, or the sandbox around the process, has no asynchronous I/O",
    errno.EPERM: "a system call filter, as containers have, forbids asynchronous I/O",
    errno.EMFILE: "the process has too many open files: raise ulimit -n",
}


def open_ring(ring_kind: int, *, queue_depth: int, block_bytes: int, align: int) -> tuple[Any, int]:
    """Return an open engine in C and 0, or None and a negative errno."""
    out = native.ffi.new("nvo_engine **")
    code = native.lib.nvo_engine_open(out, ring_kind, queue_depth, block_bytes, align)
    return (out[0], 0) if code == 0 else (None, code)


def refusal(code: int) -> str:
    """Say what the kernel answered to io_setup, with the numbers behind it."""
    text = native.describe(code)
    if code == -errno.EAGAIN:
        text += f"; fs.aio-nr {_limit('aio-nr')} of fs.aio-max-nr {_limit('aio-max-nr')}"
    return text


def ring_error(code: int, queue_depth: int) -> MachineError:
    """Return the error for a user who asked for this ring by name."""
    hint = HINTS.get(-code, "the kernel refuses")
    return MachineError(
        f'engine="libaio": io_setup for {queue_depth} requests, halved down to 1, failed: {refusal(code)}. '
        f'Likely cause: {hint}. Or write engine="portable", which needs no kernel support and is slower.'
    )


def _limit(name: str) -> str:
    try:
        return Path("/proc/sys/fs", name).read_text().strip()
    except OSError:
        return "(unknown)"
