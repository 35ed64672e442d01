"""Two levels: inside each host over its fast links, and between hosts with the least traffic over the slow links.

Rank `host * size + local` has local rank `local` on this host of `size` ranks.
"""

from collections.abc import Iterable
from fractions import Fraction
from itertools import product

from motet.collectives.algorithms import rank_arithmetic
from motet.collectives.algorithms.rank_arithmetic import hosts_and_ranks_per_host, is_composite, split_over_hosts
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, algorithm, messages, sharded_all_reduce_cost
from motet.collectives.algorithms.ring import all_gather_ring, all_reduce_ring
from motet.collectives.algorithms.tree import broadcast_tree, reduce_tree
from motet.collectives.compose import collective_program, concatenate, parallel_steps, reverse, steps_on_ranks
from motet.collectives.program import ChunkTransfer, Program, transfers_for


def _leaders_all_reduce_cost(ranks: int, hosts: int | None = None) -> AlphaBetaGammaCost:
    members = split_over_hosts(ranks, hosts)
    levels = rank_arithmetic.doubling_rounds(max(map(len, members)))
    return messages(levels, reduced=True) + sharded_all_reduce_cost(len(members)) + messages(levels)


@algorithm("all-reduce", "hierarchical", cost=_leaders_all_reduce_cost)
def all_reduce_hierarchical(ranks: int, hosts: int | None = None) -> Program:
    """Reduce to one leader per host, all-reduce of the leaders around a ring, broadcast in each host."""
    members = split_over_hosts(ranks, hosts)
    chunks = len(members)
    up = parallel_steps([steps_on_ranks(reduce_tree(len(host)), host, [0], width=chunks) for host in members])
    down = parallel_steps([steps_on_ranks(broadcast_tree(len(host)), host, [0], width=chunks) for host in members])
    across = steps_on_ranks(all_reduce_ring(chunks), [host[0] for host in members], range(chunks))
    return collective_program("all-reduce", "hierarchical", ranks, steps=[*up, *across, *down], chunks=chunks)


def _all_gather_cost(ranks: int, hosts: int | None = None) -> AlphaBetaGammaCost:
    count, size = hosts_and_ranks_per_host(ranks, hosts)
    return messages(count - 1, Fraction(1, ranks)) + messages(size - 1, Fraction(1, size))


@algorithm("all-gather", "hierarchical", cost=_all_gather_cost, supports=is_composite)
def all_gather_hierarchical(ranks: int, hosts: int | None = None) -> Program:
    """All-gather around rings of ranks with the same local rank, one in each host, then around a ring in each host."""
    count, size = hosts_and_ranks_per_host(ranks, hosts)
    rails = [range(local, ranks, size) for local in range(size)]
    across = parallel_steps([steps_on_ranks(all_gather_ring(count), rail, rail) for rail in rails])
    ring, members = all_gather_ring(size), [range(host * size, (host + 1) * size) for host in range(count)]
    # Chunk i of a host's ring stands for the chunks of all ranks with local rank i.
    inside = [
        [t._replace(first=chunk, last=chunk) for t in step for chunk in range(t.first, ranks, size)]
        for step in parallel_steps([steps_on_ranks(ring, host, range(size)) for host in members])
    ]
    return collective_program("all-gather", "hierarchical", ranks, steps=[*across, *inside])


def _reduce_scatter_cost(ranks: int, hosts: int | None = None) -> AlphaBetaGammaCost:
    return _all_gather_cost(ranks, hosts).with_reduction


@algorithm("reduce-scatter", "hierarchical", cost=_reduce_scatter_cost, supports=is_composite)
def reduce_scatter_hierarchical(ranks: int, hosts: int | None = None) -> Program:
    """The hierarchical all-gather backwards: inside each host first, so that only a shard of the data leaves it."""
    return reverse(all_gather_hierarchical(ranks, hosts), "reduce-scatter")


