"""Units come and go: what a program can see of it, what it cannot, and what it costs in time."""

import copy
import gc
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nvoffload as nvo
from nvoffload.shims import next_sequence_number, sequence_number

pytestmark = pytest.mark.timeout(60)

WIDTH = 24
TIERS = {
    "nvme": {"param_offload": "nvme", "buffer_count": 2, "buffer_size": "64KiB"},
    "cpu over nvme": {"param_offload": "cpu", "optimizer_offload": "nvme"},
    "cpu": {"param_offload": "cpu"},
    "none": {"param_offload": "none", "optimizer_offload": "cpu"},
}


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def stack(count: int = 5, make: Callable[[], nn.Module] = Block, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(make() for _ in range(count)))


def batch(seed: int = 0, width: int = WIDTH) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


def two_frames(model: nn.Module, **options: Any) -> int:
    """Return the least device_budget: two frames and what is kept."""
    with nvo.offload(copy.deepcopy(model), param_offload="cpu", **options) as other:
        units = other._nvoffload.units
    kept = sum(unit.spec.nbytes for unit in units if unit.spec.is_kept)
    return kept + 2 * max((unit.spec.nbytes for unit in units if not unit.spec.is_kept), default=0)


def offload(model: nn.Module, tier: str, swap: Path, **options: Any) -> Any:
    """Offload with two frames."""
    cuts = {"units": options["units"]} if "units" in options else {}
    path = swap if "nvme" in tier else None
    return nvo.offload(
        model, **{**TIERS[tier], "nvme_path": path, "device_budget": two_frames(model, **cuts), **options}
    )


def values_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_at_rest(model: Any) -> None:
    """Nothing is held once everything is written."""
    gc.collect()
    model.flush()
    session = model._nvoffload
    pool = session.backend.pool
    assert pool is None or pool.num_free == pool.buffer_count
    assert not [unit for unit in session.units if unit.pins or unit.depth]


def _for_each(act: Callable[..., None], cases: Sequence[tuple[Any, ...]], swap: Path) -> None:
    for case in cases:
        print(act.__name__, *case)
        act(*case, swap)


def in_child(act: Callable[..., None], cases: Sequence[tuple[Any, ...]], swap: Path) -> None:
    """Run `act` for all cases in a fresh process: it must come to its end, not to a signal."""
    process = multiprocessing.get_context("spawn").Process(target=_for_each, args=(act, cases, swap))
    process.start()
    process.join(50)
    assert process.exitcode == 0, f"{act.__name__} ended with {process.exitcode}"


def is_nan(tensor: Tensor) -> bool:
    return bool(tensor.isnan().all())


# ---- memory that has gone


def _read_a_kept_view(tier: str, swap: Path) -> None:
    model, kept = stack(), []
    model[0].up.register_forward_hook(lambda module, args, output: kept.append(module.weight[:3].detach()))
    offload(model, tier, swap)
    before = model[0].up.weight.detach().clone()[:3]
    with torch.no_grad():
        model(batch())
    assert is_nan(kept[0]), "the view shows another unit's values"
    with torch.no_grad():
        model[0](batch())
    assert torch.equal(kept[0], before)
    model.close()
    assert is_nan(kept[0])


def test_a_kept_view_of_a_weight_reads_nan_while_it_is_away(swap: Path) -> None:
    """What somebody keeps of a weight never shows another unit's values, and never ends the process.
    In a child: a view kept by a hook inside unit 0, read after forward and after close."""
    in_child(_read_a_kept_view, [("nvme",), ("cpu",)], swap)


def _use_a_saved_tensor(tier: str, swap: Path) -> None:
    model = stack()
    offload(model, tier, swap)
    x = batch().requires_grad_()
    out = model[0](x)
    with torch.no_grad():
        model(batch())
    node = out.grad_fn.next_functions[1][0]
    assert node.name() == "AddmmBackward0"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _ = node._saved_mat2
    out.sum().backward()
    assert model[0].up.weight.grad is not None
    model.close()


def test_a_saved_tensor_is_refused_while_its_unit_is_away(swap: Path) -> None:
    """Autograd never computes with memory that has gone; once the unit is back it does.
    In a child: the saved weight of a node is asked for, then the backward runs."""
    in_child(_use_a_saved_tensor, [("nvme",), ("cpu",)], swap)


