"""What the links between the ranks of a group really do: start-up, bandwidth and the cost of adding, as a cluster file.

Links are measured as collectives use them. Between hosts, messages follow each other in both directions at once, and a
receiver asks for the next one over a way back that is full: what a start-up costs there is more than in an idle
network, and a link that lets a burst pass after a rest gets no rest. Within a host, a port is measured alone, and the
bus with both directions at once.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from motet.collectives.execute.send_receive import TensorReceive, TensorSend, batch_send_receive
from motet.core.errors import InputError

MESSAGE_SIZES = (256 << 10, 2 << 20, 16 << 20)  # Bytes of the messages
_REPEATS = 7
_REDUCTION_BYTES = 4 << 20


class AlphaBetaFit(NamedTuple):
    """The time of a message: `alpha_s` and its bytes over `bandwidth_Bps`."""

    alpha_s: float
    bandwidth_Bps: float  # noqa: N815 - a unit


def calibrate_cluster(
    group: dist.ProcessGroup, devices_per_host: int, sizes: Sequence[int] = MESSAGE_SIZES, repeats: int = _REPEATS
) -> dict[str, Any]:
    """What `cluster_from_tree` makes a Cluster of. All ranks call it and get the same; ranks are host after host.

    Ranks of the first host stand for those of every host, and the first two hosts for every two.
    """
    world = dist.get_world_size(group)
    if world < 2 or world % devices_per_host:
        raise InputError(
            f"{world} ranks on hosts of {devices_per_host}: give a group of 2 or more that fills its hosts"
        )
    hosts = world // devices_per_host
    description: dict[str, Any] = {"device": "CPU", "hosts": hosts, "devices_per_host": devices_per_host}
    description["gamma_s_per_byte"] = _measured_value(_reduction_s_per_byte(group))
    fit_pattern = partial(_fit_pattern, group, sizes, repeats)
    between_hosts = fit_pattern(_between_hosts_pattern(devices_per_host)) if hosts > 1 else None
    if devices_per_host > 1:
        one_way, both_ways = fit_pattern(_PING_PONG, messages=2), fit_pattern(_BIDIRECTIONAL)
        bus_Bps = max(2 * both_ways.bandwidth_Bps, one_way.bandwidth_Bps)  # noqa: N806 - a unit
        description["inside"] = {"kind": "bus", **_port_description(one_way), "bus_Bps": _measured_value(bus_Bps)}
    else:
        assert between_hosts is not None
        description["inside"] = {"kind": "switch", **_port_description(between_hosts)}
    if between_hosts is not None:
        description["between"] = {"kind": "switch", "nics": 1, **_port_description(between_hosts)}
    return description


def _port_description(fit: AlphaBetaFit) -> dict[str, Any]:
    return {"alpha_s": _measured_value(fit.alpha_s), "bandwidth_Bps": _measured_value(fit.bandwidth_Bps)}


def _measured_value(value: float) -> dict[str, Any]:
    return {"value": value, "origin": "measured"}


class _SendReceiveRound(NamedTuple):
    """What a rank does at once: send to one rank, receive from one, or both."""

    destination: int | None
    source: int | None


# What each rank does again and again, turn by turn; the others wait.
_TrafficPattern = dict[int, list[_SendReceiveRound]]

_BIDIRECTIONAL: _TrafficPattern = {0: [_SendReceiveRound(1, 1)], 1: [_SendReceiveRound(0, 0)]}
_PING_PONG: _TrafficPattern = {
    0: [_SendReceiveRound(1, None), _SendReceiveRound(None, 1)],
    1: [_SendReceiveRound(None, 0), _SendReceiveRound(0, None)],
}


def _between_hosts_pattern(devices_per_host: int) -> _TrafficPattern:
    """From the first host to the second and back, between ranks of their own where there are enough."""
    if devices_per_host == 1:
        return _BIDIRECTIONAL
    forward, backward = (0, devices_per_host), (devices_per_host + 1, 1)
    return {src: [_SendReceiveRound(dst, None)] for src, dst in (forward, backward)} | {
        dst: [_SendReceiveRound(None, src)] for src, dst in (forward, backward)
    }


def _fit_pattern(
    group: dist.ProcessGroup, sizes: Sequence[int], repeats: int, pattern: _TrafficPattern, messages: int = 1
) -> AlphaBetaFit:
    """The line through the medians of all sizes; a repeat takes so many messages one after the other."""
    return fit_alpha_beta(sizes, [_median_pattern_s(group, pattern, size, repeats) / messages for size in sizes])


def fit_alpha_beta(sizes: Sequence[int], seconds: Sequence[float]) -> AlphaBetaFit:
    """The line whose relative errors are least; it starts at 0 or above."""
    weights = [1 / time_s**2 for time_s in seconds]

    def weighted_mean(values: Sequence[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    size, time_s = weighted_mean(sizes), weighted_mean(seconds)
    size_variance = weighted_mean([(s - size) ** 2 for s in sizes])
    beta = (
        weighted_mean([(s - size) * (t - time_s) for s, t in zip(sizes, seconds, strict=True)]) / size_variance
        if size_variance
        else 0.0
    )
    alpha = time_s - beta * size
    if alpha < 0 or beta <= 0:  # the best line through zero
        alpha, beta = (
            0.0,
            weighted_mean([s * t for s, t in zip(sizes, seconds, strict=True)]) / weighted_mean([s * s for s in sizes]),
        )
    return AlphaBetaFit(alpha, 1 / beta)


def _median_pattern_s(group: dist.ProcessGroup, pattern: _TrafficPattern, size: int, repeats: int) -> float:
    """The median time of one repeat, on the slowest rank; the same on all ranks."""
    outgoing, incoming = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    rounds: list[list[TensorSend | TensorReceive]] = []
    for send_receive in pattern.get(dist.get_rank(group), []):
        receives = [] if send_receive.source is None else [TensorReceive(incoming, send_receive.source)]
        sends = [] if send_receive.destination is None else [TensorSend(outgoing, send_receive.destination)]
        rounds.append([*receives, *sends])

    def run_rounds() -> None:
        for operations in rounds:
            batch_send_receive(operations, group, check=False)

    return _median_s(run_rounds, group, repeats)


def _reduction_s_per_byte(group: dist.ProcessGroup) -> float:
    """While all ranks add."""
    accumulator, incoming = torch.ones(2, _REDUCTION_BYTES // 4)
    return _median_s(lambda: accumulator.add_(incoming), group, _REPEATS) / _REDUCTION_BYTES


def _median_s(action: Callable[[], object], group: dist.ProcessGroup, repeats: int) -> float:
    """Of the slowest rank; the first time does not count."""
    dist.barrier(group=group)
    times: list[float] = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - start_s)
    slowest = torch.tensor(statistics.median(times[1:]), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()
