"""Accumulators and handles: a stock loop on handles gives what it gives on plain gradients.

Method: the same calls on a plain twin. Landings run in C where it is built, else in a stand-in here.
"""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from nvoffload import gradient, native, sums
from nvoffload.errors import UsageError
from nvoffload.gradient import Accumulator, OffloadedGradient, Phase
from nvoffload.sums import Sums

CPU = torch.device("cpu")


def land_in_torch(memory: Tensor, grad: Tensor, *, is_fresh: bool, scale: float) -> Sums:
    """What nvo_land does, for a checkout whose C core is older."""
    grad = grad.float()
    memory.copy_(grad if is_fresh else memory * scale + grad)
    finite = memory.isfinite().all().item()
    largest = memory.abs().nan_to_num(nan=0.0, posinf=math.inf).max().item() if memory.numel() else 0.0
    return Sums(memory.double().square().sum().item(), largest, bool(finite))


@pytest.fixture(autouse=True)
def landing(monkeypatch):
    torch.manual_seed(11)
    if not hasattr(native.lib, "nvo_land"):
        monkeypatch.setattr(gradient, "land", land_in_torch)


class Host:
    """An accumulator with its parameter's `.grad`, as the runtime drives them."""

    def __init__(self, *shape: int, stride: tuple[int, ...] | None = None, name: str = "up.weight") -> None:
        self.waits = 0
        self.memory = torch.full((16 + math.prod(shape),), math.nan)[16:]  # a piece of a larger buffer
        self.param = nn.Parameter(torch.empty_strided(shape, stride) if stride else torch.empty(shape))
        self.accumulator = Accumulator(
            self.memory,
            name=name,
            shape=shape,
            stride=self.param.stride(),
            device=CPU,
            before_write=self.wait,
        )

    def wait(self) -> None:
        self.waits += 1

    def backward(self, *grads: Tensor) -> OffloadedGradient:
        for grad in grads:
            self.accumulator.land(grad, self.param.grad)
        handle = self.accumulator.publish()
        assert handle is not None
        self.param.grad = handle
        return handle

    def step(self) -> Tensor | None:
        """Return what an update would read."""
        scale = self.accumulator.capture(self.param.grad)
        return None if scale is None else self.memory * scale


def hosts_and_twins(*shapes: tuple[int, ...]) -> tuple[list[Host], list[nn.Parameter]]:
    """Return hosts with landed gradients and plain parameters with the same ones."""
    hosts, twins = [], []
    for shape in shapes:
        grad = torch.randn(shape)
        host, twin = Host(*shape), nn.Parameter(torch.empty(shape))
        host.backward(grad)
        twin.grad = grad.clone()
        hosts.append(host)
        twins.append(twin)
    return hosts, twins


# Landing.


def test_a_handle_has_the_metadata_of_an_fp32_gradient():
    host = Host(4, 3, stride=(1, 4), name="layers.0.up.weight")
    handle = host.backward(torch.ones(4, 3))
    assert (handle.shape, handle.stride(), handle.dtype, handle.device) == ((4, 3), (1, 4), torch.float32, CPU)
    assert not handle.requires_grad and handle.is_leaf and handle.grad_fn is None
    assert repr(handle) == "OffloadedGradient(layers.0.up.weight, (4, 3), scale=1)"
    handle.mul_(0.5)
    assert repr(handle) == "OffloadedGradient(layers.0.up.weight, (4, 3), scale=0.5)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["same", "contiguous", "expanded", "sliced"])
def test_any_strided_gradient_lands_in_the_memory_order_of_the_parameter(dtype, kind):
    host = Host(4, 3, stride=(1, 4))
    grad = {
        "same": torch.randn(3, 4).t(),
        "contiguous": torch.randn(4, 3),
        "expanded": torch.randn(1, 1).expand(4, 3),
        "sliced": torch.randn(8, 6)[::2, ::2],
    }[kind].to(dtype)
    host.backward(grad)
    assert torch.equal(host.memory, grad.float().t().reshape(-1))
    assert torch.equal(host.param.grad.clone(), grad.float())
    assert host.param.grad.clone().stride() == (1, 4)


@pytest.mark.parametrize("shape", [(), (0,), (1, 5), (3, 0, 2)])
def test_shapes_of_few_elements_land(shape):
    host = Host(*shape)
    grad = torch.randn(shape)
    host.backward(grad)
    host.backward(grad)
    assert torch.equal(host.param.grad.clone(), grad + grad)
    assert torch.equal(host.param.grad.norm(), (grad + grad).norm())