def _backward_after_step(tier: str, swap: Path) -> None:
    model = stack()
    offload(model, tier, swap)
    opt = nvo.optim.AdamW(model.parameters(), lr=0.1)
    model(batch()).sum().backward()
    loss = model(batch(1)).sum()
    opt.step()
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    after = values_of(model)
    opt.zero_grad()
    loss = model(batch(2)).sum()
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert all(map(torch.equal, values_of(model), after))
    assert_at_rest(model)
    model.close()


def test_a_step_between_forward_and_backward_raises_in_backward(swap: Path) -> None:
    """No gradient is made of weights that have changed since, as in torch; the loop goes on after.
    In a child: forward, step, backward, then an ordinary step."""
    in_child(_backward_after_step, [(tier,) for tier in TIERS], swap)


def _write_a_kept_view(tier: str, is_away: bool, swap: Path) -> None:
    model, kept = stack(), []
    handle = model[0].up.register_forward_hook(lambda module, args, output: kept.append(module.weight.detach()))
    offload(model, tier, swap)
    before = values_of(model)
    with torch.no_grad():
        model(batch()) if is_away else model[0](batch())
    handle.remove()
    kept[0].fill_(3.0)
    with pytest.raises(nvo.UsageError, match=r"0\.up\.weight"), torch.no_grad():
        model(batch())
    if tier != "none":
        assert all(map(torch.equal, values_of(model), before))
        with torch.no_grad():
            assert torch.equal(model(batch()), stack()(batch()))
    assert_at_rest(model)
    model.close()


def test_a_write_through_a_kept_view_raises_at_the_next_use(swap: Path) -> None:
    """A change that would be lost is an error that names the parameter, wherever the unit happens to be.
    In a child: a view kept by a hook is written while its unit is away, and while it still lies in a frame."""
    in_child(_write_a_kept_view, [(tier, is_away) for tier in TIERS for is_away in (True, False)], swap)


def test_a_step_does_not_hide_a_write_through_a_kept_view(swap: Path) -> None:
    """A write through a kept view is told at the step too, not overwritten in silence.
    A view of the last unit is written between backward and step."""
    model, kept = stack(), []
    handle = model[4].up.register_forward_hook(lambda module, args, output: kept.append(module.weight.detach()))
    with offload(model, "nvme", swap):
        opt = nvo.optim.AdamW(model.parameters(), lr=0.1)
        model(batch()).sum().backward()
        handle.remove()
        kept[0].fill_(3.0)
        with pytest.raises(nvo.UsageError, match=r"4\.up\.weight"):
            opt.step()
        opt.step()


