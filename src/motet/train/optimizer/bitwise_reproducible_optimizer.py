"""AdamW and SGD of which every element has the same bits wherever it stands: in whatever shard, at whatever place.

A fused step may compute the last elements of a tensor by other instructions than those before, which round otherwise
(torch's AdamW does on x86). Here each operation is one multiplication, addition, division or root of each element,
rounded as IEEE 754 says.
"""

from typing import Any

import torch
from torch import Tensor

from motet.train.optimizer.optimizer_settings import OptimizerSettings

BLOCK_ELEMENTS = 1 << 16  # What is worked on at once, so that everything of it stays in the cache of a CPU


class BitwiseReproducibleOptimizer(torch.optim.Optimizer):
    """Keeps what torch's optimizers of these names keep. It makes no tensor of its own: whoever has it does."""

    def __init__(self, groups: list[dict[str, Any]], settings: OptimizerSettings) -> None:
        super().__init__(groups, {"lr": settings.learning_rate})
        self._settings = settings

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Without a closure, as it is called here."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                rate_and_decay = (group["lr"], group["weight_decay"])
                if self._settings.name == "adamw":
                    _adamw(self._settings, rate_and_decay, parameter, state)
                else:
                    _sgd(self._settings, rate_and_decay, parameter, state)


def _adamw(
    settings: OptimizerSettings, rate_and_decay: tuple[float, float], parameter: Tensor, state: dict[str, Tensor]
) -> None:
    state["step"] += 1
    count, (beta1, beta2), (rate, decay) = state["step"].item(), settings.betas, rate_and_decay
    correction1, root2 = 1 - beta1**count, (1 - beta2**count) ** 0.5
    for p, g, mean, square in _blocks(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
        p.mul_(1 - rate * decay)
        mean.mul_(beta1).add_(g * (1 - beta1))
        square.mul_(beta2).add_((g * g).mul_(1 - beta2))
        denominator = square.sqrt().div_(root2).add_(settings.eps)
        p.sub_((mean * (rate / correction1)).div_(denominator))


def _sgd(
    settings: OptimizerSettings, rate_and_decay: tuple[float, float], parameter: Tensor, state: dict[str, Tensor]
) -> None:
    rate, decay = rate_and_decay
    momentum = [state["momentum_buffer"]] if settings.momentum else []
    for p, g, *buffers in _blocks(parameter, parameter.grad, *momentum):
        update = (p * decay).add_(g) if decay else g
        for buffer in buffers:
            buffer.mul_(settings.momentum).add_(update)
            update = (buffer * settings.momentum).add_(update) if settings.nesterov else buffer
        p.sub_(update * rate)


def _blocks(*tensors: Tensor | None) -> Any:
    """The same elements of all of them."""
    return zip(*(tensor.view(-1).split(BLOCK_ELEMENTS) for tensor in tensors if tensor is not None), strict=True)
