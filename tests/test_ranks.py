"""Several ranks that share a model: parity with torch, equal bits, the ledger of each, what programs do differently."""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
from torch import nn

import nvoffload as nvo

pytestmark = pytest.mark.timeout(100)
Values = dict[str, torch.Tensor]
CASES = {
    "tiny": (models.tiny, models.tiny_loss),
    "t2": (models.t2, models.t2_loss),
    "stack": (models.stack, models.stack_loss),
}
TIERS: dict[str, dict[str, Any]] = {
    "nvme": {},
    "cpu": {"param_offload": "cpu"},
    "none": {"param_offload": "none"},
    "cpu-nvme": {"param_offload": "cpu", "optimizer_offload": "nvme"},
    "nvme-cpu": {"param_offload": "nvme", "optimizer_offload": "cpu"},
    "stage1": {"param_offload": "none", "zero_stage": 1},
    "stage1-nvme": {"param_offload": "none", "optimizer_offload": "nvme", "zero_stage": 1},
    "stage2": {"param_offload": "none", "zero_stage": 2},
    "stage2-nvme": {"param_offload": "none", "optimizer_offload": "nvme", "zero_stage": 2},
}
STEPS = 10


# What runs on the ranks.


def train(
    group: Any,
    rank: int,
    case: str,
    options: dict[str, Any],
    swap: Path,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
    clip: float = 0.5,
) -> tuple[Values, list[float], list[float]]:
    """Train on this rank's share of the batches; return whole values, norms and losses."""
    make, loss_of = CASES[case]
    num_ranks = group.size()
    with nvo.offload(make(dtype), nvme_path=swap, mesh=group, **options) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        norms, losses = [], []
        for step in range(steps):
            loss = loss_of(model, step * num_ranks + rank)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            losses.append(loss.item())
            opt.step()
            opt.zero_grad()
        return values_of(model), norms, losses


def values_of(model: nn.Module) -> Values:
    with nvo.gathered(model) as values:
        return {name: value.detach().clone() for name, value in values.items()}


# What it should come to.


@functools.cache
def torch_values(
    case: str, num_ranks: int, steps: int = STEPS, clip: float = 0.5
) -> tuple[Values, list[float], list[list[float]]]:
    """What plain torch AdamW makes of the loss averaged over the batches of all ranks; losses by rank."""
    make, loss_of = CASES[case]
    model = make()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norms, losses = [], []
    for step in range(steps):
        every = [loss_of(model, step * num_ranks + rank) for rank in range(num_ranks)]
        (sum(every) / num_ranks).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        losses.append([loss.item() for loss in every])
        opt.step()
        opt.zero_grad()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return values, norms, [list(own) for own in zip(*losses, strict=True)]


def assert_close(ours: Values, theirs: Values, most: float = 2e-6) -> None:
    assert ours.keys() == theirs.keys()
    worst = {name: (ours[name] - theirs[name]).abs().max().item() for name in ours if ours[name].numel()}
    assert not {name: error for name, error in worst.items() if not error <= most}


def assert_equal_bits(ours: Values, theirs: Values) -> None:
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


def assert_trained(found: list[Any], case: str, num_ranks: int, steps: int = STEPS) -> None:
    """Check every rank's values, norms and losses against torch's."""
    expected, norms, losses = torch_values(case, num_ranks, steps)
    for rank, (ours, our_norms, our_losses) in enumerate(found):
        assert_close(ours, expected)
        assert_equal_bits(ours, found[0][0])
        assert our_norms == found[0][1]
        assert our_norms == pytest.approx(norms, rel=1e-6, abs=1e-6)
        assert our_losses == pytest.approx(losses[rank], rel=1e-5)


PARITY = [
    *itertools.product(["t2"], [2], TIERS),
    *itertools.product(["t2"], [3], ["nvme", "stage1"]),
    *itertools.product(["tiny", "stack"], [3], ["nvme", "cpu", "stage2-nvme"]),
    *itertools.product(["t2"], [1], ["nvme"]),
]


@pytest.mark.parametrize(("case", "num_ranks", "tier"), PARITY)
def test_ten_steps_equal_torch(case: str, num_ranks: int, tier: str, swap: Path) -> None:
    """Every parameter, by name, is where torch puts it with the loss averaged over ranks.
    Ten clipped steps on 1, 2 and 3 ranks; norms are torch's, and the same on all ranks."""
    assert_trained(ranks.run(num_ranks, train, case, TIERS[tier], swap), case, num_ranks)


