"""The gradients of a step with which the host updates masters during the next one."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

KIND, RATE = "pending_gradient", "pending_learning_rate"
_NOTHING = -1.0  # The learning rate while no gradient is pending


class PendingGradients:
    """One gradient for each master, clipped, in the dtype of the masters, and the learning rate of its step."""

    def __init__(self, masters: Sequence[Tensor], host_tensor: Callable[[int, torch.dtype], Tensor]) -> None:
        """`host_tensor` makes zeros on the host."""
        self.gradients = [host_tensor(master.numel(), master.dtype) for master in masters]
        self.rate = torch.full((), _NOTHING, dtype=torch.float64)

    @property
    def learning_rate(self) -> float | None:
        """The learning rate with which they are applied; None if nothing is pending."""
        rate = float(self.rate)
        return None if rate == _NOTHING else rate

    def keep(self, gradients: Mapping[int, Tensor], scale: float) -> None:
        """Keep gradients of a step, scaled."""
        for index, gradient in gradients.items():
            kept = self.gradients[index]
            torch.mul(gradient.to(kept.dtype), scale, out=kept)

    def set_rate(self, learning_rate: float) -> None:
        """Say that the gradients are those of a step with this learning rate."""
        self.rate.fill_(learning_rate)

    def clear(self) -> None:
        """Forget them: they are applied, or there are none."""
        self.rate.fill_(_NOTHING)


def is_pending_gradient(name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to gradients that wait for their update."""
    return name == RATE or name.startswith(f"{KIND}/")
