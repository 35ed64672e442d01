"""Measured start-up and bandwidth of the links between the ranks of a group, and the cost of adding, as a cluster file.

Links are measured under the load of a collective. Between hosts, messages follow each other in both directions: a
start-up costs more in a full network than in an idle one, and a link that lets bursts pass gets no rest. Within a host,
a port is measured alone, and the bus in both directions together.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from motet.cluster.cluster_settings import AlphaBetaFit, fit_alpha_beta, measured
from motet.collectives.execute.program_runner import P2PBatch, P2PChannel, P2PTensor
from motet.core.errors import InputError

MESSAGE_SIZES = (256 << 10, 2 << 20, 16 << 20)  # Bytes of the messages
_REPEATS = 7
_REDUCTION_BYTES = 4 << 20
_MESSAGE_TAG = 0x6D7000


def calibrate_cluster(
    group: dist.ProcessGroup, devices_per_host: int, sizes: Sequence[int] = MESSAGE_SIZES, repeats: int = _REPEATS
) -> dict[str, Any]:
    """The description for `cluster_from_dict`. All ranks call it and get the same; ranks are host after host.

    Ranks of the first host stand for those of every host, and the first two hosts for every two.
    """
    world = dist.get_world_size(group)
    if world < 2 or world % devices_per_host:
        raise InputError(
            f"{world} ranks on hosts of {devices_per_host}: give a group of 2 or more that fills its hosts"
        )
    hosts = world // devices_per_host
    description: dict[str, Any] = {"device": "CPU", "hosts": hosts, "devices_per_host": devices_per_host}
    description["gamma_s_per_byte"] = measured(_reduction_s_per_byte(group))
    fit_pattern = partial(_fit_pattern, group, sizes, repeats)
    between_hosts = fit_pattern(_between_hosts_pattern(devices_per_host)) if hosts > 1 else None
    if devices_per_host > 1:
        one_way, both_ways = fit_pattern(_PING_PONG, messages=2), fit_pattern(_BIDIRECTIONAL)
        bus_Bps = max(2 * both_ways.bandwidth_Bps, one_way.bandwidth_Bps)  # noqa: N806 - a unit
        description["inside"] = {"kind": "bus", **one_way.port_description(), "bus_Bps": measured(bus_Bps)}
    else:
        assert between_hosts is not None
        description["inside"] = {"kind": "switch", **between_hosts.port_description()}
    if between_hosts is not None:
        description["between"] = {"kind": "switch", "nics": 1, **between_hosts.port_description()}
    return description


class _SendReceiveRound(NamedTuple):
    """Simultaneous operations of a rank: a send to one rank, a receive from one rank, or both."""

    destination: int | None
    source: int | None


# The rounds that each rank repeats; the other ranks wait.
_TrafficPattern = dict[int, list[_SendReceiveRound]]

_BIDIRECTIONAL: _TrafficPattern = {0: [_SendReceiveRound(1, 1)], 1: [_SendReceiveRound(0, 0)]}
_PING_PONG: _TrafficPattern = {
    0: [_SendReceiveRound(1, None), _SendReceiveRound(None, 1)],
    1: [_SendReceiveRound(None, 0), _SendReceiveRound(0, None)],
}


def _between_hosts_pattern(devices_per_host: int) -> _TrafficPattern:
    """Traffic from the first host to the second and back, between different ranks if hosts have several."""
    if devices_per_host == 1:
        return _BIDIRECTIONAL
    forward, backward = (0, devices_per_host), (devices_per_host + 1, 1)
    return {src: [_SendReceiveRound(dst, None)] for src, dst in (forward, backward)} | {
        dst: [_SendReceiveRound(None, src)] for src, dst in (forward, backward)
    }


def _fit_pattern(
    group: dist.ProcessGroup, sizes: Sequence[int], repeats: int, pattern: _TrafficPattern, messages: int = 1
) -> AlphaBetaFit:
    """The fit to the medians of all sizes; a repeat takes `messages` messages in turn."""
    return fit_alpha_beta(sizes, [_median_pattern_s(group, pattern, size, repeats) / messages for size in sizes])


def _median_pattern_s(group: dist.ProcessGroup, pattern: _TrafficPattern, size: int, repeats: int) -> float:
    """The median time of a repeat on the slowest rank; the same result on all ranks."""
    outgoing, incoming = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    channel = P2PChannel(group, None, _MESSAGE_TAG)
    rounds = pattern.get(dist.get_rank(group), [])

    def run_rounds() -> None:
        for destination, source in rounds:
            receives = [] if source is None else [P2PTensor(source, incoming)]
            sends = [] if destination is None else [P2PTensor(destination, outgoing)]
            P2PBatch(receives, sends, channel, context="the calibration of a link").wait()

    return _median_s(run_rounds, group, repeats)


def _reduction_s_per_byte(group: dist.ProcessGroup) -> float:
    """Seconds per byte while all ranks add."""
    accumulator, incoming = torch.ones(2, _REDUCTION_BYTES // 4)
    return _median_s(lambda: accumulator.add_(incoming), group, _REPEATS) / _REDUCTION_BYTES


def _median_s(action: Callable[[], object], group: dist.ProcessGroup, repeats: int) -> float:
    """The median time on the slowest rank, without the first repeat."""
    dist.barrier(group=group)
    times: list[float] = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - start_s)
    slowest = torch.tensor(statistics.median(times[1:]), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()
