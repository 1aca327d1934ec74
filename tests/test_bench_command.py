"""The bench command: what it prints, what it leaves behind, how it ends."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvoffload import bench as module
from nvoffload.errors import ConfigError, CorruptionError, MachineError
from nvoffload.swapfile import filesystem_of

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "nvoffload.bench"]


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=50, check=False
    )


@pytest.mark.timeout(60)
def test_json_holds_every_row_and_the_folder_is_empty(swap):
    """Goal: figures that programs can read. Method: a small run; schema, rows, medians, nothing else on stdout."""
    done = bench(swap, "--size", "32MiB", "--seconds", "0.05", "--repeats", "3", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["schema"] == "nvoffload.bench/1"
    assert {"machine", "disk", "config", "results"} <= set(figures)
    names = [result["name"] for result in figures["results"]]
    assert names == [
        "engine read",
        "engine read, 4 KiB pages",
        "engine write",
        "engine mixed",
        "pool swap in",
        "pool swap out",
    ]
    for result in figures["results"]:
        samples = result["samples_bytes_per_second"]
        assert len(samples) == 3
        assert min(samples) > 0
        assert sorted(samples)[1] == result["median_bytes_per_second"]
        assert result["is_cached"] is not figures["disk"]["is_direct"]
    assert figures["config"]["size_bytes"] <= 32 << 20
    assert "writing 33554432 bytes" in done.stderr.splitlines()[0]
    assert not list(swap.iterdir())


@pytest.mark.timeout(60)
def test_results_go_to_stdout_and_json_to_a_file(swap, tmp_path):
    target = tmp_path / "figures.json"
    done = bench(
        swap, "--size", "8MiB", "--seconds", "0.02", "--repeats", "1", "--engine", "portable", "--json", target
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"engine mixed +\d+\.\d\d GB/s", done.stdout)
    assert "repeat" not in done.stdout
    assert json.loads(target.read_text())["config"]["engine"] == "portable"
    assert not list(swap.iterdir())


@pytest.mark.timeout(60)
def test_interrupt_leaves_nothing_and_exits_130(swap):
    """Goal: Ctrl-C is safe. Method: SIGINT twice while rows are timed."""
    child = subprocess.Popen(
        [*COMMAND, str(swap), "--size", "64MiB", "--seconds", "20"], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert child.stderr is not None
    while "repeat" not in child.stderr.readline():
        assert child.poll() is None
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGINT)
    _, rest = child.communicate(timeout=20)
    assert child.returncode == 130, rest
    assert rest.splitlines()[-1] == "interrupted; the file is removed."
    assert "Traceback" not in rest
    assert not list(swap.iterdir())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["{swap}/none"], ConfigError, "does not exist"),
        (["{swap}", "--size", "huge"], ConfigError, "is not a size"),
        (["{swap}", "--size", "1MiB"], ConfigError, "the least is"),
        (["{swap}", "--engine", "libiao"], ConfigError, "Did you mean 'libaio'?"),
        (["{swap}", "--size", "1000TB"], MachineError, "are free"),
    ],
)
def test_what_cannot_work_is_a_named_error(swap, arguments, error, words):
    with pytest.raises(error, match=re.escape(words)):
        module.run(module.parse([text.format(swap=swap) for text in arguments]))
    assert not list(swap.iterdir())


@pytest.mark.timeout(60)
def test_memory_is_refused_as_a_disk():
    memory = Path("/dev/shm")
    if not memory.exists() or filesystem_of(memory) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    before = set(memory.iterdir())
    done = bench(memory)
    assert done.returncode == 2
    assert "tmpfs" in done.stderr
    assert set(memory.iterdir()) <= before


@pytest.mark.timeout(60)
def test_too_little_space_exits_3(swap):
    done = bench(swap, "--size", "1000TB")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.timeout(60)
def test_a_changed_byte_is_found(swap, monkeypatch):
    """Goal: no figure for wrong data. Method: the checksum of what was written is altered before the check."""
    real = module.Field.fill

    def spoil(field):
        real(field)
        field._disk = [crc ^ 1 for crc in field._disk]

    monkeypatch.setattr(module.Field, "fill", spoil)
    settings = module.parse([str(swap), "--size", "8MiB", "--seconds", "0.02", "--repeats", "1"])
    with pytest.raises(CorruptionError, match="checksum"):
        module.run(settings)
    assert not list(swap.iterdir())
