"""Decoders of a user with one kind of attention each, some of which mix tokens elsewhere, and batches for them."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.core.batch import Batch

Kind = Literal[
    "plain",
    "dropout",
    "dropout of heads",
    "dropout of all tokens",
    "bidirectional",
    "convolution",
    "mean",
    "late mean",
    "mask",
    "by hand",
    "counts",
    "flat heads",
    "gradient",
]
ENTRIES, WIDTH, HEADS = 40, 16, 2


class AttentionBlock(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3) if kind == "convolution" else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.kind == "mean":
            h = h + h.mean(1, keepdim=True)
        if self.conv is not None:
            h = h + self.conv(F.pad(h.mT, (2, 0))).mT
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        if self.kind == "dropout":
            x = F.dropout(x, 0.2, self.training)
        if self.kind == "dropout of all tokens":
            x = x * F.dropout(torch.ones_like(x[:, :1]), 0.2, self.training)
        return x - x.mean(1, keepdim=True) if self.kind == "late mean" else x

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend, tokens = F.scaled_dot_product_attention, q.shape[2]
        visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        match self.kind:
            case "mask":
                return attend(q, k, v, visible)
            case "by hand":
                return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf")).softmax(-1) @ v
            case "bidirectional":
                return attend(q, k, v)
            case "dropout":
                return attend(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
            case "dropout of heads":
                return attend(F.dropout(q, 0.2, self.training), k, v, is_causal=True)
            case "flat heads":
                return attend(*(x.flatten(0, 1) for x in (q, k, v)), is_causal=True).view_as(q)
            case _:
                return attend(q, k, v, is_causal=True)


class AttentionDecoder(nn.Module):
    """A decoder with learned positions, whose forward takes tokens and positions."""

    def __init__(self, kind: Kind = "plain", blocks: int = 2) -> None:
        super().__init__()
        self.kind, self.embedding, self.positions = kind, nn.Embedding(ENTRIES, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(AttentionBlock(kind) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, ENTRIES)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None or self.kind == "counts":
            positions = torch.arange(tokens.shape[1])
        x: Tensor = self.embedding(tokens) + self.positions(positions)
        if self.kind == "gradient" and x.requires_grad:
            x.register_hook(lambda gradient: gradient / gradient.shape[1])
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]  # a module's call is untyped in torch


def batch_of_rows(tokens: int, entries: int = ENTRIES, rows: int = 2) -> Batch:
    """Random rows of one document each."""
    generator = torch.Generator().manual_seed(tokens)
    values, targets = (torch.randint(3, entries, (rows, tokens), generator=generator) for _ in range(2))
    return Batch(values, targets, torch.ones(rows, tokens), torch.arange(rows))
