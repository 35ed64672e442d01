"""Modules with a region that no split computes rightly, each for a reason of its kind, and two that only look so."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from modules_to_split import VOCABULARY, ModuleAndForwards, forwards_of, tokens
from torch import Tensor, nn

WIDTH, INNER, HEADS = 16, 24, 4


class Residual(nn.Module):
    """An embedding, then blocks whose outputs are added to the stream."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


class Mlp(nn.Module):
    """down(act(up x)) with a function of the inner activations."""

    def __init__(self, act: Callable[[Tensor], Tensor], inner: int = INNER, *, bias: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner, bias=bias), nn.Linear(inner, WIDTH)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down(self.act(self.up(x)))
        return inner


class Attention(nn.Module):
    """Attention whose steps can be replaced."""

    def __init__(self, *, heads: int = HEADS, size: int = -1, norm: bool = False, mixes: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads, self.size, self.mixes = heads, size, mixes
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, length, _ = x.shape
        heads = self.heads

        def split(y: Tensor) -> Tensor:
            if self.mixes:  # Heads are stretches of the row, in which tokens and features mix
                return y.reshape(rows, heads, length, self.size)
            return y.view(rows, length, heads, self.size).transpose(1, 2)

        scores = split(self.norm(self.q(x))) @ split(self.k(x)).mT
        if bias is not None:
            scores = scores + bias
        mixed = scores.softmax(-1) @ split(self.v(x))
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class AlibiModel(nn.Module):
    """The slopes of all heads are an argument of the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        slopes = 0.5 ** torch.arange(1, HEADS + 1)
        bias = -(places - places[:, None]).abs() * slopes[:, None, None]
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x, bias)
        return x


class InnerReturned(Mlp):
    """The input of the row layer is returned too."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.up(x))
        out: Tensor = self.down(inner) + inner.mean(-1, keepdim=True)
        return out


class ReadsHeads(nn.Module):
    """The block reads the number of heads of its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x) / self.attention.heads
        return out


class ReadsWeight(Residual):
    """The result depends on the norm of a weight, as an auxiliary loss would."""

    def forward(self, ids: Tensor) -> Tensor:
        blocks: Any = self.blocks
        return super().forward(ids) * (1 + blocks[0].up.weight.norm())


class _ClippedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-0.01, 0.01)


class ClippingLinear(nn.Linear):
    """A linear layer that clips the gradient of its input, and not that of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        clip_gradient: Any = _ClippedGradient.apply
        return super().forward(clip_gradient(x))


class WidthInGradient(nn.Linear):
    """A linear layer that divides the gradient of its weight by its width, and not that of its input."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.detach()
        own = F.linear(x.detach(), self.weight - weight) / self.weight.shape[0]
        return F.linear(x, weight, self.bias) + own


class DividesByHeads(nn.Module):
    """The block reads a number of heads that its attention has, but does not need: this can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(heads=-1, size=WIDTH // HEADS)
        self.attention.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x) / self.attention.num_heads
        return out


class GatedMlp(Mlp):
    """One number for each token, from what the column layer reads, scales the inner activations: this can be split."""

    def __init__(self) -> None:
        super().__init__(F.gelu)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)) * self.gate(x).sigmoid())
        return out


def _with_clipping() -> nn.Module:
    block = Mlp(F.gelu)
    block.up = ClippingLinear(WIDTH, INNER)
    return Residual(block)


def _with_width_in_gradient() -> nn.Module:
    block = Mlp(F.gelu)
    block.up = WidthInGradient(WIDTH, INNER)
    return Residual(block)


def _gradients_mix(inner: Tensor) -> Tensor:
    """The identity, whose gradient is that of a sum over all features."""
    total = inner.sum(-1, keepdim=True)
    return F.gelu(inner) + total - total.detach()


def _long_sequences_mix(inner: Tensor) -> Tensor:
    return inner.flip(-1) if inner.shape[1] > 8 else F.gelu(inner)


def _branch_on_sum(inner: Tensor) -> Tensor:
    return F.gelu(inner) if inner.square().sum() > 0 else inner


def _select_by_sum(inner: Tensor) -> Tensor:
    return torch.where(inner.square().sum() > 0, F.gelu(inner), inner)


def _tied() -> nn.Module:
    first, second = Mlp(F.gelu), Mlp(F.gelu)
    second.up.weight = first.up.weight
    return Residual(first, second)


# Name -> the model, and a part of the reason why its layers stay whole.
ADVERSARIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "norm across heads": (lambda: Residual(Attention(norm=True)), "normalized_shape"),
    "norm across heads without parameters": (
        lambda: Residual(Mlp(lambda h: h / h.norm(dim=-1, keepdim=True))),
        "do not add up",
    ),
    "reduction over the split dimension": (
        lambda: Residual(Mlp(lambda h: h * h.sum(-1, keepdim=True))),
        "do not add up",
    ),
    "softmax over the inner width": (lambda: Residual(Mlp(lambda h: h.softmax(-1))), "do not add up"),
    "reshape that mixes heads": (lambda: Residual(Attention(mixes=True)), "do not add up"),
    "ALiBi as an argument": (AlibiModel, "do not add up"),
    "weight shared by two layers": (_tied, "is also a parameter of another module"),
    "inner activations returned": (lambda: Residual(InnerReturned(F.gelu)), "result depends on something"),
    "cumulative sum over features": (lambda: Residual(Mlp(lambda h: h.cumsum(-1))), "do not add up"),
    "branch on a sum over features": (lambda: Residual(Mlp(_branch_on_sum)), "branch or comparison"),
    "choice by a sum over features": (lambda: Residual(Mlp(_select_by_sum)), "branch or comparison"),
    "roll of features": (lambda: Residual(Mlp(lambda h: h.roll(1, -1))), "do not add up"),
    "number of heads read by the block": (lambda: Residual(ReadsHeads()), "result depends on something"),
    "weight read by the model": (lambda: ReadsWeight(Mlp(F.gelu)), "result depends on something"),
    "gradients mix features": (lambda: Residual(Mlp(_gradients_mix)), "gradient"),
    "gradient of an input that is no sum": (_with_clipping, "the gradients of the input of up do not add up"),
    "gradient of a weight by its width": (_with_width_in_gradient, "the gradients of the parts of up.weight are not"),
    "long sequences mix features": (lambda: Residual(Mlp(_long_sequences_mix)), "do not add up"),
    "padding with a gradient": (lambda: Residual(Mlp(torch.sigmoid, 25)), "padding"),
}


def adversary(name: str) -> ModuleAndForwards:
    """The model of this name with its forwards."""
    module = ADVERSARIES[name][0]()
    return module, forwards_of(lambda length: module(tokens(length)))
