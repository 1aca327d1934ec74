"""The wrapper: what it answers, what it refuses, and that nothing it is told gets lost.

Method: a home that is a list of tensors and counts what is asked of it.
"""

import copy
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nvoffload import parameter
from nvoffload.errors import UsageError
from nvoffload.parameter import OffloadedParameter, wrap

CPU = torch.device("cpu")


class FakeHome:
    """Values in memory; reads are copies, writes must be plain and of the right kind."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.is_open = True
        self.reads = 0
        self.writes = 0

    def read(self, index: int) -> Tensor:
        assert self.is_open
        self.reads += 1
        return self.tensors[index].clone()

    def write(self, index: int, values: Tensor) -> None:
        assert self.is_open
        old = self.tensors[index]
        assert type(values) is Tensor
        assert (values.shape, values.stride(), values.dtype) == (old.shape, old.stride(), old.dtype)
        self.writes += 1
        self.tensors[index] = values

    def wrap(self, values: Tensor, *, name: str = "layers.3.up.weight", requires_grad: bool = True):
        self.tensors.append(values.clone())
        return wrap(
            self,
            len(self.tensors) - 1,
            name=name,
            tier="nvme",
            shape=values.shape,
            stride=values.stride(),
            dtype=values.dtype,
            device=values.device,
            requires_grad=requires_grad,
        )


@pytest.fixture
def home() -> FakeHome:
    torch.manual_seed(1)
    return FakeHome()


@pytest.fixture
def values() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(2))


def offloaded(home: FakeHome, module: nn.Module) -> nn.Module:
    """Register wrappers for all parameters of `module`."""
    for owner in list(module.modules()):
        for name, param in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, home.wrap(param.detach(), name=name, requires_grad=param.requires_grad))
    return module


# What it is.


def test_it_is_a_parameter_without_memory_that_tells_the_truth(home):
    values = torch.randn(3, 4, dtype=torch.bfloat16).t()
    param = home.wrap(values)
    assert isinstance(param, nn.Parameter) and isinstance(param, OffloadedParameter)
    assert param.is_leaf and param.requires_grad and param.grad is None
    assert (param.shape, param.stride(), param.dtype, param.device) == ((4, 3), (1, 4), torch.bfloat16, CPU)
    assert (param.numel(), param.dim(), len(param), param.nbytes) == (12, 2, 4, 24)
    assert repr(param) == "OffloadedParameter(layers.3.up.weight, (4, 3), bfloat16, tier=nvme)"
    assert repr(param.detach()) == "OffloadedParameter(layers.3.up.weight, (4, 3), bfloat16, tier=nvme, detached)"
    assert f"{param}" == str(param) == repr(param)
    assert home.reads == 0


def test_it_is_hashed_by_identity_and_referenced_weakly(home, values):
    first, second = home.wrap(values), home.wrap(values)
    assert {first: 1, second: 2}[second] == 2
    reference = weakref.ref(first)
    del first
    assert reference() is None


def test_a_module_registers_it(home, values):
    module = nn.Module()
    module.register_parameter("weight", home.wrap(values))
    module.other = home.wrap(values, requires_grad=False)
    assert [name for name, _ in module.named_parameters()] == ["weight", "other"]
    assert home.reads == 0


def test_a_detached_one_is_no_parameter_and_names_the_same_values(home, values):
    param = home.wrap(values)
    for other in (param.detach(), param.data):
        assert type(other) is OffloadedParameter and not isinstance(other, nn.Parameter)
        assert not other.requires_grad
        assert torch.equal(other.clone(), values)
    assert param.detach()._version == param._version


def test_an_optimizer_takes_it(home, values):
    param = home.wrap(values.bfloat16())
    optimizer = torch.optim.Optimizer([param], {"lr": 0.1})
    param.grad = torch.ones(4, 3)
    optimizer.zero_grad(set_to_none=False)
    assert param.grad.dtype is torch.float32 and param.grad.sum() == 0
    optimizer.zero_grad()
    assert param.grad is None
    assert home.reads == 0


def test_new_tensors_in_its_likeness_read_nothing(home, values):
    param = home.wrap(values.t())
    for made in (torch.zeros_like(param), param.new_zeros(4, 3), torch.empty_like(param), torch.full_like(param, 2)):
        assert type(made) is Tensor and made.device == CPU and made.dtype is torch.float32
    assert torch.zeros_like(param).stride() == (1, 3)
    assert torch.zeros_like(param, dtype=torch.float64).dtype is torch.float64
    assert torch.rand_like(param).min() >= 0
    assert home.reads == 0


# Reads.

READS = {
    "norm": lambda p: p.norm(),
    "sum": lambda p: p.sum(dim=1),
    "clone": lambda p: p.clone(),
    "isnan": lambda p: p.isnan(),
    "abs max": lambda p: p.abs().max(),
    "arithmetic": lambda p: (2 * p + p - 1) / p,
    "reflected": lambda p: torch.ones(4, 3) - p,
    "matmul": lambda p: p @ torch.ones(3, 2),
    "comparison": lambda p: p > 0,
    "argument": lambda p: torch.ones(4, 3).copy_(p),
    "in-place on another": lambda p: torch.ones(4, 3).lerp_(p, 0.3),
    "out": lambda p: torch.mul(p, 2, out=torch.empty(4, 3)),
    "list": lambda p: torch._foreach_mul([p, torch.ones(1)], 3)[0],
    "cat": lambda p: torch.cat([p, p]),
    "contiguous": lambda p: p.contiguous().clone(),
    "histogram": torch.histc,
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("how", ["no_grad", "detach", "data"])
def test_a_whole_tensor_read_gives_what_a_plain_tensor_gives(home, values, name, how):
    param = home.wrap(values)
    source = {"no_grad": param, "detach": param.detach(), "data": param.data}[how]
    with torch.set_grad_enabled(how != "no_grad"):
        result = READS[name](source)
    assert type(result) is Tensor
    assert torch.equal(result, READS[name](values))
    assert home.reads >= 1 and home.writes == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_detached_one_converts(home, values, dtype):
    assert torch.equal(home.wrap(values).detach().to(dtype), values.to(dtype))
    assert type(home.wrap(values).detach().to(dtype)) is Tensor


def test_one_element_is_read_as_a_number(home):
    param = home.wrap(torch.tensor([2.5]))
    assert param.item() == float(param) == 2.5
    assert bool(param)
    assert param.tolist() == [2.5]


def test_questions_are_answered_with_gradients_on(home, values):
    """Goal: a check of values in a training loop works as in torch. Method: its results are in no graph."""
    param = home.wrap(values)
    assert param.requires_grad and torch.is_grad_enabled()
    assert torch.equal(param, values) and torch.allclose(param, values)
    assert torch.isfinite(param).all() and not param.isnan().any()
    assert (param == values).all() and not (param != values).any()


def test_what_is_named_twice_is_read_once(home, values):
    param = home.wrap(values)
    assert torch.equal(param.detach() + param.data, values + values)
    assert home.reads == 1


def test_state_dict_is_lazy(home):
    module = offloaded(home, nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)))
    state = module.state_dict()
    assert home.reads == 0
    assert torch.equal(state["0.weight"].clone(), home.tensors[0])


def test_a_read_above_the_limit_raises_and_points_to_gathered(home, values, monkeypatch):
    param, other = home.wrap(values), home.wrap(values, name="other")
    monkeypatch.setattr(parameter, "READ_BYTES_MAX", 48)
    assert torch.equal(param.detach().clone(), values)
    with pytest.raises(UsageError, match=r"would read 96 bytes, more than the 48 .* nvoffload.gathered"):
        param.detach() + other.detach()
    monkeypatch.setattr(parameter, "READ_BYTES_MAX", 47)
    with pytest.raises(UsageError, match=r"layers.3.up.weight: aten.clone"):
        param.detach().clone()
    with torch.no_grad():
        param.copy_(values + 1)  # reads nothing
    assert torch.equal(home.tensors[0], values + 1)


# Writes.

WRITES = {
    "copy_": lambda p: p.copy_(torch.arange(12.0).view(4, 3)),
    "copy_ broadcast": lambda p: p.copy_(torch.arange(3.0).double()),
    "mul_": lambda p: p.mul_(0.5),
    "add_": lambda p: p.add_(torch.ones(4, 3), alpha=-0.1),
    "fill_": lambda p: p.fill_(7),
    "zero_": lambda p: p.zero_(),
    "normal_": lambda p: p.normal_(0, 0.02),
    "uniform_": lambda p: p.uniform_(-1, 1),
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "lerp_": lambda p: p.lerp_(torch.ones(4, 3), 0.1),
    "masked_fill_": lambda p: p.masked_fill_(torch.eye(4, 3, dtype=torch.bool), 9.0),
    "index": lambda p: p.index_copy_(0, torch.tensor([1]), torch.ones(1, 3)),
    "addcdiv_": lambda p: p.addcdiv_(torch.ones(4, 3), torch.full((4, 3), 2.0), value=-0.1),
    "by itself": lambda p: p.add_(p),
    "by its own data": lambda p: p.mul_(p.detach()),
    "copy of itself": lambda p: p.copy_(p.detach()),
    "out": lambda p: torch.mul(torch.ones(4, 3), 5, out=p),
    "foreach": lambda p: (torch._foreach_mul_([p, torch.ones(2)], 2.0), p)[1],
    "whole index": lambda p: p.__setitem__(..., 3.0) or p,
    "mask index": lambda p: p.__setitem__(torch.eye(4, 3, dtype=torch.bool), 3.0) or p,
    "operator": lambda p: p.__iadd__(1),
    "trunc_normal_": nn.init.trunc_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "constant_": lambda p: nn.init.constant_(p, 3.0),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("how", ["no_grad", "detach", "data"])
def test_a_whole_tensor_write_arrives_in_the_store(home, values, name, how):
    values = values.t().contiguous().t()  # what a random number goes to depends on the memory order
    param = home.wrap(values)
    target = {"no_grad": param, "detach": param.detach(), "data": param.data}[how]
    expected = values.clone()
    with torch.no_grad():
        torch.manual_seed(5)
        WRITES[name](expected)
        torch.manual_seed(5)
        result = WRITES[name](target)
    assert result is target
    assert torch.equal(home.tensors[0], expected)
    assert home.writes >= 1


@pytest.mark.parametrize("name", ["copy_", "fill_", "zero_", "normal_"])
def test_an_overwrite_reads_nothing(home, values, name):
    param = home.wrap(values)
    with torch.no_grad():
        WRITES[name](param)
    assert (home.reads, home.writes) == (0, 1)


def test_one_wrapper_writes_what_another_says(home, values):
    a, b = home.wrap(torch.zeros(4, 3), name="a"), home.wrap(values, name="b")
    with torch.no_grad():
        a.lerp_(b, 0.5)
        assert torch.equal(home.tensors[0], torch.zeros(4, 3).lerp_(values, 0.5))
        a.copy_(b)
    assert torch.equal(home.tensors[0], values)
    assert torch.equal(home.tensors[1], values)


def test_the_store_never_shares_memory_with_the_user(home, values):
    """Goal: a later change of the source is no write. Method: copy_ and .data from one tensor, then change it."""
    param = home.wrap(torch.zeros(4, 3))
    source = values.clone()
    with torch.no_grad():
        param.copy_(source)
    param.data = source
    source.zero_()
    assert torch.equal(home.tensors[0], values)


def test_a_failed_operation_writes_nothing(home, values):
    param = home.wrap(values)
    with torch.no_grad(), pytest.raises(RuntimeError):
        param.add_(torch.ones(5, 5))
    assert home.writes == 0
    assert torch.equal(home.tensors[0], values)


def test_a_write_advances_the_version(home, values):
    param = home.wrap(values)
    before = param._version
    with torch.no_grad():
        param.mul_(2)
        param.detach().mul_(2)
    assert param._version == before + 2


def test_setting_data_writes_the_store(home, values):
    param = home.wrap(torch.zeros(4, 3))
    param.data = values
    assert torch.equal(home.tensors[0], values)
    param.data = home.wrap(values * 2)
    assert torch.equal(home.tensors[0], values * 2)
    param.data = param
    param.data = param.data
    assert home.writes == 2


@pytest.mark.parametrize("wrong", [torch.zeros(3, 4), torch.zeros(4, 3).half(), torch.zeros(4, 3, device="meta")])
def test_setting_data_of_another_kind_raises(home, values, wrong):
    param = home.wrap(values)
    with pytest.raises(UsageError, match=r"layers.3.up.weight: .data can't become"):
        param.data = wrong
    assert home.writes == 0


def test_load_state_dict_and_back_keeps_every_bit(home):
    module = offloaded(home, nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4)))
    torch.manual_seed(9)
    twin = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4))
    assert module.load_state_dict(twin.state_dict()).missing_keys == []
    assert home.reads == 0
    twin_back = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4))
    twin_back.load_state_dict(module.state_dict())
    for name, tensor in twin.state_dict().items():
        assert torch.equal(twin_back.state_dict()[name], tensor), name


def test_reset_parameters_gives_what_a_plain_module_gets(home):
    module, twin = offloaded(home, nn.Linear(3, 4)), nn.Linear(3, 4)
    for each in (module, twin):
        torch.manual_seed(3)
        each.reset_parameters()
    assert torch.equal(home.tensors[0], twin.weight) and torch.equal(home.tensors[1], twin.bias)


def test_an_average_of_it_on_a_plain_model_works(home):
    module = offloaded(home, nn.Linear(3, 4))
    average = AveragedModel(nn.Linear(3, 4), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(module)
    assert torch.equal(average.module.weight, home.tensors[0])
    with torch.no_grad():
        module.weight.zero_()
    before = average.module.weight.clone()
    average.update_parameters(module)
    assert torch.allclose(average.module.weight, before * 0.9)


def test_inference_mode_reads_and_writes_and_leaves_no_inference_tensor(home, values):
    param = home.wrap(values)
    with torch.inference_mode():
        assert torch.equal(param.detach() * 2, values * 2)
        param.mul_(3)
        param.detach().add_(1)
    assert torch.equal(home.tensors[0], values * 3 + 1)
    assert not home.tensors[0].is_inference() and not param.detach().is_inference()


def test_a_value_saved_for_backward_is_guarded_by_the_version(home, values):
    """Goal: backward over a parameter that was written since raises, as in torch. Method: a product with detach()."""
    param = home.wrap(values)
    x = torch.ones(4, 3, requires_grad=True)
    out = (x * param.detach()).sum()
    with torch.no_grad():
        param.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


# Refusals.

VIEWS = {
    "index": lambda p: p[0],
    "slice": lambda p: p[1:],
    "view": lambda p: p.view(12),
    "reshape": lambda p: p.reshape(-1),
    "t": lambda p: p.t(),
    "T": lambda p: p.T,
    "transpose": lambda p: p.transpose(0, 1),
    "unbind": list,
    "chunk": lambda p: p.chunk(2),
    "expand": lambda p: p.expand(2, 4, 3),
    "as_strided": lambda p: p.as_strided((2,), (1,)),
    "linear": lambda p: nn.functional.linear(torch.ones(2, 3), p),
    "set row": lambda p: p.__setitem__(0, 1.0),
    "t_": lambda p: p.t_(),
    "squeeze_": lambda p: p.squeeze_(),
    "resize_": lambda p: p.detach().resize_(3),
    "bits": lambda p: p.view(torch.int32),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_refused_by_name(home, values, name):
    param = home.wrap(values)
    for target in (param, param.detach()):
        with (
            torch.no_grad(),
            pytest.raises(UsageError, match=r"layers.3.up.weight: .*p.detach\(\).clone\(\).*gathered"),
        ):
            VIEWS[name](target)
    assert home.reads == home.writes == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda p: (p**2).sum(),
        lambda p: nn.functional.linear(torch.ones(2, 3), p),
        lambda p: p.clone(),
        lambda p: p[0],
        lambda p: torch.ones(4, 3, requires_grad=True) * p,
        lambda p: nn.functional.embedding(torch.tensor([0]), p),
    ],
)
def test_a_graph_outside_its_unit_is_refused_by_name(home, values, use):
    with pytest.raises(UsageError, match=r"layers.3.up.weight: it was used outside the forward of its unit"):
        use(home.wrap(values))
    assert home.reads == 0


def test_a_write_into_a_leaf_with_gradients_on_is_refused_by_name(home, values):
    with pytest.raises(UsageError, match=r"layers.3.up.weight: mul_ changes a leaf .* torch.no_grad"):
        home.wrap(values).mul_(2)


@pytest.mark.parametrize("convert", ["half", "double", "bfloat16"])
def test_converting_a_module_raises_and_leaves_it_offloaded(home, convert):
    module = offloaded(home, nn.Linear(3, 4))
    with pytest.raises(UsageError, match=r"weight: it is offloaded as float32 on cpu and can't be converted"):
        getattr(module, convert)()
    with pytest.raises(UsageError, match="can't be converted"):
        module.to("meta")
    assert type(module.weight) is OffloadedParameter


@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_conversion_that_changes_nothing_keeps_the_wrapper(home, with_gradient):
    module = offloaded(home, nn.Linear(3, 4))
    weight = module.weight
    if with_gradient:
        weight.grad = torch.ones(4, 3)
    module.to("cpu").to(torch.float32).float().cpu().to(torch.device("cpu"), torch.float32)
    assert module.weight is weight and isinstance(module.weight, nn.Parameter)
    assert weight.cpu() is weight and weight.float() is weight and weight.to(torch.float32) is weight
    assert home.reads == home.writes == 0


@pytest.mark.parametrize(
    "use",
    [
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda p: p.numpy(),
        lambda p: p.data_ptr(),
        lambda p: p.untyped_storage(),
        lambda p: p.share_memory_(),
        lambda p: p.__dlpack__(),
        torch.Tensor.__array__,
        lambda p: p.apply_(abs),
    ],
)
def test_memory_copies_and_pickles_are_refused_by_name(home, values, use):
    for target in (home.wrap(values), home.wrap(values).detach()):
        with pytest.raises(UsageError, match=r"layers.3.up.weight: .* needs memory or a copy"):
            use(target)


def test_saving_is_refused_by_name(home, tmp_path):
    module = offloaded(home, nn.Linear(3, 4))
    with pytest.raises(UsageError, match="weight: "):
        torch.save(module.state_dict(), tmp_path / "model.pt")
    with pytest.raises(UsageError, match="weight: "):
        copy.deepcopy(module)
    with pytest.raises(UsageError, match="weight: "):
        module.share_memory()


def test_hooks_and_autograd_grad_are_refused_by_name(home, values):
    param = home.wrap(values)
    with pytest.raises(UsageError, match=r"up.weight: register_hook is not supported yet"):
        param.register_hook(print)
    with pytest.raises(UsageError, match=r"up.weight: register_post_accumulate_grad_hook is not supported"):
        param.register_post_accumulate_grad_hook(print)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(UsageError, match=r"up.weight: grad of an offloaded parameter"):
        torch.autograd.grad(x.sum(), [x, param], allow_unused=True)


def test_freezing_is_allowed_and_taken_back(home, values):
    param = home.wrap(values)
    param.requires_grad_(False)
    assert not param.requires_grad and isinstance(param, nn.Parameter)
    param.requires_grad = True
    assert param.requires_grad


def test_unfreezing_what_was_frozen_at_offload_is_refused(home, values):
    param = home.wrap(values, requires_grad=False)
    with pytest.raises(UsageError, match=r"up.weight: it was frozen when offload\(\) saw it"):
        param.requires_grad_()
    with pytest.raises(UsageError, match="frozen"):
        param.requires_grad = True
    nn.ParameterList([param]).requires_grad_(False)
    assert not param.requires_grad


def test_a_new_parameter_is_not_made_of_it(home, values):
    with pytest.raises(UsageError, match=r"no parameter of its own; clone it"):
        nn.Parameter(home.wrap(values))
    with pytest.raises(UsageError, match=r"no parameter of its own; clone it"):
        home.wrap(values).detach().requires_grad_(True)


def test_after_close_every_read_and_write_raises(home, values):
    param = home.wrap(values)
    home.is_open = False
    for use in (
        lambda: param.detach().clone(),
        lambda: param.detach().zero_(),
        lambda: torch.equal(param, values),
        lambda: setattr(param, "data", values),
        param.tolist,
        lambda: values.copy_(param.detach()),
    ):
        with pytest.raises(UsageError, match=r"up.weight: the model was closed, or offloaded in another process"):
            use()
    assert repr(param).startswith("OffloadedParameter(") and param.shape == (4, 3)
