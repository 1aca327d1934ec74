"""Bad input: each mistake is a named error that says what to change, and leaves nothing behind."""

import copy
import gc
import importlib
import os
import pickle
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from torch import nn

import nvoffload as nvo
from nvoffload import swapfile

# The package exposes the function under this name, so the room is asked for by path.
offload_room = importlib.import_module("nvoffload.offload")
pytestmark = pytest.mark.timeout(30)
TIERS = ["none", "cpu", "nvme"]  # of parameters; states are on disk


def threads_of_ours() -> list[str]:
    """Names of Python's and the kernel's threads; one that was just joined may take a moment to go."""
    names = [t.name for t in threading.enumerate()]
    for comm in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(comm.read_text().strip())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [name for name in names if name.startswith("nvo")]


@pytest.fixture(autouse=True)
def nothing_left(swap: Path) -> Iterator[None]:
    """No file in the folder and no thread stays after any of these mistakes."""
    yield
    gc.collect()
    assert sorted(os.listdir(swap)) == []
    assert threads_of_ours() == []


def offload(model: nn.Module, swap: Path | None, **options: Any) -> Any:
    options = {"param_offload": "none", "optimizer_offload": "nvme", "nvme_path": swap, **options}
    return nvo.offload(model, **options)


def test_a_missing_path_is_named() -> None:
    """The reader learns which argument is missing.
    Offload to nvme with no nvme_path."""
    with pytest.raises(nvo.ConfigError, match="nvme_path"):
        offload(models.tiny(), None)


