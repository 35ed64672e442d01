"""The Program of each collective of the backend: by collective, size, and how the ranks lie on hosts.

Within a host, a published chunk is read by all ranks, so the Programs with the fewest steps are the fastest. The
crossover was measured (benchmarks/collectives.py). Across hosts the traffic over the network counts.
"""

from motet.collectives.algorithms import build
from motet.collectives.program import Program

# Up to this size, an all-reduce within one host takes one step, in which every rank adds everything.
ONE_STEP_ALL_REDUCE_MAX_BYTES = 256 << 10

HostOfRank = tuple[int, ...]  # The index of the host of each rank


def select_program(collective: str, hosts: HostOfRank, *, is_small: bool, root: int) -> Program:
    """`is_small`: an all-reduce of at most ONE_STEP_ALL_REDUCE_MAX_BYTES."""
    ranks, spans_hosts = len(hosts), len(set(hosts)) > 1
    match collective:
        case "barrier":
            return build("all-gather", "direct", ranks)
        case "broadcast" | "reduce":
            return build(collective, "tree" if spans_hosts else "flat", ranks, root=root)
        case "gather" | "scatter":
            return build(collective, "flat", ranks, root=root)
        case "all-to-all":
            return build(collective, "pairwise", ranks)
    is_all_reduce = collective == "all-reduce"
    if not spans_hosts:
        return build(collective, "naive" if is_all_reduce and is_small else "direct", ranks)
    if blocks := _equal_host_blocks(hosts):
        return build(collective, "hierarchical-sharded" if is_all_reduce else "hierarchical", ranks, hosts=blocks)
    return build(collective, "ring" if is_all_reduce else "direct", ranks)


def _equal_host_blocks(hosts: HostOfRank) -> int:
    """The number of hosts if each has the same number of consecutive ranks, more than one; otherwise 0."""
    count = len(set(hosts))
    per_host, remainder = divmod(len(hosts), count)
    consecutive = all(host == hosts[rank // per_host * per_host] for rank, host in enumerate(hosts))
    return count if consecutive and per_host > 1 and not remainder else 0
