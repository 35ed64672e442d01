"""The staleness of gradients in a run with a parameter server, by its events, and the check of a bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet.monitor.events import StepDone


@dataclass(frozen=True)
class ServerStatistics:
    """Counts of the work of a run's servers, summed over its steps."""

    events: int
    """Steps that were reported."""
    staleness: list[int]
    """The number of gradients that missed 0, 1, 2 and so on of the updates before theirs."""
    behind: list[int]
    """The number of gradients that missed updates of no step before theirs, of the last one, and so on."""
    tokens: int
    """Work items in updates."""
    pulled_bytes: int
    """Bytes that the servers sent."""
    pushed_bytes: int
    """Bytes that the servers received."""

    @property
    def largest(self) -> int:
        """The largest staleness of any gradient."""
        return len(self.staleness) - 1

    @property
    def mean(self) -> float:
        return sum(late * count for late, count in enumerate(self.staleness)) / sum(self.staleness)

    def share(self, first: int, last: int | None = None) -> float:
        """The fraction of gradients whose staleness is at least `first`, and at most `last` if that is not None."""
        return sum(self.staleness[first : None if last is None else last + 1]) / sum(self.staleness)


def server_statistics(steps: Sequence["StepDone"], bound: int | None) -> ServerStatistics | None:
    """The statistics of a run; None without servers. A gradient further behind than the bound ends the program."""
    works = [(event.step, event.server) for event in steps if event.server is not None]
    if bound is None and not works:
        return None
    if len(works) != len(steps):
        raise SystemExit(f"only {len(works)} of {len(steps)} steps say how stale they were")
    for step, work in works:
        if bound is not None and len(work.steps_behind_histogram) - 1 > bound:
            raise SystemExit(
                f"step {step} has a gradient {len(work.steps_behind_histogram) - 1} behind, above the bound {bound}: "
                f"{work}"
            )
    staleness = added([work.staleness_histogram for _, work in works])
    return ServerStatistics(
        events=len(works),
        staleness=staleness,
        behind=added([work.steps_behind_histogram for _, work in works]),
        tokens=sum(event.tokens for event in steps),
        pulled_bytes=sum(work.sent_bytes for _, work in works),
        pushed_bytes=sum(work.received_bytes for _, work in works),
    )


def added(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(each) for each in zip_longest(*counts, fillvalue=0)]