def train_ddp(group: Any, rank: int, case: str) -> Values:
    make, loss_of = CASES[case]
    model = nn.parallel.DistributedDataParallel(make(), process_group=group)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        loss_of(model, step * group.size() + rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ten_steps_equal_distributed_data_parallel(num_ranks: int, swap: Path) -> None:
    """What torch's DistributedDataParallel makes of the same ranks and batches, this does.
    T2 with parameters and states on disk."""
    (ours, *_), *_ = ranks.run(num_ranks, train, "t2", {}, swap)
    assert_close(ours, ranks.run(num_ranks, train_ddp, "t2")[0])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_runs_tiers_and_stages_change_no_bit(num_ranks: int, swap: Path) -> None:
    """A run again, another tier, another stage, waiting for updates: the same bits.
    T2 on disk against the rest."""
    first = ranks.run(num_ranks, train, "t2", {}, swap, torch.float32, 5)[0]
    for options in ({}, {"update": "blocking"}, TIERS["stage1"], TIERS["cpu-nvme"]):
        again = ranks.run(num_ranks, train, "t2", options, swap, torch.float32, 5)[0]
        assert_equal_bits(again[0], first[0])
        assert again[1:] == first[1:], options


@pytest.mark.parametrize("tier", ["nvme", "stage2"])
def test_bfloat16_follows_one_rank(tier: str, swap: Path) -> None:
    """Losses in bfloat16 are within 2 % of those of one rank that averages the same batches, which fall by more.
    Gradients are rounded to 8 bits once more by the average: far less than a step moves a loss of 4.6."""
    dtype, steps = torch.bfloat16, 20
    model = models.t2(dtype)
    with nvo.offload(model, param_offload="none", optimizer_offload="cpu"):
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        expected = []
        for step in range(steps):
            every = [models.t2_loss(model, step * 2 + rank) for rank in range(2)]
            (sum(every) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            expected.append([loss.item() for loss in every])
            opt.step()
            opt.zero_grad()
    found = ranks.run(2, train, "t2", TIERS[tier], swap, dtype, steps)
    for rank, (_, _, losses) in enumerate(found):
        assert losses == pytest.approx([own[rank] for own in expected], rel=0.02)


LATE: list[tuple[int, str, int | None]] = [
    *((2, "nvme", frames) for frames in (2, 3, 4)),
    *((2, tier, frames) for tier, frames in [("cpu", 3), ("none", 4), ("cpu-nvme", 2), ("nvme-cpu", 4)]),
    *((2, tier, None) for tier in TIERS if tier.startswith("stage")),
    *((3, tier, frames) for tier, frames in [("nvme", 2), ("cpu", 2), ("stage1", None)]),
]


@pytest.mark.parametrize(("num_ranks", "tier", "num_frames"), LATE)
def test_late_collectives_and_copies_are_waited_for(
    num_ranks: int, tier: str, num_frames: int | None, swap: Path
) -> None:
    """What is not there yet is waited for: outputs of collectives are NaN until then, copies happen at waits only.
    A stack in 2, 3 and 4 frames against torch."""
    options = dict(TIERS[tier])
    if num_frames is not None:
        options["device_budget"] = models.stack_budget(num_frames)
    late = ranks.run(num_ranks, train, "stack", options, swap, torch.float32, 4, is_late=True)
    assert_trained(late, "stack", num_ranks, steps=4)


@pytest.mark.parametrize("tier", ["nvme", "stage1"])
def test_a_tied_model_is_right_when_late(tier: str, swap: Path) -> None:
    """A weight that two modules share is waited for in both.
    T2 with late collectives."""
    assert_trained(ranks.run(2, train, "t2", TIERS[tier], swap, is_late=True), "t2", 2)


# ---- counters


def count(
    group: Any, rank: int, options: dict[str, Any], swap: Path, passes: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Three steps of a wide Stack and a flush; return bytes read and written by the counters, and by the ledger."""
    model = models.stack(width=149)
    budget = models.stack_budget(2, width=149)
    options = {"buffer_size": "64KiB", "device_budget": budget, **options}
    with nvo.offload(model, nvme_path=swap, mesh=group, **options):
        opt = nvo.optim.AdamW(model.parameters())
        before = model.offload_stats()
        for step in range(3):
            for batch in range(passes):
                models.stack_loss(model, step * passes + batch).backward()
            opt.step()
            opt.zero_grad()
        model.flush()
        after = model.offload_stats()
        ledger = model.offload_ledger(steps=3, passes=passes)
        assert after.is_direct
        assert (after.user_read_bytes, after.user_write_bytes) == (0, 0)
        assert after.fetch_bytes + after.update_read_bytes == ledger.read_bytes
        assert after.update_write_bytes == ledger.write_bytes
    seen = after.read_bytes, after.write_bytes - before.fill_bytes
    return seen, (ledger.read_bytes, ledger.write_bytes)


@pytest.mark.parametrize("tier", ["nvme", "stage1-nvme", "cpu-nvme", "nvme-cpu"])
@pytest.mark.parametrize(("num_ranks", "passes"), [(2, 1), (3, 2)])
def test_bytes_of_each_rank_equal_the_ledger(num_ranks: int, passes: int, tier: str, swap: Path) -> None:
    """What a rank reads and writes is predicted to the byte; together they write what one would, plus alignment.
    Three steps and a flush of a stack in two frames."""
    found = ranks.run(num_ranks, count, TIERS[tier], swap, passes)
    (alone, _) = ranks.run(1, count, TIERS[tier], swap, passes)[0]
    for seen, predicted in found:
        assert seen == predicted
    padding = 4096 * 7 * 2 * num_ranks * 3 * 4  # pages of the last tiles of seven units, per part, visit and rank
    assert abs(sum(seen[1] for seen, _ in found) - alone[1]) <= padding
    assert max(seen[1] for seen, _ in found) <= alone[1] / num_ranks + padding


# ---- ranks that skip


class Choosy(models.Stack):
    """A Stack whose layers may be left out, or run without a gradient, or again, as each call says."""

    def forward(self, ids: torch.Tensor, order: Any = None, detached: Any = ()) -> torch.Tensor:
        x = self.embed(ids)
        for number in range(len(self.layers)) if order is None else order:
            with torch.no_grad() if number in detached else contextlib.nullcontext():
                y = torch.tanh(self.layers[number](x))
            x = x + y
        return x


def choosy() -> Choosy:
    torch.manual_seed(0)
    return Choosy(37, 6)


def choosy_loss(model: nn.Module, batch: int, order: Any = None, detached: Any = ()) -> torch.Tensor:
    ids = torch.randint(0, 101, (3, 5), generator=torch.Generator().manual_seed(batch))
    return model(ids, order, detached).pow(2).mean()


Plan = list[list[tuple[Any, Any]]]  # by step, by rank: which layers in which order, which without a gradient


def train_choosy(group: Any, rank: int, plan: Plan, options: dict[str, Any], swap: Path) -> tuple[Values, list[Any]]:
    with nvo.offload(choosy(), nvme_path=swap, mesh=group, **options) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        nones = []
        for step, own in enumerate(plan):
            choosy_loss(model, step * group.size() + rank, *own[rank]).backward()
            nones.append([name for name, p in model.named_parameters() if p.grad is None])
            opt.step()
            opt.zero_grad()
        return values_of(model), nones


def torch_choosy(plan: Plan) -> tuple[Values, list[Any]]:
    model = choosy()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    nones = []
    for step, own in enumerate(plan):
        losses = [choosy_loss(model, step * len(own) + rank, *choice) for rank, choice in enumerate(own)]
        (sum(losses) / len(own)).backward()
        nones.append([name for name, p in model.named_parameters() if p.grad is None])
        opt.step()
        opt.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, nones


EVERY = (tuple(range(6)), ())


def without(*left_out: int) -> tuple[Any, Any]:
    return tuple(n for n in range(6) if n not in left_out), ()


def layer_drop(num_ranks: int, steps: int, seed: int) -> Plan:
    """Each rank draws for itself which layers it leaves out."""
    draw = torch.rand(steps, num_ranks, 6, generator=torch.Generator().manual_seed(seed)) < 0.4
    return [[without(*row.nonzero()[:, 0].tolist()) for row in rows] for rows in draw]


PLANS: dict[str, Plan] = {
    "one-skips-layer-3": [[EVERY, without(3)]] * 6,
    "one-skips-the-first": [[without(0), EVERY, EVERY]] * 4,
    "one-skips-the-last": [[EVERY, EVERY, without(5)]] * 4,
    "one-skips-all": [[without(*range(6)), EVERY, EVERY]] * 4,
    "in-turn": [[EVERY, without(1, 4)], [without(1, 4), EVERY]] * 3,
    "nobody-uses-2": [[without(2), without(2)]] * 4,
    "nobody-uses-2-for-a-while": [[EVERY] * 2] * 2 + [[without(2)] * 2] * 3 + [[EVERY, without(2)]] * 3,
    "layer-drop": layer_drop(2, 10, 1),
    "layer-drop-of-three": layer_drop(3, 6, 2),
    "no-gradient-on-one": [[EVERY, (tuple(range(6)), (2,))]] * 4,
    "no-gradient-anywhere": [[(tuple(range(6)), (2,))] * 2] * 3,
    "each-its-own-half": [[without(0, 2, 4), without(1, 3, 5)]] * 4,
}


@pytest.mark.parametrize(
    ("plan", "tier"),
    [
        *((plan, "nvme") for plan in PLANS),
        *itertools.product(["layer-drop", "in-turn", "one-skips-all"], ["cpu", "stage1"]),
    ],
)
def test_ranks_that_leave_units_out_average_with_zeros(plan: str, tier: str, swap: Path) -> None:
    """A rank that skips a unit counts as a gradient of zeros; what no rank uses keeps grad None.
    Against torch with the mean of all losses; two frames."""
    options = dict(TIERS[tier])
    if tier != "stage1":
        options["device_budget"] = models.stack_budget(2)
    expected, nones = torch_choosy(PLANS[plan])
    for ours, our_nones in ranks.run(len(PLANS[plan][0]), train_choosy, PLANS[plan], options, swap):
        assert our_nones == nones
        assert_close(ours, expected)


@pytest.mark.parametrize("plan", ["layer-drop-of-three", "nobody-uses-2-for-a-while", "each-its-own-half"])
def test_ranks_that_leave_units_out_are_right_when_late(plan: str, swap: Path) -> None:
    """What is caught up unseen is waited for like the rest.
    Late collectives, three frames."""
    options = {"device_budget": models.stack_budget(3)}
    expected, nones = torch_choosy(PLANS[plan])
    for ours, our_nones in ranks.run(len(PLANS[plan][0]), train_choosy, PLANS[plan], options, swap, is_late=True):
        assert our_nones == nones
        assert_close(ours, expected)


REPEATED: Plan = [[((*range(6), 1, 1), ())] * 2] * 3
REORDERED: Plan = [[((3, 1, 5, 0, 2, 4), ())] * 2, [EVERY] * 2, [((5, 4, 3, 2, 1, 0), ())] * 2]


@pytest.mark.parametrize("tier", ["nvme", "cpu", "stage2"])
@pytest.mark.parametrize("plan", [REPEATED, REORDERED], ids=["repeated", "reordered"])
def test_ranks_that_change_order_together_are_right(plan: Plan, tier: str, swap: Path) -> None:
    """Units used again, or in another order, on all ranks alike are no matter.
    Against torch."""
    expected, _ = torch_choosy(plan)
    for ours, _ in ranks.run(2, train_choosy, plan, TIERS[tier], swap):
        assert_close(ours, expected)


@pytest.mark.parametrize("tier", ["nvme", "stage1"])
def test_a_unit_that_is_new_on_some_ranks_is_an_error_on_all(tier: str, swap: Path) -> None:
    """Ranks that use units in different orders can't go on: all say so at once, and which unit it is.
    One rank uses a layer a second time, after the others."""
    plan: Plan = [[EVERY, EVERY], [EVERY, ((*range(6), 2), ())], [EVERY, EVERY]]
    for outcome in ranks.outcomes(2, train_choosy, plan, TIERS[tier], swap, is_short=True):
        assert isinstance(outcome, ranks.RankError)
        assert outcome.kind == "PeerError", outcome
        assert "layers." in outcome.message


# ---- gradients


def accumulate(group: Any, rank: int, options: dict[str, Any], swap: Path, no_sync: bool) -> tuple[Values, Values]:
    """Two steps of three backward passes each; return the gradients of the last, and the values."""
    num_ranks = group.size()
    with nvo.offload(models.t2(), nvme_path=swap, mesh=group, **options) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(2):
            for turn in range(3):
                with model.no_sync() if no_sync and turn < 2 else contextlib.nullcontext():
                    models.t2_loss(model, (step * 3 + turn) * num_ranks + rank).backward()
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
            opt.step()
            opt.zero_grad()
        return grads, values_of(model)


def torch_accumulate(num_ranks: int) -> tuple[Values, Values]:
    model = models.t2()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        for batch in range(3 * num_ranks):
            (models.t2_loss(model, step * 3 * num_ranks + batch) / num_ranks).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        opt.step()
        opt.zero_grad()
    return grads, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tier", ["nvme", "stage2-nvme"])
@pytest.mark.parametrize("no_sync", [False, True], ids=["each-pass", "no_sync"])
def test_gradients_of_several_passes_add_up(no_sync: bool, tier: str, swap: Path) -> None:
    """Three backward passes before a step give the sum of three averages, exchanged at each or, with no_sync, once.
    Gradients and values of three ranks against torch."""
    grads, values = torch_accumulate(3)
    for our_grads, ours in ranks.run(3, accumulate, TIERS[tier], swap, no_sync):
        assert_close(our_grads, grads)
        assert_close(ours, values)


def _whole(p: torch.Tensor) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))


def _replace(p: Any) -> None:
    p.grad = _whole(p)


def _replace_by_edited(p: Any) -> None:
    p.grad = p.grad.clone() * 3


def _read_twice(p: Any) -> None:
    before = p.grad.clone()
    p.grad.add_(before)


def _set_none(p: Any) -> None:
    p.grad = None


EDITS: dict[str, Callable[[Any], object]] = {
    "nothing": lambda p: None,
    "mul": lambda p: p.grad.mul_(0.5),
    "add": lambda p: p.grad.add_(1),
    "mul-add": lambda p: p.grad.mul_(0.25).add_(1).mul_(3),
    "div-by-tensor": lambda p: p.grad.div_(torch.tensor(4.0)),
    "by-elements": lambda p: p.grad.mul_(_whole(p)),
    "clamp": lambda p: p.grad.clamp_(-1e-3, 1e-3),
    "copy": lambda p: p.grad.copy_(_whole(p)),
    "zero": lambda p: p.grad.zero_(),
    "read": lambda p: p.grad.norm(1),
    "read-twice": _read_twice,
    "whole": _replace,
    "whole-from-own": _replace_by_edited,
    "none": _set_none,
    "zero-add": lambda p: p.grad.zero_().add_(2),
}


def edit(group: Any, rank: int, options: dict[str, Any], swap: Path) -> dict[str, list[Values]]:
    """By edit: gradients after it, after one backward more, after a clipping; and the values after the step."""
    found = {}
    with nvo.offload(models.tiny(), nvme_path=swap, mesh=group, **options) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        for number, (name, change) in enumerate(EDITS.items()):
            batch = 2 * number * group.size() + rank
            found[name] = edited(
                model, opt, change, lambda turn, batch=batch: models.tiny_loss(model, batch + turn * group.size())
            )
            found[name].append(values_of(model))
    return found


def edited(model: nn.Module, opt: Any, change: Callable[[Any], object], loss_of: Callable[[int], Any]) -> list[Values]:
    def grads() -> Values:
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    loss_of(0).backward()
    with torch.no_grad():
        for p in model.parameters():
            change(p)
    found = [grads()]
    loss_of(1).backward()
    found.append(grads())
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    found.append(grads())
    opt.step()
    opt.zero_grad()
    return found


def torch_edit(num_ranks: int) -> dict[str, list[Values]]:
    found = {}
    model = models.tiny()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, (name, change) in enumerate(EDITS.items()):

        def loss_of(turn: int, number: int = number) -> torch.Tensor:
            first = (2 * number + turn) * num_ranks
            return sum(models.tiny_loss(model, first + rank) for rank in range(num_ranks)) / num_ranks

        found[name] = edited(model, opt, change, loss_of)
        found[name].append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("tier", ["nvme", "cpu", "stage2"])
def test_edited_gradients_equal_torch_on_all_ranks(tier: str, swap: Path) -> None:
    """What a program does with `.grad` has torch's effect, on all ranks the same.
    Fifteen edits, each followed by one backward more, a clipping and a step."""
    expected = torch_edit(2)
    first, *others = ranks.run(2, edit, TIERS[tier], swap)
    for name, parts in expected.items():
        for part, values in enumerate(parts):
            for key, value in values.items():
                assert (first[name][part][key] - value).abs().max() <= 5e-6, (name, part, key)
            assert first[name][part].keys() == values.keys()
            for other in others:
                assert_equal_bits(other[name][part], first[name][part])


def meet_infinity(group: Any, rank: int, options: dict[str, Any], swap: Path, value: float) -> tuple[list[float], str]:
    """Gradients of one rank are not finite; return norms as each rank sees them, and what an error check says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    with nvo.offload(model, nvme_path=swap, mesh=group, **options):
        x = torch.ones(2, 3)  # all gradients of a parameter's element have one sign: inf, not nan
        (model(x).sum() * (value if rank == 1 else 1.0)).backward()
        params = list(model.parameters())
        norms = [nn.utils.get_total_norm([p.grad for p in params], kind).item() for kind in (2.0, math.inf)]
        norms += [p.grad.norm().item() for p in params]
        finite = [bool(torch.isfinite(p.grad).all()) for p in params]
        with pytest.raises(RuntimeError) as error:
            nn.utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        norms.append(nn.utils.clip_grad_norm_(params, 1.0).item())
        return [*norms, *finite], str(error.value)


@pytest.mark.parametrize("tier", ["nvme", "stage1"])
def test_an_infinite_gradient_of_one_rank_is_seen_by_all(tier: str, swap: Path) -> None:
    """Norms, of all and of each parameter, are infinite on every rank if one of them has an infinite gradient.
    One of three ranks scales its loss by inf, or by nan."""
    for value in (math.inf, math.nan):
        found = ranks.run(3, meet_infinity, TIERS[tier], swap, value)
        for numbers, message in found:
            assert not any(math.isfinite(number) for number in numbers[:-4])
            assert numbers[-4:] == [0.0] * 4
            assert "non-finite" in message
        if value == math.inf:
            assert [numbers[0] for numbers, _ in found] == [math.inf] * 3


def read_a_float32_average(group: Any, rank: int, swap: Path) -> tuple[Values, Values]:
    """Return the gradients as averaged, and this rank's own."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    own = models.t2(torch.bfloat16)
    models.t2_loss(own, rank).backward()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    with nvo.offload(models.t2(torch.bfloat16), nvme_path=swap, mesh=group, mp_policy=policy) as model:
        models.t2_loss(model, rank).backward()
        averaged = {name: p.grad.clone() for name, p in model.named_parameters()}
    return averaged, {name: p.grad for name, p in own.named_parameters()}


def test_reduce_dtype_averages_without_rounding(swap: Path) -> None:
    """With reduce_dtype=float32, gradients in bfloat16 are averaged as exactly as float32 can.
    Two ranks against the mean of what each computes alone."""
    found = ranks.run(2, read_a_float32_average, swap)
    for name in found[0][0]:
        mean = (found[0][1][name].float() + found[1][1][name].float()) / 2
        assert torch.equal(found[0][0][name], mean), name
        assert torch.equal(found[1][0][name], mean), name


# ---- reads and writes


def change_values(model: nn.Module, turn: int) -> None:
    """Write by every way that a program has."""
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            match (number + turn) % 4:
                case 0:
                    p.mul_(2)
                case 1:
                    p.copy_(_whole(p) / 8)
                case 2:
                    p.add_(p.detach().clone().abs(), alpha=0.25)
                case 3:
                    p.data = p.detach().clone() - 0.125


def write_and_train(
    group: Any, rank: int, case: str, options: dict[str, Any], swap: Path
) -> tuple[Values, list[float]]:
    """Write, read, evaluate and train, in turn; the initial values are those of a seed of this rank."""
    make, loss_of = CASES[case]
    with nvo.offload(make(seed=rank), nvme_path=swap, mesh=group, **options) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        return written(model, opt, lambda batch: loss_of(model, batch * group.size() + rank)), losses_of(
            model, lambda batch: loss_of(model, batch)
        )


def losses_of(model: nn.Module, loss_of: Callable[[int], torch.Tensor]) -> list[float]:
    with torch.no_grad():
        return [loss_of(batch).item() for batch in range(3)]


def written(model: nn.Module, opt: Any, loss_of: Callable[[int], torch.Tensor]) -> Values:
    for turn in range(3):
        change_values(model, turn)
        with torch.no_grad():
            loss_of(90 + turn)
        loss_of(turn).backward()
        opt.step()
        opt.zero_grad()
        change_values(model, turn + 1)
    model.load_state_dict({name: p.detach().clone() / 2 for name, p in model.named_parameters(remove_duplicate=False)})
    loss_of(5).backward()
    opt.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("case", "tier"),
    [*itertools.product(["t2"], ["nvme", "stage1"]), *itertools.product(["tiny"], ["cpu", "cpu-nvme", "stage2-nvme"])],
)
def test_written_values_are_used_by_all_ranks(case: str, tier: str, swap: Path) -> None:
    """copy_, mul_, add_, .data and load_state_dict have torch's effect; all ranks start from rank 0's values.
    Writes before and after steps, then losses of equal batches, against torch."""
    make, loss_of = CASES[case]
    model = make()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = written(model, opt, lambda batch: sum(loss_of(model, batch * 2 + rank) for rank in range(2)) / 2)
    expected_losses = losses_of(model, lambda batch: loss_of(model, batch))
    for values, losses in ranks.run(2, write_and_train, case, TIERS[tier], swap):
        assert_close(values, expected)
        assert losses == pytest.approx(expected_losses, rel=1e-5)


def write_differently(group: Any, rank: int, options: dict[str, Any], swap: Path) -> tuple[Values, list[float], Values]:
    """Each rank writes values of its own; return what is read then, losses of one batch, and values trained."""
    with nvo.offload(models.tiny(), nvme_path=swap, mesh=group, **options) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        models.tiny_loss(model, rank).backward()
        opt.step()
        torch.manual_seed(rank)
        for p in model.parameters():
            nn.init.uniform_(p, -0.2, 0.2)
        losses = losses_of(model, lambda batch: models.tiny_loss(model, batch))
        values = values_of(model)
        models.tiny_loss(model, rank).backward()
        opt.step()
        return values, losses, values_of(model)


@pytest.mark.parametrize("tier", ["nvme", "cpu", "stage1"])
def test_ranks_agree_after_writes_that_differ(tier: str, swap: Path) -> None:
    """Whatever each rank writes, afterwards all have the same values, in forwards and reads.
    Initialisation by each rank's own random numbers."""
    (values, losses, trained), *others = ranks.run(3, write_differently, TIERS[tier], swap)
    for other_values, other_losses, other_trained in others:
        assert_equal_bits(other_values, values)
        assert_equal_bits(other_trained, trained)
        assert other_losses == losses
    plain = models.tiny()
    plain.load_state_dict(values)
    assert losses == pytest.approx(losses_of(plain, lambda batch: models.tiny_loss(plain, batch)), rel=1e-6)


SIZES = {"one": (1,), "two": (2,), "three": (3,), "five": (5,), "many": (17, 33), "nothing": (0, 8), "long": (4099,)}


class Odd(nn.Module):
    """Parameters of all sizes in one module, each with a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SIZES.items():
            self.add_module(name, Holder(shape))

    def forward(self) -> torch.Tensor:
        return sum(child() for child in self.children())


class Holder(nn.Module):
    """One parameter."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def mark(p: torch.Tensor, start: int) -> torch.Tensor:
    return torch.arange(start, start + p.numel(), dtype=torch.float32).view(p.shape)


def mark_elements(group: Any, rank: int, options: dict[str, Any], swap: Path) -> dict[str, list[Values]]:
    """Give every element a number, by two ways; return what is read then, after a step of lr 0, and after a flush."""
    found = {}
    with nvo.offload(Odd(), nvme_path=swap, mesh=group, **options) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        for start, way in enumerate(("gathered", "copy_")):
            if way == "gathered":
                with nvo.gathered(model, write=True) as values:
                    for value in values.values():
                        value.copy_(mark(value, start))
            else:
                with torch.no_grad():
                    for p in model.parameters():
                        p.copy_(mark(p, start))
            found[way] = [values_of(model)]
            model().backward()
            opt.step()
            opt.zero_grad()
            found[way].append(values_of(model))
            model.flush()
            with torch.no_grad():
                model()
            found[way].append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("tier", ["nvme", "cpu", "none", "stage1", "stage2-nvme"])
def test_every_element_stays_in_its_place(tier: str, swap: Path) -> None:
    """Elements marked with their index are read back in their places, on three ranks, before and after a step.
    Parameters of 0, 1, 2, 3, 5 and more elements, each a unit."""
    for found in ranks.run(3, mark_elements, TIERS[tier], swap):
        for start, reads in enumerate(found.values()):
            for values in reads:
                for value in values.values():
                    assert torch.equal(value, mark(value, start))
    # A unit smaller than the ranks are many leaves some without a part.


# ---- what programs do


class Six(nn.Module):
    """One module that uses six parameters at once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(190, 230) / 8) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(x @ part for part in self.parts).tanh()


def six(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(17, 190), Six(), nn.Linear(230, 7))


def with_empty(place: int) -> nn.Module:
    """A model with a Linear(8, 0) first, in the middle, or last but one."""
    torch.manual_seed(0)
    layers = [nn.Linear(17, 8), nn.Linear(8, 8), nn.Linear(8, 7)]
    empty = nn.Linear(17 if place == 0 else 8, 0, bias=False)
    return Beside(layers, empty, place)


class Beside(nn.Module):
    """Layers, beside one of which an empty one runs."""

    def __init__(self, layers: list[nn.Module], empty: nn.Module, place: int) -> None:
        super().__init__()
        if place == 0:
            self.empty, self.layers = empty, nn.ModuleList(layers)
        else:
            self.layers, self.empty = nn.ModuleList(layers), empty
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number == self.place:
                x = x + self.empty(x).sum(-1, keepdim=True)
            x = layer(x)
        return x


def train_any(
    group: Any, rank: int, make: Callable[[], nn.Module], loss_of: Any, options: dict[str, Any], swap: Path, steps: int
) -> tuple[Values, Values]:
    """Train a model of the test; return values and the last gradients."""
    with nvo.offload(make(), nvme_path=swap, mesh=group, **options) as model:
        opt = nvo.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for step in range(steps):
            opt.zero_grad()
            loss_of(model, step * group.size() + rank).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            opt.step()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return values_of(model), grads


def torch_any(make: Callable[[], nn.Module], loss_of: Any, num_ranks: int, steps: int) -> tuple[Values, Values]:
    model = make()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(steps):
        opt.zero_grad()
        (sum(loss_of(model, step * num_ranks + rank) for rank in range(num_ranks)) / num_ranks).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        opt.step()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: p.detach().clone() for name, p in model.named_parameters()}, grads


def check_any(
    make: Callable[[], nn.Module],
    loss_of: Any,
    options: dict[str, Any],
    swap: Path,
    *,
    num_ranks: int,
    steps: int = 4,
    **switches: bool,
) -> None:
    """Train on ranks and by torch: values and gradients are equal."""
    expected, grads = torch_any(make, loss_of, num_ranks, steps)
    for ours, our_grads in ranks.run(num_ranks, train_any, make, loss_of, options, swap, steps, **switches):
        assert_close(ours, expected)
        assert_close(our_grads, grads)


@pytest.mark.parametrize("buffer_count", [2, 5])
def test_a_module_may_use_more_parameters_than_there_are_buffers(buffer_count: int, swap: Path) -> None:
    """Six parameters at once are brought through two or five buffers.
    Two ranks against torch."""
    options = {"buffer_count": buffer_count, "buffer_size": "64KiB"}
    check_any(six, models.tiny_loss, options, swap, num_ranks=2)


def offload_only(group: Any, rank: int, make: Callable[[], nn.Module], options: Any, swap: Path) -> None:
    """Offload with this rank's options."""
    own = options[rank] if isinstance(options, list) else options
    with nvo.offload(make(), **{"nvme_path": swap, "mesh": group, **own}):
        pass


def test_one_buffer_is_refused_by_all_ranks(swap: Path) -> None:
    """buffer_count=1 can't work: every rank raises ConfigError at once.
    Two ranks."""
    for outcome in ranks.outcomes(2, offload_only, six, {"buffer_count": 1}, swap):
        assert (outcome.kind, "buffer_count=1" in outcome.message) == ("ConfigError", True), outcome


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(("num_ranks", "tier"), [(1, "nvme"), (2, "nvme"), (2, "stage1")])
def test_a_parameter_without_elements_trains(num_ranks: int, tier: str, place: int, swap: Path) -> None:
    """Linear(8, 0) first, in the middle and last keeps its shape, and the rest trains.
    Against torch; nothing to collect is nothing to wait for."""
    make = functools.partial(with_empty, place)
    check_any(make, models.tiny_loss, TIERS[tier], swap, num_ranks=num_ranks)


def no_parameters() -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Flatten())


def one_element() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.ReLU(), nn.PReLU())


def one_element_loss(model: nn.Module, batch: int) -> torch.Tensor:
    x = torch.randn(4, 17, generator=torch.Generator().manual_seed(batch))
    return (model(x - 0.5) + model[1](x)).pow(2).mean()


def flush_twice(group: Any, rank: int, make: Callable[[], nn.Module], options: dict[str, Any], swap: Path) -> list[int]:
    """Evaluate and flush, twice each; return what was moved."""
    with nvo.offload(make(), nvme_path=swap, mesh=group, **options) as model:
        for _ in range(2):
            with torch.no_grad():
                model(torch.ones(4, 17))
            model.flush()
            model.flush()
        assert values_of(model).keys() == dict(model.named_parameters()).keys()
        repr(model)
        model.offload_summary()
        stats = model.offload_stats()
    return [stats.read_bytes, stats.write_bytes]


@pytest.mark.parametrize("tier", ["nvme", "cpu", "stage1"])
@pytest.mark.parametrize("make", [no_parameters, one_element])
def test_ranks_that_own_nothing_take_part(make: Callable[[], nn.Module], tier: str, swap: Path) -> None:
    """Models without parameters, and ranks without a part of one, evaluate, flush and close like others.
    Three ranks; the parameter of one element trains too."""
    ranks.run(3, flush_twice, make, TIERS[tier], swap)
    if make is one_element:
        check_any(one_element, one_element_loss, TIERS[tier], swap, num_ranks=3)


def test_one_rank_needs_no_process_group(swap: Path) -> None:
    """Without torch.distributed everything works as on one rank: offload, no_sync, gathered, clipping.
    In this process, which has no group."""
    assert not torch.distributed.is_initialized()
    expected, norms, _ = torch_values("tiny", 1)
    with nvo.offload(models.tiny(), nvme_path=swap) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        ours = []
        for step in range(STEPS):
            models.tiny_loss(model, step).backward()
            ours.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            opt.step()
            opt.zero_grad()
        assert_close(values_of(model), expected)
    assert ours == pytest.approx(norms, rel=1e-6)


def evaluate_unequally(group: Any, rank: int, options: dict[str, Any], swap: Path) -> None:
    """Rank 0 evaluates twice, rank 1 five times, between steps."""
    with nvo.offload(models.t2(), nvme_path=swap, mesh=group, **options) as model:
        opt = nvo.optim.AdamW(model.parameters())
        for step in range(2):
            models.t2_loss(model, step).backward()
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                for _ in range((2, 5)[rank]):
                    models.t2_loss(model, 0)


@pytest.mark.parametrize("tier", ["nvme", "cpu", "stage1"])
def test_unequal_numbers_of_evaluations_are_an_error_on_all_ranks(tier: str, swap: Path) -> None:
    """Ranks that evaluate unequally often are told so, with the position of each.
    Two forwards against five."""
    for outcome in ranks.outcomes(2, evaluate_unequally, TIERS[tier], swap, is_short=True):
        assert isinstance(outcome, ranks.RankError)
        assert outcome.kind == "PeerError", outcome
        assert "rank 0 wants to" in outcome.message, outcome
        assert "rank 1 wants to" in outcome.message, outcome
        assert "in evaluation forward" in outcome.message, outcome
        assert "after step 1" in outcome.message, outcome
        assert "local_forward" in outcome.message, outcome


@pytest.mark.parametrize("tier", ["nvme", "cpu", "stage1"])
def test_a_group_of_gloo_alone_clips_in_every_tier(tier: str, swap: Path) -> None:
    """A norm of a group with the single backend gloo is right, with a rank that owns nothing.
    One and three ranks, clipped at 0.05: equal to 1e-6."""
    check_any(one_element, one_element_loss, TIERS[tier], swap, num_ranks=3)
    found = {n: ranks.run(n, same_batches, TIERS[tier], swap)[0] for n in (1, 3)}
    assert found[3][1] == pytest.approx(found[1][1], rel=1e-6)
    assert_close(found[3][0], found[1][0])


def same_batches(group: Any, rank: int, options: dict[str, Any], swap: Path) -> tuple[Values, list[float]]:
    """Train a small model on the same batches on all ranks, clipped; return values and norms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 1), nn.PReLU(), nn.Linear(1, 2))
    with nvo.offload(model, nvme_path=swap, mesh=group, **options):
        opt, norms = nvo.optim.AdamW(model.parameters(), lr=1e-3), []
        for step in range(STEPS):
            models.tiny_loss(model, step).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
            opt.step()
            opt.zero_grad()
        return values_of(model), norms


# ---- models and loops of other kinds


def frozen() -> nn.Module:
    """The first layers are frozen, one bias in the middle as well."""
    model = models.stack()
    for p in [*model.embed.parameters(), *model.layers[0].parameters(), model.layers[3].bias]:
        p.requires_grad_(False)
    return model


class Mixed(nn.Module):
    """A float32 norm among bfloat16 layers, and a matrix stored by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(17, 33)
        self.norm = nn.LayerNorm(33)
        self.last = nn.Linear(33, 7).to(torch.bfloat16)
        self.turned = nn.Parameter(torch.randn(7, 33).div(8).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.first(x)))
        return self.last(x.bfloat16()).float() + x @ self.turned


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return Mixed()


