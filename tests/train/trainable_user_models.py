"""Modules of a user's own, each with something that a trainer may stumble over."""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(260, 16)
        self.head = nn.Linear(16, 260)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(tokens))
        return logits


class Unhurried(Table):
    def forward(self, tokens: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(tokens)


class Held(Unhurried):
    """It is called only as often as the number in a file allows, and waits until that is larger."""

    def __init__(self, allowed: str) -> None:
        super().__init__()
        self.allowed, self.calls = Path(allowed), 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        while self.calls > int(self.allowed.read_text() or 0):
            time.sleep(0.02)
        return super().forward(tokens)


class Stack(nn.Module):
    """Blocks between a table and a head."""

    def __init__(self, blocks: Iterable[nn.Module], entries: int = 260, width: int = 16) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(entries, width), nn.ModuleList(blocks)
        self.head = nn.Linear(width, entries)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class _UsesTwice(nn.Module):
    """One linear layer twice, one of a computed weight, and one of vectors without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(16, 16), nn.Linear(16, 16)
        self.computed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.vector_layer, self.vector = nn.Linear(16, 16, bias=False), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.twice(torch.tanh(self.once(torch.tanh(self.twice(x)))))
        return x + torch.tanh(self.computed(x)) * self.vector_layer(self.vector)


class LayersUsedTwice(Stack):
    def __init__(self) -> None:
        super().__init__(_UsesTwice() for _ in range(4))


class _UsedByFewRows(nn.Module):
    """A layer for some rows, like an expert: a micro-batch without them gives it no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.always = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.always(x)
        chosen = x[:, :1, :1] > 1.0
        return x + chosen * self.expert(x) if chosen.any() else x


class LayersForFewRows(Stack):
    def __init__(self) -> None:
        super().__init__(_UsedByFewRows() for _ in range(4))


def other_values_on_each_rank() -> nn.Module:
    """Initialised from what nobody seeded."""
    module = Table()
    noise = np.random.default_rng(os.getpid()).standard_normal((260, 16))
    module.table.weight.data = torch.from_numpy(noise).to(module.table.weight.dtype)
    return module


class WithSlashes(Table):
    """Parameters and a buffer under keys that are no words."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a/b": nn.Linear(16, 16), "b": nn.Linear(16, 16), "outer/mean": nn.BatchNorm1d(16)})
        self.register_parameter("step", nn.Parameter(torch.ones(16)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) * self.step
        x = self.heads["b"](self.heads["a/b"](x))
        logits: Tensor = self.head(self.heads["outer/mean"](x.flatten(0, 1)).view_as(x))
        return logits


class Normed(Table):
    """Batch statistics, and a buffer that is a view of one number."""

    def __init__(self, nan_at: int = -1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.ones(1).expand(16))
        self.calls, self.nan_at = 0, nan_at

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        if self.training:
            x = x * (float("nan") if self.calls == self.nan_at else 1.0)
            self.calls += 1
        logits: Tensor = self.head(self.norm(x.flatten(0, 1)).view_as(x) * self.scale)
        return logits


class WithTables(Table):
    """Buffers that forwards write to or not, in checkpoints or not; a frozen weight; small and large parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16).requires_grad_(False)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("scale", torch.linspace(1, 2, 16))
        self.register_buffer("shift", torch.linspace(0, 1, 16), persistent=False)
        self.register_buffer("largest", torch.zeros(()), persistent=False)  # It differs from rank to rank
        self.register_buffer("first_token", torch.tensor(-1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mix(self.table(tokens))
        self.largest.copy_(torch.maximum(self.largest, x.detach().max()))
        self.first_token = tokens[0, 0].clone()
        logits: Tensor = self.head(self.norm(x * self.scale.to(x.dtype) + self.shift.to(x.dtype)))
        return logits


class WithBatchNorm(nn.Module):
    """Its running mean and variance are buffers, which each rank fills from the rows that it reads."""

    def __init__(self, vocab_size: int, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2))
        return logits


class Noisy(Table):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        logits: Tensor = self.head(x + 0.1 * torch.randn_like(x))
        return logits


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.dropout(self.linear(x))), 0.3, self.training)


class Recomputed(Table):
    """A block that keeps only its input for backward, and a dropout that is active in evaluation, too."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList([_Dropping(), _Dropping()]), reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if x.requires_grad else block(x)
        logits: Tensor = self.head(F.dropout(x, 0.2))
        return logits


class WithCache(Table):
    """The first forward adds a buffer."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.persistent = persistent

    def forward(self, tokens: Tensor) -> Tensor:
        self.register_buffer("cache", torch.zeros(3, dtype=torch.int64), persistent=self.persistent)
        return super().forward(tokens)


class HiddenState(Table):
    def get_extra_state(self) -> Any:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None: ...


class Plain(Table):
    """A table, and a buffer that is computed when it is built, not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(16) * 0.5, persistent=False)


class Tied(nn.Module):
    """Its head is its table, and so is a third name, which nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(260, 16))
        self.table, self.other = nn.Embedding(260, 16), nn.Linear(16, 260, bias=False)
        self.table.weight = self.other.weight = weight
        self.head = nn.Linear(16, 260, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(tokens))
        return logits


class RandomBuffers(Table):
    """Buffers drawn after parameters: their values differ if the parameters were not drawn."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.table.weight)
        self.register_buffer("noise", torch.randn(16), persistent=False)
        self.register_buffer("chosen", torch.rand(16) < 0.5)
        self.register_buffer("size", self.table.weight.detach().norm(dim=0), persistent=False)


def reads_a_value() -> nn.Module:
    module = Table()
    if module.table.weight.detach().abs().max().item() > 1e6:
        raise ValueError("too large")
    return module


def keeps_a_random_number() -> nn.Module:
    module = Table()
    module.temperature = float(torch.rand(1))
    return module


def assigns_data() -> nn.Module:
    module = Table()
    module.table.weight.data = torch.randn(260, 16)
    return module


class KeepsTensors(Table):
    """Computes with tensors that are no buffers: drawn after parameters, a parameter under another name, both."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.scales = [nn.Parameter(torch.randn(16)) for _ in range(2)]
        for index, scale in enumerate(self.scales):
            self.register_parameter(f"scale{index}", scale)
        noise = {"list": torch.ones(16), "drawn": torch.randn(16), "read": self.head.weight[0].detach().clone()}[kept]
        if kept == "drawn":
            self.table.register_forward_hook(lambda module, inputs, output: output + noise)
        self.kept = {"noise": [noise]} if kept == "read" else {}

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + sum(self.kept.get("noise", ()))
        logits: Tensor = self.head(x * self.scales[0] + self.scales[1])
        return logits


class _NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.norm(self.inner(x).flatten(0, 1)).view_as(x)
        return x + inner


class NormedBlocks(LayersUsedTwice):
    """Blocks with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_NormedBlock() for _ in range(2))


class _AveragedBlock(nn.Module):
    """Its running mean, which counts no batch in evaluation, is subtracted before it is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        output: Tensor = x + torch.tanh(inner - self.mean)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inner.detach().mean((0, 1))
        return output


class AveragedBlocks(LayersUsedTwice):
    """Blocks whose forward reads a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_AveragedBlock() for _ in range(2))