def test_tied_parameters_land_several_times_before_anyone_sees_it():
    host = Host(5)
    first, second = torch.randn(5), torch.randn(5)
    assert host.accumulator.publish() is None
    host.accumulator.land(first, None)
    assert host.accumulator.phase is Phase.LANDED
    host.accumulator.land(second, None)
    assert torch.equal(host.backward(first).clone(), first + second + first)
    assert host.accumulator.phase is Phase.SHOWN


def test_a_second_backward_adds_to_the_same_handle():
    host = Host(5)
    first, second = torch.randn(5), torch.randn(5)
    handle = host.backward(first)
    assert host.accumulator.publish() is None
    assert host.backward(second) is handle
    assert torch.equal(handle.clone(), first + second)


def test_what_landed_before_an_exception_stays_seen_as_one_handle():
    """Goal: ADDED keeps adding. Method: a backward that lands twice on a published handle, then one more."""
    host = Host(5)
    handle = host.backward(torch.ones(5))
    host.accumulator.land(torch.ones(5), handle)
    assert host.accumulator.phase is Phase.ADDED
    assert host.backward(torch.ones(5)) is handle
    assert handle.tolist() == [3.0] * 5


@pytest.mark.parametrize("clear", [lambda p: setattr(p, "grad", None), lambda p: torch.optim.SGD([p]).zero_grad()])
def test_zero_grad_starts_fresh_and_ends_the_old_handle(clear):
    host = Host(5)
    old = host.backward(torch.randn(5))
    kept = old.clone()
    clear(host.param)
    assert torch.equal(old.clone(), kept)  # until something new lands
    grad = torch.randn(5)
    new = host.backward(grad)
    assert torch.equal(new.clone(), grad)
    message = r"the gradient of up.weight of an earlier step is gone; clone\(\) it"
    for use in (old.clone, old.norm, lambda: old.mul_(2), old.zero_, lambda: old + 1):
        with pytest.raises(UsageError, match=message):
            use()
    assert repr(old) == "OffloadedGradient(up.weight, (5,), gone)"
    assert torch.equal(new.clone(), grad)


def test_a_dead_handle_assigned_again_raises_and_spoils_nothing():
    host = Host(5)
    old = host.backward(torch.ones(5))
    host.param.grad = None
    new = host.backward(torch.ones(5) * 2)
    with pytest.raises(UsageError, match="is gone"):
        host.accumulator.land(torch.ones(5), old)
    with pytest.raises(UsageError, match="is gone"):
        host.accumulator.capture(old)
    assert new.tolist() == [2.0] * 5


def test_a_plain_tensor_assigned_by_the_user_is_added_to():
    host = Host(4, 3, stride=(1, 4))
    old = host.backward(torch.randn(4, 3))
    assigned, grad = torch.randn(4, 3), torch.randn(4, 3)
    host.param.grad = assigned
    assert torch.equal(host.backward(grad, grad).clone(), assigned + grad + grad)
    with pytest.raises(UsageError, match="is gone"):
        old.clone()


def test_a_gradient_of_another_parameter_is_taken_by_value():
    host, other = Host(5, name="a"), Host(5, name="b")
    host.backward(torch.ones(5))
    other.backward(torch.full((5,), 7.0)).mul_(2)
    host.param.grad = other.param.grad
    assert host.step().tolist() == [14.0] * 5
    assert host.backward(torch.ones(5)).tolist() == [15.0] * 5
    assert other.param.grad.tolist() == [14.0] * 5


def test_a_sparse_gradient_is_refused_by_name():
    host = Host(5, 2)
    sparse = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (5, 2), check_invariants=True)
    with pytest.raises(UsageError, match=r"up.weight has a sparse gradient.*use sparse=False"):
        host.accumulator.land(sparse, None)


def test_nothing_that_lands_is_kept_or_changed():
    host = Host(5)
    grad = torch.randn(5)
    before = grad.clone()
    handle = host.backward(grad)
    grad.zero_()
    assert torch.equal(handle.clone(), before)
    handle.clone().zero_()
    assert torch.equal(handle.clone(), before)


# Marks.


