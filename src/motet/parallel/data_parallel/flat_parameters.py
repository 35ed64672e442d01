"""Trainable parameters and their gradients on flat tensors, bucket by bucket.

    compute   recipe.compute   all buckets one after another; the module's parameters are views of it
    master    recipe.master    this rank's shard of every bucket, updated by the optimizer; a view of `compute` where
                               the dtypes agree, unless parameters are gathered by a lossy codec

A shard may be the whole bucket: then every rank updates everything.

Gives the parameters of a rank their initial values: only the elements that it holds are read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from motet.collectives.execute.api import broadcast
from motet.core.errors import check_input
from motet.memory.tiers.optimizer_states import Target
from motet.models.parameter_values import BoxReader, ParameterValues, set_values
from motet.models.weight_init import TensorBox
from motet.parallel.data_parallel.buckets import Bucket, BucketParameter
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec
from motet.precision.recipe import PrecisionRecipe, keeps_masters

STRAY_GRADIENT = (
    "parameter {} got a gradient past its hook, which would be lost: something assigned to .grad (torch's split "
    "backward does so); let autograd accumulate it, by loss.backward()"
)


class LocalShard(NamedTuple):
    """The contiguous elements of a parameter that a rank holds, from `start` on."""

    shape: torch.Size  # Shape of the unsharded parameter
    start: int
    values: Tensor


# Updates masters, by their indices, with these gradients.
MasterUpdate = Callable[[Mapping[int, Tensor]], None]


def no_update(gradients: Mapping[int, Tensor]) -> None:
    """Update nothing: a module without an optimizer."""


class GradientBuffer:
    """Gradients in `recipe.reduce`: of all buckets, or of this rank's shards, with a bucket while backward fills it."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        shard_slices: Sequence[slice],
        dtype: torch.dtype,
        *,
        device: torch.device,
        keeps_all: bool,
    ) -> None:
        self._buckets, self._shard_slices, self._keeps_all = buckets, shard_slices, keeps_all
        self.dtype, self.device = dtype, device
        offsets = [0, *accumulate(s.stop - s.start for s in shard_slices)]
        # The slices of `_flat` that hold the shards.
        self._stored_slices = shard_slices if keeps_all else [slice(*pair) for pair in pairwise(offsets)]
        self._flat = torch.zeros(buckets[-1].stop if keeps_all else offsets[-1], dtype=dtype, device=device)
        self._open_buckets: dict[int, Tensor] = {}  # Buckets in use, where only shards are kept
        self._names = [frozenset(member.name for member in bucket.members) for bucket in buckets]
        # By bucket: parameters whose next gradient replaces the contents of the buffer.
        self._unwritten: list[set[str]] = [set() for _ in buckets]
        self._missing: list[set[str]] = [set() for _ in buckets]  # Parameters without a gradient in this backward
        self.on_bucket_ready: Callable[[int], None] = lambda bucket_id: None

    def begin_step(self) -> None:
        """Gradients that follow replace those in the buffer."""
        self._unwritten = self._all_names()

    def begin_backward(self) -> None:
        self._missing = self._all_names()

    def _all_names(self) -> list[set[str]]:
        return [set(names) for names in self._names]

    def bucket(self, bucket_id: int) -> Tensor:
        """The unreduced gradients of a bucket."""
        bucket = self._buckets[bucket_id]
        if self._keeps_all:
            return self._flat[bucket.flat_slice]
        if bucket_id not in self._open_buckets:
            self._open_buckets[bucket_id] = tensor = self._flat.new_empty(bucket.length)
            for gap in bucket.padding:
                tensor[gap.start - bucket.start : gap.stop - bucket.start].zero_()
        return self._open_buckets[bucket_id]

    def shard(self, bucket_id: int) -> Tensor:
        """This rank's shard of the reduced gradients."""
        return self._flat[self._stored_slices[bucket_id]]

    def local_slice(self, flat_slice: slice) -> Tensor:
        """Gradients of a range of the flat tensors that this rank keeps."""
        if self._keeps_all or flat_slice.start == flat_slice.stop:
            return self._flat[flat_slice]
        slices = zip(self._stored_slices, self._shard_slices, strict=True)
        offset = next(at.start - shard.start for at, shard in slices if shard.start <= flat_slice.start < shard.stop)
        return self._flat[flat_slice.start + offset : flat_slice.stop + offset]

    def free_bucket(self, bucket_id: int) -> None:
        """Free the unreduced gradients of a bucket."""
        if self._open_buckets.pop(bucket_id, None) is not None:
            self._unwritten[bucket_id] = set(self._names[bucket_id])

    def zero_missing(self, bucket_id: int) -> None:
        """Write zeros for parameters that got no gradient."""
        bucket, tensor = self._buckets[bucket_id], self.bucket(bucket_id)
        for member in bucket.members:
            if member.name in self._unwritten[bucket_id]:
                tensor[member.start - bucket.start : member.stop - bucket.start].zero_()
        self._unwritten[bucket_id] = set()

    def begins_sum(self, bucket_id: int, name: str) -> bool:
        """Whether the next gradient of a parameter replaces the contents of the buffer. Later ones are added."""
        unwritten = self._unwritten[bucket_id]
        is_first = name in unwritten
        unwritten.discard(name)
        return is_first

    def view_of(self, bucket_id: int, member: BucketParameter, shape: torch.Size) -> Tensor:
        """The part of a bucket in which the gradient of a parameter is added up."""
        start = self._buckets[bucket_id].start
        return self.bucket(bucket_id)[member.start - start : member.stop - start].view(shape)

    def lasting_view_of(self, bucket_id: int, member: BucketParameter, shape: torch.Size) -> Tensor | None:
        """The same part, if it stays the same tensor."""
        return self.view_of(bucket_id, member, shape) if self._keeps_all else None

    def complete(self, bucket_id: int, member: BucketParameter) -> None:
        """Mark the gradient of a parameter as complete in this backward."""
        missing = self._missing[bucket_id]
        missing.discard(member.name)
        if not missing:
            self.on_bucket_ready(bucket_id)


