"""The heads of each rank of an all-to-all, which gives a part of the heads for a part of the tokens."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from motet.core.errors import check_input
from motet.parallel.context_parallel.attention_tiles import Span


@dataclass(frozen=True)
class HeadSplit:
    """Query heads in even shares. A key head goes to each rank that has a query head of its group."""

    query_heads: int
    key_heads: int
    ranks: int

    def __post_init__(self) -> None:
        check_input(
            self.query_heads >= self.ranks,
            f"an all-to-all over {self.ranks} ranks of context parallelism gives each of them a part of the heads, but "
            f"a layer has {self.query_heads} query heads here; set layout.cp_inner to {self.query_heads} at most with "
            "layout.cp_kind = 'ring', or use layout.cp_kind = 'ring' or 'all-gather'",
        )

    @property
    def group(self) -> int:
        """The query heads of each key head."""
        return self.query_heads // self.key_heads

    def queries(self, rank: int) -> Span:
        """The query heads of a rank."""
        return rank * self.query_heads // self.ranks, (rank + 1) * self.query_heads // self.ranks

    def keys(self, rank: int) -> Span:
        """The key heads of a rank."""
        first, stop = self.queries(rank)
        return first // self.group, -(-stop // self.group)

    def groups(self, rank: int) -> list[tuple[Span, Span]]:
        """Query heads and key heads that are used together, counted from the first of the rank: each key head of an
        item has as many query heads. At the ends, a rank may have a part of the query heads of a key head."""
        (first, stop), first_key = self.queries(rank), self.keys(rank)[0]
        full = -(-first // self.group) * self.group, stop // self.group * self.group
        cuts = sorted({first, *(cut for cut in full if first < cut < stop), stop})
        return [
            ((a - first, b - first), (a // self.group - first_key, -(-b // self.group) - first_key))
            for a, b in pairwise(cuts)
        ]

    @cached_property
    def query_counts(self) -> tuple[int, ...]:
        """The number of query heads of each rank."""
        return tuple(stop - first for first, stop in map(self.queries, range(self.ranks)))

    @cached_property
    def key_counts(self) -> tuple[int, ...]:
        """The number of key heads of each rank."""
        return tuple(stop - first for first, stop in map(self.keys, range(self.ranks)))