def test_marks_touch_no_memory_and_wait_for_nothing():
    host = Host(5)
    handle = host.backward(torch.ones(5))
    before, waits = host.memory.clone(), host.waits
    handle.mul_(0.5).mul_(torch.tensor(2.0)).div_(4)
    torch._foreach_mul_([handle], 3.0)
    handle.norm(), handle.norm(math.inf), handle.zero_()
    assert torch.equal(host.memory, before) and host.waits == waits == 1


def test_a_landing_folds_the_scale():
    host = Host(5)
    first, second = torch.randn(5), torch.randn(5)
    host.backward(first).mul_(0.25)
    handle = host.backward(second)
    assert torch.equal(handle.clone(), first * 0.25 + second)
    assert host.accumulator.scale == 1.0


def test_a_landing_on_zero_is_fresh():
    """Goal: zero is zero, whatever was there. Method: what was there is infinite."""
    host = Host(5)
    handle = host.backward(torch.full((5,), math.inf))
    handle.mul_(0.5).zero_()
    assert handle.tolist() == [0.0] * 5 and handle.norm() == 0.0
    assert host.backward(torch.ones(5)) is handle
    assert handle.tolist() == [1.0] * 5
    assert not host.accumulator.is_zero


def test_what_the_user_assigned_is_summed_with_what_lands():
    host = Host(2000)
    assigned, grad = torch.randn(2000), torch.randn(2000)
    host.param.grad = assigned
    handle = host.backward(grad)
    torch.testing.assert_close(handle.norm(), (assigned + grad).norm(), rtol=1e-6, atol=0)
    assert handle.norm(math.inf) == (assigned + grad).abs().max()


@pytest.mark.parametrize(
    "edit",
    [
        lambda g: g.mul_(0.3),
        lambda g: g.mul_(torch.tensor([0.3])),
        lambda g: g.div_(3),
        lambda g: g.mul_(True),
        lambda g: g.zero_().mul_(5),
        lambda g: torch._foreach_mul_([g], 0.3),
        lambda g: torch._foreach_mul_([g], torch.tensor(0.3)),
        lambda g: torch._foreach_mul_([g], [0.3]),
        lambda g: torch._foreach_mul_([g], [torch.tensor(0.3)]),
        lambda g: torch._foreach_div_([g], 3.0),
        lambda g: torch._foreach_zero_([g]),
        lambda g: g.__imul__(2.0),
        # By values:
        lambda g: g.mul_(torch.arange(6.0).view(2, 3)),
        lambda g: g.mul_(math.inf),
        lambda g: g.zero_().mul_(math.nan),
        lambda g: g.div_(0),
        lambda g: g.add_(1, alpha=0.1),
        lambda g: g.clamp_(-0.5, 0.5),
        lambda g: g.copy_(torch.ones(3)),
        lambda g: g.add_(g),
        lambda g: g.mul_(0.5).add_(g.detach()),
        lambda g: g.masked_fill_(torch.eye(2, 3, dtype=torch.bool), 0),
        lambda g: torch._foreach_mul_([g], [torch.arange(6.0).view(2, 3)]),
        lambda g: torch._foreach_add_([g], 1.0),
        lambda g: g.nan_to_num_(),
        lambda g: setattr(g, "data", g.data * 0.5),
    ],
)
def test_an_edit_gives_what_it_gives_on_a_plain_gradient(edit):
    (host,), (twin,) = hosts_and_twins((2, 3))
    with torch.no_grad():
        edit(host.param.grad)
        edit(twin.grad)
    torch.testing.assert_close(host.param.grad.clone(), twin.grad, equal_nan=True, rtol=2e-7, atol=0)
    torch.testing.assert_close(host.param.grad.norm(), twin.grad.norm(), equal_nan=True)
    assert type(host.param.grad) is OffloadedGradient
    torch.testing.assert_close(host.step().view(2, 3), twin.grad, equal_nan=True, rtol=2e-7, atol=0)


def test_an_edit_returns_the_handle_itself():
    host = Host(5)
    handle = host.backward(torch.ones(5))
    assert handle.mul_(2) is handle and handle.zero_() is handle and handle.add_(1) is handle
    assert handle.detach_() is handle and handle.requires_grad_(False) is handle


def test_a_detached_handle_is_the_same_gradient():
    host = Host(5)
    handle = host.backward(torch.ones(5))
    for other in (handle.detach(), handle.data):
        assert type(other) is OffloadedGradient
        other.mul_(2)
    assert handle.tolist() == [4.0] * 5
    host.param.grad = handle.detach()
    host.accumulator.land(torch.ones(5), host.param.grad)
    assert handle.tolist() == [5.0] * 5