class ParameterGradientSum:
    """Adds gradients of one parameter to its bucket: the sums of autograd, and products of a linear layer."""

    def __init__(
        self, parameter: nn.Parameter, buffer: GradientBuffer, bucket_id: int, *, member: BucketParameter
    ) -> None:
        self._buffer, self._bucket_id, self._member, self._shape = buffer, bucket_id, member, parameter.shape
        self._lasting_view = buffer.lasting_view_of(bucket_id, member, parameter.shape)
        self._has_product = False  # A product was added in this backward without autograd
        parameter.register_post_accumulate_grad_hook(_call_while_alive(WeakMethod(self._collect)))

    def _collect(self, parameter: Tensor) -> None:
        """Move the gradient of a parameter into its bucket."""
        grad = parameter.grad
        if grad is not None:
            grad = grad.to_dense() if grad.is_sparse else grad
            if self._buffer.begins_sum(self._bucket_id, self._member.name):
                self._view().copy_(grad)
            else:
                self._view().add_(grad)
            parameter.grad = None
            del grad  # before the bucket is sent, which may allocate more
        elif not self._has_product:  # The product was deferred, and autograd calls hooks nevertheless
            return
        self.complete()

    def add_product(self, product: Callable[..., Tensor]) -> None:
        """Add a product to the gradient, by `product(out, adds=...)`."""
        adds = not self._buffer.begins_sum(self._bucket_id, self._member.name)
        product(self._view(), adds=adds)
        self._has_product = True

    def complete(self) -> None:
        """Mark the parameter's gradient as complete in this backward."""
        self._has_product = False
        self._buffer.complete(self._bucket_id, self._member)

    def _view(self) -> Tensor:
        if self._lasting_view is not None:
            return self._lasting_view
        return self._buffer.view_of(self._bucket_id, self._member, self._shape)


def _call_while_alive(method: "WeakMethod[Callable[[Tensor], None]]") -> Callable[[Tensor], None]:
    """A hook that does not keep its owner, and with it all tensors of a run, from being collected: Python's collector
    of cycles does not see the hooks of a tensor."""

    def call(parameter: Tensor) -> None:
        if (alive := method()) is not None:
            alive(parameter)

    return call


class OptimizerSlice(NamedTuple):
    """Elements that one call of the optimizer updates: one optimizer group in this rank's shard of one bucket."""

    bucket_id: int
    optimizer_group: int
    flat_slice: slice  # Range in the flat tensors
    master: Tensor


