"""The tensors of a server: masters and moments of its pieces, what was pushed of their gradients, and what is pulled.

What is pulled is never written to again: an update makes a new tensor, so that a value that is being sent is of one
version.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn

from motet.parallel.data_parallel.buckets import Bucket
from motet.parallel.parameter_server.process.push_pull_compression import (
    ERROR_FEEDBACK_ENTRY,
    PUBLISHED_VALUE_ENTRY,
    PushPullCompressor,
    decompress_gradient,
)
from motet.parallel.parameter_server.protocol.parameter_slices import ParameterSlice
from motet.parallel.parameter_server.server_settings import NO_COMPRESSION, PushPullCompression
from motet.parallel.reproducible.accurate_norm import squared_norm
from motet.precision.recipe import PrecisionRecipe

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class ParameterPartition:
    """What all processes know of the parameters."""

    buckets: tuple[Bucket, ...]
    slices: tuple[ParameterSlice, ...]
    recipe: PrecisionRecipe
    optimizer_groups: tuple[tuple[float, float], ...]  # Of the optimizer: (scale of the learning rate, weight decay)
    compression: PushPullCompression = NO_COMPRESSION
    delay_compensation: float = 0.0  # Of delays: how much of what has become of the parameters since

    @property
    def gradient_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.recipe.reduce)
        return dtype

    def slice_ids_of_bucket(self, bucket_id: int) -> list[int]:
        return self._slice_ids_by_bucket[bucket_id]

    @cached_property
    def _slice_ids_by_bucket(self) -> dict[int, list[int]]:
        """Asked for again and again in every step."""
        slice_ids_by_bucket: dict[int, list[int]] = {}
        for slice_id, parameter_slice in enumerate(self.slices):
            slice_ids_by_bucket.setdefault(parameter_slice.bucket_id, []).append(slice_id)
        return slice_ids_by_bucket


@dataclass
class _ParameterSliceTensors:
    """Of one piece."""

    master: Tensor
    optimizer: torch.optim.Optimizer
    optimizer_slices: list[tuple[slice, nn.Parameter]]  # (where in the piece, what is updated as one)
    published_value: Tensor  # What is pulled: parameters, or a message about them
    pushes: dict[int, bytearray] = field(default_factory=dict)  # By share, as it came
    # By worker, the parameters of its last pull, where delays are compensated for.
    pulled_by_worker: dict[str, Tensor] = field(default_factory=dict)
    # By share, the parameters that it was computed with.
    parameters_at_pull: dict[int, Tensor] = field(default_factory=dict)
    summed_gradient: tuple[tuple[int, ...], Tensor] | None = None  # The sum over these shares


class ParameterStore:
    """All begins with zeros, until it is loaded."""

    def __init__(self, partition: ParameterPartition, make_optimizer: OptimizerFactory) -> None:
        self._partition = partition
        self._make_optimizer = make_optimizer
        self._tensors_by_slice: dict[int, _ParameterSliceTensors] = {}
        self._compressor = (
            PushPullCompressor(partition.compression.pull_codec, partition.compression)
            if partition.compression.pull_codec
            else None
        )

    def _tensors_of(self, slice_id: int) -> _ParameterSliceTensors:
        if slice_id not in self._tensors_by_slice:
            self._tensors_by_slice[slice_id] = self._create_tensors(slice_id)
        return self._tensors_by_slice[slice_id]

    def _create_tensors(self, slice_id: int) -> _ParameterSliceTensors:
        parameter_slice = self._partition.slices[slice_id]
        master = torch.zeros(parameter_slice.numel, dtype=getattr(torch, self._partition.recipe.master))
        group_ranges = self._partition.buckets[parameter_slice.bucket_id].group_slices(parameter_slice.flat_range)
        optimizer_slices, groups = [], []
        for group, flat_range in group_ranges:
            slice_range = slice(
                flat_range.start - parameter_slice.flat_range.start, flat_range.stop - parameter_slice.flat_range.start
            )
            scale, weight_decay = self._partition.optimizer_groups[group]
            optimizer_slices.append((slice_range, nn.Parameter(master[slice_range], requires_grad=False)))
            groups.append({"params": [optimizer_slices[-1][1]], "weight_decay": weight_decay, "scale": scale})
        return _ParameterSliceTensors(
            master, self._make_optimizer(groups), optimizer_slices, self._encode_value(slice_id, master)
        )

    def _encode_value(self, slice_id: int, master: Tensor) -> Tensor:
        if self._compressor:
            return self._compressor.compress(slice_id, 0, master)
        return master.to(getattr(torch, self._partition.recipe.compute), copy=True)

    def add_push(self, slice_id: int, work_item: int, gradient: bytearray, worker: str = "") -> None:
        tensors = self._tensors_of(slice_id)
        tensors.pushes.setdefault(work_item, gradient)
        if worker in tensors.pulled_by_worker:
            tensors.parameters_at_pull.setdefault(work_item, tensors.pulled_by_worker.pop(worker))

    def push_of(self, slice_id: int, work_item: int) -> memoryview:
        return memoryview(self._tensors_of(slice_id).pushes[work_item])

    def discard_pushes_except(self, slice_id: int, work_items: Collection[int]) -> None:
        tensors = self._tensors_of(slice_id)
        tensors.pushes = {
            work_item: gradient for work_item, gradient in tensors.pushes.items() if work_item in work_items
        }
        tensors.parameters_at_pull = {
            share: parameters for share, parameters in tensors.parameters_at_pull.items() if share in work_items
        }

    def squared_norm(self, slice_id: int, work_items: Sequence[int]) -> float:
        """Of the norm of a sum."""
        return squared_norm(self._sum_pushes(slice_id, work_items))

    def apply_update(self, slice_id: int, work_items: Sequence[int], learning_rate: float, factor: float) -> None:
        """One update with the sum of these gradients times the factor."""
        tensors, total = self._tensors_of(slice_id), self._sum_pushes(slice_id, work_items)
        total.mul_(factor)
        if self._partition.delay_compensation and work_items[0] in tensors.parameters_at_pull:
            drift = tensors.master - tensors.parameters_at_pull[work_items[0]]
            total.add_(self._partition.delay_compensation * total.square() * drift)
        for group in tensors.optimizer.param_groups:
            group["lr"] = learning_rate * group["scale"]
        for slice_range, parameter in tensors.optimizer_slices:
            parameter.grad = total[slice_range]
        tensors.optimizer.step()
        for _, parameter in tensors.optimizer_slices:
            parameter.grad = None
        tensors.summed_gradient = None
        tensors.published_value = self._encode_value(slice_id, tensors.master)

    def value_for_worker(self, slice_id: int, worker: str = "") -> memoryview:
        """For this worker."""
        tensors = self._tensors_of(slice_id)
        if self._partition.delay_compensation:
            tensors.pulled_by_worker[worker] = tensors.master.clone()
        return tensor_bytes(tensors.published_value)

    def _sum_pushes(self, slice_id: int, work_items: Sequence[int]) -> Tensor:
        """In the order of the shares, whatever order they came in."""
        tensors = self._tensors_of(slice_id)
        if tensors.summed_gradient is None or tensors.summed_gradient[0] != tuple(work_items):
            like = torch.empty(tensors.master.shape, dtype=self._partition.gradient_dtype, device="meta")
            compression = self._partition.compression
            first, *others = (
                decompress_gradient(compression, tensors.pushes[work_item], slice_id, work_item, like)
                for work_item in work_items
            )
            total = first.to(tensors.master.dtype, copy=True)
            for other in others:
                total.add_(other)
            tensors.summed_gradient = tuple(work_items), total
        return tensors.summed_gradient[1]

    # --- what a second server, a checkpoint and a snapshot are given --------------------------------

    def slice_state(self, slice_id: int) -> dict[str, Tensor]:
        """Masters and moments of the whole piece, and counts."""
        tensors = self._tensors_of(slice_id)
        moments = [tensors.optimizer.state[parameter] for _, parameter in tensors.optimizer_slices]
        state = {"master": tensors.master}
        for kind, value in moments[0].items():
            if isinstance(value, Tensor):
                state[kind] = value if value.ndim == 0 else torch.cat([moment[kind] for moment in moments])
        return state

    def full_slice_state(self, slice_id: int) -> dict[str, Tensor]:
        """And what is published, with what that has lost."""
        if self._compressor is None:
            return self.slice_state(slice_id)
        return (
            self.slice_state(slice_id)
            | {PUBLISHED_VALUE_ENTRY: self._tensors_of(slice_id).published_value}
            | self._compressor.error_feedback_state(slice_id)
        )

    def load_slice_state(self, slice_id: int, state: Mapping[str, Tensor]) -> None:
        """A state, or all of it."""
        tensors = self._tensors_of(slice_id)
        tensors.master.copy_(state["master"])
        for kind, value in state.items():
            for slice_range, parameter in (
                tensors.optimizer_slices if kind not in ("master", PUBLISHED_VALUE_ENTRY, ERROR_FEEDBACK_ENTRY) else ()
            ):
                tensors.optimizer.state[parameter][kind] = (
                    value.clone() if value.ndim == 0 else value[slice_range].clone()
                )
        if self._compressor is not None and PUBLISHED_VALUE_ENTRY in state:
            tensors.published_value = state[PUBLISHED_VALUE_ENTRY].clone()
            if ERROR_FEEDBACK_ENTRY in state:
                self._compressor.load_error_feedback(slice_id, state[ERROR_FEEDBACK_ENTRY])
        else:
            tensors.published_value = self._encode_value(slice_id, tensors.master)


def serialize_tensors(tensors: Mapping[str, Tensor]) -> memoryview:
    file = BytesIO()
    torch.save(dict(tensors), file)
    return file.getbuffer()


def deserialize_tensors(content: bytes | bytearray) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = torch.load(BytesIO(content), weights_only=True)
    return tensors


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor on the CPU, which stays alive as long as this does."""
    return tensor.detach().view(torch.uint8).numpy().data
