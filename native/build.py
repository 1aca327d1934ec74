"""Describe the native module to cffi: one abi3 extension from the C files beside this one.

setuptools calls `ffibuilder` (see setup.py). Paths are relative to the project's root, as
setuptools demands.
"""

import os
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
SOURCES = [
    "crc32c",
    "adam",
    "file",
    "fork",
    "engine",
    "pump",
    "ring_aio",
    "ring_bridge",
    "pool",
    "tile",
    "mover",
    "visit",
    "land",
    "poison",
    "simdev",
]
# Without -Wpedantic, which the code that cffi generates does not pass; .ci/run adds it for ours.
WARNINGS = ["-Wall", "-Wextra", "-Wconversion"]
FLAGS = ["-std=c11", "-O3", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread"]


def declarations() -> str:
    """Return the part of nvo.h that stands between the two cffi marks."""
    header = (HERE / "nvo.h").read_text()
    return header.split("/* cffi: begin */")[1].split("/* cffi: end */")[0]


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "nvoffload._native",
    '#include "nvo.h"',
    sources=[f"native/{name}.c" for name in SOURCES],
    depends=["native/nvo.h", "native/engine.h", "native/mover.h", "native/adam_body.h", "native/build.py"],
    include_dirs=["native"],
    libraries=["m", "dl"],
    extra_compile_args=[*FLAGS, *WARNINGS, *os.environ.get("NVO_CFLAGS", "").split()],
    extra_link_args=["-pthread", *os.environ.get("NVO_LDFLAGS", "").split()],
)
