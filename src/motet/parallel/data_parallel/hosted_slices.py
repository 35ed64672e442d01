"""The slices of an engine whose masters lie on the host: sums travel down, and modules wait for values."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from motet.core import trace
from motet.memory.tiers.optimizer_states import HostStates, Target


class HostedSlices:
    """The slices of one engine, counted from zero; the states of a rank have those of all its engines."""

    def __init__(self, states: HostStates) -> None:
        self.states, self._first = states, len(states.masters)
        self.sums = dict[int, Tensor]()  # Copies of reduced gradients on the host, by slice

    def set_targets(self, targets: Sequence[Target | None]) -> None:
        """Name the tensors that get the values of the slices."""
        self.states.set_targets(targets)

    def begin_step(self) -> None:
        self.sums = {}

    def send(self, slices: Sequence[int], sums: Sequence[Tensor]) -> None:
        """Send the sums of slices to the host."""
        copies = self.states.to_host(sums, [self._first + index for index in slices])
        self.sums |= zip(slices, copies, strict=True)

    def wait(self, slices: Iterable[int]) -> None:
        """Wait until the device has the values of slices that the host updates."""
        with trace.span("update"):
            self.states.wait_for_arrival(self._first + index for index in slices)

    def wait_after_update(self, count: int) -> None:
        """Wait for the values of all slices, where the update does not go on behind the next forward."""
        if not (self.states.overlaps or self.states.delays):
            self.wait(range(count))
