"""What training asks of parameters that are spread over ranks, however that is done."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from motet.parallel.data_parallel.zero import BucketsAndFSDPUnits


class LocalShard(NamedTuple):
    """What a rank keeps of a parameter: its elements from `start` on, in a row."""

    shape: torch.Size  # Of the whole
    start: int
    values: Tensor


class ShardedParameters(Protocol):
    """The trainable parameters of a model, as one rank keeps and updates them."""

    @property
    def comm_units(self) -> BucketsAndFSDPUnits:
        """What travels together."""

    @property
    def optimizer_groups(self) -> Sequence[int]:
        """The optimizer group of each master."""

    @property
    def local_masters(self) -> Sequence[Tensor]:
        """What this rank updates."""

    @property
    def contributes_to_norm(self) -> bool:
        """Whether this rank's share of a sum over all parameters counts; it is one of several replicas' otherwise."""

    @property
    def updates_on_arrival(self) -> bool:
        """Gradients of what this rank updates come after `reduced` was scaled, with the update."""

    def begin_step(self) -> None: ...

    def begin_backward(self, is_first: bool, is_last: bool) -> None:
        """Of a micro-batch, which is the first or last of the step."""

    def end_backward(self) -> None:
        """After the last of a step, gradients are summed over micro-batches and ranks."""

    def local_gradients(self) -> Sequence[Tensor]:
        """Those of the masters."""

    def reduced_gradients(self) -> Sequence[Tensor]:
        """What this rank has of the sums, each number once over the ranks that count; to be scaled in place."""

    def update(self, update_masters: Callable[[Sequence[int]], None]) -> None:
        """Have the masters of these numbers updated, and give the model of every rank what they are then."""

    def load_assigned_values(self) -> None:
        """Go on from the values that somebody has given to parameters, on all ranks alike."""

    def sync_parameters(self) -> None:
        """Give the model of every rank what the masters are now."""

    def wait_for_pending(self) -> None:
        """Until the model and the masters of this rank are what the last update or `publish` made of them."""

    def local_shards(self, tensors: Sequence[Tensor]) -> dict[str, LocalShard]:
        """One tensor for each master, cut into what this rank keeps of the parameters, by name."""

    def compression_state(self) -> dict[str, LocalShard | Tensor]:
        """What compression goes by in the next step, which the same layout alone can go on with; as views."""
