"""The keys that travel around a ring of ranks: each rank computes with those of one other rank after another.

In hop h the keys of rank o are at rank o + h. They travel only as far as a later rank needs them, and only the tokens
that it needs. The gradients of keys follow them, growing by the part of each rank, and go from the last rank home.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from motet.parallel.context_parallel.attention_tiles import PlaceVisibility, Span
from motet.parallel.context_parallel.context_partition import Spans, count_tokens


@dataclass(frozen=True)
class RingSchedule:
    """The places of the keys of each rank that travel in each hop. A result has a span, perhaps an empty one, for each
    span of the owner."""

    spans_by_rank: tuple[Spans, ...]
    visible: PlaceVisibility

    @property
    def ranks(self) -> int:
        """The number of ranks of the ring."""
        return len(self.spans_by_rank)

    def keys_in_hop(self, owner: int, hop: int) -> Spans:
        """The keys that reach rank owner + hop, because it or a later rank on their way needs them."""
        return self._hops_by_owner[owner][0][hop]

    def gradients_after_hop(self, owner: int, hop: int) -> Spans:
        """The keys with gradients from ranks up to owner + hop, which that rank sends on."""
        return self._hops_by_owner[owner][1][hop]

    def last_hop(self, owner: int) -> int:
        """The last hop in which a rank needs keys of the owner; 0 if no other rank does."""
        return max((hop for hop in range(1, self.ranks) if count_tokens(self.keys_in_hop(owner, hop))), default=0)

    @cached_property
    def _hops_by_owner(self) -> tuple[tuple[tuple[Spans, ...], tuple[Spans, ...]], ...]:
        hops_by_owner = []
        for owner in range(self.ranks):
            nothing = tuple((first, first) for first, _ in self.spans_by_rank[owner])
            needed = [nothing, *(self._needed(owner, (owner + hop) % self.ranks) for hop in range(1, self.ranks))]
            sent, gradients = [nothing] * (self.ranks + 1), [nothing] * self.ranks
            for hop in range(self.ranks - 1, 0, -1):
                sent[hop] = _joined(sent[hop + 1], needed[hop])
            for hop in range(1, self.ranks):
                gradients[hop] = _joined(gradients[hop - 1], needed[hop])
            hops_by_owner.append((tuple(sent[:-1]), tuple(gradients)))
        return tuple(hops_by_owner)

    def _needed(self, owner: int, rank: int) -> Spans:
        """The keys of a rank that the queries of another rank see."""
        needed = []
        for keys in self.spans_by_rank[owner]:
            seen: Span = keys[0], keys[0]
            for queries in self.spans_by_rank[rank]:
                seen = _hull(seen, self.visible.seen(queries, keys))
            needed.append(seen)
        return tuple(needed)


@lru_cache(maxsize=256)
def shared_ring_schedule(spans_by_rank: tuple[Spans, ...], visible: PlaceVisibility) -> RingSchedule:
    """The same schedule for all layers whose keys are visible alike."""
    return RingSchedule(spans_by_rank, visible)


def _joined(a: Spans, b: Spans) -> Spans:
    return tuple(map(_hull, a, b))


def _hull(a: Span, b: Span) -> Span:
    if a[0] == a[1] or b[0] == b[1]:
        return b if a[0] == a[1] else a
    return min(a[0], b[0]), max(a[1], b[1])
