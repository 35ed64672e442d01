"""Tiles, ring schedules and head splits, and bytes by their formula, against sets of places."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from motet.core.errors import InputError
from motet.models.spec.layer_specs import MicroBatchShape
from motet.parallel.context_parallel.attention_calls import AttentionCall
from motet.parallel.context_parallel.attention_tiles import PlaceVisibility, TileLimits
from motet.parallel.context_parallel.context_bytes import ring_spans, sent_bytes
from motet.parallel.context_parallel.context_partition import (
    ContextOrder,
    ContextParallelKind,
    ContextPartition,
    ContextSplit,
    Spans,
)
from motet.parallel.context_parallel.head_split import HeadSplit
from motet.parallel.context_parallel.ring_schedule import RingSchedule

VISIBILITIES = [PlaceVisibility(causal, window) for causal in (True, False) for window in (None, 1, 5, 40)]


def sees(visible: PlaceVisibility, query: int, key: int) -> bool:
    return (not visible.causal or key <= query) and (visible.window is None or key > query - visible.window)


def places(spans: Spans) -> set[int]:
    return {place for span in spans for place in range(*span)}


@pytest.mark.parametrize("visible", VISIBILITIES, ids=str)
def test_tiles_have_each_visible_pair_once(visible: PlaceVisibility) -> None:
    spans = [(0, 7), (7, 20), (3, 16), (25, 31), (0, 31), (30, 31)]
    limits = [TileLimits(4), TileLimits(9, limits_all=True), TileLimits(5, has_documents=True), TileLimits(100)]
    for queries, keys, limit in product(spans, spans, limits):
        pairs = []
        for tile in visible.tiles(queries, keys, limit):
            assert set(range(*tile.queries)) <= set(range(*queries)) and set(range(*tile.keys)) <= set(range(*keys))
            in_tile = [(q, k) for q, k in product(range(*tile.queries), range(*tile.keys)) if sees(visible, q, k)]
            assert in_tile, tile  # No tile that nobody sees
            if tile.mask == "none":
                assert not limit.has_documents and len(in_tile) == tile.pairs
            if tile.mask == "causal":
                assert tile.queries == tile.keys and len(in_tile) == tile.pairs
            if tile.mask == "dense" or limit.limits_all:
                assert max(b - a for a, b in (tile.queries, tile.keys)) <= limit.edge
            pairs += in_tile
        expected = [(q, k) for q, k in product(range(*queries), range(*keys)) if sees(visible, q, k)]
        assert sorted(pairs) == expected, (queries, keys, limit)


def test_pairs_of_each_rank() -> None:
    for visible, order in product(VISIBILITIES, ("head-tail", "contiguous")):
        partition = ContextPartition(31, 3, order)
        for rank in range(3):
            queries = places(partition.spans(rank))
            expected = sum(sees(visible, q, k) for q, k in product(queries, range(31)))
            assert visible.pairs(partition.spans(rank), 31) == expected
    by_rank = {
        order: [
            PlaceVisibility(causal=True).pairs(ContextPartition(1 << 17, 8, order).spans(rank), 1 << 17)
            for rank in range(8)
        ]
        for order in ("head-tail", "contiguous")
    }
    assert len(set(by_rank["head-tail"])) == 1
    assert max(by_rank["contiguous"]) / (sum(by_rank["contiguous"]) / 8) == pytest.approx(15 / 8, rel=1e-4)


@pytest.mark.parametrize("order", ["head-tail", "contiguous"])
@pytest.mark.parametrize("visible", VISIBILITIES, ids=str)
def test_keys_travel_as_far_as_a_rank_needs_them(order: ContextOrder, visible: PlaceVisibility) -> None:
    for ranks in (2, 3, 4):
        partition = ContextPartition(31, ranks, order)
        schedule = RingSchedule(partition.spans_by_rank, visible)
        for owner in range(ranks):
            needed = []
            for hop in range(1, ranks):
                queries = places(partition.spans((owner + hop) % ranks))
                keys = {k for k in places(partition.spans(owner)) if any(sees(visible, q, k) for q in queries)}
                needed.append(keys)
            for hop in range(1, ranks):
                sent, later = places(schedule.keys_in_hop(owner, hop)), set().union(*needed[hop - 1 :])
                assert later <= sent
                assert bool(later) == bool(sent)  # Between two spans of queries, keys that nobody sees may travel
                assert set().union(*needed[:hop]) <= places(schedule.gradients_after_hop(owner, hop))
            last = schedule.last_hop(owner)
            assert last == max((hop for hop in range(1, ranks) if needed[hop - 1]), default=0)


def test_contiguous_causal_keys_go_to_later_ranks_alone() -> None:
    schedule = RingSchedule(ContextPartition(12, 4, "contiguous").spans_by_rank, PlaceVisibility(causal=True))
    assert [schedule.last_hop(owner) for owner in range(4)] == [3, 2, 1, 0]
    windowed = RingSchedule(ContextPartition(12, 4, "contiguous").spans_by_rank, PlaceVisibility(causal=True, window=3))
    assert windowed.keys_in_hop(1, 1) == ((4, 6),) and windowed.last_hop(1) == 1


@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 4), (4, 2), (6, 3), (9, 3), (6, 1), (12, 4), (5, 5)])
def test_key_heads_go_to_each_rank_that_shares_them(query_heads: int, key_heads: int) -> None:
    for ranks in range(1, query_heads + 1):
        heads, group = HeadSplit(query_heads, key_heads, ranks), query_heads // key_heads
        assert [q for r in range(ranks) for q in range(*heads.queries(r))] == list(range(query_heads))
        for rank in range(ranks):
            (first, stop), (first_key, stop_key) = heads.queries(rank), heads.keys(rank)
            assert set(range(first_key, stop_key)) == {q // group for q in range(first, stop)}
            pairs = []
            for queries, keys in heads.groups(rank):
                share = (queries[1] - queries[0]) / (keys[1] - keys[0])
                pairs += [(q + first, keys[0] + int((q - queries[0]) // share) + first_key) for q in range(*queries)]
            assert pairs == [(q, q // group) for q in range(first, stop)]
            assert len(heads.groups(rank)) <= 3
    with pytest.raises(InputError, match=rf"over {query_heads + 1} ranks .* {query_heads} query heads"):
        HeadSplit(query_heads, key_heads, query_heads + 1)


def test_sent_bytes() -> None:
    """Numbers by hand: 12 tokens, 4 query heads and 2 key heads of 8 elements, 3 rows of float64."""
    call = AttentionCall("attention", 4, 2, 8, 8, causal=True)
    token = 3 * 8 * 2 * 16  # Keys and values of a token of 3 rows

    def sent(kind: ContextParallelKind, inner: int = 1, **changes: Any) -> list[tuple[int, int]]:
        changed, context = replace(call, **changes), ContextSplit(4, "contiguous", kind, inner)
        return [sent_bytes(changed, context, rank, shape=MicroBatchShape(3, 12), itemsize=8) for rank in range(4)]

    assert sent("all-gather") == [(9 * token, 18 * token)] * 4
    # Rank r passes on the keys of ranks 0..r to the next one; the last rank returns the gradients.
    assert sent("ring") == [(0 + 3 * token, 3 * token), (6 * token, 9 * token), (9 * token, 15 * token), (0, 9 * token)]
    assert sent("ring", causal=False) == [(9 * token, 18 * token)] * 4
    assert sent("ring", window=3) == [(2 * token, 2 * token)] + [(2 * token, 4 * token)] * 2 + [(0, 2 * token)]
    head = 3 * 8 * 8  # One head of a token
    forward = 3 * 3 * (head + 2 * head) + 9 * head
    assert sent("all-to-all") == [(forward, 3 * 3 * head + 9 * 3 * head)] * 4
    pairs = sent("ring", inner=2)
    exchange = 3 * (2 * head + 2 * head) + 3 * 2 * head
    assert pairs[0] == (exchange + 6 * token // 2, exchange + 6 * token // 2)
    assert pairs[3] == (exchange, exchange + 6 * token // 2)
    assert ring_spans(ContextPartition(16, 4, "head-tail"), 2) == (((0, 4), (12, 16)), ((4, 12),))
