"""Counts of the outputs of blocks and linear layers, and of their gradients, by hooks that stay for one step."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from motet.models.blocks import find_blocks
from motet.models.torch_private import is_in_backward
from motet.parallel.step_plan.plan import StepPlan
from motet.precision.value_counts import count_values, row_length

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ActivationSite(NamedTuple):
    """A module whose outputs are counted."""

    name: str
    weight: str | None = None  # Of a linear layer: its name in the inventory
    output_dim: int = 0  # The dimension of the weight that becomes the features of the output


def activation_sites(module: nn.Module, plan: StepPlan) -> list[ActivationSite]:
    """Blocks and linear layers in the order of the module; the same on every rank, whatever it holds of them."""
    blocks = set(find_blocks(module))
    matrices = {tensor.name for tensor in plan.inventory.tensors if len(tensor.shape) == 2}
    sites = []
    for name, inner in module.named_modules():
        weight = f"{name}.weight"
        is_linear = weight in matrices and not isinstance(inner, nn.Embedding) and not any(inner.children())
        if inner in blocks or is_linear:
            # Other layers of one matrix, such as Conv1D of transformers, keep it transposed.
            output_dim = 0 if isinstance(inner, nn.Linear) else 1
            sites.append(ActivationSite(name, weight, output_dim) if is_linear else ActivationSite(name))
    return sites


class ActivationCounts:
    """The counts of a step on this rank: a row for each site, and one for the gradient there."""

    def __init__(
        self,
        module: nn.Module,
        sites: Sequence[ActivationSite],
        formats: Sequence[torch.dtype],
        *,
        device: torch.device,
    ) -> None:
        self._formats = formats
        shape = len(sites), row_length(len(formats))
        self.outputs = torch.zeros(shape, dtype=torch.int64, device=device)
        self.gradients = torch.zeros_like(self.outputs)
        # Elements, and the sum of their bits, of outputs and gradients: ranks with other numbers have other tensors.
        self.digests = torch.zeros(len(sites), 4, dtype=torch.int64, device=device)
        modules: Mapping[str, nn.Module] = dict(module.named_modules())
        self._handles: list[RemovableHandle] = [
            modules[site.name].register_forward_hook(partial(self._on_output, index))
            for index, site in enumerate(sites)
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _on_output(self, index: int, *call: Any) -> None:
        tensor = _first_floating(call[-1])  # After the module and its arguments
        if tensor is None or is_in_backward():  # Recomputation repeats what was counted
            return
        self._add(index, tensor, rows=self.outputs, column=0)
        if tensor.requires_grad:
            tensor.register_hook(partial(self._on_gradient, index))

    def _on_gradient(self, index: int, gradient: Tensor) -> None:
        self._add(index, gradient, rows=self.gradients, column=2)

    @torch.no_grad()
    def _add(self, index: int, tensor: Tensor, *, rows: Tensor, column: int) -> None:
        rows[index] += count_values(tensor, self._formats)
        self.digests[index, column] += tensor.numel()
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.dtype.itemsize])
        self.digests[index, column + 1] += bits.sum(dtype=torch.int64)


def _first_floating(output: Any) -> Tensor | None:
    """The first tensor of floating-point numbers in the output of a module."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((tensor for tensor in map(_first_floating, items) if tensor is not None), None)
