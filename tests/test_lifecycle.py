"""From birth to every kind of end: exits, exceptions, kills, forks, neighbours. Files stay only on purpose."""

import contextlib
import copy
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from stores import committed_steps, committed_values
from torch import nn

import nvoffload as nvo
from nvoffload.mover import Mover
from nvoffload.plan import resident_bytes

pytestmark = pytest.mark.timeout(60)
TIERS = ["none", "cpu", "nvme"]  # of parameters; states are on disk
REPO = Path(__file__).parent.parent
PRELUDE = """
import os, sys, signal, time
import torch
import models
import nvoffload as nvo
torch.set_num_threads(1)
folder = sys.argv[1]

def start(seed=0, **options):
    model = models.tiny(seed=seed)
    options = {"param_offload": "none", "optimizer_offload": "nvme", "nvme_path": folder, **options}
    model = nvo.offload(model, **options)
    return model, nvo.optim.AdamW(model.parameters(), lr=1e-2)

def train(model, opt, steps):
    for step in steps:
        models.tiny_loss(model, step).backward()
        opt.step()
        opt.zero_grad()
"""


def child(body: str, swap: Path) -> "subprocess.Popen[str]":
    path = os.pathsep.join([str(REPO), str(REPO / "tests")])
    return subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", "-c", PRELUDE + body, str(swap)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=50)
    return process.returncode, out, err


def wait_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def offload(model: nn.Module, swap: Path, **options: Any) -> Any:
    options = {"param_offload": "none", "optimizer_offload": "nvme", "nvme_path": swap, **options}
    return nvo.offload(model, **options)


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        models.tiny_loss(model, step).backward()
        opt.step()
        opt.zero_grad()


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(ours)


def tiny_alone(steps: int, seed: int = 0) -> list[torch.Tensor]:
    """The same training with everything in memory."""
    model = models.tiny(seed=seed)
    with nvo.offload(model, param_offload="none", optimizer_offload="cpu"):
        train(model, nvo.optim.AdamW(model.parameters(), lr=1e-2), range(steps))
        return values_of(model)


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_a_script_that_never_closes_leaves_nothing(tier: str, swap: Path) -> None:
    """The end of a program is the end of its run: code 0, soon, no files, no warnings.
    A child trains two steps and falls off its end, or deletes the model first."""
    body = f"model, opt = start(param_offload='{tier}'); train(model, opt, range(2))"
    body += "; print('end', time.time(), flush=True)"
    first = child(body, swap)
    second = child(f"{body}; del model; print(len(os.listdir(folder)))", swap)
    for process in (first, second):
        code, out, err = end_of(process)
        assert (code, err) == (0, "")
        assert time.time() - float(out.split()[1]) < 20
    assert tree(swap) == []


@pytest.mark.parametrize("tier", TIERS)
def test_close_twice_is_close_once(tier: str, swap: Path) -> None:
    """A second close does nothing; `with` after close neither.
    close, close, a with block over a closed model."""
    model = offload(models.tiny(), swap, param_offload=tier)
    train(model, nvo.optim.AdamW(model.parameters()), range(1))
    model.close()
    model.close()
    with model:
        pass
    assert tree(swap) == []


