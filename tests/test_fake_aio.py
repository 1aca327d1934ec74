"""Claims about the ring when the library under it misbehaves.

A stand-in libaio.so.1 is compiled and put first on the library path of a child process, which writes and
reads a file and prints what happened.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nvoffload import native

BLOCK = 64 * 1024

pytestmark = pytest.mark.timeout(30)

# The package without its __init__: the child needs no torch, and starts in no time.
CHILD = """
import json, logging, mmap, os, random, sys, time, types
package = types.ModuleType("nvoffload")
package.__path__ = [sys.argv[1]]
sys.modules["nvoffload"] = package
from nvoffload import native
from nvoffload.errors import StorageError
from nvoffload.io.engine import open_engine

path, nbytes, depth, timeout_s = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
maps = [mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
source, target = (int(native.ffi.cast("uintptr_t", native.ffi.from_buffer(m))) for m in maps)
maps[0][:] = random.Random(1).randbytes(nbytes)
fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0))
os.posix_fallocate(fd, 0, nbytes)
engine = open_engine("libaio", block_bytes=65536, queue_depth=depth)
out = {"library": engine.library, "depth": engine.queue_depth, "errors": [], "in_flight": []}
for _ in range(2):  # what a first round broke, a second one must not feel
    for move, address in [(engine.write, source), (engine.read, target)]:
        start = time.monotonic()
        try:
            move(fd, address, 0, nbytes, path=path, timeout_s=timeout_s)
        except StorageError as error:
            out["errors"].append([error.errno, error.filename, error.offset, error.nbytes, str(error)])
            out["in_flight"].append(engine.stats().inflight)
            out["error_s"] = time.monotonic() - start
    out["equal"] = maps[0][:] == maps[1][:]
out["write_bytes"], out["write_requests"] = engine.stats().write_bytes, engine.stats().write_requests
try:
    engine.close(timeout_s=timeout_s)
except StorageError as error:
    out["close"] = str(error)
print(json.dumps(out), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The folder of the stand-in."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in libaio with")
    folder = tmp_path_factory.mktemp("fake_aio")
    source = Path(__file__).with_name("fake_aio.c")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", folder / "libaio.so.1", source]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def run(library, tmp_path):
    """Run the child in a mode; return what it printed."""

    def run_child(*, nbytes=20 * BLOCK + 4096, depth=8, timeout_s=10.0, **modes):
        env = os.environ | {f"FAKE_AIO_{name.upper()}": str(value) for name, value in modes.items()}
        env["LD_LIBRARY_PATH"] = str(library)
        package = Path(native.__file__).parent
        path = tmp_path / "0.swap"
        args = [sys.executable, "-c", CHILD, package, path, str(nbytes), str(depth), str(timeout_s)]
        child = subprocess.run(args, env=env, capture_output=True, text=True, timeout=25, check=False)
        if "MachineError" in child.stderr and "io_setup" in child.stderr:
            pytest.skip(f"no kernel AIO here: {child.stderr.splitlines()[-1]}")
        assert child.returncode == 0, child.stderr
        out = json.loads(child.stdout) | {"log": child.stderr, "path": str(path)}
        assert out["library"] == "libaio.so.1", "the stand-in must be in use"
        return out

    return run_child


@pytest.mark.parametrize(
    "modes",
    [
        {},
        {"one": 1},
        {"eagain": 1},
        {"short": 3},
        {"twice": 1},
        {"one": 1, "eagain": 1, "short": 2, "twice": 1},
    ],
    ids=lambda modes: "-".join(modes) or "well-behaved",
)
def test_bytes_are_right_under(modes, run):
    """Whatever the library does short of failing, all bytes move, once, and are counted once.

    Two rounds of write and read of 20 blocks and a bit at depth 8; the stand-in also checks alignment (R10).
    """
    out = run(**modes)
    assert out["errors"] == []
    assert out["equal"]
    assert out["write_bytes"] == 2 * (20 * BLOCK + 4096)
    blocks = 2 * 21
    assert out["write_requests"] > blocks if "short" in modes else out["write_requests"] == blocks


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
def test_failed_request_is_one_error_and_the_engine_goes_on(code, run):
    """A failed completion raises once, with file and place; nothing stays in flight; the rest works (R09, R14).

    Request 3 of the first write fails.
    """
    out = run(fail=f"3:{code}")
    (found, path, offset, nbytes, text), *others = out["errors"]
    assert not others
    assert (found, path, offset, nbytes) == (code, out["path"], 2 * BLOCK, BLOCK)
    assert f"write of {BLOCK} bytes at {2 * BLOCK} of {out['path']} failed" in text
    assert out["in_flight"] == [0]
    assert out["equal"]


def test_rejected_submit_fails_only_its_block(run):
    """A submit error belongs to the first request of the batch; the others of the batch go on.

    The submit that starts with request 5 is rejected, with one request per submit.
    """
    out = run(one=1, reject=5)
    assert [error[:4] for error in out["errors"]] == [[errno.EBADF, out["path"], 4 * BLOCK, BLOCK]]
    assert out["in_flight"] == [0]
    assert out["equal"]


def test_small_quota_halves_the_depth(run):
    """When the kernel gives no 64 requests, the engine runs with fewer and says so (R07).

    io_setup answers EAGAIN for more than 8.
    """
    assert run(depth=64)["depth"] == 64
    out = run(depth=64, quota=8)
    assert out["depth"] == 8
    assert "depth 8 (of 64: fs.aio-max-nr is spent)" in out["log"]
    assert out["equal"]


def test_write_that_never_completes_is_reported_in_time(run):
    """A lost request becomes an error that names the file within the limit, not a hang (R73).

    Request 2 never completes; the limit is 0.5 s; later transfers go through; close reports the leak.
    """
    out = run(never=2, timeout_s=0.5)
    (found, path, _, _, text), *others = out["errors"]
    assert not others
    assert (found, path) == (errno.ETIMEDOUT, out["path"])
    assert "no completion for 0.5 s" in text
    assert 0.4 < out["error_s"] < 5
    assert out["in_flight"] == [1]
    assert "1 requests in flight" in out["close"]
