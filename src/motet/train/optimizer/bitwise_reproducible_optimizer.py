"""AdamW and SGD in which every element has the same bits in whatever shard and at whatever position it is.
A fused step may compute the last elements of a tensor by other instructions, which round differently (torch's AdamW
does on x86). Here each operation is one multiplication, addition, division or root, rounded as IEEE 754 says."""

from typing import Any

import torch
from torch import Tensor

from motet.train.optimizer.elementwise_updates import elementwise_update
from motet.train.optimizer.optimizer_settings import OptimizerSettings

BLOCK_ELEMENTS = 1 << 16  # Elements of a block, whose tensors all fit in the cache of a CPU


class BitwiseReproducibleOptimizer(torch.optim.Optimizer):
    """Has the state of torch's optimizers of these names, which the caller must create."""

    def __init__(self, groups: list[dict[str, Any]], settings: OptimizerSettings) -> None:
        super().__init__(groups, {"lr": settings.learning_rate})
        self._settings = settings

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient; a closure is ignored."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group)

    def _update(self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        count = 0.0
        if "step" in state:
            state["step"] += 1
            count = state["step"].item()
        update = elementwise_update(self._settings, group, count)
        moments = [state[kind] for kind in self._settings.moment_kinds]
        for p, g, *blocks in _blocks(parameter, parameter.grad, *moments):
            update(p, g, blocks)


def _blocks(*tensors: Tensor | None) -> Any:
    return zip(*(tensor.view(-1).split(BLOCK_ELEMENTS) for tensor in tensors if tensor is not None), strict=True)
