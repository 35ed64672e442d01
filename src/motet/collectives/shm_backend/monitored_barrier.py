"""The barrier that names missing ranks: every rank writes to rank 0, which answers when all have written."""

import time
from datetime import timedelta

import torch

from motet.collectives.errors import CollectiveError, PeerLostError
from motet.collectives.execute.work_queue import AsyncWork
from motet.collectives.shm_backend.transport.message_matcher import MessageMatcher

_MIN_WAIT_S = 0.001


def run_monitored_barrier(
    messages: MessageMatcher, rank: int, ranks: int, *, tag: int, timeout_s: float, wait_all_ranks: bool
) -> None:
    """Raise PeerLostError with the first missing rank, or with all of them if `wait_all_ranks`."""
    end = time.monotonic() + timeout_s

    def token() -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def wait(work: AsyncWork) -> None:
        work.wait(timedelta(seconds=max(_MIN_WAIT_S, end - time.monotonic())))

    if rank:
        try:
            wait(messages.send(token(), 0, tag))
            wait(messages.receive(token(), 0, tag))
        except CollectiveError as error:
            raise PeerLostError(f"rank {rank} came to the barrier, but rank 0 did not answer: {error}") from error
        return
    absent: dict[int, CollectiveError] = {}
    for other, work in [(other, messages.receive(token(), other, tag)) for other in range(1, ranks)]:
        try:
            wait(work)
        except CollectiveError as error:
            absent[other] = error
            if not wait_all_ranks:
                break
    if absent:
        who = f"Rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        late = f"Rank 0 timed out in monitoredBarrier after {timeout_s:g} s. " if time.monotonic() > end else ""
        raise PeerLostError(f"{late}{who} failed to pass monitoredBarrier: {next(iter(absent.values()))}")
    for other in range(1, ranks):
        messages.send(token(), other, tag).wait()
