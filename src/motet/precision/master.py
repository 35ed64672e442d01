"""Trainable parameters on flat tensors: what the model computes with, what is updated, and the gradients between.

    compute   recipe.compute   the module's parameters are views of it
    master    recipe.master    updated by the optimizer; the same tensor as `compute` where the dtypes agree
    grad      recipe.reduce    gradients are added to it as soon as backward has them, in this dtype

One tensor of each kind means one collective, one norm and one fused update per step, in an order that never changes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from motet.precision.recipe import Recipe

# Each parameter starts on a multiple of this, so that every view is aligned for vector loads. The gaps stay zero.
_ALIGN_ELEMENTS = 32


class FlatWeights:
    """The parameters of one optimizer group."""

    def __init__(self, parameters: dict[str, nn.Parameter], recipe: Recipe) -> None:
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._starts: dict[str, int] = {}
        total = 0
        for name, parameter in parameters.items():
            self._starts[name] = total
            total += math.ceil(parameter.numel() / _ALIGN_ELEMENTS) * _ALIGN_ELEMENTS
        device = next(iter(parameters.values())).device
        master_dtype, compute_dtype = getattr(torch, recipe.master), getattr(torch, recipe.compute)
        self.master = torch.zeros(total, dtype=master_dtype, device=device)
        for name, view in self.views(self.master).items():
            view.copy_(parameters[name].detach())
        self.compute = self.master if compute_dtype == master_dtype else self.master.to(compute_dtype)
        self.grad = torch.zeros(total, dtype=getattr(torch, recipe.reduce), device=device)
        self._untouched = set(parameters)
        grads = self.views(self.grad)
        for name, view in self.views(self.compute).items():
            parameters[name].data = view
            parameters[name].register_post_accumulate_grad_hook(self._collector(name, grads[name]))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat tensor of this layout, cut into the parameters by name."""
        return {
            name: flat[start : start + self._shapes[name].numel()].view(self._shapes[name])
            for name, start in self._starts.items()
        }

    def begin_step(self) -> None:
        """The first gradient of a step replaces what the last step left; later ones are added."""
        self._untouched = set(self._shapes)

    def end_backward(self) -> None:
        """Parameters that got no gradient in this step have a gradient of zero."""
        for name in self._untouched:
            start = self._starts[name]
            self.grad[start : start + self._shapes[name].numel()].zero_()
        self._untouched = set()

    def publish(self) -> None:
        """Cast the masters to what the model computes with, after an update."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)

    def _collector(self, name: str, view: Tensor) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            grad = parameter.grad
            assert grad is not None
            grad = grad.to_dense() if grad.is_sparse else grad
            if name in self._untouched:
                self._untouched.discard(name)
                view.copy_(grad)
            else:
                view.add_(grad)
            parameter.grad = None

        return collect


def cast_frozen(module: nn.Module, recipe: Recipe) -> None:
    """Parameters that are not trained go to the compute dtype; buffers stay (a rotary table needs its bits)."""
    compute = getattr(torch, recipe.compute)
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(compute)
