"""The work of attention on each rank of context parallelism: pairs of a query and a key that it sees."""

from functools import lru_cache

from motet.parallel.context_parallel.attention_tiles import PlaceVisibility
from motet.parallel.context_parallel.context_bytes import ring_spans
from motet.parallel.context_parallel.context_partition import ContextPartition


@lru_cache(maxsize=1 << 12)
def fullest_share(partition: ContextPartition, visible: PlaceVisibility, exchanged: int) -> float:
    """The pairs of the rank that has the most, over the mean of all ranks. Where neighbours exchange tokens for heads,
    each of `exchanged` ranks has their tokens together."""
    counts = [visible.pairs(spans, partition.tokens) for spans in ring_spans(partition, exchanged)]
    return max(counts) * len(counts) / sum(counts)
