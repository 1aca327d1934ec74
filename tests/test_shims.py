"""The private torch APIs: each has the property that we rely on, or fails here by name."""

import ctypes
import mmap

import pytest
import torch
from torch import nn

from nvoffload import shims
from nvoffload.errors import MachineError

CPU = torch.device("cpu")


def memory(nbytes: int) -> tuple[mmap.mmap, int]:
    """Return memory that is not torch's, and its address."""
    owner = mmap.mmap(-1, nbytes)
    return owner, ctypes.addressof(ctypes.c_char.from_buffer(owner))


def tensor_on(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def test_a_storage_at_an_address_reads_and_writes_that_memory():
    owner, address = memory(4096)
    storage = shims.storage_at(address, 4096, CPU)
    assert storage.data_ptr() == address
    assert storage.nbytes() == 4096
    tensor_on(storage)[7] = 42
    assert owner[7] == 42
    owner[8] = 43
    assert tensor_on(storage)[8] == 43


def test_a_storage_at_an_address_does_not_own_it():
    """Goal: dropping the storage frees nothing. Method: the memory is still there, and makes another."""
    owner, address = memory(4096)
    tensor_on(shims.storage_at(address, 4096, CPU)).fill_(5)
    assert owner[4095] == 5
    assert tensor_on(shims.storage_at(address, 4096, CPU)).sum() == 5 * 4096


def test_views_follow_a_swap():
    a, b = torch.zeros(64, dtype=torch.uint8), torch.full((64,), 255, dtype=torch.uint8)
    param = nn.Parameter(a[16:48].view(torch.float32).view(2, 4).detach())
    pointers = a.data_ptr(), b.data_ptr()
    shims.swap_storages(a.untyped_storage(), b.untyped_storage())
    assert (a.data_ptr(), b.data_ptr()) == (pointers[1], pointers[0])
    assert param.data_ptr() == pointers[1] + 16
    assert param.isnan().all()
    assert b.sum() == 0


def test_saved_tensors_follow_a_swap():
    """Goal: backward reads what was swapped in. Method: the gradient of x is the weight, new values in new memory."""
    base = torch.ones(4)
    weight = nn.Parameter(base.view(4).detach())
    x = torch.ones(4, requires_grad=True)
    out = (x * weight).sum()
    other = torch.full((4,), 3.0)
    shims.swap_storages(base.untyped_storage(), other.untyped_storage())
    out.backward()
    assert x.grad.tolist() == [3.0] * 4


def test_swap_of_unequal_sizes_is_a_mistake():
    with pytest.raises(AssertionError, match="64 and 32 bytes"):
        shims.swap_storages(torch.UntypedStorage(64), torch.UntypedStorage(32))


def test_a_torch_without_an_api_is_named():
    class Old:
        def nbytes(self) -> int:
            return 0

    with pytest.raises(MachineError, match=r"torch .* has no _swap_data_ptr_"):
        shims.swap_storages(Old(), Old())


def unit() -> tuple[torch.Tensor, nn.Parameter, nn.Parameter]:
    """Return a base of bytes and two Parameters of two dtypes in it."""
    base = torch.zeros(64, dtype=torch.uint8)
    first = nn.Parameter(base[:32].view(torch.float32).detach())
    return base, first, nn.Parameter(base[32:].view(torch.bfloat16).detach())


def test_parameters_in_one_base_share_one_version_counter():
    base, first, second = unit()
    base.fill_(1)
    assert first._version == second._version == base._version == 1
    with torch.no_grad():
        first.mul_(2.0)
    assert second._version == base._version == 2
    shims.set_version(base, 8)
    assert first._version == second._version == 8


def test_an_advanced_version_makes_a_backward_raise_and_setting_it_back_makes_it_legal():
    base, first, _ = unit()
    gathered = base._version
    x = torch.ones(8, requires_grad=True)
    out = (x * first).sum()
    shims.set_version(base, gathered + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(retain_graph=True)
    base.view(torch.float32)[:8] = 5.0
    shims.set_version(base, gathered)
    out.backward()
    assert x.grad.tolist() == [5.0] * 8


def test_graph_task_id_is_minus_one_outside_and_differs_between_backwards():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(shims.graph_task_id()))
    assert shims.graph_task_id() == -1
    x.sum().backward()
    x.sum().backward()
    assert len(set(seen)) == 2 and min(seen) >= 0
    assert shims.graph_task_id() == -1


def test_the_end_of_backward_comes_after_all_gradients():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []
    out = x * 2
    out.register_hook(lambda _: shims.queue_end_of_backward(lambda: seen.append((x.grad, y.grad))))
    (out + y).sum().backward()
    assert len(seen) == 1
    assert all(grad is not None for grad in seen[0])


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


def wrapper(dtype: torch.dtype = torch.bfloat16) -> Wrapper:
    return shims.make_wrapper(Wrapper, shape=(4, 3), stride=(1, 4), dtype=dtype, device=CPU, requires_grad=True)


def test_a_wrapper_has_the_metadata_and_no_memory():
    tensor = wrapper()
    assert type(tensor) is Wrapper
    assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) == ((4, 3), (1, 4), torch.bfloat16, CPU)
    assert tensor.requires_grad and tensor.is_leaf
    assert tensor.data_ptr() == 0
    with pytest.raises(NotImplementedError, match=r"aten\.mul"), torch.no_grad():
        tensor * 2


