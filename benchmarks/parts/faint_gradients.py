"""A case with gradients below the smallest number of float16: a small network learns lengths of about a centimetre.

The loss is the mean of the squared errors, in square metres, over a batch and all outputs. So the gradient of an output
is about its error in centimetres times 1e-7, and the smallest number of float16 is 6e-8.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from motet import parallelize
from motet.precision.numerics import float32_products
from motet.train.engine import StepStats

INPUTS, HIDDEN, OUTPUTS, ROWS = 4, 64, 8, 256
METRES = 0.01
"""The length that an output of 1 stands for."""
LEARNING_RATE = 1e-2
"""The learning rate of the first step; it falls evenly to 0."""
EPS = 1e-15
"""Far below the gradients, so that AdamW takes steps of the same size whatever the unit of the loss."""
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {"recipe": "fp32"},
    "fp16, loss scale 1": {"recipe": "fp16", "loss_scale": 1},
    "fp16, dynamic loss scale": {"recipe": "fp16"},
}


@dataclass
class ZeroShares:
    """Elements of gradients, and those that are zero, of all steps so far, by the kind of tensor."""

    elements: dict[str, int] = field(default_factory=lambda: {"parameters": 0, "activations": 0})
    zeros: dict[str, int] = field(default_factory=lambda: {"parameters": 0, "activations": 0})

    def add(self, kind: str, gradient: Tensor) -> None:
        self.elements[kind] += gradient.numel()
        self.zeros[kind] += int((gradient == 0).sum())

    def share(self, kind: str) -> float:
        return self.zeros[kind] / self.elements[kind]


@dataclass(frozen=True)
class FaintRun:
    """A run of the case."""

    losses: list[float]
    """The loss of each step over the mean square of the targets: 1 for a model that always predicts zero."""
    shares: ZeroShares
    stats: list[StepStats]


def train_on_faint_gradients(precision: Mapping[str, Any], seed: int, steps: int) -> FaintRun:
    """Train with a `[precision]` section; values and batches depend on the seed alone. Products are in float32."""
    generator = torch.Generator().manual_seed(seed)
    teacher, student = network(generator), network(generator)
    optimizer = {"name": "adamw", "eps": EPS, "weight_decay": 0.0, "clip_norm": None}
    engine = parallelize(student, precision=precision, optimizer=optimizer)
    shares, losses, stats = ZeroShares(), list[float](), list[StepStats]()
    watch(student, shares)
    with products_of(student):
        for step in range(steps):
            inputs = torch.randn(ROWS, INPUTS, generator=generator)
            with torch.no_grad():
                targets = teacher(inputs)
            engine.begin_step()
            outputs = student(inputs.to(dtype_of(student)))
            loss = (METRES * (outputs.float() - targets)).square().mean()
            engine.backward(loss)
            stats.append(engine.update(LEARNING_RATE * (1 - step / steps), loss.item(), 1.0))
            losses.append(stats[-1].loss / (METRES * targets).square().mean().item())
    return FaintRun(losses, shares, stats)


def network(generator: torch.Generator) -> nn.Sequential:
    """Three layers whose outputs are of about the size of 1."""
    layers = [nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)]
    with torch.no_grad():
        for layer in layers:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
                nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def watch(module: nn.Module, shares: ZeroShares) -> None:
    """Count the gradients of parameters and of the outputs of layers, as backward computes them."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: shares.add("parameters", gradient))

    def watch_output(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: shares.add("activations", gradient))

    for layer in module.children():
        layer.register_forward_hook(watch_output)


def products_of(module: nn.Module) -> AbstractContextManager[None]:
    """Multiplies 16-bit matrices in float32 and rounds each result, as hardware with 16-bit matmuls does."""
    dtype = dtype_of(module)
    return float32_products(dtype) if dtype.itemsize == 2 else nullcontext()


def dtype_of(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
