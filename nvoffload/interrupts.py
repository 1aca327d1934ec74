"""Ctrl-C: held back while something is half changed, and how a command ends by it. Knows nothing of what."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Held:
    """`with Held():` a signal that Python would handle in between is handled at the end. Nests.

    Only the main thread handles signals, so elsewhere there is nothing to hold. It costs some ten
    microseconds, so it stands around what must not be half done, not around every lock.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = self._noted or (number, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._noted is not None:
            self._handlers[self._noted[0]](*self._noted)


def interrupt_once(number: int, _frame: object) -> None:
    """Signal handler: stop; what comes again while the files are being removed is ignored."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def interrupt_behind(error: BaseException | None) -> BaseException | None:
    """Return the interrupt during whose handling `error` came up, itself included, or None."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error
