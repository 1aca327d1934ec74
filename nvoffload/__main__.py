"""python -m nvoffload [FOLDER ...]: what this machine offers, for a bug report. Changes nothing."""

import os
import platform
import re
import resource
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from nvoffload import __version__, native
from nvoffload.buffers import Pool, available_memory_bytes
from nvoffload.config import format_bytes
from nvoffload.errors import NvoffloadError
from nvoffload.io.engine import open_engine
from nvoffload.swapfile import RunFolder, SwapFile, check_folder, filesystem_of

USAGE = """usage: python -m nvoffload [FOLDER ...]

Says what this machine offers; with folders, whether they take direct I/O."""
SIMD_LEVELS = ("scalar", "avx2", "avx512")


def package(name: str) -> str:
    """Return `name 1.2`, or that it is missing."""
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} missing"


def read(path: str) -> str:
    """Return a one-line file's text, "?" if there is none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "?"


def probe_engine(kind: str) -> str:
    """Return how opening an engine went."""
    try:
        with open_engine(kind, block_bytes=1 << 20, queue_depth=32) as engine:
            return f"yes  {engine!r}"
    except (NvoffloadError, OSError) as error:
        return f"no   {error}"


def probe_pool() -> str:
    """Return how much of a small pool stands on 2 MiB pages."""
    pool = Pool(buffer_count=2, buffer_bytes=8 << 20)
    try:
        return f"{format_bytes(pool.huge_bytes())} of {format_bytes(pool.nbytes)} on 2 MiB pages"
    finally:
        pool.close()


def probe_folder(folder: Path) -> str:
    """Return whether a file in `folder` takes direct I/O, by writing one."""
    try:
        check_folder(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".nvoffload-probe-") as inside:
            run = RunFolder.create(Path(inside))
            file = SwapFile(run, "m0.r0.f0.swap")
            try:
                direct = "yes" if file.is_direct else "no, through the page cache"
            finally:
                file.close(remove=True)
                run.remove()
                run.close()
    except (NvoffloadError, OSError) as error:
        return f"no   {error}"
    usage = os.statvfs(folder)
    return f"{direct}  {filesystem_of(folder)}, {format_bytes(usage.f_bavail * usage.f_frsize)} free"


def lines(folders: list[Path]) -> list[str]:
    """Return the report."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    huge = re.search(r"HugePages_Free:\s+(\d+)", read("/proc/meminfo"))
    memlock = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    packages = ", ".join(map(package, ("torch", "numpy", "cffi", "aiofiles")))
    rows = [
        ("nvoffload", f"{__version__}, python {platform.python_version()}, {packages}"),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} processors"),
        ("kernels", f"AdamW {SIMD_LEVELS[native.lib.nvo_simd_best()]}"),
        ("libaio", probe_engine("libaio")),
        ("portable", probe_engine("portable")),
        ("aio", f"{read('/proc/sys/fs/aio-nr')} of {read('/proc/sys/fs/aio-max-nr')} requests taken machine-wide"),
        ("memory", f"{format_bytes(available_memory_bytes())} available, memlock {memlock}"),
        ("pages", f"{probe_pool()}; {huge[1] if huge else '?'} reserved"),
        ("gpu", _gpus()),
        *[("direct", f"{folder} {probe_folder(folder)}") for folder in folders],
    ]
    return [f"{name:10} {text}" for name, text in rows]


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def main(arguments: list[str]) -> int:
    """Print the report; return the exit status."""
    if any(argument.startswith("-") for argument in arguments):
        print(USAGE)
        return 0 if arguments[0] in ("-h", "--help") else 2
    try:
        print("\n".join(lines([Path(argument) for argument in arguments])))
    except NvoffloadError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