@pytest.mark.parametrize("optimizer_offload", ["cpu", "nvme"])
def test_a_closed_model_whose_parameters_stayed_is_an_ordinary_one(optimizer_offload: str, swap: Path) -> None:
    """close() applies the last step and gives plain parameters back: names, values, ties, frozen ones.
    T2 with one frozen layer; then a stock step and a second offload."""
    model = models.t2()
    model.blocks[0].up.requires_grad_(False)
    names = [name for name, _ in model.named_parameters()]
    offload(model, swap, optimizer_offload=optimizer_offload, nvme_path=swap if optimizer_offload == "nvme" else None)
    opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
    models.t2_loss(model, 0).backward()
    opt.step()
    values = values_of(model)
    models.t2_loss(model, 1).backward()
    opt.step()
    model.close()
    assert [name for name, _ in model.named_parameters()] == names
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert model.head.weight is model.embed.weight
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
        "blocks.0.up.weight",
        "blocks.0.up.bias",
    ]
    changed = [not torch.equal(a, b) for a, b in zip(values, values_of(model), strict=True)]
    assert changed == [p.requires_grad for p in model.parameters()]
    stock = torch.optim.SGD(model.parameters(), lr=0.1)
    models.t2_loss(model, 2).backward()
    stock.step()
    with offload(model, swap):
        models.t2_loss(model, 3).backward()
    assert tree(swap) == []


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_closed_model_whose_parameters_left_says_so(tier: str, swap: Path) -> None:
    """Wrappers outlive their values; every read, write and forward names the parameter or close().
    After close of a trained model."""
    model = offload(models.tiny(), swap, param_offload=tier)
    train(model, nvo.optim.AdamW(model.parameters()), range(1))
    model.close()
    calls = [
        lambda: model[0].weight.detach().clone(),
        lambda: model[0].weight.detach().fill_(1.0),
        lambda: models.tiny_loss(model, 0),
        lambda: {name: value.clone() for name, value in model.state_dict().items()},
        lambda: offload(model, swap),
    ]
    for call in calls:
        with pytest.raises(nvo.UsageError, match="close"):
            call()
    assert model[0].weight.shape == (33, 17)


@pytest.mark.parametrize("tier", TIERS)
def test_close_with_updates_on_their_way_waits_for_what_uses_memory(
    tier: str, swap: Path, use_sim: Any, pools: list[bool]
) -> None:
    """Ending right after step() leaves no transfer, no file and a whole pool; what stays has its last values.
    Slow disks of several speeds, closed in the middle of a deferred update."""
    expected = tiny_alone(2)
    for number, latency_s in enumerate((0.0, 0.0005, 0.002, 0.01)):
        sim = use_sim(seed=number, latency_s=latency_s)
        model = offload(models.tiny(), swap, param_offload=tier, buffer_size="64KiB")
        train(model, nvo.optim.AdamW(model.parameters(), lr=1e-2), range(2))
        model.close()
        assert sim.inflight == 0
        assert tree(swap) == []
        if tier == "none":
            assert_equal_bits(values_of(model), expected)
    assert pools == [True] * 4


