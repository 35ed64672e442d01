"""The time of collectives of CPU ranks: the Programs that motet's backend executes, on the links of a cluster."""

from dataclasses import dataclass
from functools import lru_cache

from motet.cluster.cluster import Cluster
from motet.collectives.algorithms import build
from motet.collectives.cost.alpha_beta import CollectiveCost, estimate_cost
from motet.collectives.execute.slot_plan import ONE_STEP_ALL_REDUCE_MAX_BYTES, select_program
from motet.core.errors import check_input


@dataclass(frozen=True)
class ProgramCosts:
    """Costs by the steps of Programs; ranks of a group are neighbours."""

    cluster: Cluster

    def seconds(self, collective: str, size_bytes: float, *, ranks: int, ranks_per_host: int) -> float:
        """Seconds of a collective, of which `ranks_per_host` ranks are on one host."""
        is_small = size_bytes <= ONE_STEP_ALL_REDUCE_MAX_BYTES
        cost = _cost(self.cluster, collective, (ranks, ranks_per_host), is_small=is_small)
        return float(cost.seconds(size_bytes))


@lru_cache(maxsize=1024)
def _cost(cluster: Cluster, collective: str, group: tuple[int, int], *, is_small: bool) -> CollectiveCost:
    ranks, per_host = group
    members = tuple(rank // per_host * cluster.devices_per_host + rank % per_host for rank in range(ranks))
    check_input(
        members[-1] < cluster.ranks,
        f"a group of {ranks} ranks does not fit cluster {cluster.name}, which has {cluster.ranks}; describe it with "
        "more hosts or devices",
    )
    if collective == "send-receive":
        program = build("broadcast", "flat", ranks)  # One message
    else:
        hosts = tuple(rank // per_host for rank in range(ranks))
        program = select_program(collective, hosts, is_small=is_small, root=0)
    return estimate_cost(program, cluster, (members,))
