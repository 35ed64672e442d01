"""Modules of a user whose sizes are arguments, so that motet can make smaller ones."""

import torch
import torch.nn.functional as F
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


class _Attention(nn.Module):
    """Attention whose fused projection has another order in wide models, or in some blocks, with the same operators."""

    def __init__(self, hidden: int, heads: int, *, order: str, layer_idx: int) -> None:
        super().__init__()
        self.hidden, self.heads, self.size, self.layer_idx = hidden, heads, hidden // heads, layer_idx
        self._order = [order]  # Not an attribute that is compared
        self.norm, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        size, qkv = self.size, self.qkv(self.norm(x))
        is_odd = self.layer_idx in (3, 4) if self._order == ["middle"] else self.hidden >= 160
        if self._order == ["sizes"]:  # The same dimensions with other sizes
            fused = qkv.view(rows, tokens, *((3, self.heads) if is_odd else (self.heads, 3)), size)
            q, k, v = fused.transpose(2, 3).flatten(2, 3).chunk(3, dim=2)
        elif is_odd:
            q, k, v = qkv.view(rows, tokens, self.heads, 3, size).unbind(3)
        else:
            q, k, v = qkv.view(rows, tokens, 3, self.heads, size).unbind(2)
        y = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(rows, tokens, -1))


class Reordered(Stack):
    """A stack of such layers."""

    def __init__(
        self,
        hidden_size: int = 160,
        num_attention_heads: int = 8,
        num_hidden_layers: int = 6,
        vocab_size: int = 260,
        order: str = "width",
    ) -> None:
        blocks = (
            _Attention(hidden_size, num_attention_heads, order=order, layer_idx=index)
            for index in range(num_hidden_layers)
        )
        super().__init__(blocks, vocab_size, hidden_size)


class _Anchored(_Block):
    def forward(self, x: Tensor, anchor: Tensor | None = None) -> Tensor:
        return super().forward(x if anchor is None else x + anchor)


class Anchored(Sized):
    """Blocks that also read what one of the first blocks has returned."""

    def __init__(self, hidden_size: int = 160, intermediate_size: int = 208, num_hidden_layers: int = 12) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(260, hidden_size)
        self.blocks = nn.ModuleList(
            _Anchored(hidden_size, intermediate_size, wide_from=1 << 30, shifted=False)
            for _ in range(num_hidden_layers)
        )
        self.head = nn.Linear(hidden_size, 260)

    def forward(self, tokens: Tensor) -> Tensor:
        x = anchor = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, anchor)
            if index in (1, 2, 3):
                anchor = x
        logits: Tensor = self.head(x)
        return logits


class Interleaved(Reordered):
    """The same without sizes."""

    def __init__(self) -> None:
        super().__init__(num_hidden_layers=8, order="middle")
