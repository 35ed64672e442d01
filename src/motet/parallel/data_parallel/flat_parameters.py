"""Trainable parameters on flat tensors: what the model computes with, what is updated, and the gradients between.

    compute   recipe.compute   all buckets one after another; the module's parameters are views of it
    master    recipe.master    this rank's shard of every bucket, updated by the optimizer; where the dtypes agree it is
                               that part of `compute`, unless what is published is not exactly the masters
    grad      recipe.reduce    what backward has is added to its bucket at once; all buckets stay, or the shards alone

A shard may be the whole bucket: then every rank keeps and updates everything.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from motet.core.errors import InputError
from motet.parallel.data_parallel.buckets import Bucket, BucketParameter
from motet.parallel.data_parallel.sharded_parameters import LocalShard
from motet.precision.recipe import PrecisionRecipe


class OptimizerSlice(NamedTuple):
    """What one update works on: parameters of one optimizer group in this rank's shard of one bucket."""

    bucket_id: int
    optimizer_group: int
    flat_slice: slice  # In the flat tensors
    master: Tensor


class FlatParameters:
    """All trainable parameters of a module."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        updated_slices: Sequence[slice],
        recipe: PrecisionRecipe,
        gradients: "GradientBuffer",
        separate_masters: bool = False,
    ) -> None:
        """`held`: what of each bucket this rank updates. `keep_masters`: apart, also where the dtypes agree."""
        self.buckets = tuple(buckets)
        self.gradients = gradients
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._parameters = dict(parameters)
        device = next(iter(parameters.values())).device
        total = self.buckets[-1].stop
        compute, master = getattr(torch, recipe.compute), getattr(torch, recipe.master)
        self.compute = torch.zeros(total, dtype=compute, device=device)
        for member in self._all_members():
            self.compute[member.start : member.stop].view(self._shapes[member.name]).copy_(parameters[member.name])
        shares_storage = compute == master and not separate_masters
        self.optimizer_slices = self._make_optimizer_slices(
            parameters, updated_slices, self.compute if shares_storage else None, master
        )
        for bucket_id, bucket in enumerate(self.buckets):
            for member in bucket.members:
                parameter = parameters[member.name]
                parameter.data = self.compute[member.start : member.stop].view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(self.gradients.make_grad_hook(bucket_id, member))
        self._addresses = {name: p.data_ptr() for name, p in parameters.items() if p.numel()}

    def _make_optimizer_slices(
        self,
        parameters: Mapping[str, nn.Parameter],
        updated_slices: Sequence[slice],
        shared_storage: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[OptimizerSlice, ...]:
        """The masters from the parameters as they are given, before these are cast."""
        slices = []
        for bucket_id, bucket in enumerate(self.buckets):
            for group, flat_slice in bucket.group_slices(updated_slices[bucket_id]):
                if shared_storage is not None:
                    slices.append(OptimizerSlice(bucket_id, group, flat_slice, shared_storage[flat_slice]))
                    continue
                size = flat_slice.stop - flat_slice.start
                optimizer_slice = OptimizerSlice(
                    bucket_id, group, flat_slice, torch.zeros(size, dtype=dtype, device=self.compute.device)
                )
                for member, first, stop in _overlaps(bucket, flat_slice):
                    values = parameters[member.name].detach().reshape(-1)
                    optimizer_slice.master[first - flat_slice.start : stop - flat_slice.start] = values[
                        first - member.start : stop - member.start
                    ]
                slices.append(optimizer_slice)
        if not slices:  # a rank that keeps nothing has an optimizer, too, with the same counts as the others'
            slices.append(
                OptimizerSlice(
                    0, self.buckets[0].members[0].optimizer_group, slice(0, 0), self.compute.new_zeros(0, dtype=dtype)
                )
            )
        return tuple(slices)

    def cast_masters(self, slices: Sequence[OptimizerSlice] | None = None) -> None:
        """Cast this rank's masters, or those of some parts, to what the model computes with, after an update."""
        for optimizer_slice in self.optimizer_slices if slices is None else slices:
            if optimizer_slice.master.data_ptr() != self.compute[optimizer_slice.flat_slice].data_ptr():
                self.compute[optimizer_slice.flat_slice].copy_(optimizer_slice.master)

    def bump_versions(self, bucket_id: int) -> None:
        """Parameters have other values now: autograd tells whoever has used them already."""
        increment_version([self._parameters[member.name] for member in self.buckets[bucket_id].members])

    def load_assigned_values(self) -> None:
        """Go on from the values that parameters have been given. Masters that are these, rounded, stay as they are."""
        moved = {
            m.name: p.detach().clone()
            for m in self._all_members()
            if self._has_new_storage(m, p := self._parameters[m.name])
        }
        for name, values in moved.items():
            self._check_shape_and_device(name, values)
        for member in self._all_members():
            view = self.compute[member.start : member.stop].view(self._shapes[member.name])
            if member.name in moved:
                view.copy_(moved[member.name])
                self._parameters[member.name].data = view
        for optimizer_slice in self.optimizer_slices:
            values = self.compute[optimizer_slice.flat_slice]
            if optimizer_slice.master.data_ptr() != values.data_ptr():
                same = optimizer_slice.master.to(values.dtype) == values
                optimizer_slice.master.copy_(
                    torch.where(same, optimizer_slice.master, values.to(optimizer_slice.master.dtype))
                )

    def check_storage_unchanged(self) -> None:
        """Updates would not reach a parameter that is no view of the flat tensor any more."""
        for name, address in self._addresses.items():
            if self._parameters[name].data_ptr() != address:
                raise InputError(
                    f"parameter {name} was given other memory after the module was parallelized (p.data = ..., or by "
                    "its module), where updates do not reach it; call engine.load_assigned_values() after you have assigned values"
                )

    def _has_new_storage(self, member: BucketParameter, parameter: nn.Parameter) -> bool:
        """It is no view of the flat tensor any more, or not the one that it was."""
        view = self.compute[member.start : member.stop].view(self._shapes[member.name])
        current, expected = ((t.data_ptr(), t.shape, t.stride()) for t in (parameter, view))
        return current != expected

    def _check_shape_and_device(self, name: str, values: Tensor) -> None:
        if values.shape != self._shapes[name] or values.device != self.compute.device:
            raise InputError(
                f"parameter {name} has become {list(values.shape)} on {values.device} after the module was "
                f"parallelized, when it was {list(self._shapes[name])} on {self.compute.device}; change shapes and "
                "devices before"
            )

    def local_shards(self, tensors: Sequence[Tensor]) -> dict[str, LocalShard]:
        """One tensor for each part, cut into what this rank keeps of the parameters, by name."""
        shards = {
            member.name: LocalShard(self._shapes[member.name], 0, tensors[0][:0]) for member in self._all_members()
        }
        for optimizer_slice, tensor in zip(self.optimizer_slices, tensors, strict=True):
            for member, first, stop in _overlaps(self.buckets[optimizer_slice.bucket_id], optimizer_slice.flat_slice):
                values = tensor[first - optimizer_slice.flat_slice.start : stop - optimizer_slice.flat_slice.start]
                shards[member.name] = LocalShard(self._shapes[member.name], first - member.start, values)
        return {name: shards[name] for name in self._shapes}

    def full_gradient(self, name: str) -> Tensor:
        """A whole gradient, where whole gradients are kept."""
        member = next(member for member in self._all_members() if member.name == name)
        return self.gradients.local_slice(slice(member.start, member.stop)).view(self._shapes[name])

    def _all_members(self) -> list[BucketParameter]:
        return [member for bucket in self.buckets for member in bucket.members]


