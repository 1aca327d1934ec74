"""Random programs: whatever order a loop calls things in, every tier gives the bits that plain torch gives.

A program runs on three models at once: offloaded with two frames and the smallest pool, offloaded with
everything in memory, and not offloaded at all. The last takes its new values from the second after each
step, so that forwards, gradients and exceptions are compared with torch itself. NVO_RANDOM_PROGRAMS=N
tries N programs per tier instead of a few.
"""

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import nvoffload as nvo

WIDTH, VOCABULARY, NUM_BLOCKS = 16, 37, 5
NUM_PROGRAMS = int(os.environ.get("NVO_RANDOM_PROGRAMS", "8"))
SHRINKS = "NVO_RANDOM_SHRINK" in os.environ  # takes minutes
pytestmark = pytest.mark.timeout(60 + 30 * NUM_PROGRAMS)


class Boom(Exception):
    """What a fuse throws."""


class Fuse(torch.autograd.Function):
    """Identity; its backward throws if the block's fuse says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.block.fuse == "backward":
            raise Boom("backward")
        return grad, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(5 * WIDTH, WIDTH)
        self.fuse = ""
        self.clamps = False

    def forward(self, x: Tensor) -> Tensor:
        if self.clamps:
            with torch.no_grad():
                self.up.weight.clamp_(-0.2, 0.2)
        h = F.gelu(self.up(self.norm(x)))
        if self.fuse == "forward":
            raise Boom("forward")
        return Fuse.apply(x + self.down(h), self)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, chain: Sequence[int], recompute: tuple[int, int, bool] | None) -> Tensor:
        return self.head(self.norm(self.run_blocks(self.embed(ids), chain, recompute)))

    def run_blocks(self, x: Tensor, chain: Sequence[int], recompute: tuple[int, int, bool] | None) -> Tensor:
        """Run `chain`, positions from `recompute[0]`, `recompute[1]` of them, under checkpoint."""
        start, count, is_reentrant = recompute or (len(chain), 0, False)

        def run(x: Tensor, part: Sequence[int]) -> Tensor:
            for index in part:
                x = self.blocks[index](x)
            return x

        x = run(x, chain[:start])
        if chain[start : start + count]:
            x = checkpoint(run, x, chain[start : start + count], use_reentrant=is_reentrant)
        return run(x, chain[start + count :])


class Side:
    """One of the models, its optimizer, and the losses whose graphs it still holds."""

    def __init__(self, dtype: torch.dtype, swap: Path | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Model().to(dtype)
        self.is_plain = not options
        if options:
            nvo.offload(self.model, nvme_path=swap, **options)
            self.opt: Any = nvo.optim.AdamW(self.model.parameters(), lr=1e-2)
        else:
            self.opt = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.losses: list[Tensor] = []

    @property
    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    @property
    def grads(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


def same(a: Any, b: Any) -> bool:
    """Are two results equal, bit for bit where they are tensors?"""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


CHAINS = strategies.one_of(
    strategies.just(list(range(NUM_BLOCKS))),
    strategies.lists(strategies.integers(0, NUM_BLOCKS - 1), max_size=6),
)
RECOMPUTE = strategies.none() | strategies.tuples(
    strategies.integers(0, 4), strategies.integers(1, 2), strategies.booleans()
)
BLOCKS = strategies.integers(0, NUM_BLOCKS - 1)
PARAMS = strategies.integers(0, 3 + 6 * NUM_BLOCKS - 1)
SEEDS = strategies.integers(0, 7)


class Programs(RuleBasedStateMachine):
    """One random program."""

    swap: Path
    dtype: torch.dtype
    options: dict[str, Any]

    @initialize()
    def begin(self) -> None:
        pool = {"buffer_count": 2, "buffer_size": "64KiB"} if self.options["param_offload"] == "nvme" else {}
        tiers = {**self.options, **pool, "device_budget": device_budget(self.dtype)}
        self.ours = Side(self.dtype, self.swap, **tiers)
        self.twin = Side(self.dtype, None, param_offload="none", optimizer_offload="cpu", update="blocking")
        self.plain = Side(self.dtype, None)
        self.sides = [self.ours, self.twin, self.plain]

    def agree(self, act: Callable[[Side], Any]) -> Any:
        """Let every side act; compare what they return or raise; return it."""
        results: list[Any] = []
        for side in self.sides:
            torch.manual_seed(1)
            try:
                results.append(act(side))
            except Boom as error:
                results.append(str(error))
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error) or "backward through the graph" in str(error), (
                    f"{side.model}: {error}"
                )
                results.append("stale")
        ours, twin, plain = results
        assert same(ours, plain), f"{ours}, torch gives {plain}"
        assert same(twin, plain), f"twin gives {twin}, torch {plain}"
        return ours

    def agree_on_grads(self) -> None:
        ours, twin, plain = (side.grads for side in self.sides)
        assert same(ours, twin)
        params = dict(self.plain.model.named_parameters())
        for (name, param), ours_, theirs in zip(params.items(), twin, plain, strict=True):
            # Torch adds up what comes from both uses of a tied parameter first, and bfloat16 in bfloat16.
            if name == "embed.weight" or self.dtype is torch.bfloat16:
                assert name == "embed.weight" or (ours_ is None) == (theirs is None), name
                param.grad = None if ours_ is None else ours_.to(self.dtype)
            else:
                assert same(ours_, theirs), name

    def loss_of(self, side: Side, seed: int, chain: Sequence[int], recompute: Any, *, is_whole: bool) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if is_whole:
            ids = torch.randint(0, VOCABULARY, (2, 5), generator=generator)
            return side.model(ids, chain, recompute).float().pow(2).mean()
        x = torch.randn(2, 5, WIDTH, generator=generator).to(self.dtype)
        if seed % 2:
            x.requires_grad_()
        return side.model.run_blocks(x, chain, recompute).float().pow(2).mean()

    # ---- rules

    @precondition(lambda self: len(self.ours.losses) < 3)
    @rule(seed=SEEDS, chain=CHAINS, recompute=RECOMPUTE, is_whole=strategies.booleans())
    def forward(self, seed: int, chain: list[int], recompute: Any, is_whole: bool) -> None:
        def act(side: Side) -> Tensor:
            side.losses.append(self.loss_of(side, seed, chain, recompute, is_whole=is_whole))
            return side.losses[-1].detach()

        self.agree(act)

    @precondition(lambda self: self.ours.losses)
    @rule(position=strategies.integers(0, 2), is_retained=strategies.booleans())
    def backward(self, position: int, is_retained: bool) -> None:
        def act(side: Side) -> None:
            loss = side.losses.pop(position % len(side.losses))
            if is_retained:
                side.losses.append(loss)
            if loss.requires_grad:
                loss.backward(retain_graph=is_retained)

        self.agree(act)
        self.agree_on_grads()

    @precondition(lambda self: self.ours.losses)
    @rule(position=strategies.integers(0, 2))
    def drop(self, position: int) -> None:
        self.agree(lambda side: side.losses.pop(position % len(side.losses)).detach())

    @rule(seed=SEEDS, chain=CHAINS, recompute=RECOMPUTE)
    def train(self, seed: int, chain: list[int], recompute: Any) -> None:
        self.forward(seed, chain, recompute, True)
        self.backward(-1, False)
        self.step()
        self.zero(True)

    @rule(seed=SEEDS, chain=CHAINS)
    def ask_for_the_gradient_of_an_input(self, seed: int, chain: list[int]) -> None:
        def act(side: Side) -> Tensor:
            x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
            loss = side.model.run_blocks(x.requires_grad_(), chain, None).float().pow(2).mean()
            return torch.autograd.grad(loss, x)[0]

        self.agree(act)

    @rule(seed=SEEDS, chain=CHAINS, is_whole=strategies.booleans(), is_inference=strategies.booleans())
    def evaluate(self, seed: int, chain: list[int], is_whole: bool, is_inference: bool) -> None:
        def act(side: Side) -> Tensor:
            with torch.inference_mode() if is_inference else torch.no_grad():
                return self.loss_of(side, seed * 2, chain, None, is_whole=is_whole).clone()

        self.agree(act)

    @rule(
        seed=SEEDS,
        chain=CHAINS,
        recompute=RECOMPUTE,
        block=BLOCKS,
        fuse=strategies.sampled_from(["forward", "backward"]),
    )
    def blow(self, seed: int, chain: list[int], recompute: Any, block: int, fuse: str) -> None:
        """A block throws in forward or backward, and the program goes on."""

        def act(side: Side) -> None:
            side.model.blocks[block].fuse = fuse
            try:
                loss = self.loss_of(side, seed, chain, recompute, is_whole=seed % 3 > 0)
                if loss.requires_grad:
                    loss.backward()
            finally:
                side.model.blocks[block].fuse = ""

        self.agree(act)
        self.agree_on_grads()

    @rule(seed=SEEDS, chain=CHAINS, block=BLOCKS)
    def clamp_in_forward(self, seed: int, chain: list[int], block: int) -> None:
        def act(side: Side) -> Tensor:
            side.model.blocks[block].clamps = True
            try:
                loss = self.loss_of(side, seed, chain, None, is_whole=True)
            finally:
                side.model.blocks[block].clamps = False
            loss.backward()
            return loss.detach()

        self.agree(act)
        self.agree_on_grads()

    @rule()
    def step(self) -> None:
        for side in self.sides:
            side.opt.step()
        values = self.twin.values
        with torch.no_grad():
            for p, value in zip(self.plain.model.parameters(), values, strict=True):
                if p.grad is not None:
                    p.copy_(value)

    @rule(to_none=strategies.booleans())
    def zero(self, to_none: bool) -> None:
        self.agree(lambda side: side.opt.zero_grad(set_to_none=to_none))

    @rule(norm=strategies.sampled_from([1e-3, 1.0, 1e3]))
    def clip(self, norm: float) -> None:
        for side in self.sides:
            nn.utils.clip_grad_norm_(side.model.parameters(), norm)
        for p, grad in zip(self.plain.model.parameters(), self.twin.grads, strict=True):
            if p.grad is not None:
                p.grad.copy_(grad)  # torch's norm is a float32 sum: equal to rounding only
        self.agree_on_grads()

    @rule(param=PARAMS)
    def read(self, param: int) -> None:
        self.agree(lambda side: list(side.model.parameters())[param].detach().clone())

    @rule(param=PARAMS, seed=SEEDS, is_copy=strategies.booleans())
    def write(self, param: int, seed: int, is_copy: bool) -> None:
        def act(side: Side) -> None:
            p = list(side.model.parameters())[param]
            with torch.no_grad():
                if is_copy:
                    p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).mul_(0.2))
                else:
                    p.mul_(0.5)

        self.agree(act)

    @rule()
    def flush(self) -> None:
        self.ours.model.flush()

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        try:
            for side in self.sides:
                side.losses.clear()
            gc.collect()
            session = self.ours.model._nvoffload
            self.ours.model.flush()
            assert same(self.ours.values, self.twin.values)
            assert same(self.ours.values, self.plain.values)
            pool = session.backend.pool
            assert pool is None or pool.num_free == pool.buffer_count
            assert not [unit for unit in session.units if unit.pins or unit.depth]
        finally:
            self.ours.model.close()
            self.twin.model.close()


def device_budget(dtype: torch.dtype) -> int:
    """Bytes of two frames and what is kept beside them."""
    torch.manual_seed(0)
    with nvo.offload(Model().to(dtype), param_offload="cpu") as model:
        units = model._nvoffload.units
        framed = [u.spec.nbytes for u in units if not u.spec.is_kept]
        return sum(u.spec.nbytes for u in units if u.spec.is_kept) + 2 * max(framed)


CASES = {
    "nvme": (torch.float32, {"param_offload": "nvme"}),
    "cpu over nvme": (torch.float32, {"param_offload": "cpu", "optimizer_offload": "nvme"}),
    "nvme bf16": (torch.bfloat16, {"param_offload": "nvme"}),
}


@pytest.mark.parametrize("case", CASES)
def test_any_order_of_calls_gives_the_bits_of_memory(case: str, swap: Path) -> None:
    """No order of forwards, backwards, exceptions, steps, reads and writes changes a bit or leaves anything held.
    Random programs on three models side by side, with two frames and the smallest pool."""
    dtype, options = CASES[case]

    class Chosen(Programs):
        pass

    Chosen.swap, Chosen.dtype, Chosen.options = swap, dtype, options
    run_state_machine_as_test(
        Chosen,
        settings=settings(
            max_examples=NUM_PROGRAMS,
            stateful_step_count=30,
            deadline=None,
            phases=[Phase.generate, Phase.shrink] if SHRINKS else [Phase.generate],
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