class Checkpointed(models.Stack):
    """A Stack whose layers are recomputed in backward."""

    use_reentrant = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.embed(ids)
        for layer in self.layers:
            x = x + checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=self.use_reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


def checkpointed() -> nn.Module:
    torch.manual_seed(0)
    return Checkpointed(37, 6)


def checkpointed_reentrant() -> nn.Module:
    torch.manual_seed(0)
    return CheckpointedReentrant(37, 6)


def shared_layer() -> nn.Module:
    """One layer called three times in each forward, with others between."""
    torch.manual_seed(0)
    layer = nn.Linear(33, 33)
    return nn.Sequential(nn.Linear(17, 33), layer, nn.ReLU(), layer, nn.Linear(33, 33), layer, nn.Linear(33, 7))


def convolution() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (1, 1, 17)), nn.Conv2d(1, 5, 3, padding=1), nn.Conv2d(5, 3, 1), nn.Flatten())
    return model.to(memory_format=torch.channels_last)


def nested_loss(model: nn.Module, batch: int) -> torch.Tensor:
    """Two forwards, whose backwards run together, and an evaluation between."""
    first = models.tiny_loss(model, batch)
    with torch.no_grad():
        models.tiny_loss(model, batch + 7)
    return first + models.tiny_loss(model, batch + 100)