# The step.


def test_capture_without_a_gradient_is_none():
    host = Host(5)
    assert host.accumulator.capture(None) is None
    host.backward(torch.ones(5))
    host.param.grad = None
    assert host.step() is None


def test_capture_returns_the_scale_and_leaves_the_memory():
    host = Host(5)
    grad = torch.randn(5)
    host.backward(grad).mul_(0.5)
    waits = host.waits
    assert torch.equal(host.step(), grad * 0.5)
    assert torch.equal(host.memory, grad) and host.waits == waits
    assert torch.equal(host.param.grad.clone(), grad * 0.5)


def test_an_edit_while_an_update_is_pending_changes_no_memory():
    """Goal: the pending update reads what step() saw. Method: capture, then edit; landing waits."""
    host = Host(5)
    grad = torch.randn(5)
    handle = host.backward(grad)
    scale = host.accumulator.capture(handle)
    waits = host.waits
    handle.mul_(3).zero_()
    assert torch.equal(host.memory * scale, grad) and host.waits == waits
    host.backward(grad)
    assert host.waits == waits + 1


def test_capture_of_zero_really_zeroes_after_waiting():
    host = Host(5)
    host.backward(torch.full((5,), math.nan)).zero_()
    waits = host.waits
    assert host.step().tolist() == [0.0] * 5
    assert host.waits == waits + 1
    assert host.param.grad.norm() == 0.0
    assert host.backward(torch.ones(5)).tolist() == [1.0] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_capture_of_a_plain_tensor_copies_it_in(dtype):
    host = Host(4, 3, stride=(1, 4))
    old = host.backward(torch.randn(4, 3))
    assigned = torch.randn(4, 3).to(dtype)
    waits = host.waits
    assert host.accumulator.capture(assigned) == 1.0
    assert host.waits == waits + 1
    assert torch.equal(host.memory.as_strided((4, 3), (1, 4)), assigned.float())
    with pytest.raises(UsageError, match="is gone"):
        old.clone()
    assert host.accumulator.publish() is None
    grad = torch.randn(4, 3)
    host.accumulator.land(grad, assigned)
    assert torch.equal(host.accumulator.values(), assigned.float() + grad)


def test_every_write_of_the_memory_waits_first():
    """Goal: an update that still reads is never overtaken. Method: the memory is as it was whenever we are asked."""
    host = Host(5)
    seen = []
    host.accumulator._before_write = lambda: seen.append(host.memory.clone())
    grad = torch.ones(5)
    changes = [
        lambda: host.backward(grad),
        lambda: host.backward(grad),
        lambda: host.param.grad.add_(1),
        lambda: host.param.grad.zero_() is not None and host.step(),
        lambda: host.accumulator.capture(grad * 9),
        lambda: host.accumulator.land(grad, grad * 7),
    ]
    for change in changes:
        before, asked = host.memory.clone(), len(seen)
        change()
        assert (
            not torch.equal(
                host.memory,
                before,
            )
            and len(seen) > asked
        )
        assert torch.equal(seen[asked].nan_to_num(), before.nan_to_num())


# What stock loops ask.


def test_norms_read_no_memory(monkeypatch):
    (host,), (twin,) = hosts_and_twins((7, 5))
    monkeypatch.setattr(Accumulator, "values", lambda self: pytest.fail("read"))
    handle = host.param.grad
    for scale in (1.0, -0.37):
        handle.mul_(scale)
        twin.grad.mul_(scale)
        for order in (2, math.inf):
            expected = torch.linalg.vector_norm(twin.grad, order)
            for got in (
                torch.linalg.vector_norm(handle, order),
                torch.linalg.vector_norm(handle, order, dim=(0, 1)),
                torch.linalg.vector_norm(handle, order, keepdim=True).squeeze(),
                torch.linalg.vector_norm(handle, order, dtype=torch.float64).float(),
                torch._foreach_norm([handle], order)[0],
                handle.norm(order),
                torch.norm(handle, p=order),
            ):
                torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
                assert got.dtype is torch.float32 and got.shape == ()
    assert torch.linalg.vector_norm(handle, keepdim=True).shape == (1, 1)
    assert torch.linalg.vector_norm(handle, dtype=torch.float64).dtype is torch.float64


