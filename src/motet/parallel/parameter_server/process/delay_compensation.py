"""Delay compensation (DC-ASGD, arXiv:1609.08326): correct a gradient by how far the parameters have moved since."""

from collections.abc import Collection

from torch import Tensor


class DelayCompensator:
    """Remembers the parameters of each worker's last pull of one slice, until its gradient is applied."""

    def __init__(self, strength: float) -> None:
        self._strength = strength
        self._pulled_by_worker: dict[str, Tensor] = {}
        self._at_work_item: dict[int, Tensor] = {}

    def on_pull(self, worker: str, master: Tensor) -> None:
        self._pulled_by_worker[worker] = master.clone()

    def on_push(self, worker: str, work_item: int) -> None:
        if worker in self._pulled_by_worker:
            self._at_work_item.setdefault(work_item, self._pulled_by_worker.pop(worker))

    def discard_except(self, work_items: Collection[int]) -> None:
        self._at_work_item = {item: tensor for item, tensor in self._at_work_item.items() if item in work_items}

    def correct(self, gradient: Tensor, work_item: int, master: Tensor) -> None:
        """Add strength * gradient^2 * drift in place."""
        if work_item in self._at_work_item:
            gradient.add_(self._strength * gradient.square() * (master - self._at_work_item[work_item]))