class Clamped(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", ["nvme", "cpu over nvme", "cpu"])
def test_a_weight_changed_in_place_in_forward_is_kept(tier: str, dtype: torch.dtype, swap: Path) -> None:
    """A forward may change its weights under no_grad, and every tier keeps the same bits.
    Three steps with weights clamped in forward, against memory; parameters beside it keep their masters."""

    def run(tier: str) -> list[Tensor]:
        model = stack(make=Clamped).to(dtype)
        with offload(model, tier, swap):
            opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
            for step in range(3):
                model(batch(step).to(dtype)).float().pow(2).mean().backward()
                opt.step()
                opt.zero_grad()
            model(batch().to(dtype))
            assert_at_rest(model)
            assert all(float(block.up.weight.detach().abs().max()) <= 0.0501 for block in model)
            return values_of(model)

    assert all(map(torch.equal, run(tier), run("none")))


class Renormed(Block):
    """Sets a weight anew in each forward, as layers with a norm constraint do."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data = torch.renorm(self.up.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


def test_a_weight_replaced_in_forward_is_kept(swap: Path) -> None:
    """`p.data = values` inside a forward writes the parameter, on every tier.
    Three steps with weights renormed in forward, against torch at the first and over tiers."""
    assert_same_as_torch(lambda: stack(make=Renormed), lambda model, step: model(batch(step)).pow(2).mean(), swap)


def test_a_change_in_forward_spoils_only_what_it_changed(swap: Path) -> None:
    """As in torch, changing one weight in place leaves what autograd saved of the others good.
    A block that clamps a bias after its weights have been used."""

    class Late(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            with torch.no_grad():
                self.down.bias.clamp_(-0.01, 0.01)
            return y

    model, plain = stack(make=Late), stack(make=Late)
    with offload(model, "nvme", swap):
        model(batch()).sum().backward()
        plain(batch()).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        assert all(map(torch.equal, values_of(model), values_of(plain)))


# ---- when a backward is done with a unit


def test_backward_goes_from_young_to_old() -> None:
    """Of the nodes that one thread has made, backward runs the youngest first, whatever the wiring.
    A graph with branches of unequal length, numbers by hooks."""
    x = torch.ones(3, requires_grad=True)
    first, seen = next_sequence_number(), []
    a, b = x * 2, x.exp()
    c = a.sin() + b
    out = (c * a + b.cos()).sum()
    nodes = {out.grad_fn}
    while len(nodes) < len(nodes := nodes | {n for node in nodes for n, _ in node.next_functions if n is not None}):
        pass
    for node in nodes:
        node.register_prehook(partial(lambda number, _: seen.append(number), sequence_number(node)))
    out.backward()
    leaf = seen.pop()
    assert seen == list(range(next_sequence_number() - 1, first - 1, -1))
    assert leaf > next_sequence_number()


def test_a_failed_backward_keeps_what_has_landed(swap: Path) -> None:
    """As in torch, gradients that a failed backward had made stand in `.grad`, and zero_grad ends them.
    A hook throws in the middle of backward, twice with zero_grad between, then a whole backward."""
    model, plain = stack(), stack()
    with offload(model, "nvme", swap):
        for fails in (True, True, False):
            for each in (model, plain):
                each.zero_grad()
                x = each[1](each[0](batch()))
                if fails:
                    x.register_hook(lambda grad: 1 / 0)
                loss = each[4](each[3](each[2](x))).sum()
                with pytest.raises(ZeroDivisionError) if fails else nullcontext():
                    loss.backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None) and (p.grad is None or torch.equal(p.grad, q.grad))
        assert_at_rest(model)


# ---- shapes of modules


def assert_same_as_torch(
    make: Callable[[], nn.Module], loss_of: Callable[[nn.Module, int], Tensor], swap: Path, **options: Any
) -> None:
    """Two steps: losses, gradients and buffers are torch's at the first, and equal over tiers to the end."""
    found = []
    plain = make()
    loss = loss_of(plain, 0)
    loss.backward()
    for tier in ("nvme", "none"):
        model = make()
        with offload(model, tier, swap, **options):
            opt = nvo.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            ours = loss_of(model, 0)
            ours.backward()
            assert torch.equal(ours, loss)
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                assert p.grad is None or torch.equal(p.grad, q.grad), name
            assert all(map(torch.equal, model.buffers(), plain.buffers()))
            opt.step()
            opt.zero_grad()
            last = loss_of(model, 1)
            last.backward()
            opt.step()
            assert_at_rest(model)
            found.append([last.detach(), *values_of(model), *(b.clone() for b in model.buffers())])
    assert all(map(torch.equal, *found))


@dataclass
class Answer:
    value: Tensor
    others: dict[str, Any]


class Nested(Block):
    """Returns tensors in a dataclass, a dict, tuples, a list."""

    def forward(self, x: Any) -> Any:
        x = x.others["deep"][0][1] if isinstance(x, Answer) else x
        y = super().forward(x)
        return Answer(y * 0.5, {"deep": ([None, y], "text"), "n": 3})


class Passing(Block):
    """Every second one returns its input as it came, as layer dropout does; all return it beside."""

    def __init__(self) -> None:
        super().__init__()
        self.is_off = False

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, first = pair
        return (x, first) if self.is_off else (super().forward(x) + 0.1 * first, first)


class InPlace(Block):
    """Changes its input in place first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.leaky_relu_(x, 0.3))


class Keyed(Block):
    def forward(self, *, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x) + memory


class Chain(nn.Module):
    """An entry, blocks, and how to run them."""

    def __init__(self, make: Callable[[], nn.Module], run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([make() for _ in range(5)])
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.entry(x))


def run_in_order(chain: Chain, x: Any) -> Any:
    for block in chain.blocks:
        x = block(x)
    return x


def run_passing(chain: Chain, x: Tensor) -> Tensor:
    pair = (x, x)
    for position, block in enumerate(chain.blocks):
        block.is_off = position % 2 == 1
        pair = block(pair)
    return pair[0]


def run_with_memory(chain: Chain, x: Tensor) -> Tensor:
    memory = chain.entry(x)
    for block in chain.blocks:
        x = block(x=x, memory=memory)
    return x


def run_side_by_side(chain: Chain, x: Tensor) -> Tensor:
    return sum((block(x.detach()) for block in chain.blocks), x)


def run_twice(chain: Chain, x: Tensor) -> Tensor:
    return run_in_order(chain, run_in_order(chain, x))


def run_same_block(chain: Chain, x: Tensor) -> Tensor:
    for position in (0, 1, 0, 0, 2, 1, 3, 4, 0):
        x = chain.blocks[position](x)
    return x


CHAINS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Any]]] = {
    "nested outputs": (Nested, lambda chain, x: run_in_order(chain, x).others["deep"][0][1]),
    "parts of nested outputs": (Nested, lambda chain, x: run_in_order(chain, x).value),
    "inputs passed through": (Passing, run_passing),
    "inputs changed in place": (InPlace, lambda chain, x: run_in_order(chain, x * 1.0)),
    "one input for all": (Keyed, run_with_memory),
    "side by side on an input without gradient": (Block, run_side_by_side),
    "twice": (Block, run_twice),
    "a block called often": (Block, run_same_block),
    "views as outputs": (Block, lambda chain, x: run_in_order(chain, x).t()[1:].mul_(2.0)),
}


@pytest.mark.parametrize("case", CHAINS)
def test_two_frames_are_enough_for_any_wiring(case: str, swap: Path) -> None:
    """How blocks are wired costs no frame and no bit.
    Five blocks on two frames, against torch."""
    make, run = CHAINS[case]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Chain(make, run)

    assert_same_as_torch(build, lambda model, step: model(batch(step)).pow(2).mean(), swap)


class Weights(nn.Module):
    """Its output is its parameter, or a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, WIDTH))
        self.extra = nn.Parameter(torch.randn(WIDTH))

    def forward(self, what: str) -> Any:
        return {"whole": self.table, "row": self.table[2], "both": (self.table.t(), {"e": self.extra})}[what]


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList([Weights() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        whole, row = self.prompts[0]("whole"), self.prompts[1]("row")
        turned, extra = self.prompts[2]("both")
        return ((x @ whole.t()) @ whole) * row + (x @ turned).sum() * extra["e"] + self.prompts[3]("row")


def test_outputs_that_are_parameters_are_safe_to_keep(swap: Path) -> None:
    """A module may return its own parameters; gradients flow to them, and what was returned keeps its values.
    Modules that return a parameter, a view of one, both in a container; without gradients too."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Prompted()

    assert_same_as_torch(build, lambda model, step: model(batch(step)).pow(2).mean(), swap)
    model, plain = build(), build()
    with offload(model, "nvme", swap):
        for enabled in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with enabled():
                kept = model.prompts[0]("whole")
                for prompt in model.prompts[1:]:
                    prompt("row")
            assert torch.equal(kept, plain.prompts[0].table)


class Partly(Block):
    """Uses one of its layers only."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x)[:, :WIDTH]


def test_parameters_without_a_gradient_are_left_alone(swap: Path) -> None:
    """A parameter that no graph reached keeps grad None and its value: no decay.
    Blocks that use one of two layers, decay 0.5."""
    model = stack(make=Partly)
    with offload(model, "nvme", swap):
        opt = nvo.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        before = values_of(model[1].down)
        for step in range(2):
            model(batch(step)).sum().backward()
            assert model[1].down.weight.grad is None
            assert model[1].up.weight.grad is not None
            opt.step()
        assert all(map(torch.equal, values_of(model[1].down), before))
    assert_same_as_torch(lambda: stack(make=Partly), lambda model, step: model(batch(step)).sum(), swap)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_frozen_parts_travel_and_stay(swap: Path) -> None:
    """Frozen units and frozen parts of units are brought for backward too, and never change.
    Adapters on frozen layers; a stack of which two blocks are frozen."""

    def half_frozen() -> nn.Module:
        model = stack()
        model[1].requires_grad_(False)
        model[4].requires_grad_(False)
        return model

    assert_same_as_torch(lambda: stack(make=Lora), lambda model, step: model(batch(step)).sum(), swap)
    assert_same_as_torch(half_frozen, lambda model, step: model(batch(step)).pow(2).sum(), swap)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x)[0])


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(5)
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return self.norm(x + self.attend(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    "make", [lambda: Recurrent(nn.LSTM), lambda: Recurrent(nn.GRU), Attends], ids=["lstm", "gru", "attention"]
)
def test_modules_that_read_parameters_their_own_way(make: Callable[[], nn.Module], swap: Path) -> None:
    """RNNs keep lists of their weights, attention reads its child's, lists have no forward, buffers move.
    Stacks of three of each against torch."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(step))).pow(2).mean()

    assert_same_as_torch(lambda: stack(3, make), loss_of, swap)
    units = [nn.LSTM, nn.GRU, nn.Linear, nn.MultiheadAttention]
    assert_same_as_torch(lambda: stack(1, make), loss_of, swap, units=units)


def test_a_submodule_can_be_called_alone(swap: Path) -> None:
    """A block works without the model around it, in any order, forward and backward.
    Blocks called one by one, each with a backward, against torch."""
    model, plain = stack(), stack()
    with offload(model, "nvme", swap):
        for position in (3, 0, 4, 4, 1, 2, 0):
            for each in (model, plain):
                each[position](batch(position)).pow(2).sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        assert_at_rest(model)


def test_an_interrupted_forward_leaves_nothing_behind(swap: Path) -> None:
    """Ctrl-C in a forward or backward ends that pass; the loop can go on.
    KeyboardInterrupt from a hook inside a block, in forward, then in backward; then a step."""
    model, plain = stack(), stack()
    armed = [True]

    def interrupt(*_: Any) -> None:
        if armed[0]:
            raise KeyboardInterrupt

    model[2].up.register_forward_hook(interrupt)
    with offload(model, "nvme", swap):
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        with pytest.raises(KeyboardInterrupt):
            model(batch())
        armed[0] = False
        model(batch()).sum().backward()
        plain(batch()).sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        opt.step()
        opt.zero_grad()
        out = model(batch())
        out.grad_fn.next_functions[0][0].register_prehook(interrupt)
        armed[0] = True
        with pytest.raises(KeyboardInterrupt):
            out.sum().backward()
        opt.step()
        assert_at_rest(model)


# ---- what is refused


def _call_with_foreign_values(model: nn.Module) -> None:
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters() if name.startswith("3.")}
    torch.func.functional_call(model, values, (batch(),))


def _set_a_new_parameter(model: Any) -> None:
    model[3].up.weight = nn.Parameter(torch.zeros(3 * WIDTH, WIDTH))
    model(batch())


def _assign_a_state_dict(model: nn.Module) -> None:
    model.load_state_dict(stack(seed=1).state_dict(), assign=True)
    model(batch())


@pytest.mark.parametrize("tier", ["nvme", "cpu", "none"])
@pytest.mark.parametrize(
    ("replace", "named"),
    [
        (_call_with_foreign_values, r"3\.up\.weight"),
        (_set_a_new_parameter, r"3\.up\.weight"),
        (_assign_a_state_dict, r"0\.up\.weight"),
    ],
)
def test_a_foreign_tensor_in_place_of_a_parameter_is_named(
    replace: Callable[[nn.Module], None], named: str, tier: str, swap: Path
) -> None:
    """What would train something that is not offloaded is an error at the next forward, by name, each time.
    functional_call, a new Parameter, load_state_dict(assign=True); after functional_call all is as before."""
    model = stack()
    with offload(model, tier, swap):
        for _ in range(2):
            with pytest.raises(nvo.UsageError, match=named):
                replace(model)
        with torch.no_grad():
            model[2](batch()) if replace is not _assign_a_state_dict else None
        if replace is _call_with_foreign_values:
            model(batch()).sum().backward()
            assert_at_rest(model)


def _wrap_in_ddp(model: nn.Module) -> None:
    nn.parallel.DistributedDataParallel(model)


def _shard_fully(model: nn.Module) -> None:
    torch.distributed.fsdp.fully_shard(model)
    model(batch())


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("tier", ["nvme", "none"])
@pytest.mark.parametrize(
    ("act", "named"),
    [
        (copy.deepcopy, "deep-copied"),
        (pickle.dumps, "pickled"),
        (lambda model: model.half(), r"0\.up\.weight"),
        (lambda model: model.double(), r"0\.up\.weight"),
        (lambda model: model.share_memory(), r"0\.up\.weight"),
        (lambda model: copy.deepcopy(model[1]), r"\.up\.weight"),
        (lambda model: nn.utils.parametrizations.weight_norm(model[1].up)(batch()), r"1\.up\.weight"),
        (_wrap_in_ddp, "DistributedDataParallel"),
        (_shard_fully, r"0\.up\.weight|0\.down\.weight"),
    ],
    ids=["deepcopy", "pickle", "half", "double", "share_memory", "deepcopy of a part", "parametrize", "ddp", "fsdp2"],
)
def test_what_cannot_work_says_so(
    act: Callable[[Any], Any], named: str, tier: str, swap: Path, world_of_one: None
) -> None:
    """Copies, conversions and other owners of parameters are refused by name, before anything has changed.
    Each is tried on an offloaded stack, which trains on after where it is still whole."""
    model = stack()
    with offload(model, tier, swap):
        with pytest.raises(nvo.UsageError, match=named):
            act(model)
        if "sharded" not in str(type(model[0])) and not hasattr(model[1].up, "parametrizations"):
            model(batch()).sum().backward()


# ---- several at once


@dataclass
class Pair:
    g: Any
    d: Any
    opt_g: Any
    opt_d: Any


def _pair(tier: str, swap: Path) -> Pair:
    g, d = offload(stack(4, seed=1), tier, swap), offload(stack(3, seed=2), tier, swap)
    return Pair(g, d, nvo.optim.AdamW(g.parameters(), lr=1e-2), nvo.optim.AdamW(d.parameters(), lr=1e-2))


def _train_pair(pair: Pair) -> list[Tensor]:
    """Like a GAN: d steps more often than g, g learns through d."""
    for step in range(6):
        for inner in range(3):
            with torch.no_grad():
                fake = pair.g(batch(step))
            (pair.d(fake).mean() - pair.d(batch(step + inner)).mean()).backward()
            pair.opt_d.step()
            pair.opt_d.zero_grad()
        (-pair.d(pair.g(batch(step))).mean()).backward()
        pair.opt_g.step()
        pair.opt_g.zero_grad()
        pair.opt_d.zero_grad()
    return values_of(pair.g) + values_of(pair.d)


def test_two_models_that_train_each_other_share_a_run(swap: Path) -> None:
    """Models of one folder may step at different times; commits wait for neither for ever.
    A pair like a GAN on disk against one in memory; then both are flushed."""
    pair = _pair("nvme", swap)
    with pair.g, pair.d:
        ours = _train_pair(pair)
        assert_at_rest(pair.g)
        assert_at_rest(pair.d)
    twin = _pair("none", swap)
    with twin.g, twin.d:
        assert all(map(torch.equal, ours, _train_pair(twin)))


def test_a_model_at_rest_holds_up_no_other(swap: Path) -> None:
    """A model with steps that nobody has needed yet does not stop another one of the same run.
    One step of the first; many steps, writes and a flush of the second."""
    first, second = offload(stack(4), "nvme", swap), offload(stack(4), "nvme", swap)
    with first, second:
        opts = [nvo.optim.AdamW(model.parameters(), lr=1e-2) for model in (first, second)]
        first(batch()).sum().backward()
        opts[0].step()
        for step in range(8):
            second(batch(step)).sum().backward()
            opts[1].step()
            opts[1].zero_grad()
            with torch.no_grad():
                second[0].up.bias.mul_(0.5)
        second.flush()
        first.flush()


def test_a_write_waits_for_no_unit_that_nobody_needs(swap: Path) -> None:
    """A write starts what its generation needs to be committed, also of units that are away.
    A step, a forward of one block, which ends the generation, then a write."""
    with offload(stack(), "nvme", swap) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(batch(step)).sum().backward()
            opt.step()
            model[0](batch())
            with torch.no_grad():
                model[0].up.bias.mul_(0.5)
        assert_at_rest(model)


def test_any_thread_may_use_a_model(swap: Path) -> None:
    """A model is not bound to the thread that made it.
    Steps alternate between this thread and others, against memory."""

    def run(tier: str) -> list[Tensor]:
        with offload(stack(), tier, swap) as model:
            opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)

            def step(number: int) -> None:
                model(batch(number)).pow(2).sum().backward()
                opt.step()
                opt.zero_grad()

            for number in range(6):
                if number % 2:
                    thread = threading.Thread(target=step, args=(number,))
                    thread.start()
                    thread.join()
                else:
                    step(number)
            assert_at_rest(model)
            return values_of(model)

    assert all(map(torch.equal, run("nvme"), run("none")))


def test_a_gradient_hook_may_read_parameters(swap: Path) -> None:
    """Inside backward every parameter can be read, wherever it is.
    A hook on an activation of block 2 reads all parameters."""
    with offload(stack(), "nvme", swap) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            before = values_of(model)
            seen: list[Tensor] = []
            x = model[1](model[0](batch(step)))
            x.register_hook(lambda grad, seen=seen: seen.extend(values_of(model)))
            for block in model[2:]:
                x = block(x)
            x.sum().backward()
            assert all(map(torch.equal, seen, before))
            opt.step()
            opt.zero_grad()
        assert_at_rest(model)


@pytest.mark.parametrize("call", ["step", "flush"])
def test_a_step_inside_forward_or_backward_is_refused(call: str, swap: Path) -> None:
    """What would change weights under a pass is an error there, and works after it.
    Called by hooks inside a block's forward, and inside backward."""
    with offload(stack(), "nvme", swap) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-2)
        act = {"step": opt.step, "flush": model.flush}[call]
        model(batch()).sum().backward()
        handle = model[2].up.register_forward_hook(lambda *_: act())
        with pytest.raises(nvo.UsageError, match="inside the forward of 2"):
            model(batch())
        handle.remove()
        out = model(batch())
        out.register_hook(lambda grad: act())
        with pytest.raises(nvo.UsageError, match="inside a backward"):
            out.sum().backward()
        act()
        assert_at_rest(model)


