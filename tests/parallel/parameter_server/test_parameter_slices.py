"""Parameters cut into pieces, and pieces spread over servers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.errors import InputError
from motet.parallel.data_parallel.buckets import ALIGN_ELEMENTS, build_buckets
from motet.parallel.parameter_server.protocol.parameter_slices import partition_buckets


@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(64, 3000), st.integers(1, 5))
def test_pieces_are_all_of_it_and_servers_have_nearly_as_much(sizes: list[int], most: int, servers: int) -> None:
    buckets = build_buckets({f"p{i}": (i % 2, size) for i, size in enumerate(sizes)}, 1, most)
    try:
        pieces = partition_buckets(buckets, most, servers)
    except InputError as error:
        assert f"layout.server.count = {servers} is more than the slices" in str(error)
        return
    at = 0
    held = [0] * servers
    for piece in pieces:
        bucket = buckets[piece.bucket_id]
        assert piece.flat_range.start == at and bucket.start <= at and piece.flat_range.stop <= bucket.stop
        assert piece.numel <= most + ALIGN_ELEMENTS * len(sizes)
        at = piece.flat_range.stop
        held[piece.server_index] += piece.numel
    assert at == buckets[-1].stop
    assert max(held) - min(held) <= max(piece.numel for piece in pieces)
    assert min(held) > 0


def test_more_servers_than_pieces_are_refused() -> None:
    buckets = build_buckets({"w": (0, 100)}, 1, 1000)
    with pytest.raises(InputError, match=r"layout.server.count = 2 is more than the slices .*, 1; take fewer servers"):
        partition_buckets(buckets, 1000, 2)
