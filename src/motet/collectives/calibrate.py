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

from motet.collectives.exchange import Receive, Send, exchange
from motet.core.errors import InputError

SIZES = (256 << 10, 2 << 20, 16 << 20)
"""Bytes of the messages."""
_REPEATS = 7
_ADDED_BYTES = 4 << 20


class Line(NamedTuple):
    """The time of a message: `alpha_s` and its bytes over `bandwidth_Bps`."""

    alpha_s: float
    bandwidth_Bps: float  # noqa: N815 - a unit


def calibrate(
    group: dist.ProcessGroup, devices_per_host: int, sizes: Sequence[int] = SIZES, repeats: int = _REPEATS
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
    found: dict[str, Any] = {"device": "CPU", "hosts": hosts, "devices_per_host": devices_per_host}
    found["gamma_s_per_byte"] = _figure(_adding_s_per_byte(group))
    measure = partial(_line, group, sizes, repeats)
    across = measure(_crossing(devices_per_host)) if hosts > 1 else None
    if devices_per_host > 1:
        alone, together = measure(_THERE_AND_BACK, messages=2), measure(_SWAP)
        bus_Bps = max(2 * together.bandwidth_Bps, alone.bandwidth_Bps)  # noqa: N806 - a unit
        found["inside"] = {"kind": "bus", **_port(alone), "bus_Bps": _figure(bus_Bps)}
    else:
        assert across is not None
        found["inside"] = {"kind": "switch", **_port(across)}
    if across is not None:
        found["between"] = {"kind": "switch", "nics": 1, **_port(across)}
    return found


def _port(line: Line) -> dict[str, Any]:
    return {"alpha_s": _figure(line.alpha_s), "bandwidth_Bps": _figure(line.bandwidth_Bps)}


def _figure(value: float) -> dict[str, Any]:
    return {"value": value, "origin": "measured"}


class _Turn(NamedTuple):
    """What a rank does at once: send to one rank, receive from one, or both."""

    to: int | None
    source: int | None


_Pattern = dict[int, list[_Turn]]
"""What each rank does again and again, turn by turn; the others wait."""

_SWAP: _Pattern = {0: [_Turn(1, 1)], 1: [_Turn(0, 0)]}
_THERE_AND_BACK: _Pattern = {0: [_Turn(1, None), _Turn(None, 1)], 1: [_Turn(None, 0), _Turn(0, None)]}


def _crossing(devices_per_host: int) -> _Pattern:
    """From the first host to the second and back, between ranks of their own where there are enough."""
    if devices_per_host == 1:
        return _SWAP
    there, back = (0, devices_per_host), (devices_per_host + 1, 1)
    return {src: [_Turn(dst, None)] for src, dst in (there, back)} | {
        dst: [_Turn(None, src)] for src, dst in (there, back)
    }


def _line(group: dist.ProcessGroup, sizes: Sequence[int], repeats: int, pattern: _Pattern, messages: int = 1) -> Line:
    """The line through the medians of all sizes; a repeat takes so many messages one after the other."""
    return fit(sizes, [_seconds(group, pattern, size, repeats) / messages for size in sizes])


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line whose relative errors are least; it starts at 0 or above."""
    weights = [1 / time_s**2 for time_s in seconds]

    def mean(values: Sequence[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    size, time_s = mean(sizes), mean(seconds)
    spread = mean([(s - size) ** 2 for s in sizes])
    beta = mean([(s - size) * (t - time_s) for s, t in zip(sizes, seconds, strict=True)]) / spread if spread else 0.0
    alpha = time_s - beta * size
    if alpha < 0 or beta <= 0:  # the best line through zero
        alpha, beta = 0.0, mean([s * t for s, t in zip(sizes, seconds, strict=True)]) / mean([s * s for s in sizes])
    return Line(alpha, 1 / beta)


def _seconds(group: dist.ProcessGroup, pattern: _Pattern, size: int, repeats: int) -> float:
    """The median time of one repeat, on the slowest rank; the same on all ranks."""
    out, arrived = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    turns: list[list[Send | Receive]] = []
    for turn in pattern.get(dist.get_rank(group), []):
        receives = [] if turn.source is None else [Receive(arrived, turn.source)]
        sends = [] if turn.to is None else [Send(out, turn.to)]
        turns.append([*receives, *sends])

    def once() -> None:
        for parts in turns:
            exchange(parts, group, check=False)

    return _median_s(once, group, repeats)


def _adding_s_per_byte(group: dist.ProcessGroup) -> float:
    """While all ranks add."""
    own, arrived = torch.ones(2, _ADDED_BYTES // 4)
    return _median_s(lambda: own.add_(arrived), group, _REPEATS) / _ADDED_BYTES


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
