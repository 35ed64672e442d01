"""Flat buffers that collect the gradients of backward, bucket by bucket."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from motet.parallel.data_parallel.buckets import Bucket, BucketParameter


class GradientBuffer:
    """Gradients in `recipe.reduce`: of all buckets, or of this rank's shards, with a bucket while backward fills it."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        shard_index: int,
        dtype: torch.dtype,
        *,
        device: torch.device,
        keeps_full_gradients: bool,
    ) -> None:
        self._buckets = buckets
        self._keeps_full_gradients = keeps_full_gradients
        self._dtype, self._device = dtype, device
        self._shard_slices = [bucket.shard_slice(shard_index) for bucket in buckets]
        self._offsets = [0, *accumulate(s.stop - s.start for s in self._shard_slices)]
        size = buckets[-1].stop if keeps_full_gradients else self._offsets[-1]
        self._flat = torch.zeros(size, dtype=dtype, device=device)
        self._open_buckets: dict[int, Tensor] = {}  # Buckets in use, where only shards are kept
        # By bucket: parameters whose next gradient replaces what is in the buffer.
        self._unwritten: list[set[str]] = [set() for _ in buckets]
        self._missing: list[set[str]] = [set() for _ in buckets]  # Parameters without a gradient in this backward
        self.on_bucket_ready: Callable[[int], None] = lambda bucket_id: None

    def begin_step(self) -> None:
        """Gradients that follow replace those in the buffer."""
        self._unwritten = self._all_names()

    def begin_backward(self) -> None:
        """Begin a micro-batch."""
        self._missing = self._all_names()
        if not self._keeps_full_gradients:
            self._unwritten = self._all_names()

    def _all_names(self) -> list[set[str]]:
        return [{member.name for member in bucket.members} for bucket in self._buckets]

    def bucket(self, bucket_id: int) -> Tensor:
        """The unreduced gradients of a bucket."""
        bucket = self._buckets[bucket_id]
        if self._keeps_full_gradients:
            return self._flat[bucket.flat_slice]
        if bucket_id not in self._open_buckets:
            self._open_buckets[bucket_id] = tensor = torch.empty(bucket.length, dtype=self._dtype, device=self._device)
            for gap in bucket.padding:
                tensor[gap.start - bucket.start : gap.stop - bucket.start].zero_()
        return self._open_buckets[bucket_id]

    def shard(self, bucket_id: int) -> Tensor:
        """This rank's shard of the reduced gradients."""
        if self._keeps_full_gradients:
            return self._flat[self._shard_slices[bucket_id]]
        return self._flat[self._offsets[bucket_id] : self._offsets[bucket_id + 1]]

    def local_slice(self, flat_slice: slice) -> Tensor:
        """Gradients of a range of the flat tensors that this rank keeps."""
        if self._keeps_full_gradients or flat_slice.start == flat_slice.stop:
            return self._flat[flat_slice]
        shards = enumerate(self._shard_slices)
        bucket_id = next(i for i, shard in shards if shard.start <= flat_slice.start < shard.stop)
        offset = self._offsets[bucket_id] - self._shard_slices[bucket_id].start
        return self._flat[flat_slice.start + offset : flat_slice.stop + offset]

    def free_bucket(self, bucket_id: int) -> None:
        """Free the unreduced gradients of a bucket."""
        self._open_buckets.pop(bucket_id, None)

    def zero_missing(self, bucket_id: int) -> None:
        """Write zeros for parameters that got no gradient."""
        bucket, tensor = self._buckets[bucket_id], self.bucket(bucket_id)
        for member in bucket.members:
            if member.name in self._unwritten[bucket_id]:
                tensor[member.start - bucket.start : member.stop - bucket.start].zero_()
        self._unwritten[bucket_id] = set()

    def make_grad_hook(self, bucket_id: int, member: BucketParameter) -> Callable[[Tensor], None]:
        """A post-accumulate hook that moves a parameter's gradient into its bucket."""
        start = self._buckets[bucket_id].start

        def collect(parameter: Tensor) -> None:
            grad = parameter.grad
            assert grad is not None
            grad = grad.to_dense() if grad.is_sparse else grad
            view = self.bucket(bucket_id)[member.start - start : member.stop - start].view(grad.shape)
            if member.name in self._unwritten[bucket_id]:
                self._unwritten[bucket_id].discard(member.name)
                view.copy_(grad)
            else:
                view.add_(grad)
            parameter.grad = None
            del grad  # before the bucket is sent, which may allocate more
            self._missing[bucket_id].discard(member.name)
            if not self._missing[bucket_id]:
                self.on_bucket_ready(bucket_id)

        return collect
