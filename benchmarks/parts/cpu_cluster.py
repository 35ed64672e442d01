"""A cluster file of this machine for its CPU ranks: rates of kernels, links of the backend `motet`, shared cores.

Only single kernels and single collectives are measured. `alpha_s`, `bandwidth_Bps` and `bus_Bps` are those with which
the Programs that the backend executes take the measured times of collectives on 2 and on 4 ranks.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from motet.cluster.cluster import cluster_from_dict
from motet.cluster.cluster_settings import measured
from motet.plan.planned_cluster import ProgramCosts

if TYPE_CHECKING:
    from motet.parallel.process.process_group import RankGroup

SIZES = (16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)  # Bytes
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")
MOST_RANKS = 4
_BUSY_S = 0.1  # Seconds in which a kernel is called over and over
_STEPS = (4.0, 2.0, 1.3, 1.1, 1.03)  # Factors by which constants are changed


class CollectiveTime(NamedTuple):
    """The median time of a collective."""

    collective: str
    ranks: int
    size: int
    seconds: float


def measure_collectives(group: "RankGroup", repeats: int = 15) -> list[CollectiveTime]:
    """The times on all ranks of a group, by the slowest rank."""
    import torch
    import torch.distributed as dist

    from motet.collectives.execute.api import all_gather, all_reduce, reduce_scatter

    times = []
    for size in SIZES:
        whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // group.world)
        calls = {
            "all-reduce": lambda whole=whole: all_reduce(whole, group),
            "reduce-scatter": lambda whole=whole, part=part: reduce_scatter(part, whole, group),
            "all-gather": lambda whole=whole, part=part: all_gather(whole, part, group),
        }
        for name, call in calls.items():
            seconds = []
            for _ in range(repeats + 1):
                dist.barrier()
                start_s = time.perf_counter()
                call().wait()
                seconds.append(time.perf_counter() - start_s)
            slowest = torch.tensor(statistics.median(seconds[1:]), dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times.append(CollectiveTime(name, group.world, size, float(slowest)))
    return times


def measure_busy_factors(group: "RankGroup", repeats: int = 15) -> dict[str, float]:
    """The time of kernels while as many ranks as cores compute, over that of the first rank alone.

    The slowest rank counts, since ranks wait for each other in a step.
    """
    import torch
    import torch.distributed as dist

    from motet.cluster.local_device import rate_kernels

    kernels = rate_kernels(torch.float32)
    factors = {}
    for factor, name in (("busy_factor", "products"), ("busy_memory_factor", "stream")):
        alone, busy = list[float](), list[float]()
        for _ in range(repeats):
            dist.barrier()
            if group.rank == 0:
                alone.append(_seconds_of_call(kernels[name]))
            else:
                time.sleep(_BUSY_S)  # Its core is free
            dist.barrier()
            slowest = torch.tensor(_seconds_of_call(kernels[name]))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            busy.append(float(slowest))
        if group.rank == 0:
            factors[factor] = max(1.0, statistics.median(busy) / statistics.median(alone))
    return factors


def _seconds_of_call(kernel: Callable[[], object]) -> float:
    """Seconds of a call, from enough calls that those of all ranks overlap."""
    calls, start_s = 0, time.perf_counter()
    while time.perf_counter() < start_s + _BUSY_S:
        kernel()
        calls += 1
    return (time.perf_counter() - start_s) / calls


def cluster_description(rates: dict[str, Any], times: Sequence[CollectiveTime]) -> dict[str, Any]:
    """The values of a cluster file."""
    base = {"alpha_s": 20e-6, "bandwidth_Bps": 5e9, "bus_Bps": 8e9}
    gamma = 3 / rates["memory_Bps"]["value"]  # Two bytes are read, one is written

    def description(constants: dict[str, float]) -> dict[str, Any]:
        inside = {name: measured(value) for name, value in constants.items()}
        return {
            "device": "CPU",
            "devices_per_host": MOST_RANKS,
            "gamma_s_per_byte": measured(gamma),
            "inside": {"kind": "bus", **inside},
            "rates": rates,
        }

    def error(constants: dict[str, float]) -> float:
        costs = ProgramCosts(cluster_from_dict(description(constants)))
        return sum(
            abs(math.log(costs.seconds(t.collective, t.size, ranks=t.ranks, ranks_per_host=t.ranks) / t.seconds))
            for t in times
        ) / max(1, len(times))

    best = error(base)
    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for name in base:
                for factor in (step, 1 / step):
                    changed = base | {name: base[name] * factor}
                    if (now := error(changed)) < best * (1 - 1e-6):
                        base, best, improved = changed, now, True
    return description(base)
