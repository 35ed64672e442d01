"""The updates of AdamW and SGD as operations on the elements of flat tensors, each rounded as IEEE 754 says."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from motet.train.optimizer.optimizer_settings import OptimizerSettings

# Updates parameters with their gradients and moments, in the order of `OptimizerSettings.moment_kinds`, in place.
ElementwiseUpdate = Callable[[Tensor, Tensor, Sequence[Tensor]], None]


def elementwise_update(settings: OptimizerSettings, group: dict[str, Any], count: float) -> ElementwiseUpdate:
    """The update of a group of parameters in the step of this number, counted from 1."""
    return _adamw(settings, group, count) if settings.name == "adamw" else _sgd(settings, group)


def _adamw(settings: OptimizerSettings, group: dict[str, Any], count: float) -> ElementwiseUpdate:
    rate, decay, (beta1, beta2) = group["lr"], group["weight_decay"], settings.betas
    correction1, root2 = 1 - beta1**count, (1 - beta2**count) ** 0.5

    def update(p: Tensor, g: Tensor, moments: Sequence[Tensor]) -> None:
        mean, square = moments
        p.mul_(1 - rate * decay)
        mean.mul_(beta1).add_(g * (1 - beta1))
        square.mul_(beta2).add_((g * g).mul_(1 - beta2))
        p.sub_((mean * (rate / correction1)).div_(square.sqrt().div_(root2).add_(settings.eps)))

    return update


def _sgd(settings: OptimizerSettings, group: dict[str, Any]) -> ElementwiseUpdate:
    def update(p: Tensor, g: Tensor, moments: Sequence[Tensor]) -> None:
        change = (p * group["weight_decay"]).add_(g) if group["weight_decay"] else g
        for buffer in moments:
            buffer.mul_(settings.momentum).add_(change)
            change = (buffer * settings.momentum).add_(change) if settings.nesterov else buffer
        p.sub_(change * group["lr"])

    return update
