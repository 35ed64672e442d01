"""Modules whose parameters are hard to shard, for `model.factory`; tokens of the tokenizer `bytes`."""

import torch
from torch import Tensor, nn

WIDTH = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Parameter(0.1 * torch.ones(1, WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = x + self.scale * torch.tanh(self.linear(x))
        if chosen.any():
            x = x + chosen.to(x.dtype)[:, None, None] * self.sometimes
        return x


class Tied(nn.Module):
    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table
        self.bias = nn.Parameter(torch.zeros(260))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.T + self.bias


class Hard(nn.Module):
    """A block called twice, one never called, nested lists, a sequence, tied, frozen, scalar and integer parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(260, WIDTH)
        twice = Block()
        self.blocks = nn.ModuleList([twice, Block(), twice, Block()])
        self.nested = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])
        self.sequence = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)))
        self.heads = nn.ModuleList([Tied(self.table.weight)])
        self.narrow = nn.Parameter(torch.randn(WIDTH, 3))
        self.fixed = nn.Parameter(torch.randn(WIDTH, 3), requires_grad=False)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        chosen, x = tokens.sum(dim=1) % 4 == 0, self.table(tokens)
        for block in (*self.blocks[:3], *self.nested[0], *self.nested[1]):
            x = block(x, chosen)
        x = x + self.sequence(x) + x @ self.narrow @ self.fixed.T / self.count.sum()
        logits: Tensor = self.heads[0](x) * self.temperature
        return logits


class Reaching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(260, WIDTH)
        self.blocks = nn.ModuleList([Block()])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks[0].linear(self.table(tokens)) @ self.table.weight.T
