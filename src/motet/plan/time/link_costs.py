"""The time of collectives of a library that pipelines pieces over all links: a start-up, a delay for each hop of the
first piece, and the bytes over the link that is the bottleneck.

All like groups of a host run the same collective at the same time, so each device has its share of the NICs.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import log2

# Bytes that cross the bottleneck, over the size that is exchanged
_BUS_FACTORS = {"all-reduce": 2.0, "send-receive": 0.0, "broadcast": 0.0}


@dataclass(frozen=True)
class LinkCosts:
    """Rates of the links of a device in one direction."""

    inside_Bps: float  # noqa: N815 - a unit
    between_Bps: float  # noqa: N815
    startup_s: float = 20e-6  # Of a collective inside of a host
    hop_s: float = 0.6e-6  # For each device that the first piece passes inside of a host
    host_s: float = 5.5e-6  # For each host that it passes
    inside_efficiency: float = 0.85
    between_efficiency: float = 0.95

    def seconds(self, collective: str, size_bytes: float, *, ranks: int, ranks_per_host: int) -> float:
        """The time of a collective of a group."""
        fixed_s, per_byte_s = _line(self, collective, (ranks, ranks_per_host))
        return fixed_s + per_byte_s * size_bytes


@lru_cache(maxsize=4096)
def _line(costs: LinkCosts, collective: str, placement: tuple[int, int]) -> tuple[float, float]:
    """(Start-up, seconds for each byte)."""
    ranks, per_host = placement
    hosts = -(-ranks // per_host)
    inside, between = costs.inside_Bps * costs.inside_efficiency, costs.between_Bps * costs.between_efficiency
    part = (ranks - 1) / ranks
    if collective in ("send-receive", "broadcast"):
        return costs.startup_s + (hosts > 1) * costs.host_s, 1 / (inside if hosts == 1 else between)
    if hosts == 1:
        hops = ranks * (2 if collective == "all-reduce" else 1)
        return costs.startup_s + hops * costs.hop_s, part * _BUS_FACTORS.get(collective, 1.0) / inside
    if collective == "all-to-all":  # Each device sends what is for other hosts over its share of the NICs
        fixed = costs.startup_s + costs.host_s * log2(hosts) + costs.hop_s * ranks
        return fixed, max((1 - per_host / ranks) / between, part / inside)
    # A tree for small messages of an all-reduce, rings for everything else
    rings = 2 if collective == "all-reduce" else 1
    passes = 2 * log2(hosts) if collective == "all-reduce" else hosts
    fixed = costs.startup_s + costs.host_s * passes + costs.hop_s * ranks * (collective != "all-reduce")
    return fixed, part * rings / min(inside, between * per_host)
