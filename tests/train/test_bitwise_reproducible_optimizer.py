"""The optimizers of reproducible runs: torch's numbers, and the same bits wherever an element stands."""

from collections.abc import Sequence

import pytest
import torch

from motet.train.optimizer.bitwise_reproducible_optimizer import BitwiseReproducibleOptimizer
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.sharded_optimizer import make_torch_optimizer

KINDS = {
    "adamw": OptimizerSettings(weight_decay=0.1),
    "sgd": OptimizerSettings(name="sgd", weight_decay=0.1),
    "momentum": OptimizerSettings(name="sgd", momentum=0.9),
    "nesterov": OptimizerSettings(name="sgd", momentum=0.9, nesterov=True),
}
COUNT, STEPS = 140_003, 4


def stepped(kind: str, dtype: torch.dtype, cuts: Sequence[int] = (), *, torchs: bool = False) -> torch.Tensor:
    """After some steps, in tensors cut like this."""
    settings = KINDS[kind]
    draw = torch.Generator().manual_seed(5)
    start, *gradients = (torch.randn(COUNT, generator=draw, dtype=dtype) for _ in range(1 + STEPS))
    parameters = [torch.nn.Parameter(part.clone()) for part in start.tensor_split(list(cuts))]
    group = [{"params": parameters, "weight_decay": settings.weight_decay, "lr": 0.003}]
    optimizer = make_torch_optimizer(group, settings) if torchs else BitwiseReproducibleOptimizer(group, settings)
    for parameter in [] if torchs else parameters:
        names = ["momentum_buffer"] if settings.name == "sgd" else ["exp_avg", "exp_avg_sq"]
        optimizer.state[parameter].update({name: torch.zeros_like(parameter) for name in names}, step=torch.zeros(()))
    for gradient in gradients:
        for parameter, part in zip(parameters, gradient.tensor_split(list(cuts)), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_torchs(kind: str) -> None:
    ours, theirs = (stepped(kind, torch.float64, torchs=which) for which in (False, True))
    assert (ours - theirs).norm() < 1e-14 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_cuts_change_no_bit(kind: str, dtype: torch.dtype) -> None:
    whole = stepped(kind, dtype)
    for cuts in ([1], [7, 8, 1000], list(range(3, COUNT, 371))):
        assert torch.equal(stepped(kind, dtype, cuts), whole)
