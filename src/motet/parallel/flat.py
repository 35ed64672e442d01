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
from motet.parallel.buckets import Bucket, Member
from motet.parallel.spread import Piece
from motet.precision.recipe import Recipe


class Part(NamedTuple):
    """What one update works on: parameters of one optimizer group in this rank's shard of one bucket."""

    bucket: int
    group: int
    place: slice
    """In the flat tensors."""
    master: Tensor


class FlatWeights:
    """All trainable parameters of a module."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        held: Sequence[slice],
        recipe: Recipe,
        gradients: "Gradients",
        keep_masters: bool = False,
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
        for member in self._members():
            self.compute[member.start : member.stop].view(self._shapes[member.name]).copy_(parameters[member.name])
        inside = compute == master and not keep_masters
        self.parts = self._make_parts(parameters, held, self.compute if inside else None, master)
        for number, bucket in enumerate(self.buckets):
            for member in bucket.members:
                parameter = parameters[member.name]
                parameter.data = self.compute[member.start : member.stop].view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(self.gradients.collector(number, member))
        self._addresses = {name: p.data_ptr() for name, p in parameters.items() if p.numel()}

    def _make_parts(
        self,
        parameters: Mapping[str, nn.Parameter],
        held: Sequence[slice],
        inside: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Part, ...]:
        """The masters from the parameters as they are given, before these are cast."""
        parts = []
        for number, bucket in enumerate(self.buckets):
            for group, place in bucket.runs(held[number]):
                if inside is not None:
                    parts.append(Part(number, group, place, inside[place]))
                    continue
                size = place.stop - place.start
                part = Part(number, group, place, torch.zeros(size, dtype=dtype, device=self.compute.device))
                for member, first, stop in _overlaps(bucket, place):
                    given = parameters[member.name].detach().reshape(-1)
                    part.master[first - place.start : stop - place.start] = given[
                        first - member.start : stop - member.start
                    ]
                parts.append(part)
        if not parts:  # a rank that keeps nothing has an optimizer, too, with the same counts as the others'
            parts.append(Part(0, self.buckets[0].members[0].group, slice(0, 0), self.compute.new_zeros(0, dtype=dtype)))
        return tuple(parts)

    def publish(self, parts: Sequence[Part] | None = None) -> None:
        """Cast this rank's masters, or those of some parts, to what the model computes with, after an update."""
        for part in self.parts if parts is None else parts:
            if part.master.data_ptr() != self.compute[part.place].data_ptr():
                self.compute[part.place].copy_(part.master)

    def arrived(self, bucket: int) -> None:
        """Parameters have other values now: autograd tells whoever has used them already."""
        increment_version([self._parameters[member.name] for member in self.buckets[bucket].members])

    def adopt(self) -> None:
        """Go on from the values that parameters have been given. Masters that are these, rounded, stay as they are."""
        moved = {
            m.name: p.detach().clone() for m in self._members() if self._has_moved(m, p := self._parameters[m.name])
        }
        for name, values in moved.items():
            self._refuse_other(name, values)
        for member in self._members():
            view = self.compute[member.start : member.stop].view(self._shapes[member.name])
            if member.name in moved:
                view.copy_(moved[member.name])
                self._parameters[member.name].data = view
        for part in self.parts:
            values = self.compute[part.place]
            if part.master.data_ptr() != values.data_ptr():
                same = part.master.to(values.dtype) == values
                part.master.copy_(torch.where(same, part.master, values.to(part.master.dtype)))

    def refuse_moved(self) -> None:
        """Updates would not reach a parameter that is no view of the flat tensor any more."""
        for name, address in self._addresses.items():
            if self._parameters[name].data_ptr() != address:
                raise InputError(
                    f"parameter {name} was given other memory after the module was parallelized (p.data = ..., or by "
                    "its module), where updates do not reach it; call engine.adopt() after you have assigned values"
                )

    def _has_moved(self, member: Member, parameter: nn.Parameter) -> bool:
        """It is no view of the flat tensor any more, or not the one that it was."""
        there = self.compute[member.start : member.stop].view(self._shapes[member.name])
        now, then = ((t.data_ptr(), t.shape, t.stride()) for t in (parameter, there))
        return now != then

    def _refuse_other(self, name: str, values: Tensor) -> None:
        if values.shape != self._shapes[name] or values.device != self.compute.device:
            raise InputError(
                f"parameter {name} has become {list(values.shape)} on {values.device} after the module was "
                f"parallelized, when it was {list(self._shapes[name])} on {self.compute.device}; change shapes and "
                "devices before"
            )

    def pieces(self, tensors: Sequence[Tensor]) -> dict[str, Piece]:
        """One tensor for each part, cut into what this rank keeps of the parameters, by name."""
        found = {member.name: Piece(self._shapes[member.name], 0, tensors[0][:0]) for member in self._members()}
        for part, tensor in zip(self.parts, tensors, strict=True):
            for member, first, stop in _overlaps(self.buckets[part.bucket], part.place):
                values = tensor[first - part.place.start : stop - part.place.start]
                found[member.name] = Piece(self._shapes[member.name], first - member.start, values)
        return {name: found[name] for name in self._shapes}

    def gradient(self, name: str) -> Tensor:
        """A whole gradient, where whole gradients are kept."""
        member = next(member for member in self._members() if member.name == name)
        return self.gradients.kept(slice(member.start, member.stop)).view(self._shapes[name])

    def _members(self) -> list[Member]:
        return [member for bucket in self.buckets for member in bucket.members]


