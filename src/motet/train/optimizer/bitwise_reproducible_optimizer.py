"""AdamW and SGD in which every element has the same bits in whatever shard and at whatever position it is.
A fused step may compute the last elements of a tensor by other instructions, which round differently (torch's AdamW
does on x86). Here each operation is one multiplication, addition, division or root, rounded as IEEE 754 says."""

from typing import Any

import torch
from torch import Tensor

from motet.train.optimizer.optimizer_settings import OptimizerSettings

BLOCK_ELEMENTS = 1 << 16  # Elements of a block, whose tensors all fit in the cache of a CPU


class BitwiseReproducibleOptimizer(torch.optim.Optimizer):
    """Has the state of torch's optimizers of these names, which the caller must create."""

    def __init__(self, groups: list[dict[str, Any]], settings: OptimizerSettings) -> None:
        super().__init__(groups, {"lr": settings.learning_rate})
        self._settings = settings
        self._update = _adamw if settings.name == "adamw" else _sgd

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient; a closure is ignored."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(self._settings, p, self.state[p], group=group)


def _adamw(settings: OptimizerSettings, parameter: Tensor, state: dict[str, Tensor], *, group: dict[str, Any]) -> None:
    rate, decay = group["lr"], group["weight_decay"]
    state["step"] += 1
    count, (beta1, beta2) = state["step"].item(), settings.betas
    correction1, root2 = 1 - beta1**count, (1 - beta2**count) ** 0.5
    for p, g, mean, square in _blocks(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
        p.mul_(1 - rate * decay)
        mean.mul_(beta1).add_(g * (1 - beta1))
        square.mul_(beta2).add_((g * g).mul_(1 - beta2))
        p.sub_((mean * (rate / correction1)).div_(square.sqrt().div_(root2).add_(settings.eps)))


def _sgd(settings: OptimizerSettings, parameter: Tensor, state: dict[str, Tensor], *, group: dict[str, Any]) -> None:
    momentum = [state["momentum_buffer"]] if settings.momentum else []
    for p, g, *buffers in _blocks(parameter, parameter.grad, *momentum):
        update = (p * group["weight_decay"]).add_(g) if group["weight_decay"] else g
        for buffer in buffers:
            buffer.mul_(settings.momentum).add_(update)
            update = (buffer * settings.momentum).add_(update) if settings.nesterov else buffer
        p.sub_(update * group["lr"])


def _blocks(*tensors: Tensor | None) -> Any:
    return zip(*(tensor.view(-1).split(BLOCK_ELEMENTS) for tensor in tensors if tensor is not None), strict=True)
