"""Small models whose sizes divide by nothing, and loops over them."""

import torch
from torch import nn
from torch.nn import functional as F


def tiny(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Linear(17, 33), ReLU, Linear(33, 7)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(17, 33), nn.ReLU(), nn.Linear(33, 7)).to(dtype)


def tiny_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Mean square of the output on a batch of 4 made from `step`."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 17, generator=torch.Generator().manual_seed(step))
    return model(x.to(dtype)).float().pow(2).mean()


class Block(nn.Module):
    """Pre-norm attention and MLP of one width; the key projection has no bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class T2(nn.Module):
    """Embedding(101, 24), two blocks, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 24)
        self.blocks = nn.ModuleList([Block(24, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 101, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def t2(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Return a T2 with seeded weights."""
    torch.manual_seed(seed)
    return T2().to(dtype)


def t2_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Next-token loss on two rows of 11 tokens made from `step`."""
    ids = torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


class Stack(nn.Module):
    """Embedding and Linear layers of one width: more units of one size than frames."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def stack(dtype: torch.dtype = torch.float32, seed: int = 0, width: int = 37, depth: int = 6) -> nn.Module:
    """Return a Stack with seeded weights."""
    torch.manual_seed(seed)
    return Stack(width, depth).to(dtype)


def stack_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Mean square of the output on 3 rows of 5 tokens made from `step`."""
    ids = torch.randint(0, 101, (3, 5), generator=torch.Generator().manual_seed(step))
    return model(ids).float().pow(2).mean()


def stack_budget(num_frames: int, dtype: torch.dtype = torch.float32, width: int = 37) -> int:
    """Return the device_budget that gives a Stack so many frames beside its embedding."""
    start_numel = 64 // dtype.itemsize  # parameters start at multiples of 64 bytes, units at those of pages

    def page_bytes(*numels: int) -> int:
        nbytes = sum(-(-numel // start_numel) * 64 for numel in numels)
        return -(-nbytes // 4096) * 4096

    return page_bytes(101 * width) + num_frames * page_bytes(width * width, width)