def _overlaps(bucket: Bucket, place: slice) -> list[tuple[Member, int, int]]:
    """(member, from, to) in the flat tensor, of the members that have elements in this place."""
    cut = [(member, max(member.start, place.start), min(member.stop, place.stop)) for member in bucket.members]
    return [(member, first, stop) for member, first, stop in cut if first < stop]


class Gradients:
    """Collects what backward makes. Says which buckets are complete, first to last."""

    def __init__(
        self, buckets: Sequence[Bucket], shard: int, dtype: torch.dtype, device: torch.device, keep: bool
    ) -> None:
        self._buckets = buckets
        self._keep = keep
        self._dtype, self._device = dtype, device
        self._shards = [bucket.shard(shard) for bucket in buckets]
        starts = [0]
        for piece in self._shards:
            starts.append(starts[-1] + piece.stop - piece.start)
        self._offsets = starts
        size = buckets[-1].stop if keep else starts[-1]
        self._flat = torch.zeros(size, dtype=dtype, device=device)
        self._open: dict[int, Tensor] = {}
        """Buckets in use, where only shards are kept."""
        self._untouched: list[set[str]] = [set() for _ in buckets]
        """Their members that have no gradient since the last `begin`; the first replaces what was there."""
        self._missing: list[set[str]] = [set() for _ in buckets]
        """Their members without a gradient in this backward."""
        self.on_complete: Callable[[int], None] = lambda number: None

    def begin(self) -> None:
        """Of a step. What follows replaces what is there."""
        self._untouched = [{member.name for member in bucket.members} for bucket in self._buckets]

    def begin_backward(self) -> None:
        """Of a micro-batch."""
        self._missing = [{member.name for member in bucket.members} for bucket in self._buckets]
        if not self._keep:
            self._untouched = [set(names) for names in self._missing]

    def bucket(self, number: int) -> Tensor:
        """All of it, as it stands on this rank."""
        bucket = self._buckets[number]
        if self._keep:
            return self._flat[bucket.start : bucket.stop]
        if number not in self._open:
            self._open[number] = tensor = torch.empty(bucket.length, dtype=self._dtype, device=self._device)
            for gap in bucket.gaps:
                tensor[gap.start - bucket.start : gap.stop - bucket.start].zero_()
        return self._open[number]

    def shard(self, number: int) -> Tensor:
        """This rank's part of the sum."""
        if self._keep:
            return self._flat[self._shards[number]]
        return self._flat[self._offsets[number] : self._offsets[number + 1]]

    def kept(self, place: slice) -> Tensor:
        """What is kept of this place in the flat tensors; of a part, or anywhere if all is kept."""
        if self._keep or place.start == place.stop:
            return self._flat[place]
        number = next(i for i, piece in enumerate(self._shards) if piece.start <= place.start < piece.stop)
        offset = self._offsets[number] - self._shards[number].start
        return self._flat[place.start + offset : place.stop + offset]

    def release(self, number: int) -> None:
        """Nobody needs the bucket of this backward any more."""
        self._open.pop(number, None)

    def fill(self, number: int) -> None:
        """Members that got no gradient have a gradient of zero."""
        bucket, tensor = self._buckets[number], self.bucket(number)
        for member in bucket.members:
            if member.name in self._untouched[number]:
                tensor[member.start - bucket.start : member.stop - bucket.start].zero_()
        self._untouched[number] = set()

    def collector(self, number: int, member: Member) -> Callable[[Tensor], None]:
        start = self._buckets[number].start
        place = slice(member.start - start, member.stop - start)

        def collect(parameter: Tensor) -> None:
            grad = parameter.grad
            assert grad is not None
            grad = grad.to_dense() if grad.is_sparse else grad
            view = self.bucket(number)[place].view(grad.shape)
            if member.name in self._untouched[number]:
                self._untouched[number].discard(member.name)
                view.copy_(grad)
            else:
                view.add_(grad)
            parameter.grad = None
            del grad  # before a bucket is sent, for which more may be needed
            self._missing[number].discard(member.name)
            if not self._missing[number]:
                self.on_complete(number)

        return collect
