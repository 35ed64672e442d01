"""Parameters cut into slices, and slices spread over servers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.errors import InputError
from motet.parallel.data_parallel.buckets import ALIGN_ELEMENTS, build_buckets
from motet.parallel.parameter_server.protocol.messages import partition_buckets


@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(64, 3000), st.integers(1, 5))
def test_slices_are_all_of_it_and_servers_have_nearly_as_much(sizes: list[int], most: int, servers: int) -> None:
    buckets = build_buckets({f"p{i}": (i % 2, size) for i, size in enumerate(sizes)}, 1, most)
    try:
        slices = partition_buckets(buckets, most, servers)
    except InputError as error:
        assert f"layout.server.count = {servers} is more than the slices" in str(error)
        return
    at, held = 0, [0] * servers
    for part in slices:
        bucket = buckets[part.bucket_id]
        assert part.flat_range.start == at and bucket.start <= at and part.flat_range.stop <= bucket.stop
        assert part.numel <= most + ALIGN_ELEMENTS * len(sizes)
        at = part.flat_range.stop
        held[part.server_index] += part.numel
    assert at == buckets[-1].stop
    assert max(held) - min(held) <= max(part.numel for part in slices)
    assert min(held) > 0


def test_more_servers_than_slices_are_refused() -> None:
    buckets = build_buckets({"w": (0, 100)}, 1, 1000)
    with pytest.raises(InputError, match=r"layout.server.count = 2 is more than the slices .*, 1; take fewer servers"):
        partition_buckets(buckets, 1000, 2)
