"""A model of many parameters whose layers wait instead of computing, for times that the environment sets.

So a machine of few cores can stand for many hosts, and the time for which a worker computes is known exactly.
"""

import hashlib
import os
import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD, BACKWARD, SLOW = "SLEEPER_FORWARD_S", "SLEEPER_BACKWARD_S", "SLEEPER_SLOW"
RANDOM, TIMES = "random", 4.0


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, times: float) -> Tensor:
        y = x + torch.tanh(self.linear(x))
        waited: Tensor = _Wait.apply(y, times * float(os.environ[FORWARD]), times * float(os.environ[BACKWARD]))
        return waited


class SleepingModel(nn.Module):
    def __init__(self, width: int, layers: int, vocab_size: int = 260) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)
        self._calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        times = slowness(os.environ.get(SLOW, ""), self._calls)
        self._calls += 1
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, times)
        logits: Tensor = self.head(x)
        return logits


def slowness(text: str, call: int) -> float:
    """The factor of the time: a number, or `random:NUMBER`, which applies now and then."""
    kind, _, worker = text.partition(":")
    if kind != RANDOM:
        return float(text or 1.0)
    drawn = hashlib.sha256(f"{worker}-{call}".encode()).digest()[0]
    return TIMES if drawn % 4 == 0 else 1.0