def _sharded_all_reduce_cost(ranks: int, hosts: int | None = None) -> AlphaBetaGammaCost:
    return _reduce_scatter_cost(ranks, hosts) + _all_gather_cost(ranks, hosts)


@algorithm("all-reduce", "hierarchical-sharded", cost=_sharded_all_reduce_cost, supports=is_composite)
def all_reduce_hierarchical_sharded(ranks: int, hosts: int | None = None) -> Program:
    """Reduce-scatter in each host, all-reduce of each shard between hosts, all-gather in each host."""
    gathered = all_gather_hierarchical(ranks, hosts)
    return concatenate(reverse(gathered, "reduce-scatter"), gathered, "all-reduce", "hierarchical-sharded")


def _leaders_all_to_all_cost(ranks: int, hosts: int | None = None) -> AlphaBetaGammaCost:
    count, size = hosts_and_ranks_per_host(ranks, hosts)
    in_host = messages(size - 1, Fraction(ranks - 1, ranks))
    return in_host + messages(count - 1, Fraction(size * size, ranks)) + in_host


@algorithm("all-to-all", "hierarchical", cost=_leaders_all_to_all_cost, supports=is_composite)
def all_to_all_hierarchical(ranks: int, hosts: int | None = None) -> Program:
    """Gather to one leader per host, exchange between leaders, scatter in each host: few, large messages across."""
    count, size = hosts_and_ranks_per_host(ranks, hosts)

    def members(host: int) -> range:
        return range(host * size, (host + 1) * size)

    def others(rank: int) -> list[int]:
        return [other for other in range(ranks) if other != rank]

    gather: list[list[ChunkTransfer]] = [[] for _ in range(1, size)]
    scatter: list[list[ChunkTransfer]] = [[] for _ in range(1, size)]
    for local in range(1, size):
        for leader in range(0, ranks, size):
            rank = leader + local
            gather[local - 1] += transfers_for(rank, leader, _chunks([rank], others(rank), ranks))
            scatter[local - 1] += transfers_for(leader, rank, _chunks(others(rank), [rank], ranks))
    across: list[list[ChunkTransfer]] = [[] for _ in range(1, count)]
    for shift in range(1, count):
        for host in range(count):
            other = (host + shift) % count
            across[shift - 1] += transfers_for(host * size, other * size, _chunks(members(host), members(other), ranks))
    return collective_program("all-to-all", "hierarchical", ranks, steps=[*gather, *across, *scatter])


def _chunks(sources: Iterable[int], targets: Iterable[int], ranks: int) -> list[int]:
    return [source * ranks + target for source, target in product(sources, targets)]


def _sharded_all_to_all_cost(ranks: int, hosts: int | None = None) -> AlphaBetaGammaCost:
    count, size = hosts_and_ranks_per_host(ranks, hosts)
    return messages(size - 1, Fraction(count, ranks)) + messages(count - 1, Fraction(size, ranks))


@algorithm("all-to-all", "hierarchical-sharded", cost=_sharded_all_to_all_cost, supports=is_composite)
def all_to_all_hierarchical_sharded(ranks: int, hosts: int | None = None) -> Program:
    """Send inside each host to the rank with the target's local rank, then between hosts to the same local rank."""
    count, size = hosts_and_ranks_per_host(ranks, hosts)
    inside: list[list[ChunkTransfer]] = [[] for _ in range(1, size)]
    across: list[list[ChunkTransfer]] = [[] for _ in range(1, count)]
    for rank in range(ranks):
        leader = rank // size * size
        for shift in range(1, size):
            local = (rank + shift) % size
            chunks = _chunks([rank], range(local, ranks, size), ranks)
            inside[shift - 1] += transfers_for(rank, leader + local, chunks)
        for shift in range(1, count):
            target = (rank + shift * size) % ranks
            chunks = _chunks(range(leader, leader + size), [target], ranks)
            across[shift - 1] += transfers_for(rank, target, chunks)
    return collective_program("all-to-all", "hierarchical-sharded", ranks, steps=[*inside, *across])
