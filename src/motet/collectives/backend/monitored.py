"""The barrier that says who did not come: every rank writes to rank 0, which answers when all have written."""

import time
from datetime import timedelta

import torch

from motet.collectives.backend.errors import CollectiveError, PeerLostError
from motet.collectives.backend.station import Station
from motet.collectives.backend.work import Task

_LEAST_S = 0.001


def monitored_barrier(station: Station, rank: int, ranks: int, tag: int, timeout_s: float, every: bool) -> None:
    """`every`: wait for all, and name all that did not come, not the first alone."""
    end = time.monotonic() + timeout_s
    if rank:
        try:
            _wait(station.send(_word(), 0, tag), end)
            _wait(station.receive(_word(), 0, tag), end)
        except CollectiveError as error:
            raise PeerLostError(f"rank {rank} came to the barrier, but rank 0 did not answer: {error}") from error
        return
    absent: dict[int, CollectiveError] = {}
    for other, call in [(other, station.receive(_word(), other, tag)) for other in range(1, ranks)]:
        try:
            _wait(call, end)
        except CollectiveError as error:
            absent[other] = error
            if not every:
                break
    if absent:
        who = f"Rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        late = f"Rank 0 timed out in monitoredBarrier after {timeout_s:g} s. " if time.monotonic() > end else ""
        raise PeerLostError(f"{late}{who} failed to pass monitoredBarrier: {next(iter(absent.values()))}")
    for other in range(1, ranks):
        station.send(_word(), other, tag).wait()


def _word() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def _wait(call: Task, end: float) -> None:
    call.wait(timedelta(seconds=max(_LEAST_S, end - time.monotonic())))
