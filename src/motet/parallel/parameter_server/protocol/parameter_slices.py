"""Parameters cut into pieces, and pieces spread over servers so that none has much more to send than another.

A piece is a part of one bucket: small parameters share one, and one that is larger than a piece is cut. Pieces are
numbered in the order of the buckets, that is in the order in which backward has their gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from motet.core.errors import InputError
from motet.parallel.data_parallel.buckets import ALIGN_ELEMENTS, Bucket


@dataclass(frozen=True)
class ParameterSlice:
    """What is pushed and pulled as one."""

    bucket_id: int
    flat_range: slice  # In the flat tensors
    server_index: int

    @property
    def numel(self) -> int:
        count: int = self.flat_range.stop - self.flat_range.start
        return count


def partition_buckets(buckets: Sequence[Bucket], max_numel: int, server_count: int) -> tuple[ParameterSlice, ...]:
    """Pieces of up to `most` numbers, each to the server that has least until then."""
    slices: list[ParameterSlice] = []
    numel_by_server = [0] * server_count
    for bucket_id, bucket in enumerate(buckets):
        slice_count = ceil(bucket.length / max_numel)
        slice_numel = ceil(bucket.length / slice_count / ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        for first in range(bucket.start, bucket.stop, slice_numel):
            flat_range = slice(first, min(first + slice_numel, bucket.stop))
            server_index = min(range(server_count), key=lambda s: numel_by_server[s])
            numel_by_server[server_index] += flat_range.stop - flat_range.start
            slices.append(ParameterSlice(bucket_id, flat_range, server_index))
    if server_count > len(slices):
        raise InputError(
            f"layout.server.count = {server_count} is more than the pieces that parameters are cut into, {len(slices)}; take "
            "fewer servers, or smaller pieces (layout.server.slice_mib)"
        )
    return tuple(slices)
