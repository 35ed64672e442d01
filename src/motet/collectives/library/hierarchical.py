"""Two levels: inside each host over its quick links, and across hosts with as little as possible over the slow ones.

Rank `host * size + local` is the one with this local number on this host.
"""

from motet.collectives.compose import among, reverse, side_by_side, then
from motet.collectives.library.registry import Terms, algorithm, message
from motet.collectives.library.ring import all_gather_ring, all_reduce_ring, ring_cost
from motet.collectives.library.shapes import any_hosts, composite, equal_hosts, exchange, part, reduction, rounds, swap
from motet.collectives.library.tree import broadcast_tree, reduce_tree
from motet.collectives.score import Program, Step, Transfer, sending


def _leaders_cost(ranks: int, hosts: int | None = None) -> Terms:
    """The largest host takes the longest: a tree up, a ring of leaders, a tree down."""
    members = any_hosts(ranks, hosts)
    levels = rounds(max(len(host) for host in members))
    across = ring_cost(len(members)) if len(members) > 1 else Terms(0, part(0, 1))
    return message(1, 1).times(levels) + across + message().times(levels)


@algorithm("all-reduce", "hierarchical", cost=_leaders_cost)
def all_reduce_hierarchical(ranks: int, hosts: int | None = None) -> Program:
    """Reduce to one leader per host, all-reduce of the leaders around a ring, broadcast in each host."""
    members = any_hosts(ranks, hosts)
    chunks = len(members)
    inside = [host for host in members if len(host) > 1]
    up = side_by_side([among(reduce_tree(len(host)), host, [0], chunks) for host in inside])
    down = side_by_side([among(broadcast_tree(len(host)), host, [0], chunks) for host in inside])
    across: tuple[Step, ...] = ()
    if chunks > 1:
        across = among(all_reduce_ring(chunks), [host[0] for host in members], range(chunks))
    return reduction("hierarchical", ranks, chunks, [*up, *across, *down])


def _gathered_cost(ranks: int, hosts: int | None = None) -> Terms:
    count, size = equal_hosts(ranks, hosts)
    return message(part(1, ranks)).times(count - 1) + message(part(1, size)).times(size - 1)


@algorithm("all-gather", "hierarchical", cost=_gathered_cost, takes=composite)
def all_gather_hierarchical(ranks: int, hosts: int | None = None) -> Program:
    """Around rings of ranks with the same local number, one in each host, then around a ring in each host."""
    count, size = equal_hosts(ranks, hosts)
    rails = [range(local, ranks, size) for local in range(size)]
    across = side_by_side([among(all_gather_ring(count), rail, rail) for rail in rails] if count > 1 else [])
    inside: list[tuple[Step, ...]] = []
    if size > 1:
        for host in range(count):
            members = range(host * size, (host + 1) * size)
            inside += [_columns(among(all_gather_ring(size), members, range(size)), count, size)]
    return exchange("hierarchical", ranks, [*across, *_merged(inside)])


def _columns(steps: tuple[Step, ...], count: int, size: int) -> tuple[Step, ...]:
    """Chunk i of a host's ring stands for the chunks of all ranks with local number i."""
    return tuple(
        tuple(
            t._replace(first=host * size + t.first, last=host * size + t.first) for t in step for host in range(count)
        )
        for step in steps
    )


def _merged(parts: list[tuple[Step, ...]]) -> tuple[Step, ...]:
    return side_by_side(parts)


@algorithm(
    "reduce-scatter",
    "hierarchical",
    cost=lambda n, hosts=None: _gathered_cost(n, hosts).adding,
    takes=composite,
)
def reduce_scatter_hierarchical(ranks: int, hosts: int | None = None) -> Program:
    """The hierarchical all-gather backwards: inside each host first, so that only a share of the data leaves it."""
    return reverse(all_gather_hierarchical(ranks, hosts), "reduce-scatter")


def _sharded_cost(ranks: int, hosts: int | None = None) -> Terms:
    once = _gathered_cost(ranks, hosts)
    return once.adding + once


@algorithm("all-reduce", "hierarchical-sharded", cost=_sharded_cost, takes=composite)
def all_reduce_hierarchical_sharded(ranks: int, hosts: int | None = None) -> Program:
    """Reduce-scatter in each host, all-reduce of each share across hosts, all-gather in each host."""
    gathered = all_gather_hierarchical(ranks, hosts)
    return then(reverse(gathered, "reduce-scatter"), gathered, "all-reduce", "hierarchical-sharded")


def _leaders_swap_cost(ranks: int, hosts: int | None = None) -> Terms:
    count, size = equal_hosts(ranks, hosts)
    in_host = message(part(ranks - 1, ranks)).times(size - 1)
    return in_host + message(part(size * size, ranks)).times(count - 1) + in_host


@algorithm("all-to-all", "hierarchical", cost=_leaders_swap_cost, takes=composite)
def all_to_all_hierarchical(ranks: int, hosts: int | None = None) -> Program:
    """Gather to one leader per host, exchange between leaders, scatter in each host: few, large messages across."""
    count, size = equal_hosts(ranks, hosts)
    leaders = range(0, ranks, size)
    gather = [
        [
            t
            for leader in leaders
            for t in sending(leader + local, leader, _from(leader + local, set(range(ranks)) - {leader + local}, ranks))
        ]
        for local in range(1, size)
    ]
    across = [
        [t for host in range(count) for t in _between(host, (host + shift) % count, size, ranks)]
        for shift in range(1, count)
    ]
    scatter = [
        [
            t
            for leader in leaders
            for t in sending(leader, leader + local, _to(leader + local, set(range(ranks)) - {leader + local}, ranks))
        ]
        for local in range(1, size)
    ]
    return swap("hierarchical", ranks, [*gather, *across, *scatter])


def _from(source: int, targets: set[int] | range, ranks: int) -> list[int]:
    return [source * ranks + target for target in targets]


def _to(target: int, sources: set[int] | range, ranks: int) -> list[int]:
    return [source * ranks + target for source in sources]


def _between(host: int, other: int, size: int, ranks: int) -> list[Transfer]:
    """All that the ranks of one host have for those of another, from leader to leader."""
    targets = range(other * size, (other + 1) * size)
    chunks = [chunk for source in range(host * size, (host + 1) * size) for chunk in _from(source, targets, ranks)]
    return sending(host * size, other * size, chunks)


def _rails_swap_cost(ranks: int, hosts: int | None = None) -> Terms:
    count, size = equal_hosts(ranks, hosts)
    return message(part(count, ranks)).times(size - 1) + message(part(size, ranks)).times(count - 1)


@algorithm("all-to-all", "hierarchical-sharded", cost=_rails_swap_cost, takes=composite)
def all_to_all_hierarchical_sharded(ranks: int, hosts: int | None = None) -> Program:
    """First in each host to the rank with the target's local number, then across between ranks of the same number."""
    count, size = equal_hosts(ranks, hosts)
    inside = [
        [
            t
            for rank in range(ranks)
            for local in [(rank + shift) % size]
            for t in sending(rank, rank // size * size + local, _from(rank, range(local, ranks, size), ranks))
        ]
        for shift in range(1, size)
    ]
    across = [
        [
            t
            for rank in range(ranks)
            for target in [(rank + shift * size) % ranks]
            for t in sending(rank, target, _to(target, range(rank // size * size, rank // size * size + size), ranks))
        ]
        for shift in range(1, count)
    ]
    return swap("hierarchical-sharded", ranks, [*inside, *across])