def empty_batch_loss(model: nn.Module, batch: int) -> torch.Tensor:
    """Every second batch has no rows."""
    x = torch.randn(4 * (batch % 2), 17, generator=torch.Generator().manual_seed(batch))
    return model(x).pow(2).sum()


KINDS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "frozen": (frozen, models.stack_loss),
    "checkpointed": (checkpointed, models.stack_loss),
    "reentrant": (checkpointed_reentrant, models.stack_loss),
    "shared-layer": (shared_layer, models.tiny_loss),
    "convolution": (convolution, models.tiny_loss),
    "nested": (shared_layer, nested_loss),
    "empty-batches": (models.tiny, empty_batch_loss),
}


@pytest.mark.parametrize(
    ("kind", "tier"),
    [*((kind, "nvme") for kind in KINDS), *itertools.product(["frozen", "reentrant"], ["cpu", "stage2"])],
)
def test_models_of_other_kinds_equal_torch(kind: str, tier: str, swap: Path) -> None:
    """Frozen units, recomputation, layers called again, other memory orders, several forwards: as in torch.
    Two ranks, values and gradients."""
    make, loss_of = KINDS[kind]
    check_any(make, loss_of, TIERS[tier], swap, num_ranks=2, steps=3)


@pytest.mark.parametrize("kind", ["frozen", "checkpointed", "reentrant", "shared-layer", "nested"])
def test_models_of_other_kinds_are_right_when_late(kind: str, swap: Path) -> None:
    """What they wait for is waited for, too.
    Two ranks with late collectives; the stacks in few frames."""
    make, loss_of = KINDS[kind]
    options = {"device_budget": models.stack_budget(3)} if loss_of is models.stack_loss else {}
    check_any(make, loss_of, options, swap, num_ranks=2, steps=3, is_late=True)


