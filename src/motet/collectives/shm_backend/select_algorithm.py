"""Which Program a collective is played from: by what is moved, how much of it, and how the ranks lie on hosts.

Inside a host everything passes through shared memory, where a chunk that is put out once is read by all; the Programs
that talk to everybody at once have the fewest steps there; the crossover was measured (benchmarks/collectives.py).
Across hosts the traffic over the network counts.
"""

from functools import lru_cache

from motet.collectives.algorithms import build
from motet.collectives.program import Program
from motet.collectives.shm_backend.rank_schedule import RankSchedule, make_rank_schedule, use_host_local_ranks

# Up to here an all-reduce in one host goes in one step, in which everybody adds up everything.
ONE_STEP_ALL_REDUCE_MAX_BYTES = 256 << 10

HostOfRank = tuple[int, ...]  # The host of each rank, as numbers


def select_program(collective: str, size_bytes: int, hosts: HostOfRank, root: int) -> Program:
    ranks = len(hosts)
    spans_hosts = len(set(hosts)) > 1
    if collective == "barrier":
        return build("all-gather", "direct", ranks)
    if collective in ("broadcast", "reduce"):
        return build(collective, "tree" if spans_hosts else "flat", ranks, root=root)
    if collective in ("gather", "scatter"):
        return build(collective, "flat", ranks, root=root)
    if collective == "all-to-all":
        return build(collective, "pairwise", ranks)
    blocks = _equal_host_blocks(hosts) if spans_hosts else 0
    if collective == "all-reduce":
        if not spans_hosts:
            return build(collective, "naive" if size_bytes <= ONE_STEP_ALL_REDUCE_MAX_BYTES else "direct", ranks)
        return (
            build(collective, "hierarchical-sharded", ranks, hosts=blocks)
            if blocks
            else build(collective, "ring", ranks)
        )
    return build(collective, "hierarchical", ranks, hosts=blocks) if blocks else build(collective, "direct", ranks)


def _equal_host_blocks(hosts: HostOfRank) -> int:
    """The number of hosts when each has equally many neighbouring ranks, more than one; otherwise 0."""
    count = len(set(hosts))
    ranks_per_host = len(hosts) // count
    even = ranks_per_host > 1 and all(
        hosts[rank] == hosts[rank // ranks_per_host * ranks_per_host] for rank in range(len(hosts))
    )
    return count if even and len(hosts) == count * ranks_per_host else 0


@lru_cache(maxsize=256)
def rank_schedule_for(
    collective: str, small: bool, hosts: HostOfRank, root: int, rank: int
) -> tuple[RankSchedule, int]:
    """The Program's part of a rank, and how many chunks it has."""
    if len(hosts) == 1:
        return RankSchedule((), 0, (0,), (), needs_wider_dtype=False), 1
    collective_program = select_program(collective, 0 if small else ONE_STEP_ALL_REDUCE_MAX_BYTES + 1, hosts, root)
    local_ranks = [other for other in range(len(hosts)) if hosts[other] == hosts[rank]]
    local = {other: number for number, other in enumerate(local_ranks)}
    return use_host_local_ranks(make_rank_schedule(collective_program, rank), local), collective_program.chunks
