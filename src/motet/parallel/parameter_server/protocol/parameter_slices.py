"""Parameters cut into slices of about equal size, and slices assigned to servers with balanced load.
A slice is a part of one bucket, so small parameters share one. Slice ids follow the order of the buckets, which is the
order in which backward produces their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from motet.core.errors import check_input
from motet.parallel.data_parallel.buckets import ALIGN_ELEMENTS, Bucket
from motet.parallel.parameter_server.protocol.messages import ParameterPlacement, SlicePrimaryAndBackups


@dataclass(frozen=True)
class ParameterSlice:
    """The part of a bucket that one message pushes or pulls."""

    bucket_id: int
    flat_range: slice  # In the flat tensors
    server_index: int

    @property
    def numel(self) -> int:
        return int(self.flat_range.stop - self.flat_range.start)


def partition_buckets(buckets: Sequence[Bucket], max_numel: int, server_count: int) -> tuple[ParameterSlice, ...]:
    """Slices of up to `max_numel` elements, each assigned to the server that has the fewest so far."""
    slices: list[ParameterSlice] = []
    load = [0] * server_count
    for bucket_id, bucket in enumerate(buckets):
        slice_count = ceil(bucket.length / max_numel)
        slice_numel = ceil(bucket.length / slice_count / ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        for first in range(bucket.start, bucket.stop, slice_numel):
            flat_range = slice(first, min(first + slice_numel, bucket.stop))
            server_index = min(range(server_count), key=load.__getitem__)
            slices.append(ParameterSlice(bucket_id, flat_range, server_index))
            load[server_index] += slices[-1].numel
    problem = f"layout.server.count = {server_count} is more than the slices that parameters are cut into"
    remedy = "take fewer servers, or smaller slices (layout.server.slice_mib)"
    check_input(server_count <= len(slices), f"{problem}, {len(slices)}; {remedy}")
    return tuple(slices)


def initial_placement(slices: Sequence[ParameterSlice], server_count: int, copies: int) -> ParameterPlacement:
    """The placement of a new run: server i + 1 has the second copy of the slices of server i."""
    replicas = (tuple(f"s{(s.server_index + copy) % server_count}" for copy in range(copies)) for s in slices)
    return ParameterPlacement(0, tuple(map(SlicePrimaryAndBackups, replicas)))