def test_an_empty_path_is_not_the_working_directory(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset environment variable must not put swap files wherever the program was started.
    nvme_path="" with an empty working directory."""
    monkeypatch.chdir(swap)
    with pytest.raises(nvo.ConfigError, match="nvme_path"):
        offload(models.tiny(), "")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["absent", "absent/below", "n" * 300, "nul\0byte"])
def test_a_folder_that_does_not_exist_is_named(name: str, swap: Path) -> None:
    """Told at once, with the path, whatever makes it impossible.
    Absent, absent parent, longer than a file name, with a NUL."""
    with pytest.raises(nvo.ConfigError, match="nvme_path"):
        offload(models.tiny(), swap / name)


def test_a_file_is_no_folder(swap: Path) -> None:
    """The path of a file is refused, and the file stays as it was.
    A file with content as nvme_path."""
    file = swap / "notes.txt"
    file.write_text("mine")
    with pytest.raises(nvo.ConfigError, match="is a file"):
        offload(models.tiny(), file)
    assert file.read_text() == "mine"
    file.unlink()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any folder")
def test_a_folder_without_permission_is_named(swap: Path) -> None:
    """Told before anything is made.
    A folder of mode 0500."""
    swap.chmod(0o500)
    try:
        with pytest.raises(nvo.ConfigError, match="not writable"):
            offload(models.tiny(), swap)
    finally:
        swap.chmod(0o700)


def test_a_read_only_filesystem_is_named(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount without writing is told apart from a full one.
    statvfs reports ST_RDONLY."""
    real = os.statvfs(swap)
    fields = {name: getattr(real, name) for name in dir(real) if name.startswith("f_")}
    fake = SimpleNamespace(**{**fields, "f_flag": os.ST_RDONLY})
    monkeypatch.setattr(swapfile.os, "statvfs", lambda _: fake)
    with pytest.raises(nvo.ConfigError, match="not writable"):
        offload(models.tiny(), swap)


def test_memory_is_no_disk() -> None:
    """A tmpfs folder is refused: states would stay in memory.
    A fresh folder under /dev/shm."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or swapfile.filesystem_of(shm) != "tmpfs" or not os.access(shm, os.W_OK):
        pytest.skip("no writable tmpfs at /dev/shm")
    folder = shm / f"nvo-test-{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        with pytest.raises(nvo.ConfigError, match="tmpfs"):
            offload(models.tiny(), folder)
        assert os.listdir(folder) == []
    finally:
        shutil.rmtree(folder)


def test_too_little_space_gives_both_numbers(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is written, with what is needed and what is free.
    statvfs reports 8 KiB."""
    real = os.statvfs(swap)
    fake = SimpleNamespace(f_bavail=2, f_frsize=4096, f_flag=real.f_flag)
    monkeypatch.setattr(swapfile.os, "statvfs", lambda _: fake)
    with pytest.raises(nvo.MachineError, match=r"needs .*iB in .*8 KiB are free"):
        offload(models.tiny(), swap)


def test_a_pool_larger_than_memory_gives_both_numbers(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the pool is taken, with what it asks and what is available.
    A pool of a hundred buffers where the machine has 1 MiB."""
    monkeypatch.setattr("nvoffload.buffers.available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(nvo.ConfigError, match=r"asks .*100 x .*available") as caught:
        offload(models.t2(), swap, buffer_count=100)
    assert "buffer_count=" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"buffer_size": 0},
        {"buffer_size": -4096},
        {"buffer_size": 1},
        {"buffer_size": "many"},
        {"buffer_size": "12 parsecs"},
        {"buffer_size": "9" * 400 + "GB"},
        {"buffer_size": True},
        {"buffer_count": 0},
        {"buffer_count": 1},
        {"buffer_count": -3},
        {"buffer_count": "4"},
        {"buffer_count": 2.5},
        {"buffer_count": 1 << 40},
        {"update_threads": 0},
        {"update_threads": 100_000},
        {"update_threads": True},
        {"name": ""},
        {"name": "../elsewhere"},
        {"name": "x" * 65},
        {"verify": "no"},
        {"io": 32},
        {"io": {"queue_depht": 3}},
        {"config": 5},
        {"config": {5: "x"}},
        {"device": "toaster"},
        {"device_budget": 0},
        {"device_budget": "some"},
        {"device_budget": True},
        {"param_offload": "disk"},
        {"param_offload": ["nvme"]},
        {"grad_offload": "disk"},
        {"update": "sometimes"},
        {"units": ["0"]},
        {"units": "layers"},
        {"units": nn.ReLU()},
    ],
    ids=str,
)
def test_nonsense_values_name_their_argument(options: dict[str, Any], swap: Path) -> None:
    """Each is a ConfigError that names the argument.
    Values out of range, of a wrong type, unreadable."""
    with pytest.raises(nvo.ConfigError, match=next(iter(options))):
        offload(models.tiny(), swap, **options)


@pytest.mark.parametrize(
    "field",
    [
        {"block_size": 0},
        {"block_size": 1000},
        {"block_size": "2TiB"},
        {"queue_depth": 0},
        {"queue_depth": 1 << 20},
        {"queue_depth": True},
        {"queue_depth": 2.0},
        {"stall_limit_s": 0},
        {"stall_limit_s": float("nan")},
        {"stall_limit_s": "soon"},
        {"engine": "libaoi"},
    ],
    ids=str,
)
def test_nonsense_io_names_its_field(field: dict[str, Any]) -> None:
    """Each is a ConfigError at construction that names the field.
    Values out of range, of a wrong type, misspelt."""
    with pytest.raises(nvo.ConfigError, match=f"Io.{next(iter(field))}"):
        nvo.Io(**field)


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"nvme_paht": "/x"}, "nvme_path"),
        ({"buffer_cuont": 3}, "buffer_count"),
        ({"optimizer_offload": "nvm"}, "nvme"),
        ({"keep": "on_eror"}, "on_error"),
        ({"io": {"engine": "libaoi"}}, "libaio"),
        ({"io": {"queue_dept": 3}}, "queue_depth"),
        ({"config": {"bufer_size": 3}}, "buffer_size"),
    ],
    ids=str,
)
def test_an_unknown_name_gets_the_nearest(options: dict[str, Any], meant: str, swap: Path) -> None:
    """A slip of the pen is answered with what was meant.
    Misspelt arguments, fields and choices."""
    with pytest.raises(nvo.ConfigError, match=f"Did you mean '{meant}'"):
        offload(models.tiny(), swap, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"grad_offload": "nvme"},
        {"grad_offload": "none"},
        {"update": "on_arrival"},
        {"update": "delayed"},
        {"weights": "w.safetensors"},
        {"init_fn": print},
        {"durability": "power"},
        {"cpu_budget": "1GiB"},
        {"resume": True},
        {"resume": "require"},
        {"nvme_path": ["/a", "/b"]},
        {"config": "settings.toml"},
    ],
    ids=lambda o: next(iter(o)) + "=" + str(next(iter(o.values())))[:12],
)
def test_what_is_not_supported_yet_says_so(options: dict[str, Any], swap: Path) -> None:
    """No argument that would do nothing is accepted in silence.
    Every argument of later work, with a plausible value."""
    with pytest.raises(nvo.ConfigError, match="not supported yet"):
        offload(models.tiny(), swap, **options)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_device_budget_below_two_frames_names_the_least(tier: str, swap: Path) -> None:
    """Told before anything is made, with a number that works.
    One byte less than the least, then the least that the error named."""
    least = models.stack_budget(2)
    with pytest.raises(nvo.ConfigError, match=rf"device_budget={least - 1} .* least is {least} bytes"):
        offload(models.stack(), swap, param_offload=tier, device_budget=least - 1)
    with offload(models.stack(), swap, param_offload=tier, device_budget=least) as model:
        assert model.offload_plan.gathered_text.startswith("2 frames")


def test_several_folders_in_a_config_are_refused_too(swap: Path) -> None:
    """The same mistake gives the same error through both doors.
    A list of folders inside config."""
    config = {"param_offload": "none", "optimizer_offload": "nvme", "nvme_path": [str(swap), str(swap)]}
    with pytest.raises(nvo.ConfigError, match="not supported yet"):
        nvo.offload(models.tiny(), config=config)


@pytest.mark.parametrize("kind", [dict, nvo.OffloadConfig])
def test_a_field_given_twice_is_named(kind: Any, swap: Path) -> None:
    """Config and arguments can't disagree.
    The same field in both."""
    config = kind(param_offload="none", optimizer_offload="nvme", nvme_path=swap, keep="never")
    with pytest.raises(nvo.ConfigError, match=r"given both .*keep"):
        nvo.offload(models.tiny(), config=config, keep="always")


def test_a_model_must_be_a_module(swap: Path) -> None:
    """Parameters without a module are refused with the type that was given.
    A list of parameters."""
    with pytest.raises(nvo.ConfigError, match=r"nn\.Module.*list"):
        offload(list(models.tiny().parameters()), swap)  # type: ignore[arg-type]


def test_a_model_without_parameters_is_no_error(swap: Path) -> None:
    """Nothing to do is done at once.
    A bare ReLU: forward, flush twice, close twice."""
    model = offload(nn.ReLU(), swap)
    assert model(torch.ones(2)).sum() == 2
    model.flush()
    model.flush()
    model.close()
    model.close()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adam"])
def test_a_stock_optimizer_cannot_step(name: str, tier: str, swap: Path) -> None:
    """A stock optimizer never changes an offloaded value, and the error says what to use.
    One step of torch's optimizer; values compared by bits."""
    with offload(models.tiny(), swap, param_offload=tier) as model:
        before = [p.detach().clone() for p in model.parameters()]
        stock = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        models.tiny_loss(model, 0).backward()
        with pytest.raises(nvo.UsageError, match=r"nvoffload\.optim\.AdamW"):
            stock.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_stock_optimizer_works_again_after_close(swap: Path) -> None:
    """close() gives an ordinary model back.
    A stock step after close."""
    model = offload(models.tiny(), swap)
    model.close()
    before = model[0].weight.detach().clone()
    stock = torch.optim.SGD(model.parameters(), lr=0.1)
    models.tiny_loss(model, 0).backward()
    stock.step()
    assert not torch.equal(before, model[0].weight)


@pytest.mark.parametrize("tier", TIERS)
def test_an_optimizer_built_before_offload_is_refused(tier: str, swap: Path) -> None:
    """The order is told at construction (ours) or at the first step (stock).
    Both orders the wrong way round."""
    model = models.tiny()
    with pytest.raises(nvo.UsageError, match=r"nvoffload\.offload"):
        nvo.optim.AdamW(model.parameters())
    stock = torch.optim.AdamW(model.parameters())
    with offload(model, swap, param_offload=tier):
        models.tiny_loss(model, 0).backward()
        with pytest.raises(nvo.UsageError, match=r"0\.weight .*built after offload"):
            stock.step()
    with pytest.raises(nvo.UsageError, match=r"0\.weight .*built after offload"):
        stock.step()


def test_a_second_optimizer_is_refused_while_the_first_lives(swap: Path) -> None:
    """Two optimizers can't own one state; after the first is deleted a new one trains from zero.
    The second one's training equals a fresh optimizer's on the cpu tier, by bits."""
    with offload(models.tiny(), swap) as model:
        first = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        with pytest.raises(nvo.UsageError, match="another optimizer"):
            nvo.optim.AdamW([model[0].bias], lr=1e-2)
        del first
        second = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            models.tiny_loss(model, step).backward()
            second.step()
            second.zero_grad()
        ours = [p.detach().clone() for p in model.parameters()]
    with offload(models.tiny(), None, optimizer_offload="cpu") as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            models.tiny_loss(model, step).backward()
            opt.step()
            opt.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(ours, model.parameters(), strict=True))


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"capturable": True}, {"differentiable": True}], ids=str)
def test_optimizer_options_not_supported_yet_say_so(options: dict[str, bool], swap: Path) -> None:
    """Options that would change the result are not ignored.
    Each one at construction; afterwards the right call works."""
    with offload(models.tiny(), swap) as model:
        with pytest.raises(nvo.ConfigError, match="not supported yet"):
            nvo.optim.AdamW(model.parameters(), **options)
        nvo.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1e-8}, {"weight_decay": -1.0}],
    ids=str,
)
def test_nonsense_hyper_parameters_are_refused(options: dict[str, Any], swap: Path) -> None:
    """A bad value is told at construction; the parameters stay free.
    Negative rates and betas outside [0, 1)."""
    with offload(models.tiny(), swap) as model:
        with pytest.raises(nvo.ConfigError, match=next(iter(options))):
            nvo.optim.AdamW(model.parameters(), **options)
        nvo.optim.AdamW(model.parameters())