@pytest.mark.parametrize("order", [0, 1, 3, -math.inf])
def test_other_norms_and_norms_along_dimensions_come_from_the_values(order):
    (host,), (twin,) = hosts_and_twins((7, 5))
    for tensor in (host.param.grad, twin.grad):
        tensor.mul_(0.5)
    norm = torch.linalg.vector_norm
    assert torch.equal(norm(host.param.grad, order), norm(twin.grad, order))
    assert torch.equal(norm(host.param.grad, 2, dim=1), norm(twin.grad, 2, dim=1))
    assert torch.equal(torch._foreach_norm([host.param.grad], order)[0], norm(twin.grad, order))


def test_a_norm_is_the_same_double_rounded_once():
    host = Host(3000)
    grad = torch.randn(3000)
    handle = host.backward(grad)
    handle.mul_(0.7)
    exact = math.sqrt(grad.double().square().sum().item()) * torch.tensor(0.7).item()
    assert abs(handle.norm().item() - exact) <= 1e-7 * exact
    assert torch.equal(handle.norm(), handle.norm())


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clip_grad_norm_gives_what_it_gives_on_plain_gradients(norm_type, foreach, max_norm):
    """Method: handles and a plain gradient in one call, twice, so that marks are on marks."""
    hosts, twins = hosts_and_twins((7, 5), (4,), (2, 2))
    plain = nn.Parameter(torch.empty(3))
    plain.grad = torch.randn(3)
    params, others = [host.param for host in hosts], [*twins, nn.Parameter(torch.empty(3))]
    others[-1].grad = plain.grad.clone()
    params.insert(1, plain)
    others.insert(1, others.pop())
    for _ in range(2):
        got = clip_grad_norm_(params, max_norm, norm_type, foreach=foreach, error_if_nonfinite=True)
        expected = clip_grad_norm_(others, max_norm, norm_type, foreach=foreach)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
        for param, other in zip(params, others, strict=True):
            torch.testing.assert_close(param.grad.clone(), other.grad, rtol=1e-6, atol=0)
    total = get_total_norm([param.grad for param in params], norm_type, foreach=foreach)
    torch.testing.assert_close(total, get_total_norm([other.grad for other in others], norm_type), rtol=1e-6, atol=0)


@pytest.mark.parametrize("foreach", [True, False, None])
def test_clip_grad_value_gives_what_it_gives_on_plain_gradients(foreach):
    hosts, twins = hosts_and_twins((7, 5), (4,))
    clip_grad_value_([host.param for host in hosts], 0.3, foreach=foreach)
    clip_grad_value_(twins, 0.3, foreach=foreach)
    for host, twin in zip(hosts, twins, strict=True):
        assert torch.equal(host.param.grad.clone(), twin.grad)
        assert host.param.grad.norm(math.inf) == 0.3 == twin.grad.norm(math.inf)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("foreach", [True, False])
def test_a_gradient_that_is_not_finite_has_no_finite_norm(bad, foreach):
    host = Host(2000)
    grad = torch.randn(2000)
    grad[1500] = bad
    handle = host.backward(grad)
    assert not host.accumulator.is_finite and not handle.isfinite().all()
    for norm_type in (2.0, math.inf):
        assert torch.equal(handle.norm(norm_type).isnan(), grad.norm(norm_type).isnan())
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_([host.param], 1.0, norm_type, error_if_nonfinite=True, foreach=foreach)


def test_a_scale_that_overflows_is_not_finite():
    host = Host(3)
    handle = host.backward(torch.tensor([1e30, 0.0, 1.0]))
    handle.mul_(1e20)
    assert not host.accumulator.is_finite
    assert handle.norm() == math.inf and handle.isinf().any()


def test_clipping_by_an_infinite_norm_gives_what_torch_gives():
    host, twin = Host(3), nn.Parameter(torch.empty(3))
    twin.grad = torch.tensor([math.inf, 1.0, 2.0])
    host.backward(twin.grad.clone())
    for param in (host.param, twin):
        clip_grad_norm_([param], 1.0)
    torch.testing.assert_close(host.param.grad.clone(), twin.grad, equal_nan=True)
    torch.testing.assert_close(host.step(), twin.grad, equal_nan=True)


