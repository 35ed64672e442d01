"""Two levels: inside each host over its quick links, and across hosts with as little as possible over the slow ones.

Rank `host * size + local` is the one with this local number on this host.
"""

from motet.collectives.algorithms.program_builders import (
    all_gather_program,
    all_reduce_program,
    all_to_all_program,
    doubling_rounds,
    fraction,
    hosts_and_ranks_per_host,
    is_composite,
    split_over_hosts,
)
from motet.collectives.algorithms.registry import AlphaBetaGammaCost, algorithm, one_message
from motet.collectives.algorithms.ring import all_gather_ring, all_reduce_ring, ring_all_reduce_cost
from motet.collectives.algorithms.tree import broadcast_tree, reduce_tree
from motet.collectives.compose import concatenate, parallel_steps, reverse, steps_on_ranks
from motet.collectives.program import ChunkTransfer, Program, Step, transfers_for


def _leaders_all_reduce_cost(ranks: int, hosts: int | None = None) -> AlphaBetaGammaCost:
    """The largest host takes the longest: a tree up, a ring of leaders, a tree down."""
    members = split_over_hosts(ranks, hosts)
    levels = doubling_rounds(max(len(host) for host in members))
    leaders_ring = ring_all_reduce_cost(len(members)) if len(members) > 1 else AlphaBetaGammaCost(0, fraction(0, 1))
    return one_message(1, 1).times(levels) + leaders_ring + one_message().times(levels)


@algorithm("all-reduce", "hierarchical", cost=_leaders_all_reduce_cost)
def all_reduce_hierarchical(ranks: int, hosts: int | None = None) -> Program:
    """Reduce to one leader per host, all-reduce of the leaders around a ring, broadcast in each host."""
    members = split_over_hosts(ranks, hosts)
    chunks = len(members)
    inside = [host for host in members if len(host) > 1]
    up = parallel_steps([steps_on_ranks(reduce_tree(len(host)), host, [0], chunks) for host in inside])
    down = parallel_steps([steps_on_ranks(broadcast_tree(len(host)), host, [0], chunks) for host in inside])
    across: tuple[Step, ...] = ()
    if chunks > 1:
        across = steps_on_ranks(all_reduce_ring(chunks), [host[0] for host in members], range(chunks))
    return all_reduce_program("hierarchical", ranks, chunks, [*up, *across, *down])


def _all_gather_cost(ranks: int, hosts: int | None = None) -> AlphaBetaGammaCost:
    count, size = hosts_and_ranks_per_host(ranks, hosts)
    return one_message(fraction(1, ranks)).times(count - 1) + one_message(fraction(1, size)).times(size - 1)


@algorithm("all-gather", "hierarchical", cost=_all_gather_cost, supports=is_composite)
def all_gather_hierarchical(ranks: int, hosts: int | None = None) -> Program:
    """Around rings of ranks with the same local number, one in each host, then around a ring in each host."""
    count, size = hosts_and_ranks_per_host(ranks, hosts)
    rails = [range(local, ranks, size) for local in range(size)]
    across = parallel_steps([steps_on_ranks(all_gather_ring(count), rail, rail) for rail in rails] if count > 1 else [])
    inside: list[tuple[Step, ...]] = []
    if size > 1:
        for host in range(count):
            members = range(host * size, (host + 1) * size)
            inside += [_expand_to_all_hosts(steps_on_ranks(all_gather_ring(size), members, range(size)), count, size)]
    return all_gather_program("hierarchical", ranks, [*across, *_merge_concurrent(inside)])


def _expand_to_all_hosts(steps: tuple[Step, ...], count: int, size: int) -> tuple[Step, ...]:
    """Chunk i of a host's ring stands for the chunks of all ranks with local number i."""
    return tuple(
        tuple(
            t._replace(first=host * size + t.first, last=host * size + t.first) for t in step for host in range(count)
        )
        for step in steps
    )


def _merge_concurrent(parts: list[tuple[Step, ...]]) -> tuple[Step, ...]:
    return parallel_steps(parts)


@algorithm(
    "reduce-scatter",
    "hierarchical",
    cost=lambda n, hosts=None: _all_gather_cost(n, hosts).with_reduction,
    supports=is_composite,
)
def reduce_scatter_hierarchical(ranks: int, hosts: int | None = None) -> Program:
    """The hierarchical all-gather backwards: inside each host first, so that only a share of the data leaves it."""
    return reverse(all_gather_hierarchical(ranks, hosts), "reduce-scatter")