@pytest.mark.parametrize("tiers", [("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_memory_comes_back_at_close(tiers: tuple[str, str], swap: Path) -> None:
    """A program may offload and close without end: host homes, states, frames and pools are given back.
    Thirty rounds, each of which takes several MiB; the process's own memory before and after."""

    def one_round() -> None:
        path = swap if "nvme" in tiers else None
        model = offload(models.tiny(), swap, param_offload=tiers[0], optimizer_offload=tiers[1], nvme_path=path)
        train(model, nvo.optim.AdamW(model.parameters()), range(1))
        model.close()

    for _ in range(5):
        one_round()
    gc.collect()
    before = resident_bytes("RssAnon")
    for _ in range(30):
        one_round()
    gc.collect()
    assert resident_bytes("RssAnon") - before < 30 << 20


@pytest.mark.parametrize("tier", TIERS)
def test_a_deleted_model_is_closed(tier: str, swap: Path) -> None:
    """Without references to the model its files go at once, and its optimizer says why it can't step.
    del while the optimizer and the parameters are still held."""
    model = offload(models.tiny(), swap, param_offload=tier)
    opt = nvo.optim.AdamW(model.parameters())
    train(model, opt, range(1))
    models.tiny_loss(model, 1).backward()
    del model
    gc.collect()
    assert tree(swap) == []
    with pytest.raises(nvo.UsageError, match="closed"):
        opt.step()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("nvoffload")]


@pytest.mark.parametrize("tier", TIERS)
def test_an_exception_keeps_the_store_and_says_where(tier: str, swap: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Work is not thrown away: the last step is committed, kept, and the log names the folder.
    ValueError after two steps inside `with`."""
    with (
        caplog.at_level(logging.WARNING, "nvoffload"),
        pytest.raises(ValueError),
        offload(models.tiny(), swap, param_offload=tier) as model,
    ):
        layout = model._nvoffload.layout
        train(model, nvo.optim.AdamW(model.parameters(), lr=1e-2), range(2))
        raise ValueError
    assert committed_steps(swap) == [2]
    assert_equal_bits(committed_values(swap, layout), tiny_alone(2))
    kept = [r.getMessage() for r in caplog.records if "kept" in r.getMessage()]
    assert len(kept) == 1
    assert str(next(swap.glob("nvo-*"))) in kept[0]
    assert "step 2" in kept[0]


def test_an_exception_before_the_first_step_keeps_nothing(swap: Path) -> None:
    """A store that holds no training is removed.
    ValueError before the first step inside `with`, with and without an optimizer."""
    with pytest.raises(ValueError), offload(models.tiny(), swap):
        raise ValueError
    with pytest.raises(ValueError), offload(models.tiny(), swap) as model:
        opt = nvo.optim.AdamW(model.parameters())
        raise ValueError
    del opt
    assert tree(swap) == []


def test_an_uncaught_exception_keeps_the_store(swap: Path) -> None:
    """A script that dies of an exception without `with` keeps its steps too.
    A child raises after two steps."""
    code, _, err = end_of(child("model, opt = start(); train(model, opt, range(2)); raise ValueError('oops')", swap))
    assert code == 1
    assert "ValueError: oops" in err
    assert committed_steps(swap) == [2]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("keep", "stays"), [("always", True), ("never", False)])
def test_keep_is_obeyed(keep: str, stays: bool, fails: bool, swap: Path) -> None:
    """always keeps after a clean end, never removes after an exception.
    Both words, both kinds of end."""
    try:
        with offload(models.tiny(), swap, keep=keep) as model:
            train(model, nvo.optim.AdamW(model.parameters()), range(1))
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert committed_steps(swap) == ([1] if stays else [])


def test_a_killed_run_is_offered_and_removed_on_request(swap: Path) -> None:
    """Nobody's work vanishes unasked: the error offers both ways out; another model is not held up.
    kill -9 after a flushed step; then the same model, another one, and resume=False. Foreign files stay."""
    process = child(
        "model, opt = start(); train(model, opt, range(2)); model.flush(); print('ready', flush=True); time.sleep(60)",
        swap,
    )
    assert wait_line(process) == "ready"
    process.kill()
    end_of(process)
    (dead,) = swap.glob("nvo-*")
    foreign = [swap / "notes.txt", swap / "nvo-mine", dead / "notes.txt"]
    for file in foreign:
        file.write_text("mine")
    with pytest.raises(nvo.ConfigError, match=r"committed step 2.*resume=True.*resume=False"):
        offload(models.tiny(), swap)
    assert committed_steps(swap) == [2]
    offload(nn.Linear(3, 3), swap).close()
    assert committed_steps(swap) == [2]
    with offload(models.tiny(), swap, resume=False) as model:
        train(model, nvo.optim.AdamW(model.parameters()), range(1))
    assert [file.read_text() for file in foreign] == ["mine"] * 3
    assert tree(swap) == sorted(str(p.relative_to(swap)) for p in [*foreign, dead])


def test_a_dead_run_without_a_step_is_swept(swap: Path) -> None:
    """What holds nothing is cleaned up without a question.
    kill -9 before the first step, then a new start."""
    process = child("model, opt = start(); print('ready', flush=True); time.sleep(60)", swap)
    assert wait_line(process) == "ready"
    process.kill()
    end_of(process)
    assert len(tree(swap)) >= 2
    offload(models.tiny(), swap).close()
    assert tree(swap) == []


def test_a_live_neighbour_is_left_alone(swap: Path) -> None:
    """Another process in the same folder loses neither files nor bits.
    It trains before and after we start, train and end with resume=False."""
    process = child(
        "model, opt = start(); train(model, opt, range(2)); model.flush(); print('ready', flush=True); input()\n"
        "train(model, opt, range(2, 4)); values = [p.detach().clone() for p in model.parameters()]\n"
        "torch.save(values, folder + '/out.pt')",
        swap,
    )
    assert wait_line(process) == "ready"
    before = tree(swap)
    for _ in range(2):
        with offload(models.tiny(), swap, resume=False) as model:
            train(model, nvo.optim.AdamW(model.parameters()), range(1))
    assert tree(swap) == before
    assert process.stdin is not None
    process.stdin.write("\n")
    code, _, err = end_of(process)
    assert code == 0, err
    assert_equal_bits(torch.load(swap / "out.pt"), tiny_alone(4))
    assert tree(swap) == ["out.pt"]


class Pair:
    """A generator and a discriminator, small, and the usual three backward passes."""

    def __init__(self, wrap: Callable[[nn.Module], Any]) -> None:
        torch.manual_seed(3)
        self.gen = nn.Sequential(nn.Linear(5, 33), nn.ReLU(), nn.Linear(33, 7))
        self.dis = nn.Sequential(nn.Linear(7, 19), nn.ReLU(), nn.Linear(19, 1))
        wrap(self.gen)
        wrap(self.dis)
        self.opt_gen = nvo.optim.AdamW(self.gen.parameters(), lr=1e-2)
        self.opt_dis = nvo.optim.AdamW(self.dis.parameters(), lr=1e-3)

    def round(self, step: int) -> None:
        torch.manual_seed(step)
        real, noise = torch.randn(4, 7), torch.randn(4, 5)
        self.opt_dis.zero_grad()
        (-self.dis(real).mean()).backward()
        self.dis(self.gen(noise).detach()).mean().backward()
        self.opt_dis.step()
        self.opt_gen.zero_grad()
        (-self.dis(self.gen(noise)).mean()).backward()
        self.opt_gen.step()

    def values(self) -> list[torch.Tensor]:
        return values_of(self.gen) + values_of(self.dis)

    def close(self) -> None:
        self.gen.close()
        self.dis.close()


@pytest.mark.parametrize("tier", TIERS)
def test_two_models_in_one_folder_do_not_mix(tier: str, swap: Path) -> None:
    """A GAN with both models in one folder trains as in memory, bit by bit.
    Five rounds of three backward passes; then one model ends and the other goes on."""
    ours = Pair(lambda m: offload(m, swap, param_offload=tier))
    expected = Pair(lambda m: nvo.offload(m, param_offload="none", optimizer_offload="cpu"))
    for step in range(5):
        ours.round(step)
        expected.round(step)
    assert_equal_bits(ours.values(), expected.values())
    for pair in (ours, expected):
        pair.gen.close()
        for step in range(2):
            pair.dis(torch.full((2, 7), float(step))).sum().backward()
            pair.opt_dis.step()
    ours.dis.flush()
    assert_equal_bits(values_of(ours.dis), values_of(expected.dis))
    if tier == "none":
        assert_equal_bits(values_of(ours.gen), values_of(expected.gen))
    assert len(list(swap.rglob("*.swap"))) == 1
    ours.close()
    expected.close()
    assert tree(swap) == []


@pytest.mark.parametrize("tier", TIERS)
def test_models_after_one_another_do_not_mix(tier: str, swap: Path) -> None:
    """A model that ends while another trains takes only its own with it.
    Three TINY of different seeds, interleaved, ended in another order than born."""
    seeds = (1, 2, 3)
    trained = [offload(models.tiny(seed=seed), swap, param_offload=tier) for seed in seeds]
    opts = [nvo.optim.AdamW(m.parameters(), lr=1e-2) for m in trained]
    for step in range(3):
        for model, opt in zip(trained, opts, strict=True):
            train(model, opt, range(step, step + 1))
        if step < 2:
            continue
        plain = copy_of(trained[1])
        trained[1].close()
        if tier == "none":
            assert_equal_bits(values_of(trained[1]), values_of(plain))
        trained[1] = plain
    trained[0].flush()
    trained[2].flush()
    for model, seed in zip(trained, seeds, strict=True):
        assert_equal_bits(values_of(model), tiny_alone(3, seed))
    trained[2].close()
    trained[0].close()
    assert tree(swap) == []


def copy_of(model: nn.Module) -> nn.Module:
    """The values of a model in a plain one."""
    plain = models.tiny()
    plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return plain


def in_fork(action: Callable[[], None]) -> None:
    """Run `action` in a forked child; fail with its traceback."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException as error:  # noqa: BLE001 - the child must report whatever it met
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(code)
    os.close(write)
    text = os.read(read, 4000).decode()
    os.close(read)
    assert (os.waitpid(pid, 0)[1], text) == (0, "")


@pytest.mark.parametrize("tier", TIERS)
def test_a_fork_changes_nothing_for_the_parent(tier: str, swap: Path) -> None:
    """The child holds no swap file, refuses to train and closes nothing; the parent trains on, to the bit.
    os.fork between and during steps; open files of the child, huge pages of the pool before and after."""
    with offload(models.tiny(), swap, param_offload=tier) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, opt, range(2))
        models.tiny_loss(model, 2).backward()
        huge = model._nvoffload.backend.pool.huge_bytes()

        def action() -> None:
            links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            files = [os.readlink(link) for link in links if os.path.islink(link)]
            assert not [name for name in files if name.endswith((".swap", ".manifest.0", ".manifest.1"))], files
            with pytest.raises(nvo.UsageError, match=r"0\.weight"):
                model[0].weight.detach().clone()
            calls = [opt.step, model.flush, lambda: nvo.optim.AdamW(model.parameters())]
            calls.append(lambda: models.tiny_loss(model, 0))
            for call in calls:
                try:
                    call()
                except nvo.UsageError as error:
                    assert "process" in str(error)
                else:
                    raise AssertionError(call)
            model.close()

        in_fork(action)
        assert model._nvoffload.backend.pool.huge_bytes() == huge
        opt.step()
        opt.zero_grad()
        stop = threading.Event()
        forker = threading.Thread(target=fork_until, args=(stop,))
        forker.start()
        train(model, opt, range(3, 8))
        stop.set()
        forker.join()
        model.flush()
        assert model._nvoffload.backend.pool.huge_bytes() == huge
        assert_equal_bits(values_of(model), tiny_alone(8))
    assert tree(swap) == []


def fork_until(stop: threading.Event) -> None:
    while not stop.is_set():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)


def test_a_child_that_frees_the_model_harms_no_memory_of_its_own(swap: Path) -> None:
    """The pool is not in the child; giving it up there must not unmap what took its place.
    The child maps a page at the pool's old address, drops the model, and reads the page back."""
    import ctypes

    model = offload(models.tiny(), swap)
    holder = [model]
    address = model._nvoffload.backend.pool._arena.address
    del model

    def action() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        got = libc.mmap(address, 4096, 3, 0x22, -1, 0)  # read and write, private and anonymous
        if got != address:
            return  # the kernel chose another place: nothing to see here
        ctypes.memset(got, 7, 4096)
        holder.clear()
        gc.collect()
        here = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines()]
        ranges = [tuple(int(x, 16) for x in span.split("-")) for span in here]
        assert any(low <= got < high for low, high in ranges), "the page was unmapped"

    in_fork(action)
    holder[0].close()


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Twelve rows."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((17,), float(index) / 12)