@pytest.mark.parametrize("bad", [None, math.inf])
def test_a_scaler_unscales_handles_and_sees_what_is_not_finite(bad):
    hosts, twins = hosts_and_twins((7, 5), (4,))
    if bad is not None:
        for param in (hosts[1].param, twins[1]):
            param.grad.add_(bad)
    founds = []
    for params in ([host.param for host in hosts], twins):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(1))
        optimizer = torch.optim.SGD(params)
        scaler.unscale_(optimizer)
        founds.append(sum(v.item() for v in scaler._found_inf_per_device(optimizer).values()))
    assert founds[0] == founds[1] == (0.0 if bad is None else 1.0)
    for host, twin in zip(hosts, twins, strict=True):
        torch.testing.assert_close(host.param.grad.clone(), twin.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("foreach", [True, False])
def test_zero_grad_in_place_is_a_mark(foreach):
    hosts, _ = hosts_and_twins((7, 5), (4,))
    optimizer = torch.optim.SGD([host.param for host in hosts], foreach=foreach)
    optimizer.zero_grad(set_to_none=False)
    for host in hosts:
        assert host.accumulator.is_zero and host.param.grad.sum() == 0 and host.waits == 1


READS = {
    "clone": lambda g: g.clone(),
    "isnan": lambda g: g.isnan(),
    "isfinite": torch.isfinite,
    "sum": lambda g: g.sum(),
    "abs": lambda g: g.abs().max(),
    "mul": lambda g: g * 2,
    "promotion": lambda g: g + torch.ones(2, 3, dtype=torch.float64),
    "to": lambda g: g.to(torch.bfloat16),
    "double": lambda g: g.double(),
    "argument": lambda g: torch.ones(2, 3).add_(g),
    "stack": lambda g: torch.stack([g, torch.ones(2, 3)]),
    "list": lambda g: torch._foreach_add([g, torch.ones(2)], 1.0)[0],
    "zeros_like": torch.zeros_like,
    "cosine": lambda g: nn.functional.cosine_similarity(g, torch.ones(2, 3)),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_gives_what_a_plain_gradient_gives(name):
    (host,), (twin,) = hosts_and_twins((2, 3))
    for tensor in (host.param.grad, twin.grad):
        tensor.mul_(0.5)
    result, expected = READS[name](host.param.grad), READS[name](twin.grad)
    assert type(result) is Tensor
    assert result.dtype is expected.dtype and torch.equal(result, expected)
    assert host.waits == 1


def test_one_element_is_read_as_a_number():
    host = Host(1)
    handle = host.backward(torch.tensor([2.5]))
    assert handle.item() == float(handle) == 2.5 and handle.tolist() == [2.5]


@pytest.mark.parametrize(
    "use",
    [
        lambda g: g[0],
        lambda g: g.view(-1),
        lambda g: g.t(),
        lambda g: g.reshape(-1),
        lambda g: g.resize_(3),
        lambda g: g.t_(),
        lambda g: g.numpy(),
        lambda g: g.data_ptr(),
        lambda g: g.untyped_storage(),
        lambda g: g.share_memory_(),
        copy.deepcopy,
        pickle.dumps,
        lambda g: setattr(g, "data", torch.ones(5)),
    ],
)
def test_views_and_memory_are_refused_by_name(use):
    host = Host(2, 3)
    handle = host.backward(torch.ones(2, 3))
    with pytest.raises(UsageError, match=r"the gradient of up.weight: "):
        use(handle)
    assert handle.tolist() == [[1.0] * 3] * 2 and host.waits == 1


def test_a_move_to_where_it_is_keeps_the_handle():
    """Goal: Module.to of a trainer changes nothing. Method: what _apply does to a gradient."""
    host = Host(2, 3)
    handle = host.backward(torch.ones(2, 3))
    assert handle.to("cpu") is handle and handle.float() is handle
    handle.data = handle
    handle.data = handle.detach()
    assert host.waits == 1 and handle.sum() == 6


def test_the_c_landing_gives_what_the_stand_in_gives():
    if not hasattr(native.lib, "nvo_land"):
        pytest.skip("the C core of this checkout has no nvo_land")
    for numel in (1, 5, 1024, 3001):
        for dtype in (torch.float32, torch.bfloat16):
            memory, grad = torch.randn(numel), torch.randn(numel).to(dtype)
            twin = memory.clone()
            for is_fresh in (False, True):
                got = sums.land(memory, grad, is_fresh=is_fresh, scale=0.5)
                expected = land_in_torch(twin, grad, is_fresh=is_fresh, scale=0.5)
                assert torch.equal(memory, twin)
                assert (got.largest, got.is_finite) == (expected.largest, expected.is_finite)
                assert math.isclose(got.squares, expected.squares, rel_tol=1e-12)