def _sharded_all_reduce_cost(ranks: int, hosts: int | None = None) -> AlphaBetaGammaCost:
    all_gather = _all_gather_cost(ranks, hosts)
    return all_gather.with_reduction + all_gather


@algorithm("all-reduce", "hierarchical-sharded", cost=_sharded_all_reduce_cost, supports=is_composite)
def all_reduce_hierarchical_sharded(ranks: int, hosts: int | None = None) -> Program:
    """Reduce-scatter in each host, all-reduce of each share across hosts, all-gather in each host."""
    gathered = all_gather_hierarchical(ranks, hosts)
    return concatenate(reverse(gathered, "reduce-scatter"), gathered, "all-reduce", "hierarchical-sharded")


def _leaders_all_to_all_cost(ranks: int, hosts: int | None = None) -> AlphaBetaGammaCost:
    count, size = hosts_and_ranks_per_host(ranks, hosts)
    in_host = one_message(fraction(ranks - 1, ranks)).times(size - 1)
    return in_host + one_message(fraction(size * size, ranks)).times(count - 1) + in_host


@algorithm("all-to-all", "hierarchical", cost=_leaders_all_to_all_cost, supports=is_composite)
def all_to_all_hierarchical(ranks: int, hosts: int | None = None) -> Program:
    """Gather to one leader per host, exchange between leaders, scatter in each host: few, large messages across."""
    count, size = hosts_and_ranks_per_host(ranks, hosts)
    leaders = range(0, ranks, size)
    gather = [
        [
            t
            for leader in leaders
            for t in transfers_for(
                leader + local, leader, _chunks_from(leader + local, set(range(ranks)) - {leader + local}, ranks)
            )
        ]
        for local in range(1, size)
    ]
    across = [
        [t for host in range(count) for t in _leader_transfers(host, (host + shift) % count, size, ranks)]
        for shift in range(1, count)
    ]
    scatter = [
        [
            t
            for leader in leaders
            for t in transfers_for(
                leader, leader + local, _chunks_to(leader + local, set(range(ranks)) - {leader + local}, ranks)
            )
        ]
        for local in range(1, size)
    ]
    return all_to_all_program("hierarchical", ranks, [*gather, *across, *scatter])


def _chunks_from(source: int, targets: set[int] | range, ranks: int) -> list[int]:
    return [source * ranks + target for target in targets]


def _chunks_to(target: int, sources: set[int] | range, ranks: int) -> list[int]:
    return [source * ranks + target for source in sources]


def _leader_transfers(host: int, other: int, size: int, ranks: int) -> list[ChunkTransfer]:
    """All that the ranks of one host have for those of another, from leader to leader."""
    targets = range(other * size, (other + 1) * size)
    chunks = [
        chunk for source in range(host * size, (host + 1) * size) for chunk in _chunks_from(source, targets, ranks)
    ]
    return transfers_for(host * size, other * size, chunks)


def _sharded_all_to_all_cost(ranks: int, hosts: int | None = None) -> AlphaBetaGammaCost:
    count, size = hosts_and_ranks_per_host(ranks, hosts)
    return one_message(fraction(count, ranks)).times(size - 1) + one_message(fraction(size, ranks)).times(count - 1)


@algorithm("all-to-all", "hierarchical-sharded", cost=_sharded_all_to_all_cost, supports=is_composite)
def all_to_all_hierarchical_sharded(ranks: int, hosts: int | None = None) -> Program:
    """First in each host to the rank with the target's local number, then across between ranks of the same number."""
    count, size = hosts_and_ranks_per_host(ranks, hosts)
    inside = [
        [
            t
            for rank in range(ranks)
            for local in [(rank + shift) % size]
            for t in transfers_for(
                rank, rank // size * size + local, _chunks_from(rank, range(local, ranks, size), ranks)
            )
        ]
        for shift in range(1, size)
    ]
    across = [
        [
            t
            for rank in range(ranks)
            for target in [(rank + shift * size) % ranks]
            for t in transfers_for(
                rank, target, _chunks_to(target, range(rank // size * size, rank // size * size + size), ranks)
            )
        ]
        for shift in range(1, count)
    ]
    return all_to_all_program("hierarchical-sharded", ranks, [*inside, *across])
