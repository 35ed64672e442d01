"""Models of blocks, each of which does something to the residual stream; written for one device."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCABULARY = 8, 20


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class TokenNorm(nn.Module):
    """A norm over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(1, keepdim=True) + 1).sqrt() * self.weight


class TokenConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.mT).mT


class StreamBlock(nn.Module):
    """norm and MLP, with `change` of the stream in the block's own forward, or in a module."""

    def __init__(self, change: Callable[[Tensor], Tensor] | None = None, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.mlp, self.change, self.inner = nn.LayerNorm(WIDTH), Mlp(), change, inner or nn.Identity()

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        x = x if self.change is None else self.change(x)
        return x + self.mlp(self.norm(self.inner(x)))


class StreamModel(nn.Module):
    """tokens [R, T] -> [R, T, V]."""

    def __init__(self, make_block: Callable[[], nn.Module] = StreamBlock, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ScaledBetweenBlocks(StreamModel):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = 0.5 * block(x)
        return self.head(x)


class ReadsFirstToken(StreamModel):
    """Reads the first token of what the first block returns."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, sums = self.embedding(tokens), []
        for block in self.blocks:
            x = block(x)
            sums.append(x[:, :1])
        return self.head(x + sums[0])


class AuxiliaryLoss(StreamModel):
    """Adds a number that blocks leave as an attribute."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + sum(block.loss for block in self.blocks)


class LossBlock(StreamBlock):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        self.loss = x.square().mean()
        return super().forward(x)


def add_positions(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1], dtype=x.dtype).view(1, -1, 1)


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def detach_half(x: Tensor) -> Tensor:
    """Right forward, and a gradient that depends on the number of tokens."""
    return x.detach() + (x - x.detach()) / x.shape[1]


# Models whose stream stays whole, and a part of the reason.
UNSPLIT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mean over tokens": (lambda: StreamModel(lambda: StreamBlock(lambda x: x - x.mean(1, keepdim=True))), "blocks.0"),
    "rolled residual": (lambda: StreamModel(lambda: StreamBlock(lambda x: x.roll(1, 1))), "blocks.0"),
    "cumulative sum": (lambda: StreamModel(lambda: StreamBlock(lambda x: x.cumsum(1))), "blocks.0"),
    "positions by length": (lambda: StreamModel(lambda: StreamBlock(add_positions)), "blocks.0"),
    "attention in the block": (lambda: StreamModel(lambda: StreamBlock(attend)), "blocks.0"),
    "noise": (lambda: StreamModel(lambda: StreamBlock(noisy)), "blocks.0"),
    "between blocks": (ScaledBetweenBlocks, "blocks.1 does not read the output of the block before it"),
    "first token": (ReadsFirstToken, "something outside of the blocks reads"),
    "auxiliary loss": (lambda: AuxiliaryLoss(LossBlock), "something outside of the blocks reads"),
    "gradient by length": (lambda: StreamModel(lambda: StreamBlock(detach_half)), "the gradient of"),
}