def test_a_data_loader_with_workers_feeds_training(swap: Path) -> None:
    """Forked workers neither hang nor disturb a step.
    Two workers and a subprocess against the same rows without workers, by bits."""

    def run(tiers: tuple[str, str], workers: int) -> list[torch.Tensor]:
        model = models.tiny()
        path = swap if "nvme" in tiers else None
        with nvo.offload(model, param_offload=tiers[0], optimizer_offload=tiers[1], nvme_path=path):
            opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
            context = "fork" if workers else None
            for _ in range(2):
                rows = torch.utils.data.DataLoader(
                    Rows(), batch_size=4, num_workers=workers, multiprocessing_context=context
                )
                for batch in rows:
                    model(batch).pow(2).mean().backward()
                    if workers:
                        subprocess.run(["true"], check=True)
                    opt.step()
                    opt.zero_grad()
            return values_of(model)

    expected = run(("none", "cpu"), 0)
    for tiers in (("none", "nvme"), ("cpu", "cpu"), ("nvme", "nvme")):
        assert_equal_bits(run(tiers, 2), expected)
    assert tree(swap) == []


@pytest.mark.parametrize("tier", TIERS)
def test_three_runs_leave_no_bytes(tier: str, swap: Path) -> None:
    """The folder does not fill up over runs.
    Three runs in one folder, one of them ended by an exception, keep="never"."""
    for number in range(3):
        try:
            with offload(models.tiny(), swap, param_offload=tier, keep="never") as model:
                train(model, nvo.optim.AdamW(model.parameters()), range(2))
                if number == 1:
                    raise ValueError
        except ValueError:
            pass
        assert tree(swap) == []


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_ctrl_c_in_the_middle_leaves_no_files(tier: str, swap: Path) -> None:
    """keep="never" holds for an interrupt as well; the program ends as Python programs do.
    A child that trains without end is interrupted."""
    process = child(
        "import itertools\n"
        f"with start(keep='never', param_offload='{tier}')[0] as model:\n"
        "    opt = nvo.optim.AdamW(model.parameters())\n"
        "    train(model, opt, range(2)); print('ready', flush=True)\n"
        "    train(model, opt, itertools.count())\n",
        swap,
    )
    assert wait_line(process) == "ready"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    start_s = time.monotonic()
    code, _, err = end_of(process)
    assert code in (1, 130, -signal.SIGINT)
    assert "KeyboardInterrupt" in err.strip().splitlines()[-1]
    assert time.monotonic() - start_s < 10
    assert tree(swap) == []