@pytest.mark.parametrize("tier", ["nvme", "stage1"])
def test_mixed_dtypes_follow_one_rank(tier: str, swap: Path) -> None:
    """float32 and bfloat16 parameters in one model, one stored by columns, train together.
    Three ranks on equal batches against one, whose gradients are the average to a rounding."""
    (alone, grads), *_ = ranks.run(1, train_mixed, TIERS[tier], swap)
    for ours, our_grads in ranks.run(3, train_mixed, TIERS[tier], swap):
        for name, value in alone.items():
            assert ours[name].dtype is value.dtype
            assert ours[name].stride() == value.stride()
            assert (ours[name].float() - value.float()).abs().max() <= 4e-3, name
            assert torch.allclose(our_grads[name], grads[name], rtol=0.05, atol=1e-3), name


def train_mixed(group: Any, rank: int, options: dict[str, Any], swap: Path) -> tuple[Values, Values]:
    with nvo.offload(mixed(), nvme_path=swap, mesh=group, **options) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(4):
            opt.zero_grad()
            x = torch.randn(4, 17, generator=torch.Generator().manual_seed(step))
            model(x).pow(2).mean().backward()
            opt.step()
        return values_of(model), {name: p.grad.clone() for name, p in model.named_parameters()}


def adversaries(rank: int, num_ranks: int, offload: Callable[[nn.Module, str], nn.Module], adamw: Any) -> Values:
    """Train a generator and a discriminator that is frozen meanwhile; return the values of both."""
    torch.manual_seed(0)
    generator = offload(nn.Sequential(nn.Linear(5, 21), nn.ReLU(), nn.Linear(21, 9)), "generator")
    judge = offload(nn.Sequential(nn.Linear(9, 21), nn.ReLU(), nn.Linear(21, 1)), "judge")
    opt_generator, opt_judge = adamw(generator.parameters(), lr=1e-3), adamw(judge.parameters(), lr=1e-3)

    def draw(step: int, width: int) -> list[torch.Tensor]:
        every = range(num_ranks) if rank < 0 else [rank]
        return [torch.randn(4, width, generator=torch.Generator().manual_seed(step * 10 + one)) for one in every]

    for step in range(4):
        pairs = zip(draw(step, 5), draw(step + 50, 9), strict=True)
        losses = [judge(generator(z).detach()).sigmoid().mean() - judge(x).sigmoid().mean() for z, x in pairs]
        (sum(losses) / len(losses)).backward()
        opt_judge.step()
        opt_judge.zero_grad()
        judge.requires_grad_(False)
        losses = [-judge(generator(z)).sigmoid().mean() for z in draw(step + 100, 5)]
        (sum(losses) / len(losses)).backward()
        opt_generator.step()
        opt_generator.zero_grad()
        judge.requires_grad_(True)
    named = [*generator.named_parameters("generator"), *judge.named_parameters("judge")]
    return {name: p.detach().clone() for name, p in named}