def test_states_cannot_be_saved_by_half(swap: Path) -> None:
    """No way of saving an optimizer loses its moments in silence.
    state_dict, load_state_dict, pickle and deepcopy of the optimizer."""
    with offload(models.tiny(), swap) as model:
        opt = nvo.optim.AdamW(model.parameters())
        with pytest.raises(nvo.UsageError, match="not supported yet"):
            opt.state_dict()
        with pytest.raises(nvo.UsageError, match="not supported yet"):
            opt.load_state_dict({})
        with pytest.raises(nvo.UsageError):
            pickle.dumps(opt)
        with pytest.raises(nvo.UsageError):
            copy.deepcopy(opt)


@pytest.mark.parametrize("tier", TIERS)
def test_an_offloaded_model_cannot_be_copied(tier: str, swap: Path) -> None:
    """A copy would share a store it does not own.
    deepcopy, copy and pickle of the model and of one that holds it; pickle of lazy and of read values."""
    with offload(models.tiny(), swap, param_offload=tier) as model:
        holder = nn.ModuleList([model])
        for victim in (model, holder):
            with pytest.raises(nvo.UsageError, match="deep-copied"):
                copy.deepcopy(victim)
            with pytest.raises(nvo.UsageError, match=r"state_dict\(\)"):
                pickle.dumps(victim)
        with pytest.raises(nvo.UsageError):
            copy.copy(model)
        with pytest.raises(nvo.UsageError, match=r"0\.weight"):
            pickle.dumps(model.state_dict())
        assert len(pickle.dumps({name: value.clone() for name, value in model.state_dict().items()})) > 0
        assert len(model.state_dict()) == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_trainable_dtype_not_supported_yet_is_named(dtype: torch.dtype, swap: Path) -> None:
    """Which parameter, which dtype, and what to do; frozen ones are fine.
    The same model trainable, then frozen."""
    model = models.tiny(dtype)
    with pytest.raises(nvo.ConfigError, match=r"0\.weight is trainable in float"):
        offload(model, swap)
    offload(model.requires_grad_(False), swap).close()