class FlatParameters:
    """All trainable parameters of a module, which are zero until `unfilled_shards` are filled."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        updated_slices: Sequence[slice],
        *,
        recipe: PrecisionRecipe,
        gradients: GradientBuffer,
        separate_masters: bool = False,
        allocate_masters: Callable[[Sequence[int]], Sequence[Tensor]] | None = None,
    ) -> None:
        """This rank updates `updated_slices`, one of each bucket; separate masters are never views of `compute`.
        `allocate_masters` makes masters of these lengths in another memory than that of the device."""
        self.buckets, self.gradients = tuple(buckets), gradients
        self._shapes, self._parameters = {name: p.shape for name, p in parameters.items()}, dict(parameters)
        self._members = {member.name: member for bucket in self.buckets for member in bucket.members}
        compute, master = getattr(torch, recipe.compute), getattr(torch, recipe.master)
        self.compute = torch.zeros(self.buckets[-1].stop, dtype=compute, device=gradients.device)
        self._shares_storage = not (separate_masters or keeps_masters(recipe) or allocate_masters)

        def make_master(length: int, start: int) -> Tensor:
            values = self.compute[start : start + length]
            return values if self._shares_storage and length else torch.zeros_like(values, dtype=master)

        places = [
            (i, group, flat_slice)
            for i, bucket in enumerate(self.buckets)
            for group, flat_slice in bucket.group_slices(updated_slices[i])
        ]
        # A rank that updates nothing has an optimizer too, with the same step count as the others
        places = places or [(0, self.buckets[0].members[0].optimizer_group, slice(0, 0))]
        starts, lengths = [at.start for *_, at in places], [at.stop - at.start for *_, at in places]
        masters = allocate_masters(lengths) if allocate_masters else [*map(make_master, lengths, starts)]
        self.optimizer_slices = tuple(OptimizerSlice(*place, made) for place, made in zip(places, masters, strict=True))
        self.gradient_sums = dict[Tensor, ParameterGradientSum]()
        for bucket_id, member in ((i, member) for i, bucket in enumerate(self.buckets) for member in bucket.members):
            set_values(parameter := parameters[member.name], self._view(member))
            self.gradient_sums[parameter] = ParameterGradientSum(parameter, gradients, bucket_id, member=member)
        self._addresses = {name: p.data_ptr() for name, p in parameters.items() if p.numel()}

    def _view(self, member: BucketParameter) -> Tensor:
        return self.compute[member.flat_slice].view(self._shapes[member.name])

    def unfilled_shards(self) -> Iterator[tuple[str, LocalShard]]:
        """Parameters and masters, to be filled with values before they are cast to the compute dtype."""
        for name, member in self._members.items():
            yield name, LocalShard(self._shapes[name], 0, self.compute[member.flat_slice])
        if not self._shares_storage:
            yield from self.local_shards([each.master for each in self.optimizer_slices]).items()

    def compute_slices(self) -> list[Target]:
        """The elements of each optimizer slice with which the device computes."""
        return [Target(partial(self.compute.__getitem__, each.flat_slice)) for each in self.optimizer_slices]

    def cast_targets(self) -> list[Tensor | None]:
        """The elements with which the device computes, for each master that is cast; None for masters that are them."""
        targets = (self.compute[each.flat_slice] for each in self.optimizer_slices)
        return [None if self._shares_storage else target for target in targets]

    def slices_of_buckets(self) -> list[list[int]]:
        """The indices of the optimizer slices of each bucket."""
        indices: list[list[int]] = [[] for _ in self.buckets]
        for index, each in enumerate(self.optimizer_slices):
            indices[each.bucket_id].append(index)
        return indices

    def cast_masters(self, slices: Sequence[OptimizerSlice] | None = None) -> None:
        """Cast this rank's masters, or some of them, to the compute dtype after an update."""
        for optimizer_slice in self.optimizer_slices if slices is None else slices:
            values = self.compute[optimizer_slice.flat_slice]
            if optimizer_slice.master.data_ptr() != values.data_ptr():
                values.copy_(optimizer_slice.master)

    def bump_versions(self, bucket_id: int) -> None:
        """Let autograd raise if a parameter of the bucket was used before it got its new values."""
        increment_version([self._parameters[member.name] for member in self.buckets[bucket_id].members])

    def load_assigned_values(self) -> None:
        """Continue from values that were assigned to parameters; masters that round to these values stay."""
        assigned = {}
        for name, member in self._members.items():
            now, before = ((t.data_ptr(), t.shape, t.stride()) for t in (self._parameters[name], self._view(member)))
            if now != before:
                assigned[name] = self._parameters[name].detach().clone()
        for name, values in assigned.items():
            shape, device = self._shapes[name], self.compute.device
            check_input(
                values.shape == shape and values.device == device,
                f"parameter {name} is {list(values.shape)} on {values.device}, but was {list(shape)} on {device} when "
                "the module was parallelized; change shapes and devices before",
            )
        for name, values in assigned.items():
            view = self._view(self._members[name])
            view.copy_(values)
            self._parameters[name].data = view
        for optimizer_slice in self.optimizer_slices:
            master, compute = optimizer_slice.master, self.compute[optimizer_slice.flat_slice]
            if master.data_ptr() != compute.data_ptr():
                compute = compute.to(master.device)
                master.copy_(torch.where(master.to(compute.dtype) == compute, master, compute.to(master.dtype)))

    def check_storage_unchanged(self) -> None:
        """Raise if a parameter has stopped being a view of the flat tensor: updates would not reach it."""
        addresses = self._addresses.items()
        moved = next((name for name, address in addresses if self._parameters[name].data_ptr() != address), None)
        check_input(
            moved is None,
            f"parameter {moved} was given other memory after the module was parallelized (p.data = ..., or by its "
            "module), where updates do not reach it; call engine.load_assigned_values() after you have assigned values",
        )

    def check_no_stray_gradients(self) -> None:
        """Raise if a backward left a gradient that no hook has moved into its bucket: it would be lost silently."""
        stray = next((name for name, parameter in self._parameters.items() if parameter.grad is not None), None)
        check_input(stray is None, STRAY_GRADIENT.format(stray))

    def local_shards(self, tensors: Sequence[Tensor]) -> dict[str, LocalShard]:
        """The shards of parameters in `tensors`, one for each optimizer slice, by name."""
        shards = {name: LocalShard(shape, 0, tensors[0][:0]) for name, shape in self._shapes.items()}
        for optimizer_slice, tensor in zip(self.optimizer_slices, tensors, strict=True):
            flat_slice = optimizer_slice.flat_slice
            for member, first, stop in member_overlaps(self.buckets[optimizer_slice.bucket_id], flat_slice):
                values = tensor[first - flat_slice.start : stop - flat_slice.start]
                shards[member.name] = LocalShard(self._shapes[member.name], first - member.start, values)
        return shards


