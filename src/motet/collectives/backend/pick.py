"""Which Program a collective is played from: by what is moved, how much of it, and how the ranks lie on hosts.

Inside a host everything passes through shared memory, where a chunk that is put out once is read by all; the Programs
that talk to everybody at once have the fewest steps there; the crossover was measured (benchmarks/collectives.py).
Across hosts the traffic over the network counts.
"""

from functools import lru_cache

from motet.collectives.backend.parts import Lowered, lower, on_hosts
from motet.collectives.library import program
from motet.collectives.score import Program

SMALL_BYTES = 256 << 10
"""Up to here an all-reduce in one host goes in one step, in which everybody adds up everything."""

Hosts = tuple[int, ...]
"""The host of each rank, as numbers."""


def pick(collective: str, size_bytes: int, hosts: Hosts, root: int) -> Program:
    ranks = len(hosts)
    across = len(set(hosts)) > 1
    if collective == "barrier":
        return program("all-gather", "direct", ranks)
    if collective in ("broadcast", "reduce"):
        return program(collective, "tree" if across else "flat", ranks, root=root)
    if collective in ("gather", "scatter"):
        return program(collective, "flat", ranks, root=root)
    if collective == "all-to-all":
        return program(collective, "pairwise", ranks)
    blocks = _blocks(hosts) if across else 0
    if collective == "all-reduce":
        if not across:
            return program(collective, "naive" if size_bytes <= SMALL_BYTES else "direct", ranks)
        return (
            program(collective, "hierarchical-sharded", ranks, hosts=blocks)
            if blocks
            else program(collective, "ring", ranks)
        )
    return program(collective, "hierarchical", ranks, hosts=blocks) if blocks else program(collective, "direct", ranks)


def _blocks(hosts: Hosts) -> int:
    """The number of hosts when each has equally many neighbouring ranks, more than one; otherwise 0."""
    count = len(set(hosts))
    each = len(hosts) // count
    even = each > 1 and all(hosts[rank] == hosts[rank // each * each] for rank in range(len(hosts)))
    return count if even and len(hosts) == count * each else 0


@lru_cache(maxsize=256)
def lowered(collective: str, small: bool, hosts: Hosts, root: int, rank: int) -> tuple[Lowered, int]:
    """The Program's part of a rank, and how many chunks it has."""
    if len(hosts) == 1:
        return Lowered((), 0, (0,), (), widens=False), 1
    found = pick(collective, 0 if small else SMALL_BYTES + 1, hosts, root)
    here = [other for other in range(len(hosts)) if hosts[other] == hosts[rank]]
    local = {other: number for number, other in enumerate(here)}
    return on_hosts(lower(found, rank), local), found.chunks
