"""Modules of a user whose sizes are arguments, so that motet can make smaller ones."""

import torch
from torch import Tensor, nn

from parallel.attention_styles import LanguageModel
from train.trainable_user_models import Stack


class _Block(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, *, wide_from: int, shifted: bool) -> None:
        super().__init__()
        self.norm, self.hidden_size, self.wide_from = nn.LayerNorm(hidden_size), hidden_size, wide_from
        self.up, self.down = nn.Linear(hidden_size, intermediate_size), nn.Linear(intermediate_size, hidden_size)
        self.shifted = shifted

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        if self.hidden_size >= self.wide_from:  # What one rank has of a row is not its mean
            hidden = hidden - hidden.mean(-1, keepdim=True)
        if self.shifted:
            hidden = hidden + 1
        return x + self.down(hidden)


class Sized(Stack):
    """A stack of blocks; from a width on they take another way, and so does the block `odd`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_hidden_layers: int,
        num_attention_heads: int = 4,
        vocab_size: int = 260,
        wide_from: int = 1 << 30,
        odd: int = -1,
    ) -> None:
        assert hidden_size % num_attention_heads == 0
        shifted = (index == odd for index in range(num_hidden_layers))
        blocks = (_Block(hidden_size, intermediate_size, wide_from=wide_from, shifted=each) for each in shifted)
        super().__init__(blocks, vocab_size, hidden_size)


class Unsized(Sized):
    """The same with sizes of its own."""

    def __init__(self) -> None:
        super().__init__(160, 208, 6, vocab_size=5002)


def four_heads(hidden_size: int, num_hidden_layers: int, vocab_size: int) -> LanguageModel:
    """A model with as many heads whatever its width."""
    return LanguageModel("nanoGPT", num_hidden_layers, 4, hidden_size, vocab_size)


def branching_helper(x: Tensor) -> Tensor:
    """A function that a module of another file calls."""
    return x * 1.5
