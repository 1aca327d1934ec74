"""The demo: its figures against the ledger and the plan, and how it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvoffload.demo_model import SIZES, ByteTransformer

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "nvoffload.demo"]
WITHOUT_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def demo(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**WITHOUT_GPU, "PYTHONPATH": str(ROOT)}
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=110, check=False)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_count_their_parameters(name):
    with torch.device("meta"):
        model = ByteTransformer(SIZES[name])
    assert sum(param.numel() for param in model.parameters()) == SIZES[name].numel


def test_default_size_has_four_gb_of_parameters_and_states():
    assert 12 * SIZES["350M"].numel >= 4e9


@pytest.mark.timeout(120)
def test_run_keeps_to_ledger_and_plan_under_a_hard_limit(swap, tmp_path):
    """Goal: bytes equal the ledger, memory stays within 1.10 of plan and activations. Method: 30M, 2 steps."""
    target = tmp_path / "report.json"
    done = demo("--size", "30M", "--steps", "2", "--path", swap, "--json", target)
    assert done.returncode == 0, done.stderr
    report = json.loads(target.read_text())
    assert report["step_read_bytes"] == report["ledger_read_bytes"]
    assert report["step_write_bytes"] == report["ledger_write_bytes"]
    assert report["enforced_by"] == "held by RLIMIT_DATA"
    assert report["peak_bytes"] <= 1.10 * (report["plan_bytes"] + report["activation_bytes"])
    assert report["peak_bytes"] <= report["budget_bytes"]
    assert "equal to the ledger to the byte" in done.stdout
    assert "limited by" in done.stdout
    assert not list(swap.iterdir())


@pytest.mark.timeout(120)
def test_loss_falls_and_the_temporary_folder_goes(swap):
    """Goal: it learns, and leaves nothing where it was started. Method: a few steps without --path."""
    done = demo("--size", "10M", "--steps", "6", "--json", "report.json", cwd=swap)
    assert done.returncode == 0, done.stderr
    report = json.loads((swap / "report.json").read_text())
    assert report["loss_last"] < report["loss_first"] - 0.5
    assert [path.name for path in swap.iterdir()] == ["report.json"]


@pytest.mark.timeout(120)
def test_interrupt_leaves_nothing_and_exits_130(swap):
    """Goal: Ctrl-C at any moment is safe. Method: SIGINT twice after the first step."""
    command = [*COMMAND, "--size", "10M", "--steps", "1000", "--path", str(swap)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stderr is not None
    while "step 1/" not in (line := child.stderr.readline()):
        assert child.poll() is None, line
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGINT)
    _, rest = child.communicate(timeout=60)
    assert child.returncode == 130, rest
    assert rest.split("\n")[-2] == "interrupted; the swap file is removed."
    assert "Traceback" not in rest
    assert not list(swap.iterdir())


@pytest.mark.timeout(120)
def test_a_budget_that_is_too_small_is_said(swap):
    done = demo("--size", "10M", "--steps", "1", "--path", swap, "--budget", "450MiB")
    assert done.returncode == 1
    assert "--budget" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(swap.iterdir())


@pytest.mark.timeout(60)
def test_too_little_text_is_said(swap):
    (swap / "short.txt").write_text("short")
    done = demo("--size", "10M", "--text", swap / "short.txt", "--path", swap)
    assert done.returncode == 1
    assert "5 bytes of text are too few" in done.stderr
    assert [path.name for path in swap.iterdir()] == ["short.txt"]
