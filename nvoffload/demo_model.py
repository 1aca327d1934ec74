"""A decoder-only transformer over bytes, in a page of plain PyTorch. Knows nothing of offloading."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Size:
    """Width and number of blocks; heads are 64 wide."""

    width: int
    num_blocks: int

    @property
    def numel(self) -> int:
        """Parameters: 12 width^2 + 8 width a block, embedding, positions, final norm, head."""
        return self.num_blocks * (12 * self.width**2 + 8 * self.width) + (2 * VOCABULARY + 1024 + 2) * self.width


SIZES = {
    "10M": Size(384, 5),
    "30M": Size(512, 9),
    "100M": Size(768, 14),
    "350M": Size(1536, 12),
    "700M": Size(1536, 24),
    "1B": Size(2048, 20),
    "3B": Size(2560, 38),
    "7B": Size(4096, 35),
    "10B": Size(4096, 50),
}


class Block(nn.Module):
    """Pre-norm attention and a four times wider MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, width // 64, 64).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        grown: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + grown


class ByteTransformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(1024, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.num_blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                is_last = name.endswith(("out.weight", "down.weight"))  # what a block adds to the residual
                nn.init.normal_(parameter, std=0.02 / (2 * size.num_blocks) ** 0.5 if is_last else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 (batch, length) to logits (batch, length, 256)."""
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = x * x.shape[-1] ** 0.5  # so that the first updates of the blocks don't drown it
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def activation_bytes(size: Size, tokens: int, item_bytes: int) -> int:
    """Estimate what autograd keeps and a backward adds, in tensors of (tokens, width).

    A block keeps 16: the input and output of two norms (4), qkv (3), attention's output (1), the MLP's
    middle before and after the gelu (8). Once: embedding, final norm and its output (4), the gradients in
    flight within one block (8), and over the vocabulary the logits, their log-softmax and its gradient (3).
    """
    return item_bytes * tokens * ((16 * size.num_blocks + 12) * size.width + 3 * VOCABULARY)
