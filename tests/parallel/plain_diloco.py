"""Independent replicas in plain torch: one after another in one process, with outer steps by formula."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import motet
from motet.train.engine import TrainingEngine

RATE, CLIP, STEPS = 0.02, 0.4, 13
ADAMW = {"learning_rate": RATE, "clip_norm": CLIP}
DILOCO = {"every": 4, "learning_rate": 0.6, "momentum": 0.8}


def net() -> nn.Module:
    """Four parameters of 36, 6, 36 and 6 numbers."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


HALVES = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]


def batch(step: int, rank: int, even: bool = False) -> Tensor:
    """Other ranks have other numbers of rows, unless these are to be even."""
    rows = 3 if even else 2 + (step + rank) % 3
    return torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_sum(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return (module(x) - x.flip(1)).square().sum(), len(x)


def held(engine: TrainingEngine) -> dict[str, tuple[int, Tensor]]:
    """The shard that this rank holds of each parameter: its offset and its elements."""
    spread = engine.optimizer.sharded_parameters
    return {n: (piece.start, piece.values.clone()) for n, piece in spread.local_shards(spread.local_masters).items()}


STREAMING = {**DILOCO, "fragments": 2, "delay": 3, "mixing_factor": 0.3}


def engine_of(layout: str, outer: Any, communication: Any = None, optimizer: Any = None) -> TrainingEngine:
    settings = {"optimizer": optimizer or ADAMW, "communication": communication, "outer": outer}
    return motet.parallelize(net(), layout, loss=loss_sum, precision="fp64", **settings)


def same_bits(a: dict[str, tuple[int, Tensor]], b: dict[str, tuple[int, Tensor]]) -> bool:
    return all(torch.equal(values, b[name][1]) for name, (_, values) in a.items())


# --- the reference ---------------------------------------------------------------------------------
def adamw(module: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in module.parameters()]
    return torch.optim.AdamW(groups, RATE, (0.9, 0.95))


class Alone:
    def __init__(self, replicas: int, shards: int) -> None:
        self.shards = shards
        self.modules = [net() for _ in range(replicas)]
        self.optimizers = [adamw(module) for module in self.modules]
        self.anchor = {n: p.detach().clone() for n, p in self.modules[0].named_parameters()}
        self.momenta = {n: torch.zeros_like(p) for n, p in self.anchor.items()}

    def step(self, step: int) -> list[float]:
        losses = []
        for number, (module, optimizer) in enumerate(zip(self.modules, self.optimizers, strict=True)):
            ranks = range(number * self.shards, (number + 1) * self.shards)
            total, count = loss_sum(module, torch.cat([batch(step, rank) for rank in ranks]))
            optimizer.zero_grad()
            (total / count).backward()
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            factor = min(1.0, CLIP / nn.utils.get_total_norm(grads).item())  # torch's own adds 1e-6 to the norm
            for grad in grads:
                grad.mul_(factor)
            optimizer.step()
            losses.append(total.item() / count)
        return losses

    def differences(self, names: list[str]) -> dict[str, Tensor]:
        values = {n: [m.get_parameter(n).detach() for m in self.modules] for n in names}
        return {n: torch.stack([self.anchor[n] - each for each in values[n]]).mean(0) for n in names}

    def meet(self, differences: dict[str, Tensor], mix: float = 0.0) -> None:
        for name, difference in differences.items():
            self.momenta[name] = 0.8 * self.momenta[name] + difference
            self.anchor[name] = self.anchor[name] - 0.6 * (difference + 0.8 * self.momenta[name])
            for module in self.modules:
                own = module.get_parameter(name).data
                own.copy_(mix * own + (1 - mix) * self.anchor[name])

    def compare(self, results: list[Any], meet: Callable[[int], None]) -> float:
        """The largest difference of any number that any rank holds or tells after any step."""
        worst = 0.0
        for step in range(STEPS):
            losses = self.step(step)
            meet(step + 1)
            for rank, (told, kept) in enumerate(results):
                worst = max(worst, abs(told[step].loss - losses[rank // self.shards]))
                wanted = dict(self.modules[rank // self.shards].named_parameters())
                for name, (start, values) in kept[step].items():
                    part = wanted[name].detach().flatten()[start : start + values.numel()]
                    worst = max([worst, *(values - part).abs().tolist()])
        return worst
