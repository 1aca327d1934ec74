"""The errors users meet. One base class; the kinds differ by what the reader should do next.

Depends on nothing. A message says what happened, the numbers, and what to change.
"""


class NvoffloadError(RuntimeError):
    """Base of every error that this library raises on purpose."""


class ConfigError(NvoffloadError, ValueError):
    """An argument, a setting or a model that cannot work: change the call."""


class MachineError(NvoffloadError):
    """This machine cannot do what was asked: no space, no memory, no kernel support."""


class UsageError(NvoffloadError):
    """Calls in an order or on an object that cannot work: change the loop."""


class StorageError(NvoffloadError, OSError):
    """A transfer failed. `errno`, `filename`, `offset` and `nbytes` say which and where."""

    def __init__(self, message: str, *, errno: int = 0, path: str = "", offset: int = -1, nbytes: int = -1) -> None:
        OSError.__init__(self, message)
        self.errno = errno or None
        self.filename = path or None
        self.offset = offset
        self.nbytes = nbytes

    def __str__(self) -> str:
        return str(self.args[0])


class CorruptionError(StorageError):
    """Bytes came back other than they were written."""


class PeerError(NvoffloadError):
    """Another rank failed; its message is repeated here."""


class Stopped(NvoffloadError):
    """The model is closing while something waits for other ranks. Stays between our own threads."""