def _overlaps(bucket: Bucket, flat_slice: slice) -> list[tuple[BucketParameter, int, int]]:
    """(member, from, to) in the flat tensor, of the members that have elements in this place."""
    overlaps = [
        (member, max(member.start, flat_slice.start), min(member.stop, flat_slice.stop)) for member in bucket.members
    ]
    return [(member, first, stop) for member, first, stop in overlaps if first < stop]


class GradientBuffer:
    """Collects what backward makes. Says which buckets are complete, first to last."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        shard_index: int,
        dtype: torch.dtype,
        device: torch.device,
        keeps_full_gradients: bool,
    ) -> None:
        self._buckets = buckets
        self._keeps_full_gradients = keeps_full_gradients
        self._dtype, self._device = dtype, device
        self._shard_slices = [bucket.shard_slice(shard_index) for bucket in buckets]
        starts = [0]
        for shard_slice in self._shard_slices:
            starts.append(starts[-1] + shard_slice.stop - shard_slice.start)
        self._offsets = starts
        size = buckets[-1].stop if keeps_full_gradients else starts[-1]
        self._flat = torch.zeros(size, dtype=dtype, device=device)
        self._open_buckets: dict[int, Tensor] = {}  # Buckets in use, where only shards are kept
        # Their members that have no gradient since the last `begin`; the first replaces what was there.
        self._unwritten: list[set[str]] = [set() for _ in buckets]
        self._missing: list[set[str]] = [set() for _ in buckets]  # Their members without a gradient in this backward
        self.on_bucket_ready: Callable[[int], None] = lambda number: None

    def begin_step(self) -> None:
        """Of a step. What follows replaces what is there."""
        self._unwritten = [{member.name for member in bucket.members} for bucket in self._buckets]

    def begin_backward(self) -> None:
        """Of a micro-batch."""
        self._missing = [{member.name for member in bucket.members} for bucket in self._buckets]
        if not self._keeps_full_gradients:
            self._unwritten = [set(names) for names in self._missing]

    def bucket(self, bucket_id: int) -> Tensor:
        """All of it, as it stands on this rank."""
        bucket = self._buckets[bucket_id]
        if self._keeps_full_gradients:
            return self._flat[bucket.start : bucket.stop]
        if bucket_id not in self._open_buckets:
            self._open_buckets[bucket_id] = tensor = torch.empty(bucket.length, dtype=self._dtype, device=self._device)
            for gap in bucket.padding:
                tensor[gap.start - bucket.start : gap.stop - bucket.start].zero_()
        return self._open_buckets[bucket_id]

    def shard(self, bucket_id: int) -> Tensor:
        """This rank's part of the sum."""
        if self._keeps_full_gradients:
            return self._flat[self._shard_slices[bucket_id]]
        return self._flat[self._offsets[bucket_id] : self._offsets[bucket_id + 1]]

    def local_slice(self, flat_slice: slice) -> Tensor:
        """What is kept of this place in the flat tensors; of a part, or anywhere if all is kept."""
        if self._keeps_full_gradients or flat_slice.start == flat_slice.stop:
            return self._flat[flat_slice]
        bucket_id = next(
            i for i, piece in enumerate(self._shard_slices) if piece.start <= flat_slice.start < piece.stop
        )
        offset = self._offsets[bucket_id] - self._shard_slices[bucket_id].start
        return self._flat[flat_slice.start + offset : flat_slice.stop + offset]

    def free_bucket(self, bucket_id: int) -> None:
        """Nobody needs the bucket of this backward any more."""
        self._open_buckets.pop(bucket_id, None)

    def zero_missing(self, bucket_id: int) -> None:
        """Members that got no gradient have a gradient of zero."""
        bucket, tensor = self._buckets[bucket_id], self.bucket(bucket_id)
        for member in bucket.members:
            if member.name in self._unwritten[bucket_id]:
                tensor[member.start - bucket.start : member.stop - bucket.start].zero_()
        self._unwritten[bucket_id] = set()

    def make_grad_hook(self, bucket_id: int, member: BucketParameter) -> Callable[[Tensor], None]:
        start = self._buckets[bucket_id].start
        span = slice(member.start - start, member.stop - start)

        def collect(parameter: Tensor) -> None:
            grad = parameter.grad
            assert grad is not None
            grad = grad.to_dense() if grad.is_sparse else grad
            view = self.bucket(bucket_id)[span].view(grad.shape)
            if member.name in self._unwritten[bucket_id]:
                self._unwritten[bucket_id].discard(member.name)
                view.copy_(grad)
            else:
                view.add_(grad)
            parameter.grad = None
            del grad  # before a bucket is sent, for which more may be needed
            self._missing[bucket_id].discard(member.name)
            if not self._missing[bucket_id]:
                self.on_bucket_ready(bucket_id)

        return collect