def member_overlaps(bucket: Bucket, flat_slice: slice) -> list[tuple[BucketParameter, int, int]]:
    """(Member, first, stop) of the elements of members in a range of the flat tensors."""
    overlaps = [(m, max(m.start, flat_slice.start), min(m.stop, flat_slice.stop)) for m in bucket.members]
    return [(member, first, stop) for member, first, stop in overlaps if first < stop]


READ_NUMEL = 1 << 20  # Elements that are read together, so that a large parameter is never complete in memory


class BroadcastValues:
    """The values of the first rank's module. A rank has one complete parameter at a time."""

    fingerprint = ""

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        where = None if group.rank == 0 else "meta"  # The values of other ranks need not be kept
        self._tensors, self._group = {n: p.detach().to(where) for n, p in module.named_parameters()}, group

    def open(self, name: str) -> BoxReader:
        tensor, group = self._tensors.pop(name), self._group
        if group.rank != 0:
            tensor = torch.empty_like(tensor, device=group.device)
        tensor = tensor.contiguous()
        broadcast(tensor, group)

        def read(box: TensorBox) -> Tensor:
            offsets, lengths = box
            return tensor[tuple(slice(first, first + n) for first, n in zip(offsets, lengths, strict=True))]

        return read


def fill_parameters(
    module: nn.Module,
    shards: Iterable[tuple[str, LocalShard]],
    specs: Mapping[str, ShardSpec],
    *,
    values: ParameterValues,
    device: torch.device,
) -> None:
    """Fill the shards of parameters, and all other parameters of the module; `specs` are the rank's shards."""
    by_name: dict[str, list[LocalShard]] = {}
    for name, shard in shards:
        by_name.setdefault(name, []).append(shard)
    for name, parameter in module.named_parameters():
        if name not in by_name and name in specs:
            set_values(parameter, torch.zeros(parameter.shape, dtype=parameter.dtype, device=device))
            by_name[name] = [LocalShard(parameter.shape, 0, parameter.detach().view(-1))]
        read = values.open(name)
        if name in specs:
            fill_shards(by_name[name], specs[name], read)


def fill_shards(shards: Sequence[LocalShard], spec: ShardSpec, read: BoxReader) -> None:
    """Fill runs of one local tensor, whose elements are read once for all of them. Padding gets zeros, and a tensor on
    the meta device nothing."""
    if all(shard.values.is_meta for shard in shards):
        return
    bounds = [(shard.start, shard.start + shard.values.numel()) for shard in shards]
    for shard in shards if spec.padding else ():
        shard.values.zero_()
    last = max(stop for _, stop in bounds)
    for start in range(min(start for start, _ in bounds), last, READ_NUMEL):
        for box, local in spec.boxes(start, min(start + READ_NUMEL, last)):
            values = read(box).reshape(-1)
            for shard, (first, stop) in zip(shards, bounds, strict=True):
                low, high = max(first, local.start), min(stop, local.stop)
                if low < high:
                    shard.values[low - first : high - first] = values[low - local.start : high - local.start]
