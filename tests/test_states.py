"""`optimizer.state[p]`: moments that are read when they are asked for."""

from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch

import nvoffload as nvo

TIERS = {
    "nvme": {},
    "cpu": {"param_offload": "cpu"},
    "none": {"param_offload": "none"},
    "none-nvme": {"param_offload": "none", "optimizer_offload": "nvme"},
}
MAKE = {"tiny": (models.tiny, models.tiny_loss), "t2": (models.t2, models.t2_loss)}
Moments = dict[str, tuple[torch.Tensor, torch.Tensor]]


def moments_of(model: Any, opt: Any) -> Moments:
    return {name: (opt.state[p]["exp_avg"], opt.state[p]["exp_avg_sq"]) for name, p in model.named_parameters()}


def torch_moments(case: str, steps: int, num_ranks: int = 1) -> Moments:
    make, loss = MAKE[case]
    model = make()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        opt.zero_grad()
        (sum(loss(model, step * num_ranks + rank) for rank in range(num_ranks)) / num_ranks).backward()
        opt.step()
    return moments_of(model, opt)


def offloaded_moments(group: Any, rank: int, case: str, options: dict[str, Any], swap: Path, steps: int) -> Moments:
    make, loss = MAKE[case]
    num_ranks = torch.distributed.get_world_size(group) if group is not None else 1
    with nvo.offload(make(), nvme_path=swap, mesh=group, buffer_size="64KiB", **options) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(steps):
            opt.zero_grad()
            loss(model, step * num_ranks + rank).backward()
            opt.step()
        return moments_of(model, opt)


def assert_moments(ours: Moments, theirs: Moments) -> None:
    assert ours.keys() == theirs.keys()
    for name, pair in theirs.items():
        for mine, other in zip(ours[name], pair, strict=True):
            assert mine.shape == other.shape and mine.stride() == other.stride()
            assert torch.allclose(mine, other, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("case", MAKE)
def test_moments_equal_torch(case: str, steps: int, tier: str, swap: Path) -> None:
    """Both moments of every parameter are torch's after 1 and 5 steps, also while the last update is pending."""
    assert_moments(offloaded_moments(None, 0, case, TIERS[tier], swap, steps), torch_moments(case, steps))


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_moments_of_several_ranks_are_whole(num_ranks: int, tier: str, swap: Path) -> None:
    """Each rank keeps a part of the moments, and reads all of them."""
    for found in ranks.run(num_ranks, offloaded_moments, "t2", TIERS[tier], swap, 3):
        assert_moments(found, torch_moments("t2", 3, num_ranks))


def test_moments_look_like_a_dict_and_are_read_when_asked_for(swap: Path) -> None:
    """Keys, membership and repr read nothing; zero before the first step; setting one is refused by name."""
    with nvo.offload(models.tiny(), nvme_path=swap) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        state = opt.state[next(model.parameters())]
        assert list(state) == ["step", "exp_avg", "exp_avg_sq"] and len(state) == 3 and "exp_avg" in state
        assert "read when asked for" in repr(opt.state)
        assert state["exp_avg"].abs().max() == 0 and state.get("nothing", 5) == 5
        assert dict(state.items())["exp_avg_sq"].shape == (33, 17)
        with pytest.raises(nvo.UsageError, match="exp_avg"):
            state["exp_avg"] = torch.zeros(33, 17)
    with pytest.raises(nvo.UsageError):
        state["exp_avg"]


def test_a_frozen_parameter_has_only_a_step(swap: Path) -> None:
    """There are no moments of what is not trained."""
    model = models.tiny()
    model[0].weight.requires_grad_(False)
    with nvo.offload(model, nvme_path=swap):
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        assert list(opt.state[model[0].weight]) == ["step"]


def test_a_flipped_bit_in_a_moment_is_told(swap: Path) -> None:
    """The checksum of the state is looked at before a moment is given out."""
    with nvo.offload(models.tiny(), nvme_path=swap) as model:
        opt = nvo.optim.AdamW(model.parameters(), lr=1e-3)
        models.tiny_loss(model, 0).backward()
        opt.step()
        model.flush()
        path = next(swap.rglob("*.swap"))
        content = bytearray(path.read_bytes())
        zone = model._nvoffload.backend.store.state_zones[0]
        for slot in (0, 1):
            content[zone.zone.place(0, slot) + 8] ^= 1
        path.write_bytes(content)
        with pytest.raises(nvo.CorruptionError, match=r"0\.weight"):
            opt.state[model[0].weight]["exp_avg"]
