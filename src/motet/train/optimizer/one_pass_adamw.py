"""AdamW on a device by one kernel for each master, in place of a cast, a product, an update and another cast."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from motet.models.kernels.choice import chosen, in_triton
from motet.train.optimizer.optimizer_settings import OptimizerSettings

_update_adamw = in_triton("triton_adamw", "update_adamw")


class OnePassAdamW:
    """Updates masters whose states are those of torch's AdamW."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings, compute: Sequence[Tensor | None]
    ) -> None:
        """`compute` has the elements that each master is written to, after the update."""
        self._optimizer, self._settings, self._compute = optimizer, settings, compute
        groups = enumerate(optimizer.param_groups)
        self._group_of = {id(master): index for index, group in groups for master in group["params"]}

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
        beta1, beta2 = self._settings.betas
        rates = [(group["lr"], group["weight_decay"]) for group in self._optimizer.param_groups]
        rows = [[*rate, beta1, beta2, self._settings.eps, scale] for rate in rates]
        numbers = _on_device(torch.tensor(rows, dtype=torch.float64), next(iter(masters.values())).device)
        for index, master in masters.items():
            state: Mapping[str, Any] = states[index]
            _update_adamw(
                master,
                gradients[index],
                [state[kind] for kind in self._settings.moment_kinds],
                numbers=numbers[self._group_of[id(master)]],
                step=state["step"],
                compute=self._compute[index],
            )


def _on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy from pinned memory on a GPU, for which the host does not wait."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def takes_one_pass(settings: OptimizerSettings, masters: Sequence[Tensor]) -> bool:
    """Whether the table of kernels has one for the largest of these masters, which then updates all of them."""
    largest = max(masters, key=torch.Tensor.numel)
    return settings.name == "adamw" and chosen("adamw", largest) == "triton"
