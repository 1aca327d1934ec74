"""The only importer of the C library. Exposes `ffi` and `lib`, and turns codes into text.

Importing this never fails: without the built module every use of `lib` raises MachineError.
"""

import importlib
import os
from typing import Any

from nvoffload.errors import MachineError


class _Missing:
    """Stands where the library should be and says why it is not there."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise MachineError(
            f"nvoffload's C core could not be loaded ({self._reason}). It runs on Linux; "
            "in a source checkout build it with `make build`."
        )


def _load() -> tuple[Any, Any]:
    try:
        native = importlib.import_module("nvoffload._native")
    except ImportError as error:
        missing = _Missing(str(error))
        return missing, missing
    return native.ffi, native.lib


ffi, lib = _load()


def describe(code: int) -> str:
    """Return `Input/output error (5)` for -5 or 5."""
    return f"{os.strerror(abs(code))} ({abs(code)})"


def check(code: int, what: str) -> int:
    """Return `code` if it is not negative, else raise MachineError naming `what`."""
    if code < 0:
        raise MachineError(f"{what} failed: {describe(code)}.")
    return code
