"""Memory: models larger than what the process may have, and peaks beside the plan. Each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRELUDE = """
import sys, torch
from pathlib import Path
import nvoffload as nvo
from nvoffload.demo import memory_budget
from nvoffload.plan import resident_bytes

WIDTH, BLOCKS = 2048, 48  # 16 MiB each: 768 MiB of parameters


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x):
        return x + torch.nn.functional.linear(x, self.weight)


def build(num_trainable):
    blocks = [Block() for _ in range(BLOCKS)]
    for number, block in enumerate(blocks):
        with torch.no_grad():
            block.weight.fill_(1e-4 * (number % 5 - 2))
        block.requires_grad_(number >= BLOCKS - num_trainable)
    return torch.nn.Sequential(*blocks)


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


def step(model, opt):
    loss = model(torch.ones(8, WIDTH)).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return float(loss.detach())


torch.set_num_threads(1)
# What torch loads of itself for a step then stands in the plan as resident.
for size in (64, 512):
    warm = torch.nn.Sequential(torch.nn.Linear(size, size, bias=False), torch.nn.Linear(size, size, bias=False))
    (warm(torch.ones(8, size)) + 1).pow(2).mean().backward()
    torch.optim.AdamW(warm.parameters()).step()
"""


def run(script: str, swap: Path) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(swap)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(110)
def test_a_model_larger_than_the_limit_evaluates_and_trains_under_it(swap: Path) -> None:
    """Goal: memory holds the pool and a few units, not the model. Method: 768 MiB of parameters, a hard limit of
    704 MiB for the whole process; evaluation, then training with all but two blocks frozen; the peak and the plan."""
    script = """
model = build(num_trainable=2)
params = sum(p.numel() * 4 for p in model.parameters())
x = torch.ones(8, WIDTH)
with torch.no_grad():
    expected = model(x)
limit = 704 << 20
assert limit < params
nvo.offload(model, param_offload="nvme", nvme_path=sys.argv[1], keep="never")
opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
forget_peak()
with memory_budget(limit):
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    losses = [step(model, opt) for _ in range(3)]
    model.flush()
assert losses[2] != losses[0], losses
peak, planned = resident_bytes("VmHWM"), model.offload_plan.training_bytes
print(f"peak {peak >> 20} MiB, planned {planned >> 20}, limit {limit >> 20}, parameters {params >> 20}")
assert peak < limit and peak <= 1.10 * planned
model.close()
"""
    print(run(script, swap))


@pytest.mark.timeout(110)
def test_training_keeps_to_the_plan(swap: Path) -> None:
    """Goal: peak memory is the plan's, within a tenth, in offload() and in training. Method: all of it trains."""
    script = """
model = build(num_trainable=BLOCKS)
forget_peak()
nvo.offload(model, param_offload="nvme", nvme_path=sys.argv[1], keep="never")
start = resident_bytes("VmHWM")
opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
forget_peak()
for _ in range(2):
    step(model, opt)
model.flush()
peak, plan = resident_bytes("VmHWM"), model.offload_plan
print(f"offload() {start >> 20} of {plan.start_bytes >> 20} MiB, training {peak >> 20} of {plan.training_bytes >> 20}")
assert start <= 1.10 * plan.start_bytes
assert peak <= 1.10 * plan.training_bytes
model.close()
"""
    print(run(script, swap))


@pytest.mark.timeout(110)
def test_memory_does_not_grow_with_steps(swap: Path) -> None:
    """Goal: what a step leaves behind is gone. Method: resident memory over 30 steps and 30 evaluations."""
    script = """
model = torch.nn.Sequential(*[torch.nn.Sequential(Block()) for Block in [lambda: torch.nn.Linear(64, 64)] * 6])
nvo.offload(model, param_offload="nvme", nvme_path=sys.argv[1], keep="never")
opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
WIDTH = 64
for number in range(120):
    step(model, opt)
    with torch.no_grad():
        model(torch.ones(8, WIDTH))
    model(torch.ones(8, WIDTH))  # records a graph that nobody uses
    if number == 40:
        before = resident_bytes()
grown = resident_bytes() - before
print(f"grown {grown >> 10} KiB")
assert grown < 4 << 20
model.close()
"""
    print(run(script, swap))


@pytest.mark.timeout(110)
def test_a_closed_model_that_stayed_in_memory_takes_no_more_than_itself(swap: Path) -> None:
    """Goal: close() doesn't hold two copies, and gives gradients back though the optimizer lives. Method: 768 MiB."""
    script = """
model = build(num_trainable=BLOCKS)
nvo.offload(model, param_offload="none", optimizer_offload="nvme", nvme_path=sys.argv[1], keep="never")
opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
step(model, opt)
before = resident_bytes()
forget_peak()
model.close()
peak, after = resident_bytes("VmHWM"), resident_bytes()
params = sum(p.numel() * 4 for p in model.parameters())
print(f"before {before >> 20}, peak {peak >> 20}, after {after >> 20} MiB")
assert peak < before + (96 << 20)
assert after < before - params * 9 // 10
"""
    print(run(script, swap))