def test_parameters_that_overlap_are_refused(swap: Path) -> None:
    """One place in memory has one parameter.
    An expanded one, a sliced one, two over the same storage."""
    model = models.tiny()
    model.wide = nn.Parameter(torch.ones(1, 5).expand(3, 5))
    with pytest.raises(nvo.ConfigError, match="wide has strides"):
        offload(model, swap)
    model.wide = nn.Parameter(torch.ones(4, 6)[:, :5])
    with pytest.raises(nvo.ConfigError, match="wide has strides"):
        offload(model, swap)
    base = torch.ones(10)
    model.wide, model.other = nn.Parameter(base[:6]), nn.Parameter(base[5:])
    with pytest.raises(nvo.ConfigError, match="share memory"):
        offload(model, swap)


def test_parameters_without_values_are_refused(swap: Path) -> None:
    """A model on the meta device has nothing to store, and a device without values destroys none.
    A meta model; a real one with device="meta"."""
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(nvo.ConfigError, match="meta"):
        offload(model, swap)
    model = models.tiny()
    with pytest.raises(nvo.ConfigError, match="meta"):
        offload(model, swap, device="meta")
    assert not model[0].weight.is_meta


def test_an_unusual_tensor_is_refused(swap: Path) -> None:
    """Only ordinary strided parameters have a place in a tile.
    A sparse parameter."""
    model = models.tiny()
    model.table = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(nvo.ConfigError, match="table is not an ordinary"):
        offload(model, swap)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("change", ["double", "bfloat16", "half", "reshape", "dtype", "meta"])
