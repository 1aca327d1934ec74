"""The only room that names CUDA: copies, registration, streams, and the memory that units are gathered in.

Its twin, SimDevice, keeps every copy until its stream is waited for.
"""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from nvoffload import native
from nvoffload.buffers import Arena
from nvoffload.errors import MachineError
from nvoffload.shims import storage_at


class Device(Protocol):
    """Where parameters and gradients are, as the mover needs it."""

    handle: Any

    def synchronize(self) -> None:
        """Return once everything queued on the user's stream has run."""

    def mark(self) -> Callable[[], None]:
        """Return what blocks any thread until what is queued on the user's stream now has run."""

    def background(self) -> AbstractContextManager[None]:
        """Queue what a thread of ours does beside the user's stream; at the end it has run."""

    def register(self, address: int, nbytes: int) -> str:
        """Make host memory known to the device; return how that went, in words."""

    def close(self) -> None:
        """Free streams. Idempotent."""


class Memory:
    """Bytes on the device for gathered values, from one allocation to `close`."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self._arena: Arena | None = None
        self._tensor: torch.Tensor | None = None
        if device.type == "cpu":
            self._arena = Arena(nbytes, is_forkable=True)
            self.address = self._arena.address
        else:
            self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.address = self._tensor.data_ptr()

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Return a storage over a piece; it doesn't own it. REQUIRES: within the memory."""
        assert offset >= 0 and offset + nbytes <= self.nbytes
        return storage_at(self.address + offset, nbytes, self.device)

    def close(self) -> None:
        """Give the memory back. REQUIRES: no storage over it is used any more. Idempotent."""
        self._tensor = None
        if self._arena is not None:
            self._arena.close()


class Poison:
    """What a storage shows while its bytes are elsewhere: NaN, in no memory of its own.

    On the host a mapping of one page of NaN, repeated; it lasts as long as the process, because a view
    of it may. On CUDA a null pointer: the version counter guards it.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._address = 0
        if device.type == "cpu" and nbytes:
            out = native.ffi.new("void **")
            native.check(native.lib.nvo_poison_map(nbytes, out), f"mapping {nbytes} bytes of NaN")
            self._address = int(native.ffi.cast("intptr_t", out[0]))

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of `nbytes` of it."""
        assert nbytes <= self._nbytes
        return storage_at(self._address, nbytes, self._device)

    def clean(self) -> None:
        """Undo what somebody wrote there."""
        if self._address:
            address = native.ffi.cast("void *", self._address)
            native.check(native.lib.nvo_poison_clean(address, self._nbytes), "cleaning the poison")


class HostDevice:
    """Parameters in host memory: nothing to copy by."""

    def __init__(self) -> None:
        self.handle: Any = native.ffi.NULL

    def synchronize(self) -> None:
        """Do nothing."""

    def mark(self) -> Callable[[], None]:
        """Nothing is ever queued."""
        return lambda: None

    def background(self) -> AbstractContextManager[None]:
        """Nothing is ever queued."""
        return nullcontext()

    def register(self, address: int, nbytes: int) -> str:
        """Do nothing."""
        return "not needed"

    def close(self) -> None:
        """Do nothing."""


class SimDevice(HostDevice):
    """The twin: a device whose memory is host memory and whose streams run late."""

    def __init__(self, num_threads: int) -> None:
        lib, ffi = native.lib, native.ffi
        self._streams = [lib.nvo_simdev_stream_open() for _ in range(num_threads)]
        self._array = ffi.new("void *[]", self._streams)
        self.handle = ffi.new(
            "nvo_device *",
            {"copy": lib.nvo_simdev_copy, "wait": lib.nvo_simdev_wait, "streams": self._array},
        )

    def close(self) -> None:
        """Free the streams."""
        while self._streams:
            native.lib.nvo_simdev_stream_close(self._streams.pop())


class CudaDevice:
    """A CUDA device, through the runtime library that torch has loaded."""

    def __init__(self, device: torch.device, num_threads: int) -> None:
        ffi = native.ffi
        runtime = _cuda_runtime()
        self._device = device
        self._registered: list[int] = []
        self._streams = [torch.cuda.Stream(device) for _ in range(num_threads)]  # type: ignore[no-untyped-call]
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._array = ffi.new("void *[]", [ffi.cast("void *", s.cuda_stream) for s in self._streams])
        copy = "int (*)(void *, const void *, size_t, int, void *)"
        self.handle = ffi.new(
            "nvo_device *",
            {
                "copy": ffi.cast(copy, _address(runtime, "cudaMemcpyAsync")),
                "wait": ffi.cast("int (*)(void *)", _address(runtime, "cudaStreamSynchronize")),
                "select": ffi.cast("int (*)(int)", _address(runtime, "cudaSetDevice")),
                "ordinal": device.index or 0,
                "streams": self._array,
            },
        )

    def synchronize(self) -> None:
        """Wait for the current stream: gradients and parameters are then as the loop left them."""
        torch.cuda.current_stream(self._device).synchronize()

    def mark(self) -> Callable[[], None]:
        """Record an event."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    @contextmanager
    def background(self) -> Iterator[None]:
        """Use a stream of our own."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            yield
            self._side.synchronize()

    def register(self, address: int, nbytes: int) -> str:
        """Page-lock the pool for the device; best effort."""
        cudart: Any = torch.cuda.cudart  # untyped in torch
        code = cudart().cudaHostRegister(address, nbytes, 0)
        if int(code) != 0:
            return f"not pinned: cudaHostRegister returned {int(code)}"
        self._registered.append(address)
        return "pinned"

    def close(self) -> None:
        """Take registrations back."""
        cudart: Any = torch.cuda.cudart
        while self._registered:
            cudart().cudaHostUnregister(self._registered.pop())


def open_device(device: torch.device, num_threads: int) -> Device:
    """Return the way to reach tensors on `device`."""
    if device.type == "cpu":
        return HostDevice()
    if device.type == "cuda":
        return CudaDevice(device, num_threads)
    raise MachineError(f"device {device} is not supported: parameters must be on a CPU or a CUDA device.")


def numa_node_of(device: torch.device) -> int | None:
    """Return the NUMA node that the device hangs on; None if it is the host, or nobody says."""
    if device.type != "cuda":
        return None
    facts: Any = torch.cuda.get_device_properties(device)
    place = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    file = Path("/sys/bus/pci/devices", place, "numa_node")
    node = int(file.read_text()) if file.exists() else -1
    return node if node >= 0 else None


def _cuda_runtime() -> ctypes.CDLL:
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"(/\S*libcudart\S*\.so\S*)", maps)
    if found is None:
        raise MachineError("torch has no CUDA runtime loaded (libcudart); is this a CUDA build of torch?")
    return ctypes.CDLL(found[1])


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