@pytest.mark.parametrize("update", ["deferred", "blocking"])
@pytest.mark.parametrize("tier", TIERS)
def test_an_interrupted_step_is_a_whole_step(
    tier: str, update: str, swap: Path, monkeypatch: pytest.MonkeyPatch, use_sim: Any
) -> None:
    """After Ctrl-C in a step, or a wait for its update, the loop may go on: values, states and step numbers agree.
    SIGINT while a slow disk holds the second step of two zones; then two more steps, against memory."""
    use_sim(seed=1, latency_s=0.1)
    waiting = threading.Event()
    real = Mover.wait

    def wait(self: Mover, job: Any, **how: Any) -> None:
        waiting.set()
        real(self, job, **how)

    monkeypatch.setattr(Mover, "wait", wait)
    with offload(models.tiny(), swap, param_offload=tier, update=update) as model:
        opt = nvo.optim.AdamW(model[0].parameters(), lr=1e-2)
        opt.add_param_group({"params": list(model[2].parameters())})
        train(model, opt, range(1))
        models.tiny_loss(model, 1).backward()
        model.flush()
        waiting.clear()

        def interrupt() -> None:
            waiting.wait()
            time.sleep(0.03)  # it is in the C function by now
            os.kill(os.getpid(), signal.SIGINT)

        helper = threading.Thread(target=interrupt)
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            opt.step()
            assert update == "deferred"
            model.flush()
            time.sleep(5)
        helper.join()
        opt.zero_grad()
        assert [int(opt.state[p]["step"]) for p in model.parameters()] == [2] * 4
        train(model, opt, range(2, 4))
        model.flush()
        assert_equal_bits(values_of(model), tiny_alone(4))