# ---- overlap


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        time.sleep(block.forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.block.backward_s)
        return grad, None


class Slow(Block):
    forward_s = backward_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return Sleeps.apply(super().forward(x), self)


@pytest.mark.parametrize(("forward_s", "backward_s"), [(0.02, 0.02), (0.06, 0.06), (0.04, 0.12), (0.12, 0.04)], ids=str)
def test_a_step_takes_the_longer_of_disk_and_compute(
    forward_s: float, backward_s: float, swap: Path, use_sim: Any
) -> None:
    """Disk time hides under compute, or compute under disk time, in forward and in backward each.
    A disk of 2 MB/s and modules that sleep; the best of three steps within 1.1 x the phase bound."""
    bytes_per_s = 2e6
    use_sim(bytes_per_s=bytes_per_s, parallel=1)
    model, count = stack(8, Slow), 8
    with offload(model, "nvme", swap, buffer_count=12, device_budget=None, keep="never") as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        session = model._nvoffload

        def moved() -> int:
            stats = session.backend.engine_stats()
            return stats.read_bytes + stats.write_bytes

        def step(number: int) -> float:
            start_s, start = time.perf_counter(), moved()
            loss = model(batch(number)).sum()
            middle_s, middle = time.perf_counter(), moved()
            loss.backward()
            opt.step()
            opt.zero_grad()
            end_s, end = time.perf_counter(), moved()
            disk_s = ((middle - start) / bytes_per_s, (end - middle) / bytes_per_s)
            bound_s = max(disk_s[0], count * forward_s) + max(disk_s[1], count * backward_s)
            print(f"forward {middle_s - start_s:.3f} s, disk {disk_s[0]:.3f}; ", end="")
            print(f"backward {end_s - middle_s:.3f} s, disk {disk_s[1]:.3f}; {(end_s - start_s) / bound_s:.3f}")
            return (end_s - start_s) / bound_s

        step(0)
        for block in model:
            block.forward_s, block.backward_s = forward_s, backward_s
        step(1)
        ratio = min(step(number) for number in range(2, 5))
        assert ratio <= 1.1, ratio
