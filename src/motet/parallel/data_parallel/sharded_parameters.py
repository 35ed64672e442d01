"""The interface between training and parameters that are distributed over ranks, at any stage of ZeRO."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from motet.parallel.data_parallel.zero import BucketsAndFSDPUnits


class LocalShard(NamedTuple):
    """The contiguous elements of a parameter that a rank holds, from `start` on."""

    shape: torch.Size  # Of the unsharded parameter
    start: int
    values: Tensor


class ShardedParameters(Protocol):
    """The trainable parameters of a model, as one rank holds and updates them."""

    @property
    def comm_units(self) -> BucketsAndFSDPUnits:
        """Everything that a step communicates."""

    @property
    def optimizer_groups(self) -> Sequence[int]:
        """The optimizer group of each master."""

    @property
    def local_masters(self) -> Sequence[Tensor]:
        """The tensors that this rank updates."""

    @property
    def contributes_to_norm(self) -> bool:
        """Whether this rank counts in sums over all parameters; other replicas' ranks would count them again."""

    @property
    def updates_on_arrival(self) -> bool:
        """Whether `update` gathers gradients, after `reduced_gradients` were scaled, and updates as they arrive."""

    def begin_step(self) -> None: ...

    def begin_backward(self, is_first: bool, is_last: bool) -> None:
        """Begin the backward of a micro-batch, which is the first or last of the step."""

    def end_backward(self) -> None:
        """End a backward; after the last, gradients are summed over micro-batches and ranks."""

    def local_gradients(self) -> Sequence[Tensor]:
        """The gradients of the masters."""

    def reduced_gradients(self) -> Sequence[Tensor]:
        """This rank's shards of the sums, each element once over the ranks that count; may be scaled in place."""

    def update(self, update_masters: Callable[[Sequence[int]], None]) -> None:
        """Update masters by their indices, and let every rank compute with the result."""

    def load_assigned_values(self) -> None:
        """Continue from values that were assigned to parameters, on all ranks alike."""

    def sync_parameters(self) -> None:
        """Let every rank compute with the current masters."""

    def wait_for_pending(self) -> None:
        """Wait until parameters and masters have the values of the last update or `sync_parameters`."""

    def local_shards(self, tensors: Sequence[Tensor]) -> dict[str, LocalShard]:
        """The shards of parameters in `tensors`, one for each master, by name."""

    def compression_state(self) -> dict[str, LocalShard | Tensor]:
        """State of compression that only the same layout can continue with, as views."""