@pytest.mark.parametrize("update", ["deferred", "blocking"])
def test_an_interrupt_while_jobs_are_handed_over_loses_no_update(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step ends it whole: no unit keeps its old weights under a new step number.
    A signal within the first hand-over of each step, against an undisturbed run."""
    real = Mover.submit
    armed = [False]

    def submit(self: Any, job: Any, **how: Any) -> Any:
        if armed[0]:
            armed[0] = False
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, job, **how)

    monkeypatch.setattr(Mover, "submit", submit)

    def train(*, is_interrupted: bool) -> list[torch.Tensor]:
        model = models.tiny()
        with nvo.offload(model, param_offload="none", optimizer_offload="cpu", update=update):
            opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(2):
                models.tiny_loss(model, step).backward()
                armed[0] = is_interrupted
                with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext():
                    opt.step()
                opt.zero_grad()
            return [p.detach().clone() for p in model.parameters()]

    expected = train(is_interrupted=False)
    assert all(map(torch.equal, train(is_interrupted=True), expected))


def test_a_closed_model_whose_parameters_stayed_can_be_copied(tmp_path: Path) -> None:
    """After close() it is an ordinary module to copy and pickle. deepcopy and torch.save against the model itself."""
    model = models.tiny()
    nvo.offload(model, param_offload="none", optimizer_offload="cpu")
    with pytest.raises(nvo.UsageError, match="deep-copied"):
        copy.deepcopy(model)
    offloaded: Any = model
    offloaded.close()
    x = torch.ones(2, 17)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert type(other) is nn.Sequential
        assert torch.equal(other(x), model(x))


def test_models_that_are_collected_while_others_are_made_hang_nobody(swap: Path) -> None:
    """Garbage may end a model in the middle of offload() of another: no lock is taken twice.
    Models in reference cycles, never closed."""
    for _ in range(40):
        model: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
        model.itself = [model]
        nvo.offload(model, nvme_path=swap)
    del model
    gc.collect()
    assert os.listdir(swap) == []


def test_what_was_attached_to_a_parameter_before_goes_with_it(swap: Path) -> None:
    """Marks and gradients of before count; hooks are refused; the original reads NaN and gets no gradient unseen.
    An attribute, a backward pass and a hook before offload()."""
    model, twin = models.tiny(), models.tiny()
    for each in (model, twin):
        models.tiny_loss(each, 0).backward()
    original: Any = next(model.parameters())
    original.is_special = True
    with nvo.offload(model, nvme_path=swap) as offloaded:
        param: Any = next(offloaded.parameters())
        assert param.is_special and torch.isnan(original.detach()).all()
        models.tiny_loss(model, 1).backward()
        models.tiny_loss(twin, 1).backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None and torch.allclose(mine.grad.clone(), theirs.grad, atol=1e-7)
    hooked = models.tiny()
    next(hooked.parameters()).register_hook(lambda grad: grad * 0)
    with pytest.raises(nvo.ConfigError, match=r"0\.weight has a hook"):
        nvo.offload(hooked, nvme_path=swap)


def test_a_step_without_any_gradient_says_so_once(swap: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training that does nothing is not silent. backward(inputs=...), which can't reach a wrapper, then two steps."""
    model = models.tiny()
    with nvo.offload(model, nvme_path=swap):
        opt = nvo.optim.AdamW(model.parameters())
        models.tiny_loss(model, 0).backward(inputs=list(model.parameters()))
        with caplog.at_level(logging.WARNING, "nvoffload"):
            opt.step()
            opt.step()
    assert sum("no gradient" in record.message for record in caplog.records) == 1