def test_a_parameter_cannot_be_changed_after_offload(change: str, tier: str, swap: Path) -> None:
    """What offload() saw stays so: a change of dtype, shape or device is refused at once, by name.
    Converted, reshaped and moved parameters; then a step trains as if nothing had been tried."""
    calls = {
        "reshape": lambda p: setattr(p, "data", torch.ones(3, 12)),
        "dtype": lambda p: setattr(p, "data", torch.ones(6, 6, dtype=torch.float64)),
        "meta": lambda p: setattr(p, "data", torch.ones(6, 6, device="meta")),
    }
    expected = nn.Linear(6, 6)
    model = copy.deepcopy(expected)
    with offload(model, swap, param_offload=tier):
        opt = nvo.optim.AdamW(model.parameters())
        with pytest.raises(nvo.UsageError, match="weight"):
            calls[change](model.weight) if change in calls else getattr(model, change)()
        assert (model.weight.dtype, model.weight.shape) == (torch.float32, (6, 6))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        values = [p.detach().clone() for p in model.parameters()]
    stock = torch.optim.AdamW(expected.parameters())
    for p in expected.parameters():
        p.grad = torch.ones_like(p)
    stock.step()
    assert all((a - b).abs().max() <= 1e-6 for a, b in zip(values, expected.parameters(), strict=True))


@pytest.mark.parametrize("tier", TIERS)
def test_values_in_another_order_of_memory_are_taken_by_value(tier: str, swap: Path) -> None:
    """`.data =` stores values, however they lie in memory; the parameter's strides stay.
    A transposed tensor; a view of the parameter itself needs memory and is refused by name."""
    values = torch.arange(36.0).view(6, 6)
    with offload(nn.Linear(6, 6), swap, param_offload=tier) as model:
        model.weight.data = values.t()
        assert torch.equal(model.weight.detach(), values.t())
        assert model.weight.stride() == (6, 1)
        with pytest.raises(nvo.UsageError, match="weight"):
            model.weight.data = model.weight.data.t()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_a_parameter_cannot_be_moved_to_another_device(swap: Path) -> None:
    """No address of another device is ever read: the move is refused at once.
    The model moved after offload."""
    with offload(models.tiny(), swap) as model, pytest.raises(nvo.UsageError, match=r"0\.weight"):
        model.to("cuda")


@pytest.mark.parametrize("tier", TIERS)
def test_a_replaced_parameter_is_refused(tier: str, swap: Path) -> None:
    """A parameter that offload() never saw is not trained in silence.
    One assigned after offload: by the optimizer's constructor, and by the forward, which names it."""
    with offload(models.tiny(), swap, param_offload=tier) as model:
        opt = nvo.optim.AdamW(model.parameters())
        model[0].weight = nn.Parameter(torch.zeros(33, 17))
        with pytest.raises(nvo.UsageError, match="not offloaded"):
            nvo.optim.AdamW(model.parameters())
        with pytest.raises(nvo.UsageError, match=r"0\.weight was replaced"):
            models.tiny_loss(model, 0)
        opt.step()


