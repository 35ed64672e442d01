"""The tensors of a server: master parameters and moments of its slices, pushed gradients, and published parameters.

Published parameters are never written to: an update makes a new tensor, so a reply that is being sent has one version.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from motet.collectives.compression.codec_base import SparseCodec
from motet.core.dtypes import DTYPE_BYTES
from motet.core.errors import InputError, check_input
from motet.parallel.data_parallel.buckets import Bucket
from motet.parallel.parameter_server.process import push_pull_compression
from motet.parallel.parameter_server.process.push_pull_compression import PushPullCompression, PushPullCompressor
from motet.parallel.parameter_server.protocol.message_admission import (
    STATE_BYTES_PER_ELEMENT,
    STATE_HEADER_BYTES,
    PayloadSizes,
)
from motet.parallel.parameter_server.protocol.message_framing import BadMessageError
from motet.parallel.parameter_server.protocol.messages import UpdateScalars
from motet.parallel.parameter_server.protocol.parameter_slices import ParameterSlice
from motet.parallel.reproducible.norms import squared_norm
from motet.precision.recipe import PrecisionRecipe

# State of a slice that a second server needs, in addition to master parameters and moments.
ERROR_FEEDBACK_ENTRY, PUBLISHED_VALUE_ENTRY, PUSH_PREFIX = "pull/error", "pull/message", "push/"
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class ParameterSlicingPlan:
    """How the parameters are cut and updated; the same in all processes."""

    buckets: tuple[Bucket, ...]
    slices: tuple[ParameterSlice, ...]
    recipe: PrecisionRecipe
    optimizer_groups: tuple[tuple[float, float], ...]  # (scale of the learning rate, weight decay)
    compression: PushPullCompression = field(default_factory=PushPullCompression)
    delay_compensation: float = 0.0

    @cached_property
    def payload_sizes(self) -> PayloadSizes:
        """The bytes of what processes send about each slice."""
        pushes, pulls = (
            tuple(codec.wire_bytes([s.numel], dtype) if codec else s.numel * DTYPE_BYTES[dtype] for s in self.slices)
            for codec, dtype in (
                (self.compression.push_codec, self.recipe.reduce),
                (self.compression.pull_codec, self.recipe.compute),
            )
        )
        states = tuple(s.numel * STATE_BYTES_PER_ELEMENT + STATE_HEADER_BYTES for s in self.slices)
        return PayloadSizes(pushes, pulls, states)

    @cached_property
    def slice_ids_by_bucket(self) -> list[list[int]]:
        slice_ids: list[list[int]] = [[] for _ in self.buckets]
        for slice_id, parameter_slice in enumerate(self.slices):
            slice_ids[parameter_slice.bucket_id].append(slice_id)
        return slice_ids


@dataclass
class _ParameterSliceTensors:
    master: Tensor
    optimizer: torch.optim.Optimizer
    optimizer_slices: list[tuple[slice, nn.Parameter]]  # (range in the slice, view of the master parameters)
    published_value: Tensor  # What workers pull: parameters, or a compressed message
    pushes: dict[int, bytearray] = field(default_factory=dict)  # By work item, as received
    # For delay compensation: the master parameters of each worker's last pull, until its gradient is applied.
    pulled_by_worker: dict[str, Tensor] = field(default_factory=dict)
    pulled_for_item: dict[int, Tensor] = field(default_factory=dict)
    gradient_sum: tuple[tuple[int, ...], Tensor] | None = None  # Of these work items


class ParameterStore:
    """The slices of one server. A slice is zero until it is loaded."""

    def __init__(self, partition: ParameterSlicingPlan, make_optimizer: OptimizerFactory) -> None:
        self.partition, self._make_optimizer = partition, make_optimizer
        self._tensors_by_slice: dict[int, _ParameterSliceTensors] = {}
        codec = partition.compression.pull_codec
        self._compressor = PushPullCompressor(codec, partition.compression) if codec else None

    def _tensors_of(self, slice_id: int) -> _ParameterSliceTensors:
        if slice_id in self._tensors_by_slice:
            return self._tensors_by_slice[slice_id]
        partition, parameter_slice = self.partition, self.partition.slices[slice_id]
        master = torch.zeros(parameter_slice.numel, dtype=getattr(torch, partition.recipe.master))
        optimizer_slices, groups, start = [], [], parameter_slice.flat_range.start
        for group, flat in partition.buckets[parameter_slice.bucket_id].group_slices(parameter_slice.flat_range):
            slice_range = slice(flat.start - start, flat.stop - start)
            parameter = nn.Parameter(master[slice_range], requires_grad=False)
            scale, weight_decay = partition.optimizer_groups[group]
            optimizer_slices.append((slice_range, parameter))
            groups.append({"params": [parameter], "weight_decay": weight_decay, "scale": scale})
        optimizer, published_value = self._make_optimizer(groups), self._encode_value(slice_id, master)
        tensors = _ParameterSliceTensors(master, optimizer, optimizer_slices, published_value)
        return self._tensors_by_slice.setdefault(slice_id, tensors)

    def _encode_value(self, slice_id: int, master: Tensor) -> Tensor:
        if self._compressor:
            return self._compressor.compress(slice_id, 0, master)
        return master.to(getattr(torch, self.partition.recipe.compute), copy=True)

    def add_push(self, slice_id: int, work_item: int, gradient: bytearray, *, worker: str = "") -> None:
        tensors = self._tensors_of(slice_id)
        tensors.pushes.setdefault(work_item, gradient)
        if worker in tensors.pulled_by_worker:
            tensors.pulled_for_item.setdefault(work_item, tensors.pulled_by_worker.pop(worker))

    def check_push(self, slice_id: int, work_item: int, gradient: bytearray) -> None:
        """Raise a `BadMessageError` for a compressed gradient with elements outside of the slice."""
        if isinstance(self.partition.compression.push_codec, SparseCodec):
            try:
                self._decompress(slice_id, work_item, gradient)
            except (IndexError, RuntimeError) as error:
                raise BadMessageError(f"a push has elements outside of slice {slice_id}") from error

    def _decompress(self, slice_id: int, work_item: int, gradient: bytearray) -> Tensor:
        compression, numel = self.partition.compression, self.partition.slices[slice_id].numel
        like = torch.empty(numel, dtype=getattr(torch, self.partition.recipe.reduce), device="meta")
        seed = push_pull_compression.message_seed(compression.seed, slice_id, work_item)
        return push_pull_compression.decompress(compression.push_codec, gradient, like, seed=seed)

    def push_of(self, slice_id: int, work_item: int) -> memoryview:
        return memoryview(self._tensors_of(slice_id).pushes[work_item])

    def discard_pushes_except(self, slice_id: int, work_items: Collection[int]) -> None:
        tensors = self._tensors_of(slice_id)
        tensors.pushes = {item: gradient for item, gradient in tensors.pushes.items() if item in work_items}
        tensors.pulled_for_item = {item: t for item, t in tensors.pulled_for_item.items() if item in work_items}

    def squared_norm(self, slice_id: int, work_items: Sequence[int]) -> float:
        return squared_norm(self._sum_pushes(slice_id, work_items)).item()

    def apply_update(self, slice_id: int, work_items: Sequence[int], scalars: UpdateScalars) -> None:
        """Step the optimizer with the sum of these gradients times the factor."""
        tensors, total = self._tensors_of(slice_id), self._sum_pushes(slice_id, work_items)
        total.mul_(scalars.gradient_factor)
        if work_items[0] in tensors.pulled_for_item:  # add strength * gradient^2 * drift (DC-ASGD, arXiv:1609.08326)
            drift = tensors.master - tensors.pulled_for_item[work_items[0]]
            total.add_(self.partition.delay_compensation * total.square() * drift)
        for group in tensors.optimizer.param_groups:
            group["lr"] = scalars.learning_rate * group["scale"]
        for slice_range, parameter in tensors.optimizer_slices:
            parameter.grad = total[slice_range].to(parameter.dtype)
        tensors.optimizer.step()
        tensors.optimizer.zero_grad(set_to_none=True)
        tensors.gradient_sum = None
        tensors.published_value = self._encode_value(slice_id, tensors.master)

    def value_for_worker(self, slice_id: int, worker: str = "") -> memoryview:
        tensors = self._tensors_of(slice_id)
        if self.partition.delay_compensation:
            tensors.pulled_by_worker[worker] = tensors.master.clone()
        return tensor_bytes(tensors.published_value)

    def _sum_pushes(self, slice_id: int, work_items: Sequence[int]) -> Tensor:
        """The sum in the order of the work items, in whatever order they arrived."""
        tensors = self._tensors_of(slice_id)
        if tensors.gradient_sum is None or tensors.gradient_sum[0] != tuple(work_items):
            first, *others = (self._decompress(slice_id, item, tensors.pushes[item]) for item in work_items)
            total = first.to(torch.promote_types(first.dtype, tensors.master.dtype), copy=True)
            for other in others:
                total.add_(other)
            tensors.gradient_sum = tuple(work_items), total
        return tensors.gradient_sum[1]

    def slice_state(self, slice_id: int) -> dict[str, Tensor]:
        """Master parameters, moments and step counts of a slice."""
        tensors = self._tensors_of(slice_id)
        moments = [tensors.optimizer.state[parameter] for _, parameter in tensors.optimizer_slices]
        return {"master": tensors.master} | {
            kind: value if value.ndim == 0 else torch.cat([moment[kind] for moment in moments])
            for kind, value in moments[0].items()
            if isinstance(value, Tensor)
        }

    def full_slice_state(self, slice_id: int, work_items: Collection[int] = ()) -> dict[str, Tensor]:
        """`slice_state`, with the published value, its compression error, and the pushes of these work items."""
        state = self.slice_state(slice_id)
        if self._compressor is not None:
            state[PUBLISHED_VALUE_ENTRY] = self._tensors_of(slice_id).published_value
            if slice_id in self._compressor.errors:
                state[ERROR_FEEDBACK_ENTRY] = self._compressor.errors[slice_id]
        for item in work_items:
            state[f"{PUSH_PREFIX}{item}"] = torch.frombuffer(self.push_of(slice_id, item), dtype=torch.uint8)
        return state

    def _check_slice_state(self, slice_id: int, state: Mapping[str, Tensor]) -> None:
        """Refuse a state of other tensors: a copy would broadcast them."""
        check_input(
            slice_id in range(len(self.partition.slices)) and "master" in state,
            f"slice {slice_id} is none of the {len(self.partition.slices)} of this run, or its state has no master "
            "parameters; start the run again with --resume",
        )
        tensors = self._tensors_of(slice_id)
        shape = tensors.master.shape
        expected_shapes = {"master": [shape], PUBLISHED_VALUE_ENTRY: [tensors.published_value.shape]}
        for name, value in state.items():
            expected = expected_shapes.get(name, [shape, torch.Size()])
            check_input(
                value.shape in expected or name.startswith(PUSH_PREFIX),
                f"the state of slice {slice_id} has {name} of shape {list(value.shape)}, not {list(expected[0])}; "
                "start the run again with --resume",
            )

    def load_slice_state(self, slice_id: int, state: Mapping[str, Tensor]) -> None:
        """Load a `slice_state` or a `full_slice_state`."""
        self._check_slice_state(slice_id, state)
        tensors = self._tensors_of(slice_id)
        tensors.master.copy_(state["master"])
        for name, value in state.items():
            if name.startswith(PUSH_PREFIX):
                self.add_push(slice_id, int(name.removeprefix(PUSH_PREFIX)), bytearray(tensor_bytes(value)))
            elif name not in ("master", PUBLISHED_VALUE_ENTRY, ERROR_FEEDBACK_ENTRY):
                for slice_range, parameter in tensors.optimizer_slices:
                    own_value = value if value.ndim == 0 else value[slice_range]
                    tensors.optimizer.state[parameter][name] = own_value.clone()
        if self._compressor is not None and PUBLISHED_VALUE_ENTRY in state:
            tensors.published_value = state[PUBLISHED_VALUE_ENTRY].clone()
            if ERROR_FEEDBACK_ENTRY in state:
                self._compressor.errors[slice_id] = state[ERROR_FEEDBACK_ENTRY].clone()
        else:
            tensors.published_value = self._encode_value(slice_id, tensors.master)


def serialize_tensors(tensors: Mapping[str, Tensor]) -> memoryview:
    """The tensors as safetensors: a header of JSON and plain bytes, of which nothing can execute."""
    return memoryview(safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def deserialize_tensors(content: bytes | bytearray) -> dict[str, Tensor]:
    try:
        return dict(safetensors.torch.load(bytes(content)))
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise InputError(f"the state of a slice is damaged ({error}); start the run again with --resume") from None


def read_slice_state(partition: ParameterSlicingPlan, slice_id: int, content: bytearray) -> dict[str, Tensor]:
    """The tensors of a slice that another process has sent. Raises a `BadMessageError` if one does not fit."""
    numel, sizes = partition.slices[slice_id].numel, partition.payload_sizes
    try:
        state = deserialize_tensors(content)
    except InputError as error:
        raise BadMessageError(str(error)) from error
    for name, tensor in {"master": torch.empty(0), **state}.items():
        shapes: tuple[tuple[int, ...], ...] = ((numel,),) if name == "master" else ((), (numel,))
        if name.startswith(PUSH_PREFIX):
            is_valid = name.removeprefix(PUSH_PREFIX).isdecimal() and tensor.dtype == torch.uint8
            shapes = ((sizes.pushes[slice_id],),)
        elif name == PUBLISHED_VALUE_ENTRY:
            is_valid = partition.compression.pull_codec is not None and tensor.dtype == torch.uint8
            shapes = ((sizes.pulls[slice_id],),)
        else:
            is_valid = tensor.is_floating_point()
        if not is_valid or tuple(tensor.shape) not in shapes:
            raise BadMessageError(f"{name} of slice {slice_id} is {tensor.dtype} of shape {tuple(tensor.shape)}")
    return state


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which stays alive as long as this view."""
    return tensor.detach().view(torch.uint8).numpy().data
