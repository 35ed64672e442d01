"""How stale the gradients of a run with a parameter server were, by its events, and whether a bound was kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet.monitor.events import StepDone


@dataclass(frozen=True)
class Served:
    """What the servers of a run did, summed over its steps."""

    events: int
    """Steps that were told."""
    largest: int
    """The largest staleness of any event."""
    staleness: list[int]
    """How many gradients lacked 0, 1, 2 and so on of the updates before theirs."""
    tokens: int
    """That updates were made of."""
    pulled_bytes: int
    """What the servers sent."""
    pushed_bytes: int
    """What they received."""

    @property
    def mean(self) -> float:
        return sum(late * count for late, count in enumerate(self.staleness)) / sum(self.staleness)

    def share(self, first: int, last: int | None = None) -> float:
        """Of the gradients: those whose staleness is from `first` to `last`; without an end when that is not given."""
        return sum(self.staleness[first : None if last is None else last + 1]) / sum(self.staleness)


def served_of(steps: Sequence["StepDone"], bound: int | None) -> Served | None:
    """None: it had no servers. A staleness above the bound ends the program."""
    works = [(event.step, event.server) for event in steps if event.server is not None]
    if bound is None and not works:
        return None
    if len(works) != len(steps):
        raise SystemExit(f"only {len(works)} of {len(steps)} steps say how stale they were")
    total: list[int] = []
    for step, work in works:
        most = largest_of(work.staleness)
        if bound is not None and most > bound:
            raise SystemExit(f"step {step} has a gradient of staleness {most}, above the bound {bound}: {work}")
        total += [0] * (most + 1 - len(total))
        for late, count in enumerate(work.staleness):
            total[late] += count
    return Served(
        events=len(works),
        largest=max((largest_of(work.staleness) for _, work in works), default=0),
        staleness=total,
        tokens=sum(event.tokens for event in steps),
        pulled_bytes=sum(work.sent_bytes for _, work in works),
        pushed_bytes=sum(work.received_bytes for _, work in works),
    )


def largest_of(counts: Sequence[int]) -> int:
    """The last place that has any."""
    return max((late for late, count in enumerate(counts) if count), default=0)