@pytest.mark.parametrize("tier", TIERS)
def test_a_parameter_unfrozen_after_offload_is_named(tier: str, swap: Path) -> None:
    """A parameter frozen at offload() has no place for a gradient; it says when to unfreeze.
    requires_grad_ after offload, on the parameter and on the model; then a step of the others."""
    model = models.tiny()
    model[0].weight.requires_grad_(False)
    with offload(model, swap, param_offload=tier):
        for change in (lambda: model[0].weight.requires_grad_(True), lambda: model.requires_grad_(True)):
            with pytest.raises(nvo.UsageError, match=r"0\.weight.* frozen"):
                change()
        assert not model[0].weight.requires_grad
        before = model[0].weight.detach().clone()
        opt = nvo.optim.AdamW(model.parameters())
        models.tiny_loss(model, 0).backward()
        opt.step()
        assert torch.equal(model[0].weight.detach(), before)


@pytest.mark.parametrize("tier", TIERS)
def test_a_sparse_gradient_is_refused_before_anything_changes(tier: str, swap: Path) -> None:
    """No row is lost, no value changed.
    Embedding(sparse=True) beside a dense parameter: told in backward; zero_grad() undoes what that has landed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(101, 8, sparse=True), nn.Linear(8, 1))
    with offload(model, swap, param_offload=tier):
        opt = nvo.optim.AdamW(model.parameters())
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(nvo.UsageError, match=r"0\.weight has a sparse gradient"):
            model(torch.tensor([1, 1, 3])).sum().backward()
        assert model[0].weight.grad is None
        opt.zero_grad()
        opt.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(int(opt.state[p]["step"]) == 0 for p in model.parameters())


@pytest.mark.parametrize("tier", TIERS)
def test_offload_twice_is_refused_and_harmless(tier: str, swap: Path) -> None:
    """The first offload goes on as if nothing had happened.
    Twice on the model, on a part of it, on a whole around it; then a step."""
    with offload(models.tiny(), swap, param_offload=tier) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        for other in (model, model[0], nn.Sequential(model, nn.Linear(2, 2))):
            with pytest.raises(nvo.UsageError, match="offloaded already"):
                offload(other, swap)
        models.tiny_loss(model, 0).backward()
        opt.step()
        model.flush()


def test_a_name_in_use_is_refused(swap: Path) -> None:
    """Two stores of one run never share a file.
    The same name for two open models."""
    with offload(models.tiny(), swap, name="actor"), pytest.raises(nvo.ConfigError, match="'actor' is taken"):
        offload(models.tiny(), swap, name="actor")


def test_calls_after_close_say_so(swap: Path) -> None:
    """A closed model trains no further in silence.
    step, flush and a new optimizer after close; statistics still answer."""
    model = offload(models.tiny(), swap)
    opt = nvo.optim.AdamW(model.parameters())
    models.tiny_loss(model, 0).backward()
    opt.step()
    model.close()
    before = model[0].weight.detach().clone()
    models.tiny_loss(model, 1).backward()
    for call in (opt.step, model.flush, lambda: nvo.optim.AdamW(model.parameters())):
        with pytest.raises(nvo.UsageError, match="closed"):
            call()
    assert torch.equal(before, model[0].weight)
    assert model.offload_stats().steps == 1


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_calls_after_close_say_so_where_parameters_left(tier: str, swap: Path) -> None:
    """A closed model whose parameters are gone neither computes nor trains, and says why.
    forward, step, flush, a read and a new optimizer after close; statistics still answer."""
    model = offload(models.tiny(), swap, param_offload=tier)
    opt = nvo.optim.AdamW(model.parameters())
    models.tiny_loss(model, 0).backward()
    opt.step()
    model.close()
    calls = [opt.step, model.flush, lambda: nvo.optim.AdamW(model.parameters())]
    calls += [lambda: models.tiny_loss(model, 1), lambda: model[0].weight.detach().clone()]
    for call in calls:
        with pytest.raises(nvo.UsageError, match="closed"):
            call()
    assert model.offload_stats().steps == 1