def train_adversaries(group: Any, rank: int, options: dict[str, Any], swap: Path) -> Values:
    with contextlib.ExitStack() as stack:

        def offload(model: nn.Module, name: str) -> Any:
            return stack.enter_context(nvo.offload(model, nvme_path=swap, mesh=group, name=name, **options))

        return adversaries(rank, group.size(), offload, nvo.optim.AdamW)


@pytest.mark.parametrize(("tier", "is_late"), [("nvme", False), ("stage2", False), ("cpu", True), ("nvme", True)])
def test_two_models_at_once_keep_apart(tier: str, is_late: bool, swap: Path) -> None:
    """Two models whose forwards and backwards run through each other, one frozen at times, equal torch.
    A generator and a discriminator on two ranks."""
    expected = adversaries(-1, 2, lambda model, _: model, torch.optim.AdamW)
    for ours in ranks.run(2, train_adversaries, TIERS[tier], swap, is_late=is_late):
        assert_close(ours, expected)


# ---- groups


def train_in(group: Any, rank: int, kind: str, swap: Path) -> Values | None:
    """Train on some of the ranks, named in a way of `kind`; None where this one isn't of them."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh: Any = None
    share, num_ranks = rank, 3
    if kind == "subgroup":
        mesh, share, num_ranks = torch.distributed.new_group([1, 2]), rank - 1, 2
        if rank == 0:
            return None
    elif kind == "mesh":
        mesh = DeviceMesh.from_group(group, "cpu")
    elif kind == "dp-of-mesh":
        mesh = torch.distributed.init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "tp"))["dp"]
    with nvo.offload(models.tiny(), nvme_path=swap, **({} if mesh is None else {"mesh": mesh})) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            models.tiny_loss(model, step * num_ranks + share).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
        return values_of(model)


@pytest.mark.parametrize("kind", ["world", "subgroup", "mesh", "dp-of-mesh"])
def test_the_group_is_the_world_or_what_mesh_says(kind: str, swap: Path) -> None:
    """All ranks, some, a DeviceMesh, a dimension of one: those share the model.
    Against torch with as many ranks; the subgroup is without rank 0 of the world."""
    found = [values for values in ranks.run(3, train_in, kind, swap) if values is not None]
    assert len(found) == (2 if kind == "subgroup" else 3)
    for ours in found:
        assert_close(ours, torch_values("tiny", len(found))[0])


def offload_in_two_dimensions(group: Any, rank: int, swap: Path) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "tp"))
    nvo.offload(models.tiny(), nvme_path=swap, mesh=mesh)


def test_a_mesh_of_two_dimensions_is_refused(swap: Path) -> None:
    """The error says which to pass.
    A mesh of 3 times 1."""
    for outcome in ranks.outcomes(3, offload_in_two_dimensions, swap):
        assert (outcome.kind, "mesh['dp']" in outcome.message) == ("ConfigError", True), outcome


# ---- refusals and errors


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 34), nn.ReLU(), nn.Linear(34, 7))


def make_by_rank(group: Any, rank: int, kind: str, swap: Path) -> None:
    """Offload what differs on the last rank."""
    model, options = models.tiny(), {}
    if rank == group.size() - 1:
        match kind:
            case "shape":
                model = wide()
            case "number":
                model.append(nn.Linear(7, 7))
            case "dtype":
                model = model.to(torch.bfloat16)
            case "frozen":
                model[0].requires_grad_(False)
            case "name":
                model = nn.ModuleDict({"a": model[0], "b": model[2]})
            case "tier":
                options = {"param_offload": "cpu", "optimizer_offload": "nvme"}
            case "stage":
                options = {"param_offload": "none", "optimizer_offload": "nvme", "zero_stage": 1}
            case "budget":
                options = {"device_budget": "1MiB"}
            case "update":
                options = {"update": "blocking"}
    nvo.offload(model, nvme_path=swap, mesh=group, **options)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", "names and shapes"),
        ("number", "number of parameters"),
        ("dtype", "differs"),
        ("frozen", "trainable"),
        ("name", "names"),
        ("tier", "param_offload"),
        ("stage", "param_offload"),
        ("budget", "device_budget"),
        ("update", "update"),
    ],
)
def test_ranks_with_different_models_or_arguments_are_refused(kind: str, words: str, swap: Path) -> None:
    """Every rank raises the same ConfigError, which names what differs.
    The last of three ranks differs in one thing."""
    found = ranks.outcomes(3, make_by_rank, kind, swap)
    for outcome in found:
        assert isinstance(outcome, ranks.RankError)
        assert (outcome.kind, words in outcome.message) == ("ConfigError", True), outcome
        assert "rank 2" in outcome.message
        assert outcome.message == found[0].message
    assert not list(swap.iterdir())


def fail_on_one(group: Any, rank: int, kind: str, swap: Path) -> None:
    """Offload with something wrong on rank 1 alone."""
    model: Any = models.tiny()
    options: dict[str, Any] = {"nvme_path": swap, "mesh": group}
    if rank == 1:
        match kind:
            case "no path":
                del options["nvme_path"]
            case "missing path":
                options["nvme_path"] = swap / "missing" / "folder"
            case "unknown tier":
                options["param_offload"] = "disk"
            case "unknown argument":
                options["paths"] = swap
            case "no module":
                model = [1, 2]
            case "sparse":
                model.add_module("script", torch.jit.script(nn.Linear(2, 2)))
    nvo.offload(model, **options)


@pytest.mark.parametrize("kind", ["no path", "missing path", "unknown tier", "unknown argument", "no module", "sparse"])
def test_what_is_wrong_on_one_rank_is_raised_on_all(kind: str, swap: Path) -> None:
    """The rank at fault raises its own error, the others a PeerError that repeats it.
    Rank 1 of 3; nothing is left behind."""
    found = ranks.outcomes(3, fail_on_one, kind, swap, is_short=True)
    for rank, outcome in enumerate(found):
        assert isinstance(outcome, ranks.RankError)
        if rank == 1:
            assert outcome.kind == "ConfigError", outcome
        else:
            assert outcome.kind == "PeerError", outcome
            assert "rank 1 failed" in outcome.message, outcome
            assert found[1].message.split(".")[0] in outcome.message
    assert not list(swap.iterdir())


def wrap_it(group: Any, rank: int, options: dict[str, Any], swap: Path) -> None:
    with nvo.offload(models.tiny(), nvme_path=swap, mesh=group, **options) as model:
        nn.parallel.DistributedDataParallel(model, process_group=group)


@pytest.mark.parametrize("tier", ["nvme", "stage1"])
def test_distributed_data_parallel_around_an_offloaded_model_is_refused(tier: str, swap: Path) -> None:
    """The error says that the model is used as it is.
    On two ranks."""
    for outcome in ranks.outcomes(2, wrap_it, TIERS[tier], swap, is_short=True):
        assert (outcome.kind, "Use the model as it is" in outcome.message) == ("UsageError", True), outcome


def fail_in_store(group: Any, rank: int, options: dict[str, Any], swap: Path, number: int) -> None:
    """Train on a simulated disk whose request `number` fails on rank 1."""
    import errno

    from nvoffload import backend
    from nvoffload.io.sim import Sim, open_sim_engine

    sim = Sim(seed=5, fail={number: errno.EIO} if rank == 1 else {})

    def open_twin(kind: str, *, block_bytes: int, queue_depth: int) -> Any:
        return open_sim_engine(sim, block_bytes=block_bytes, queue_depth=queue_depth)

    real, backend.open_engine = backend.open_engine, open_twin
    try:
        with nvo.offload(models.stack(), nvme_path=swap, mesh=group, keep="never", **options) as model:
            opt = nvo.optim.AdamW(model.parameters())
            for step in range(20):
                models.stack_loss(model, step).backward()
                opt.step()
                opt.zero_grad()
            model.flush()
    finally:
        backend.open_engine = real


@pytest.mark.parametrize(("tier", "number"), [("nvme", 1), ("nvme", 40), ("nvme", 150), ("stage1-nvme", 60)])
def test_a_fault_of_one_rank_reaches_the_others(tier: str, number: int, swap: Path) -> None:
    """A rank whose disk fails raises its StorageError, the others a PeerError that repeats it.
    One request fails on rank 1 of 3: while parameters are written first, or later."""
    found = ranks.outcomes(3, fail_in_store, TIERS[tier], swap, number, is_short=True)
    for rank, outcome in enumerate(found):
        assert isinstance(outcome, ranks.RankError)
        if rank == 1:
            assert outcome.kind == "StorageError", outcome
        else:
            assert outcome.kind == "PeerError", outcome
            assert "rank 1 failed: StorageError" in outcome.message, outcome


def leave(group: Any, rank: int, kind: str, swap: Path) -> None:
    """Rank 1 does something else after a step."""
    with nvo.offload(models.t2(), nvme_path=swap, mesh=group) as model:
        opt = nvo.optim.AdamW(model.parameters())
        for step in range(4):
            if rank == 1 and step == 2:
                match kind:
                    case "raises":
                        raise ValueError("a batch is broken")
                    case "closes":
                        return
                    case "skips a step":
                        continue
                    case "skips a backward":
                        models.t2_loss(model, step)
                        continue
                    case "reads":
                        next(model.parameters()).detach().clone()
                    case "steps twice":
                        opt.step()
            models.t2_loss(model, step).backward()
            if rank == 1 and step == 2 and kind == "edits":
                next(model.parameters()).grad.add_(1)
            opt.step()
            if not (rank == 1 and step == 2 and kind == "keeps gradients"):
                opt.zero_grad()
        model.flush()


LEAVES = ["raises", "closes", "skips a step", "skips a backward", "reads", "edits"]


@pytest.mark.parametrize("kind", LEAVES)
def test_a_rank_that_does_something_else_stops_the_others(kind: str, swap: Path) -> None:
    """Nobody hangs when one rank raises, ends, or does other things than the rest: the others raise PeerError.
    Rank 1 of 3, in the third step."""
    found = ranks.outcomes(3, leave, kind, swap, is_short=True)
    for rank, outcome in enumerate(found):
        if rank == 1 and kind in ("raises", "closes"):
            assert outcome is None if kind == "closes" else outcome.kind == "ValueError", outcome
        else:
            assert isinstance(outcome, ranks.RankError), rank
            assert outcome.kind == "PeerError", outcome


def close_late(group: Any, rank: int, options: dict[str, Any], swap: Path) -> list[Values]:
    """Train and close, each time another rank later than the rest; return what a model of stage 1 is then."""
    found = []
    for turn in range(4):
        model = nvo.offload(models.stack(), nvme_path=swap, mesh=group, **options)
        opt = nvo.optim.AdamW(model.parameters())
        for step in range(2):
            models.stack_loss(model, step).backward()
            opt.step()
        time.sleep(0.2 * (turn % group.size() == rank))
        model.close()
        if options.get("zero_stage") == 1:
            found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("tier", ["nvme", "cpu", "stage1"])
def test_ranks_may_close_at_different_moments(tier: str, swap: Path) -> None:
    """After the same steps every rank closes without an error, however long after the others.
    Two ranks, each 0.2 s later in turn; with whole parameters both have the same values then."""
    first, other = ranks.run(2, close_late, TIERS[tier], swap)
    for ours, theirs in zip(first, other, strict=True):
        assert_equal_bits(ours, theirs)
        assert_equal_bits(ours, first[0])
    assert not list(swap.rglob("*.swap"))


def test_the_pool_works_after_errors(swap: Path) -> None:
    """Errors leave the processes usable.
    A training after all of the above, three times."""
    for tier in ("nvme", "cpu", "stage1"):
        assert_trained(ranks.run(3, train, "tiny", TIERS[tier], swap), "tiny", 3)
