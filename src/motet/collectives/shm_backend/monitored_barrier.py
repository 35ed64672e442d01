"""The barrier that says who did not come: every rank writes to rank 0, which answers when all have written."""

import time
from datetime import timedelta

import torch

from motet.collectives.shm_backend.errors import CollectiveError, PeerLostError
from motet.collectives.shm_backend.rank_connections import RankConnections
from motet.collectives.shm_backend.work_handle import BackendWorkHandle

_MIN_WAIT_S = 0.001


def run_monitored_barrier(
    connections: RankConnections, rank: int, ranks: int, tag: int, timeout_s: float, wait_all_ranks: bool
) -> None:
    """`every`: wait for all, and name all that did not come, not the first alone."""
    end = time.monotonic() + timeout_s
    if rank:
        try:
            _wait_until(connections.send(_token(), 0, tag), end)
            _wait_until(connections.receive(_token(), 0, tag), end)
        except CollectiveError as error:
            raise PeerLostError(f"rank {rank} came to the barrier, but rank 0 did not answer: {error}") from error
        return
    absent: dict[int, CollectiveError] = {}
    for other, work in [(other, connections.receive(_token(), other, tag)) for other in range(1, ranks)]:
        try:
            _wait_until(work, end)
        except CollectiveError as error:
            absent[other] = error
            if not wait_all_ranks:
                break
    if absent:
        who = f"Rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        late = f"Rank 0 timed out in monitoredBarrier after {timeout_s:g} s. " if time.monotonic() > end else ""
        raise PeerLostError(f"{late}{who} failed to pass monitoredBarrier: {next(iter(absent.values()))}")
    for other in range(1, ranks):
        connections.send(_token(), other, tag).wait()


def _token() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def _wait_until(work: BackendWorkHandle, end: float) -> None:
    work.wait(timedelta(seconds=max(_MIN_WAIT_S, end - time.monotonic())))
