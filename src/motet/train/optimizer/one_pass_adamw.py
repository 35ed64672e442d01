"""AdamW on a device by one kernel for each master, in place of a cast, a product, an update and another cast."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from motet.models.kernels.choice import chosen, in_triton
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.replayed_calls import ReplayedCalls, cuda_graph_capture

_update_adamw = in_triton("triton_adamw", "update_adamw")


class OnePassAdamW:
    """Updates masters whose states are those of torch's AdamW."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, compute: Sequence[Tensor | None]
    ) -> None:
        """`compute` has the elements that each master is written to, after the update."""
        self._optimizer, self._settings, self._compute = optimizer, settings, compute
        groups = optimizer.param_groups
        group_of_master = [(master, index) for index, group in enumerate(groups) for master in group["params"]]
        self._group_of = {id(master): index for master, index in group_of_master}
        device = group_of_master[0][0].device
        self._numbers = torch.zeros(len(groups), 6, dtype=torch.float64, device=device)  # Graphs read them here
        self._calls = ReplayedCalls(cuda_graph_capture(device))

    def update(
        self,
        masters: Mapping[int, Tensor],
        gradients: Mapping[int, Tensor],
        states: Mapping[int, Mapping[str, Tensor]],
        *,
        scale: float,
    ) -> None:
        """Update masters, by their indices, with gradients in any dtype times the scale. States hold moments and the
        number of this update."""
        masters = {index: master for index, master in masters.items() if master.numel()}
        if not masters:
            return
        beta1, beta2 = self._settings.betas
        rates = [(group["lr"], group["weight_decay"]) for group in self._optimizer.param_groups]
        rows = [[*rate, beta1, beta2, self._settings.eps, scale] for rate in rates]
        _fill(self._numbers, torch.tensor(rows, dtype=torch.float64))
        kinds = (*self._settings.moment_kinds, "step")
        tensors_by_master = (
            (master, gradients[index], *(states[index][kind] for kind in kinds), self._compute[index])
            for index, master in masters.items()
        )
        tensors = (tensor for each in tensors_by_master for tensor in each if tensor is not None)
        self._calls.call(partial(self._launch, masters, gradients, states), tuple(masters), tensors)

    def _launch(
        self, masters: Mapping[int, Tensor], gradients: Mapping[int, Tensor], states: Mapping[int, Mapping[str, Any]]
    ) -> None:
        for index, master in masters.items():
            state = states[index]
            _update_adamw(
                master,
                gradients[index],
                [state[kind] for kind in self._settings.moment_kinds],
                numbers=self._numbers[self._group_of[id(master)]],
                step=state["step"],
                compute=self._compute[index],
            )


def _fill(target: Tensor, numbers: Tensor) -> None:
    """Copy to a GPU from pinned memory, for which the host does not wait: torch uses it again once the copy ran."""
    target.copy_(numbers.pin_memory() if target.device.type == "cuda" else numbers, non_blocking=True)


def takes_one_pass(settings: OptimizerSettings, masters: Sequence[Tensor]) -> bool:
    """Whether the table of kernels has one for the largest of these masters, which then updates all of them."""
    largest = max(masters, key=torch.Tensor.numel)
    return settings.name == "adamw" and chosen("adamw", largest) == "triton"