@pytest.mark.parametrize("make", [wrapper, lambda: nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16))])
def test_a_bf16_leaf_may_have_an_fp32_gradient(make):
    leaf = make()
    with pytest.raises(RuntimeError, match="dtype"):
        leaf.grad = torch.ones(4, 3)
    shims.set_grad_dtype(leaf, torch.float32)
    leaf.grad = torch.ones(4, 3)
    assert leaf.grad.dtype is torch.float32


def test_call_plainly_reaches_what_a_subclass_overrides():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    loud = torch.ones(3).as_subclass(Loud)
    with pytest.raises(NotImplementedError):
        loud.numel()
    assert shims.call_plainly(torch.Tensor.numel, (loud,), None) == 3


def test_schemas_say_what_is_written():
    a, b = torch.zeros(2), torch.ones(2)
    aten = torch.ops.aten
    assert shims.written_by(aten.mul.Tensor, (a, b), {}) == []
    assert shims.written_by(aten.lerp_.Scalar, (a, b, 0.5), {})[0] is a
    assert shims.written_by(aten.mul.out, (a, a), {"out": b})[0] is b
    assert [id(t) for t in shims.written_by(aten._foreach_mul_.Scalar, ([a, b], 2), {})] == [id(a), id(b)]


def test_schemas_say_what_is_a_view():
    aten = torch.ops.aten
    views = (aten.select.int, aten.view.default, aten.t.default, aten.split.Tensor, aten.t_.default, aten.squeeze_.dim)
    assert all(shims.is_view(op) for op in views)
    others = (aten.mul.Tensor, aten.mul_.Tensor, aten.clone.default, aten.mul.out, aten._foreach_mul_.Scalar)
    assert not any(shims.is_view(op) for op in others)


def test_an_op_runs_on_what_stands_for_its_tensors():
    """Goal: an op that returns its own argument returns the tensor, not the substitute. Method: add_ and add."""
    a, stand_in = torch.zeros(2), torch.ones(2)
    change = {id(a): stand_in}
    aten = torch.ops.aten
    assert shims.run_with(lambda t: change.get(id(t), t), aten.add_.Tensor, (a, 1), {}) is a
    assert stand_in.tolist() == [2.0, 2.0] and a.tolist() == [0.0, 0.0]
    assert shims.run_with(lambda t: change.get(id(t), t), aten.add.Tensor, (a, 1), {}).tolist() == [3.0, 3.0]
